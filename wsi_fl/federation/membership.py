"""Membership: where sites resume, and which participate, leave or return in a round, agreed by all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import RoundNumber
from wsi_fl.federation.exchange import exchange_models, load_mixture
from wsi_fl.federation.message import FAREWELL, WELCOME
from wsi_fl.federation.methods import Method
from wsi_fl.federation.push_sum import PushSum
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Site, relay_mixture, restore_checkpoint
from wsi_fl.federation.topology import build_handover, build_welcome, list_receivers
from wsi_fl.types import WsiFlError

_MembershipState = Literal["staying", "leaving", "returning", "listening", "away"]


class ResumeState(TypedDict):
    """A site's state before the first round: the rounds of its checkpoints, and whether it returns after a dropout."""

    kept: Annotated[list[RoundNumber], Field(max_length=1000)]
    returning: bool


class MembershipReply(TypedDict):
    """A site's state in a round; `ahead`: it has a checkpoint of this round or later that it did not resume from."""

    state: _MembershipState
    ahead: bool


class _ReturnReply(TypedDict):
    """Whether a site participates after returning sites got their shares."""

    active: bool


@dataclass(frozen=True)
class Membership:
    """The participants of a round, the same at all sites; listening sites receive and send nothing."""

    staying: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()
    listening: tuple[int, ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        """Return the sites that send, in ascending order."""
        return tuple(sorted((*self.staying, *self.returning)))


def find_first_round(states: Sequence[ResumeState]) -> int:
    """Return the last round from which all sites can resume; 1 where none has begun.

    A returning site does not make others repeat rounds.

    Example:
        >>> find_first_round([{"kept": [3, 4], "returning": False}, {"kept": [2, 3], "returning": False}])
        3
        >>> find_first_round([{"kept": [3, 4], "returning": False}, {"kept": [1], "returning": True}])
        4
    """
    latest = [max(state["kept"], default=1) for state in states]
    first = min(latest)
    if all(_can_resume(state["kept"], first) for state in states):
        return first
    waiting = [r for r, state in zip(latest, states, strict=True) if not state["returning"]]
    return min(waiting, default=max(latest))


def _can_resume(checkpoint_rounds: Sequence[int], round_: int) -> bool:
    """Return whether a site with checkpoints of the rounds `checkpoint_rounds` can resume from a round."""
    return round_ in checkpoint_rounds or (round_ == 1 and not checkpoint_rounds)


def build_membership(sites: Sequence[int], replies: Sequence[MembershipReply]) -> Membership:
    """Return the membership, given the replies of these sites in the same order.

    A returning site waits while another site already has the checkpoint of this round on disk: no share was split off
    it.
    """
    staying, leaving, returning, listening = (
        tuple(site for site, reply in zip(sites, replies, strict=True) if reply["state"] == state)
        for state in ("staying", "leaving", "returning", "listening")
    )
    ahead = any(reply["ahead"] for reply in replies if reply["state"] == "staying")
    return Membership(staying, leaving, () if ahead else returning, listening)


def find_first_rounds(sites: list[Site], recipe: Recipe, comm: Comm) -> dict[int, int]:
    """Return the round from which each of `sites` resumes: 1, or the last common checkpoint.

    A returning site does not take the others back, and where nothing is exchanged each site resumes from its own.

    Raises:
        WsiFlError: when a site has no checkpoint of that round, or its ledger has later rounds.
    """
    if not recipe.method.has_exchange:
        firsts = {site.index: max(site.folder.list_checkpoints(), default=1) for site in sites}
    else:
        local_states: list[ResumeState] = [
            {"kept": site.folder.list_checkpoints(), "returning": site.returning} for site in sites
        ]
        firsts = dict.fromkeys((site.index for site in sites), find_first_round(comm.gather(local_states, ResumeState)))
    for site in sites:
        checkpoint_rounds, first = site.folder.list_checkpoints(), firsts[site.index]
        last = max(checkpoint_rounds, default=0)
        if not _can_resume(checkpoint_rounds, first) and (last > first or not site.returning):
            raise WsiFlError(f"{site.folder.path}: no checkpoint of round {first}, from which the others resume")
        sent = min(site.ledger.last_final_round(), recipe.rounds)  # some methods send models after the last round
        # missed rounds; attempts at secure aggregation are no rounds
        missed = site.ledger.last_round() > last + 1 and recipe.colluding is None
        ahead = missed and not site.returning
        if ahead or sent > last:
            raise WsiFlError(f"{site.folder.path}: the ledger has later rounds than the checkpoints; start a new run")
    return firsts


def enter_round(site: Site, method: Method, first: int) -> None:
    """Set the state in which a site enters round `first`."""
    checkpoint_rounds = site.folder.list_checkpoints()
    if first in checkpoint_rounds:
        restore_checkpoint(site, first)
    elif site.returning and first > 1:
        if checkpoint_rounds:
            restore_checkpoint(site, max(checkpoint_rounds))
        site.set_active(active=False)
        site.returning = True  # the checkpoint is older
    else:  # a normal start
        site.returning = False
        if method.mixing_role is not None and not site.receives:
            site.push = PushSum(site.mixing_learner(method).parameter_vector(), 1.0)


def collect_membership(
    sites: list[Site], method: Method, comm: Comm, round_: int, first_rounds: Mapping[int, int]
) -> Membership:
    """Exchange the states of all sites in a round, and return the membership.

    No site runs ahead, since others may still need the checkpoints of the last round.
    """
    local_replies: list[MembershipReply] = []
    for site in sites:
        later = [r for r in site.folder.list_checkpoints() if r > first_rounds[site.index]]
        ahead = any(r >= round_ for r in later)
        local_replies.append({"state": _find_state(site, round_, round_ in later), "ahead": ahead})
    if method.has_exchange:
        return build_membership(comm.running, comm.gather(local_replies, MembershipReply))
    return build_membership([site.index for site in sites], local_replies)


def _find_state(site: Site, round_: int, is_decided: bool) -> _MembershipState:
    """Return a site's state in a round; it leaves for good where the round would exceed its budget.

    If `is_decided`, the round's checkpoint, written before a restart, is still to be restored.
    """
    if site.receives:
        return "listening"
    if is_decided:
        took_part = site.folder.load_checkpoint(round_)[1]["active"]
        return ("staying" if took_part else "leaving") if site.active else "away"
    if site.returning and site.folder.has_checkpoint(round_):  # it waited in this round before the restart
        return "away"
    if not (site.active or site.returning):
        return "away"
    is_charged = site.folder.has_checkpoint(round_)
    if site.plan is not None and not is_charged and not site.ledger.fits_budget(round_, site.plan):
        site.returning = False
        return "leaving" if site.active else "away"
    return "returning" if site.returning else "staying"


def update_membership(
    sites: list[Site], method: Method, comm: Comm, membership: Membership, round_: int, first_rounds: Mapping[int, int]
) -> tuple[Membership, set[int]]:
    """Move the mass of leaving sites to the next ones, and shares of hosts to returning sites.

    Return the new membership and the hosts.
    """
    local_sites = {site.index: site for site in sites}
    hosts: set[int] = set()
    if method.mixing_role is not None and membership.leaving and membership.staying and round_ > 1:
        matrix = build_handover(comm.n_sites, membership.leaving, membership.staying)
        relays = {i: relay_mixture(local_sites[i], method, round_ - 1) for i in membership.leaving if i in local_sites}
        exchange_models(sites, method, comm, matrix, relays, round_=round_ - 1, hop=FAREWELL)
    for index in membership.leaving:
        if index in local_sites:
            local_sites[index].set_active(active=False)
            local_sites[index].folder.log(f"round {round_}: left, as its max_epsilon does not allow the round")
    if method.mixing_role is not None and membership.returning:
        membership, hosts = _welcome_sites(sites, method, comm, membership, round_, first_rounds)
    elif membership.returning:  # there is no mass to share
        for index in membership.returning:
            if index in local_sites:
                _readmit_site(local_sites[index], round_)
    if membership.leaving or membership.returning:
        load_mixture(sites, method)
    return membership, hosts


def _welcome_sites(
    sites: list[Site], method: Method, comm: Comm, membership: Membership, round_: int, first_rounds: Mapping[int, int]
) -> tuple[Membership, set[int]]:
    """Give returning sites their shares; return the membership with those who got one, and the hosts."""
    local_sites = {site.index: site for site in sites}
    matrix = build_welcome(comm.n_sites, membership.returning, membership.staying)
    hosts = {i for i in membership.staying if list_receivers(matrix, i)}
    latest = round_ if round_ == first_rounds[sites[0].index] else round_ - 1
    relays = {i: relay_mixture(local_sites[i], method, latest) for i in hosts if i in local_sites}
    exchange_models(sites, method, comm, matrix, relays, round_=latest, hop=WELCOME, returning=membership.returning)
    for site in sites:
        if site.returning and site.push is not None and site.push.w > 0:
            _readmit_site(site, round_)
    local_replies: list[_ReturnReply] = [{"active": site.active} for site in sites]
    replies = dict(zip(comm.running, comm.gather(local_replies, _ReturnReply), strict=True))
    return replace(membership, returning=tuple(k for k in membership.returning if replies[k]["active"])), hosts


def _readmit_site(site: Site, round_: int) -> None:
    """Let a site participate again after a dropout."""
    site.returning = False
    site.set_active(active=True)
    site.folder.log(f"round {round_}: back again")
