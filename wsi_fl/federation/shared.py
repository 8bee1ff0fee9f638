"""Secure aggregation of class statistics with distributed noise: no site can read more than the sum.

Each site adds a share of discrete noise, and masks that cancel in the sum (Bonawitz et al., CCS 2017; Kairouz, Liu and
Steinke, ICML 2021). ε of the sum holds against all who see it, and against up to t colluding sites. A dropout makes the
sum unreadable, unless the sites shared their keys secretly first (`privacy.dropouts`, `wsi_fl.privacy.masks`). The
others then begin again with fresh noise, which is charged once more. A peer's message never makes a site begin again:
it does so only without a sum, and a few times under each approval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm, PeerLate
from wsi_fl.federation.documents import Count, Round
from wsi_fl.federation.message import BUFFERS, BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum
from wsi_fl.federation.site import Schedule, Site, checkpoint
from wsi_fl.models import schema
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.discrete import (
    A_LITTLE,
    SCALE,
    discrete_gaussian,
    noise_multiplier,
    quantised,
    sensitivity_of,
    share_sigma,
)
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS, attempts_of
from wsi_fl.privacy.ledger_file import Release, run_id
from wsi_fl.privacy.masks import KeyPair, Part, masked, needed_votes, opened, require_enough
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.privacy.sums import impossible
from wsi_fl.types import NoCommonPlan, WsiFlError

_T = TypeVar("_T")
_Hider = Callable[[NDArray[np.int64]], NDArray[np.uint64]]  # adds masks to integers

_MOST = 1 << 30  # more rows than any valid sum has
_FURTHEST = 100  # attempts that a site's count may be ahead of another's
_REFUSALS = {
    "budget": "its max_epsilon does not allow another attempt at the sum",
    "finished": "it has the sum, and takes part in another one only after its people approve the plan again",
    "approval": f"its approval was good for {MOST_ATTEMPTS} attempts at the sum; let its people approve the plan again",
}


class _Offer(TypedDict):
    """A site's offer before it masks its statistics."""

    # its fresh key; empty where it does not participate, or distributes keys with their shares
    public: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    done: bool  # whether it has the sum, from before a restart
    attempt: Round  # the first round of its ledger that is not final; each attempt takes one
    refuses: Literal[
        "", "budget", "finished", "approval"
    ]  # why it makes no further attempt; "" where it makes one


class _Holds(TypedDict):
    """The sites whose keys, or whose messages, a site has."""

    sites: Annotated[list[Count], Field(max_length=10_000)]


class _Pieces(TypedDict):
    """A document of `masks.Part` for a site: public keys and shares of seeds, a vote, or opened shares."""

    pieces: Annotated[list[Annotated[str, Field(pattern="^([0-9a-f]{32}){1,2}$")]], Field(max_length=10_001)]


def share_sums(
    sites: Sequence[Site],
    method: Method,
    comm: Comm,
    schedule: Schedule,
    present: Sequence[int],
    *,
    round_: int,
) -> None:
    """Aggregate the statistics of all sites present, and give each site their mean.

    It fails, and the sum is void, where too few sites are present for the number that may collude, a site makes no
    further attempt, or a message is invalid.
    """
    colluding = schedule.colluding
    assert colluding is not None
    require_enough(len(present), colluding, 0)
    # after dropouts, only as many more as the remaining sites tolerate
    dropouts = min(schedule.dropouts, len(present) - needed_votes(len(present), colluding))
    here = [site for site in sites if site.index in present]
    keys = {} if dropouts else {site.index: KeyPair.fresh() for site in here}
    mine: list[_Offer] = [
        {
            "public": keys[site.index].public.hex() if site.index in keys else "",
            "done": _is_done(site, method),
            "attempt": site.ledger.last_sent() + 1,
            "refuses": _refusal(site, method),
        }
        for site in sites
    ]
    told = dict(zip(comm.running, comm.gather(mine, _Offer), strict=True))
    if not here or all(told[index]["done"] for index in present):
        return
    attempt = _attempt_of({index: told[index] for index in present})
    sum_ = _Sum(method, colluding, dropouts, schedule.insecure_seed, attempt, list(present))
    if dropouts:
        _share_as_survivors(here, sum_, comm, round_=round_)
        return
    publics = [bytes.fromhex(told[index]["public"]) for index in present]
    _share_as_all(here, sum_, comm, keys, publics, round_=round_)


def _attempt_of(told: Mapping[int, _Offer]) -> int:
    if refusing := [index for index, offer in told.items() if offer["refuses"]]:
        raise NoCommonPlan(
            f"site {refusing[0]}: {_REFUSALS[told[refusing[0]]['refuses']]}; nothing was sent. The others can go on "
            "--without it"
        )
    attempts = [offer["attempt"] for offer in told.values()]
    if max(attempts) > min(attempts) + _FURTHEST:
        raise WsiFlError(f"a site is at attempt {max(attempts)} at the sum; start a new run")
    return max(attempts)


def _share_as_all(
    here: Sequence[Site],
    sum_: _Sum,
    comm: Comm,
    keys: Mapping[int, KeyPair],
    publics: Sequence[bytes],
    *,
    round_: int,
) -> None:
    present = sum_.present

    def hider(site: Site) -> _Hider:
        place = present.index(site.index)
        return lambda values: masked(values, place, keys[site.index], publics, sum_.context(site))

    messages = {site.index: _masked(site, sum_, hider(site)) for site in here}
    others = {site.index: [k for k in present if k != site.index] for site in here}
    arrived = _sent(messages, others, sum_, comm)
    for site in here:
        own = messages[site.index]
        for message in arrived[site.index]:
            if problem := _problem(message, own):
                raise WsiFlError(
                    f"the sum is void: the message of site {message.sender} cannot be used, {problem}"
                )
        total = opened([_numbers(own), *map(_numbers, arrived[site.index])])
        _open(site, sum_.method, total, len(present))
        checkpoint(site, round_)


def _sent(
    messages: Mapping[int, Release],
    others: Mapping[int, Sequence[int]],
    sum_: _Sum,
    comm: Comm,
    *,
    lossy: bool = False,
) -> dict[int, list[Message]]:
    """Send each local site's message to others; return the received messages by local site."""
    outgoing = [Outgoing(k, to, 1.0, messages[k]) for k in messages for to in others[k]]
    expected = [(sender, k) for k in messages for sender in others[k]]
    size = next(iter(messages.values())).vector.size
    arrived = comm.exchange(
        outgoing, expected, round_=sum_.attempt, hop=BUFFERS, size=size, kind=BYTES, lossy=lossy
    )
    return {k: [message for message in arrived if message.receiver == k] for k in messages}


def _share_as_survivors(here: Sequence[Site], sum_: _Sum, comm: Comm, *, round_: int) -> None:
    parts = {
        site.index: Part(site.index, sum_.present, sum_.colluding, sum_.dropouts, sum_.context(site))
        for site in here
    }
    heard = {k: [other for other in sum_.present if other != k] for k in parts}
    """The sites that each site has heard in time so far, and still waits for."""

    def hand(kind: type[_T], say: Callable[[int, int], _T]) -> dict[int, dict[int, _T]]:
        pairs = [(k, to) for k in parts for to in heard[k]]
        told = comm.hand({(k, to): say(k, to) for k, to in pairs}, kind, [(to, k) for k, to in pairs])
        for k in parts:
            heard[k] = [other for other in heard[k] if (other, k) in told]
        return {k: {other: told[other, k] for other in heard[k]} for k in parts}

    def hand_pieces(say: Callable[[int, int], Sequence[bytes]]) -> dict[int, dict[int, tuple[bytes, ...]]]:
        told = hand(_Pieces, lambda k, to: {"pieces": [one.hex() for one in say(k, to)]})
        return {
            k: {other: tuple(map(bytes.fromhex, one["pieces"])) for other, one in ones.items()}
            for k, ones in told.items()
        }

    def all_hold(held: Mapping[int, Collection[int]]) -> dict[int, list[list[int]]]:
        told = hand(_Holds, lambda k, _: {"sites": sorted(held[k])})
        return {k: [one["sites"] for one in ones.values()] for k, ones in told.items()}

    # 1. keys, and a share of each for every other site; only sites heard by all mask
    parcels = hand_pieces(lambda k, to: parts[k].parcels[to])
    for k, told in all_hold({k: parts[k].take(parcels[k]) for k in parts}).items():
        parts[k].join(told)
    # 2. messages, charged from here on
    own = {
        site.index: _masked(site, sum_, parts[site.index].masked, parts[site.index].bound) for site in here
    }
    arrived = _sent(own, heard, sum_, comm, lossy=True)
    heard |= {k: [one.sender for one in arrived[k]] for k in parts}
    came = {
        k: {one.sender: one for one in arrived[k] if not _problem(one, own[k])} | {k: own[k]} for k in parts
    }
    # 3. votes for the sites whose messages all have, and then one seed of each site
    votes_of = {k: parts[k].vote(came[k], told) for k, told in all_hold(came).items()}
    votes = hand_pieces(lambda k, _: votes_of[k])
    mine = {k: parts[k].opening(votes[k]) for k in parts}
    openings = hand_pieces(lambda k, _: mine[k])
    for site in here:
        k, part = site.index, parts[site.index]
        vectors = {other: _numbers(came[k][other]) for other in part.survivors}
        _open(site, sum_.method, part.total(vectors, openings[k] | {k: mine[k]}), len(vectors))
        checkpoint(site, round_)
    for k in parts:
        if gone := sorted({*sum_.present} - {k, *heard[k]}):
            raise PeerLate(
                f"site {gone[0]} was lost; the sum of the remaining sites is kept, go on --without it",
                gone,
            )


def _refusal(site: Site, method: Method) -> Literal["", "budget", "finished", "approval"]:
    """Return why a site makes no further attempt; "" where it makes one."""
    affords = site.plan is None or site.ledger.affords(site.ledger.last_sent() + 1, site.plan)
    approved = site.ledger.named.get("approved", "")
    tried = attempts_of(site.ledger.entries, site.name, approved)
    if tried and _is_done(site, method):
        return "finished"
    if approved and tried >= MOST_ATTEMPTS:
        return "approval"
    return "" if affords else "budget"


def _is_done(site: Site, method: Method) -> bool:
    return int(site.shared_head(method).n_sites) > 0


@dataclass(frozen=True)
class _Sum:
    """Terms of a sum, the same at all sites: tolerated collusion and dropouts, test seed, attempt, participants."""

    method: Method
    colluding: int
    dropouts: int
    insecure_seed: int | None
    attempt: int
    present: list[int]

    def context(self, site: Site) -> bytes:
        """Return the context of the masks, which binds them to this sum."""
        who = ",".join(map(str, self.present))
        return f"{run_id(site.ledger.run)} attempt {self.attempt} of {who}".encode()


def _masked(site: Site, sum_: _Sum, hide: _Hider, bound: bytes = b"") -> Release:
    """Return the site's masked statistics with its share of the noise, recorded in its ledger.

    The schema includes `binding` beside the head, which tells messages of other masks apart.
    """
    head = site.shared_head(sum_.method)
    exact = head.exact.cpu().numpy()
    values, share = quantised(exact, SCALE), 0.0
    if site.plan is not None and site.plan.sigma > 0:
        lacking = sum_.colluding + sum_.dropouts
        share = _share_of(site.plan, len(exact), len(sum_.present), lacking)
        seed = sum_.insecure_seed
        stream = CipherStream.fresh() if seed is None else CipherStream.seeded(seed, "shares", site.index)
        values = values + discrete_gaussian(share, len(values), stream)
    head.hold(torch.from_numpy(exact), torch.from_numpy(values / SCALE), (share / SCALE) ** 2)
    hidden, of = hide(values), schema(head)
    release = site.ledger.release(
        sum_.attempt,
        hidden.astype("<u8").view(np.uint8),
        schema=hashlib.sha256(of.encode() + bound).hexdigest() if bound else of,
        mechanism=site.plan,
        content=sum_.method.mixed.content if sum_.method.mixed else "model",
    )
    site.ledger.sending(release.round, release.digest)
    return release


def _share_of(plan: PrivacyPlan, n: int, n_sites: int, lacking: int) -> float:
    sensitivity = sensitivity_of(plan.clip, SCALE, n)
    share = share_sigma(plan.sigma * sensitivity * (1 + A_LITTLE), n_sites, lacking)
    if noise_multiplier(share, n_sites, lacking, sensitivity, n) < plan.sigma:
        raise WsiFlError(
            f"distributed noise in shares of {share:g} steps is less than the plan's; raise privacy.sigma"
        )
    return share


def _problem(message: Message, own: Release) -> str:
    """Return why a message cannot be added to the local one, or ""."""
    return message.refused or ("" if message.schema == own.schema else "it is of another head")


def _numbers(message: Message | Release) -> NDArray[np.uint64]:
    """Return the numbers uint64[n] of a masked message."""
    return np.ascontiguousarray(message.vector, np.uint8).view("<u8").astype(np.uint64)


def _open(site: Site, method: Method, summed: NDArray[np.int64], n_sites: int) -> None:
    head, total = site.shared_head(method), summed / SCALE
    variances = head.released[len(total) :].cpu().numpy()
    n = sum(units for units, _ in site.announced.values()) or _MOST
    letter = torch.from_numpy(np.concatenate([total, variances * n_sites]))
    if problem := impossible(head, letter, n, rows=False):
        raise WsiFlError(
            f"the sum is void, no honest messages add up to it: {problem}; go on with train --resume"
        )
    mean = np.concatenate([total / n_sites, variances]).astype(np.float32)
    site.traveller(method).load_vector(mean, n_sites=n_sites)
    site.push = PushSum(mean, 1.0)
