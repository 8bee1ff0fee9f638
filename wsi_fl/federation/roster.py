"""Membership: where sites resume, and which participate, leave or return in a round, agreed by all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Round
from wsi_fl.federation.exchange import exchange, load_mixture
from wsi_fl.federation.message import FAREWELL, WELCOME
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum
from wsi_fl.federation.site import Schedule, Site, relay, restore
from wsi_fl.federation.topology import handover, receivers, welcome
from wsi_fl.types import WsiFlError

_State = Literal["staying", "leaving", "returning", "listening", "away"]


class Standing(TypedDict):
    """A site's state before the first round: the rounds of its checkpoints, and whether it returns after a dropout."""

    kept: Annotated[list[Round], Field(max_length=1000)]
    returning: bool


class RosterEntry(TypedDict):
    """A site's state in a round; `ahead`: it has a checkpoint of this round or later that it did not resume from."""

    state: _State
    ahead: bool


class _Arrival(TypedDict):
    """Whether a site participates after returning sites got their shares."""

    active: bool


@dataclass(frozen=True)
class Roster:
    """The participants of a round, the same at all sites; listening sites receive and send nothing."""

    staying: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()
    listening: tuple[int, ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        """Return the sites that send, in ascending order."""
        return tuple(sorted((*self.staying, *self.returning)))


def first_round(told: Sequence[Standing]) -> int:
    """Return the last round from which all sites can resume; 1 where none has begun.

    A returning site does not make others repeat rounds.

    Example:
        >>> find_first_round([{"kept": [3, 4], "returning": False}, {"kept": [2, 3], "returning": False}])
        3
        >>> find_first_round([{"kept": [3, 4], "returning": False}, {"kept": [1], "returning": True}])
        4
    """
    latest = [max(one["kept"], default=1) for one in told]
    first = min(latest)
    if all(_stands(one["kept"], first) for one in told):
        return first
    waiting = [r for r, one in zip(latest, told, strict=True) if not one["returning"]]
    return min(waiting, default=max(latest))


def _stands(kept: Sequence[int], round_: int) -> bool:
    """Return whether a site with checkpoints of the rounds `checkpoint_rounds` can resume from a round."""
    return round_ in kept or (round_ == 1 and not kept)


def roster_of(sites: Sequence[int], told: Sequence[RosterEntry]) -> Roster:
    """Return the membership, given the replies of these sites in the same order.

    A returning site waits while another site already has the checkpoint of this round on disk: no share was split off
    it.
    """
    staying, leaving, returning, listening = (
        tuple(site for site, one in zip(sites, told, strict=True) if one["state"] == state)
        for state in ("staying", "leaving", "returning", "listening")
    )
    ahead = any(one["ahead"] for one in told if one["state"] == "staying")
    return Roster(staying, leaving, () if ahead else returning, listening)


def find_first_rounds(sites: list[Site], method: Method, schedule: Schedule, comm: Comm) -> dict[int, int]:
    """Return the round from which each of `sites` resumes: 1, or the last common checkpoint.

    A returning site does not take the others back, and where nothing is exchanged each site resumes from its own.

    Raises:
        WsiFlError: when a site has no checkpoint of that round, or its ledger has later rounds.
    """
    if not method.talks:
        firsts = {site.index: max(site.folder.checkpoints(), default=1) for site in sites}
    else:
        mine: list[Standing] = [
            {"kept": site.folder.checkpoints(), "returning": site.returning} for site in sites
        ]
        firsts = dict.fromkeys((site.index for site in sites), first_round(comm.gather(mine, Standing)))
    for site in sites:
        kept, first = site.folder.checkpoints(), firsts[site.index]
        last = max(kept, default=0)
        if not _stands(kept, first) and (last > first or not site.returning):
            raise WsiFlError(
                f"{site.folder.path}: no checkpoint of round {first}, from which the others resume"
            )
        sent = min(site.ledger.last_sent(), schedule.rounds)  # mpcpa sends its models after the last round
        # missed rounds; attempts at secure aggregation are no rounds
        missed = site.ledger.last_round() > last + 1 and schedule.colluding is None
        ahead = missed and not site.returning
        if ahead or sent > last:
            raise WsiFlError(
                f"{site.folder.path}: the ledger has later rounds than the checkpoints; start a new run"
            )
    return firsts


def begin(site: Site, method: Method, first: int) -> None:
    """Set the state in which a site enters round `first`."""
    kept = site.folder.checkpoints()
    if first in kept:
        restore(site, first)
    elif site.returning and first > 1:
        if kept:
            restore(site, max(kept))
        site.settle(active=False)
        site.returning = True  # the checkpoint is older
    else:  # a normal start
        site.returning = False
        if method.travels is not None and not site.receives:
            site.push = PushSum(site.traveller(method).vector(), 1.0)


def call_roll(
    sites: list[Site], method: Method, comm: Comm, round_: int, firsts: Mapping[int, int]
) -> Roster:
    """Exchange the states of all sites in a round, and return the membership.

    No site runs ahead, since others may still need the checkpoints of the last round.
    """
    mine: list[RosterEntry] = []
    for site in sites:
        later = [r for r in site.folder.checkpoints() if r > firsts[site.index]]
        ahead = any(r >= round_ for r in later)
        mine.append({"state": _state(site, round_, round_ in later), "ahead": ahead})
    if method.talks:
        return roster_of(comm.running, comm.gather(mine, RosterEntry))
    return roster_of([site.index for site in sites], mine)


def _state(site: Site, round_: int, decided: bool) -> _State:
    """Return a site's state in a round; it leaves for good where the round would exceed its budget.

    If `is_decided`, the round's checkpoint, written before a restart, is still to be restored.
    """
    if site.receives:
        return "listening"
    if decided:
        took_part = site.folder.load_checkpoint(round_)[1]["active"]
        return ("staying" if took_part else "leaving") if site.active else "away"
    if site.returning and round_ in site.folder.checkpoints():  # it waited in this round before the restart
        return "away"
    if not (site.active or site.returning):
        return "away"
    paid = round_ in site.folder.checkpoints()
    if site.plan is not None and not paid and not site.ledger.affords(round_, site.plan):
        site.returning = False
        return "leaving" if site.active else "away"
    return "returning" if site.returning else "staying"


def regroup(
    sites: list[Site], method: Method, comm: Comm, roster: Roster, round_: int, firsts: Mapping[int, int]
) -> tuple[Roster, set[int]]:
    """Move the mass of leaving sites to the next ones, and shares of hosts to returning sites.

    Return the new membership and the hosts.
    """
    here = {site.index: site for site in sites}
    hosts: set[int] = set()
    if method.travels is not None and roster.leaving and roster.staying and round_ > 1:
        matrix = handover(comm.n_sites, roster.leaving, roster.staying)
        relays = {i: relay(here[i], method, round_ - 1) for i in roster.leaving if i in here}
        exchange(sites, method, comm, matrix, relays, round_=round_ - 1, hop=FAREWELL)
    for index in roster.leaving:
        if index in here:
            here[index].settle(active=False)
            here[index].folder.log(f"round {round_}: left, as its max_epsilon does not allow the round")
    if method.travels is not None and roster.returning:
        roster, hosts = _welcome(sites, method, comm, roster, round_, firsts)
    elif roster.returning:  # there is no mass to share
        for index in roster.returning:
            if index in here:
                _take_back(here[index], round_)
    if roster.leaving or roster.returning:
        load_mixture(sites, method)
    return roster, hosts


def _welcome(
    sites: list[Site], method: Method, comm: Comm, roster: Roster, round_: int, firsts: Mapping[int, int]
) -> tuple[Roster, set[int]]:
    """Give returning sites their shares; return the membership with those who got one, and the hosts."""
    here = {site.index: site for site in sites}
    matrix = welcome(comm.n_sites, roster.returning, roster.staying)
    hosts = {i for i in roster.staying if receivers(matrix, i)}
    latest = round_ if round_ == firsts[sites[0].index] else round_ - 1
    relays = {i: relay(here[i], method, latest) for i in hosts if i in here}
    exchange(sites, method, comm, matrix, relays, round_=latest, hop=WELCOME, back=roster.returning)
    for site in sites:
        if site.returning and site.push is not None and site.push.w > 0:
            _take_back(site, round_)
    mine: list[_Arrival] = [{"active": site.active} for site in sites]
    told = dict(zip(comm.running, comm.gather(mine, _Arrival), strict=True))
    return replace(roster, returning=tuple(k for k in roster.returning if told[k]["active"])), hosts


def _take_back(site: Site, round_: int) -> None:
    """Let a site participate again after a dropout."""
    site.returning = False
    site.settle(active=True)
    site.folder.log(f"round {round_}: back again")
