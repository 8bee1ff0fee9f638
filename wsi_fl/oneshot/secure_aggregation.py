"""Secure aggregation of class statistics with distributed noise: no site can read more than the sum.

Each site adds a share of discrete noise, and masks that cancel in the sum (Bonawitz et al., CCS 2017; Kairouz, Liu and
Steinke, ICML 2021). ε of the sum holds against all who see it, and against up to t colluding sites. A dropout makes the
sum unreadable, unless the sites shared their keys secretly first (`privacy.dropouts`, `wsi_fl.oneshot.secagg`). The
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

from wsi_fl.federation.comm import Comm, PeerTimeout
from wsi_fl.federation.documents import Count, RoundNumber
from wsi_fl.federation.message import BUFFERS, BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.push_sum import PushSum
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Site, write_checkpoint
from wsi_fl.models import schema_digest
from wsi_fl.oneshot.class_statistics import explain_invalid_statistics
from wsi_fl.oneshot.discrete_noise import (
    NOISE_MARGIN,
    STEPS_PER_UNIT,
    discrete_gaussian,
    noise_multiplier,
    quantization_sensitivity,
    quantize,
    share_sigma,
)
from wsi_fl.oneshot.payload import require_head
from wsi_fl.oneshot.secagg import KeyPair, SecureSum, mask_values, require_enough_sites, sum_messages, vote_threshold
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.guarantee import MAX_ATTEMPTS, count_attempts
from wsi_fl.privacy.ledger_file import Release, run_id
from wsi_fl.privacy.privacy_plan import PrivacyPlan
from wsi_fl.types import NoCommonPlan, WsiFlError

_T = TypeVar("_T")
_Mask = Callable[[NDArray[np.int64]], NDArray[np.uint64]]  # adds masks to integers

_MAX_ROWS = 1 << 30  # more rows than any valid sum has
_MAX_ATTEMPT_LEAD = 100  # attempts that a site's count may be ahead of another's
_REFUSALS = {
    "budget": "its max_epsilon does not allow another attempt at the sum",
    "finished": "it has the sum, and takes part in another one only after its people approve the plan again",
    "approval": f"its approval was good for {MAX_ATTEMPTS} attempts at the sum; let its people approve the plan again",
}


class _SumOffer(TypedDict):
    """A site's offer before it masks its statistics."""

    # its fresh key; empty where it does not participate, or distributes keys with their shares
    public: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    done: bool  # whether it has the sum, from before a restart
    attempt: RoundNumber  # the first round of its ledger that is not final; each attempt takes one
    refuses: Literal["", "budget", "finished", "approval"]  # why it makes no further attempt; "" where it makes one


class _HeldSites(TypedDict):
    """The sites whose keys, or whose messages, a site has."""

    sites: Annotated[list[Count], Field(max_length=10_000)]


class _SecretPieces(TypedDict):
    """A document of `masks.SecureSum` for a site: public keys and shares of seeds, a vote, or opened shares."""

    pieces: Annotated[list[Annotated[str, Field(pattern="^([0-9a-f]{32}){1,2}$")]], Field(max_length=10_001)]


def aggregate_statistics(
    sites: Sequence[Site], comm: Comm, recipe: Recipe, present: Sequence[int], *, round_: int
) -> None:
    """Aggregate the statistics of all sites present, and give each site their mean.

    It fails, and the sum is void, where too few sites are present for the number that may collude, a site makes no
    further attempt, or a message is invalid.
    """
    colluding = recipe.colluding
    assert colluding is not None
    require_enough_sites(len(present), colluding, 0)
    # after dropouts, only as many more as the remaining sites tolerate
    dropouts = min(recipe.dropouts, len(present) - vote_threshold(len(present), colluding))
    local_sites = [site for site in sites if site.index in present]
    keys = {} if dropouts else {site.index: KeyPair.generate() for site in local_sites}
    local_offers: list[_SumOffer] = [
        {
            "public": keys[site.index].public.hex() if site.index in keys else "",
            "done": _is_done(site, recipe.method),
            "attempt": site.ledger.last_final_round() + 1,
            "refuses": _find_refusal(site, recipe.method),
        }
        for site in sites
    ]
    offers = dict(zip(comm.running, comm.gather(local_offers, _SumOffer), strict=True))
    if not local_sites or all(offers[index]["done"] for index in present):
        return
    attempt = _agree_attempt({index: offers[index] for index in present})
    terms = _SumTerms(recipe.method, colluding, dropouts, recipe.insecure_seed, attempt, list(present))
    if dropouts:
        _aggregate_survivors(local_sites, terms, comm, round_=round_)
        return
    publics = [bytes.fromhex(offers[index]["public"]) for index in present]
    _aggregate_all(local_sites, terms, comm, keys, publics, round_=round_)


def _agree_attempt(offers: Mapping[int, _SumOffer]) -> int:
    if refusing := [index for index, offer in offers.items() if offer["refuses"]]:
        raise NoCommonPlan(
            f"site {refusing[0]}: {_REFUSALS[offers[refusing[0]]['refuses']]}; nothing was sent. The others can go on "
            "--without it"
        )
    attempts = [offer["attempt"] for offer in offers.values()]
    if max(attempts) > min(attempts) + _MAX_ATTEMPT_LEAD:
        raise WsiFlError(f"a site is at attempt {max(attempts)} at the sum; start a new run")
    return max(attempts)


def _aggregate_all(
    local_sites: Sequence[Site],
    terms: _SumTerms,
    comm: Comm,
    keys: Mapping[int, KeyPair],
    publics: Sequence[bytes],
    *,
    round_: int,
) -> None:
    present = terms.present

    def build_mask(site: Site) -> _Mask:
        position = present.index(site.index)
        return lambda values: mask_values(values, position, keys[site.index], publics, terms.mask_context(site))

    messages = {site.index: _mask_statistics(site, terms, build_mask(site)) for site in local_sites}
    others = {site.index: [k for k in present if k != site.index] for site in local_sites}
    arrived = _exchange_masked(messages, others, terms, comm)
    for site in local_sites:
        local_message = messages[site.index]
        for message in arrived[site.index]:
            if problem := _find_problem(message, local_message):
                raise WsiFlError(f"the sum is void: the message of site {message.sender} cannot be used, {problem}")
        total = sum_messages([_read_numbers(local_message), *map(_read_numbers, arrived[site.index])])
        _open_sum(site, terms.method, total, len(present))
        write_checkpoint(site, round_)


def _exchange_masked(
    messages: Mapping[int, Release],
    others: Mapping[int, Sequence[int]],
    terms: _SumTerms,
    comm: Comm,
    *,
    lossy: bool = False,
) -> dict[int, list[Message]]:
    """Send each local site's message to others; return the received messages by local site."""
    outgoing = [Outgoing(k, to, 1.0, messages[k]) for k in messages for to in others[k]]
    expected = [(sender, k) for k in messages for sender in others[k]]
    size = next(iter(messages.values())).vector.size
    arrived = comm.exchange(outgoing, expected, round_=terms.attempt, hop=BUFFERS, size=size, kind=BYTES, lossy=lossy)
    return {k: [message for message in arrived if message.receiver == k] for k in messages}


class _SurvivorExchange:
    """Documents between the sites of a sum; a site that does not answer in time is waited for no more.

    Attributes:
        parts: each local site's part of the sum, by index.
        responding: the sites that each local site has heard in time so far, and still waits for.
    """

    def __init__(self, parts: Mapping[int, SecureSum], present: Sequence[int], comm: Comm) -> None:
        self.parts, self._comm = parts, comm
        self.responding = {k: [other for other in present if other != k] for k in parts}

    def exchange_pieces(
        self, make_pieces: Callable[[int, int], Sequence[bytes]]
    ) -> dict[int, dict[int, tuple[bytes, ...]]]:
        """Send each pair's pieces; return those received by each local site."""
        replies = self._exchange_all(
            _SecretPieces, lambda k, to: {"pieces": [piece.hex() for piece in make_pieces(k, to)]}
        )
        return {
            k: {other: tuple(map(bytes.fromhex, reply["pieces"])) for other, reply in site_replies.items()}
            for k, site_replies in replies.items()
        }

    def exchange_holdings(self, holdings: Mapping[int, Collection[int]]) -> dict[int, list[list[int]]]:
        """Send the sites whose keys or messages each local site holds; return what it hears from others."""
        replies = self._exchange_all(_HeldSites, lambda k, _: {"sites": sorted(holdings[k])})
        return {k: [reply["sites"] for reply in site_replies.values()] for k, site_replies in replies.items()}

    def _exchange_all(self, kind: type[_T], make_document: Callable[[int, int], _T]) -> dict[int, dict[int, _T]]:
        pairs = [(k, to) for k in self.parts for to in self.responding[k]]
        replies = self._comm.exchange_documents(
            {(k, to): make_document(k, to) for k, to in pairs}, kind, [(to, k) for k, to in pairs]
        )
        for k in self.parts:
            self.responding[k] = [other for other in self.responding[k] if (other, k) in replies]
        return {k: {other: replies[other, k] for other in self.responding[k]} for k in self.parts}


def _aggregate_survivors(local_sites: Sequence[Site], terms: _SumTerms, comm: Comm, *, round_: int) -> None:
    parts = {
        site.index: SecureSum(site.index, terms.present, terms.colluding, terms.dropouts, terms.mask_context(site))
        for site in local_sites
    }
    exchange = _SurvivorExchange(parts, terms.present, comm)
    # 1. keys, and a share of each for every other site; only sites heard by all mask
    parcels = exchange.exchange_pieces(lambda k, to: parts[k].parcels[to])
    for k, holdings in exchange.exchange_holdings({k: parts[k].take_parcels(parcels[k]) for k in parts}).items():
        parts[k].join(holdings)
    # 2. messages, charged from here on
    local_messages = {
        site.index: _mask_statistics(site, terms, parts[site.index].mask_values, parts[site.index].sum_context)
        for site in local_sites
    }
    arrived = _exchange_masked(local_messages, exchange.responding, terms, comm, lossy=True)
    exchange.responding |= {k: [message.sender for message in arrived[k]] for k in parts}
    valid_messages = {
        k: {message.sender: message for message in arrived[k] if not _find_problem(message, local_messages[k])}
        | {k: local_messages[k]}
        for k in parts
    }
    # 3. votes for the sites whose messages all have, and then one seed of each site
    local_votes = {
        k: parts[k].vote_survivors(valid_messages[k], holdings)
        for k, holdings in exchange.exchange_holdings(valid_messages).items()
    }
    votes = exchange.exchange_pieces(lambda k, _: local_votes[k])
    local_openings = {k: parts[k].open_shares(votes[k]) for k in parts}
    openings = exchange.exchange_pieces(lambda k, _: local_openings[k])
    for site in local_sites:
        k, part = site.index, parts[site.index]
        vectors = {other: _read_numbers(valid_messages[k][other]) for other in part.survivors}
        total = part.compute_total(vectors, openings[k] | {k: local_openings[k]})
        _open_sum(site, terms.method, total, len(vectors))
        write_checkpoint(site, round_)
    for k in parts:
        if lost_sites := sorted({*terms.present} - {k, *exchange.responding[k]}):
            raise PeerTimeout(
                f"site {lost_sites[0]} was lost; the sum of the remaining sites is kept, go on --without it", lost_sites
            )


def _find_refusal(site: Site, method: Method) -> Literal["", "budget", "finished", "approval"]:
    """Return why a site makes no further attempt; "" where it makes one."""
    is_affordable = site.plan is None or site.ledger.fits_budget(site.ledger.last_final_round() + 1, site.plan)
    approved = site.ledger.references.get("approved", "")
    n_attempts = count_attempts(site.ledger.entries, site.name, approved)
    if n_attempts and _is_done(site, method):
        return "finished"
    if approved and n_attempts >= MAX_ATTEMPTS:
        return "approval"
    return "" if is_affordable else "budget"


def _is_done(site: Site, method: Method) -> bool:
    return int(require_head(site.mixing_learner(method).model).n_sites) > 0


@dataclass(frozen=True)
class _SumTerms:
    """Terms of a sum, the same at all sites: tolerated collusion and dropouts, test seed, attempt, participants."""

    method: Method
    colluding: int
    dropouts: int
    insecure_seed: int | None
    attempt: int
    present: list[int]

    def mask_context(self, site: Site) -> bytes:
        """Return the context of the masks, which binds them to this sum."""
        site_list = ",".join(map(str, self.present))
        return f"{run_id(site.ledger.run)} attempt {self.attempt} of {site_list}".encode()


def _mask_statistics(site: Site, terms: _SumTerms, mask: _Mask, binding: bytes = b"") -> Release:
    """Return the site's masked statistics with its share of the noise, recorded in its ledger.

    The schema includes `binding` beside the head, which tells messages of other masks apart.
    """
    head = require_head(site.mixing_learner(terms.method).model)
    exact = head.noiseless_statistics.cpu().numpy()
    values, share = quantize(exact), 0.0
    if site.plan is not None and site.plan.sigma > 0:
        n_lacking = terms.colluding + terms.dropouts
        share = _compute_share(site.plan, len(exact), len(terms.present), n_lacking)
        seed = terms.insecure_seed
        stream = CipherStream.from_entropy() if seed is None else CipherStream.from_seed(seed, "shares", site.index)
        values = values + discrete_gaussian(share, len(values), stream)
    head.set_noisy_statistics(
        torch.from_numpy(exact), torch.from_numpy(values / STEPS_PER_UNIT), (share / STEPS_PER_UNIT) ** 2
    )
    masked_values, head_schema = mask(values), schema_digest(head)
    release = site.ledger.release(
        terms.attempt,
        masked_values.astype("<u8").view(np.uint8),
        schema=hashlib.sha256(head_schema.encode() + binding).hexdigest() if binding else head_schema,
        mechanism=site.plan,
        content=terms.method.round_disclosure.content if terms.method.round_disclosure else "model",
    )
    site.ledger.record_transmission(release.round, release.digest)
    return release


def _compute_share(plan: PrivacyPlan, n: int, n_sites: int, n_lacking: int) -> float:
    sensitivity = quantization_sensitivity(plan.clip, n)
    share = share_sigma(plan.sigma * sensitivity * (1 + NOISE_MARGIN), n_sites, n_lacking)
    if noise_multiplier(share, n_sites, n_lacking, sensitivity, n) < plan.sigma:
        raise WsiFlError(f"distributed noise in shares of {share:g} steps is less than the plan's; raise privacy.sigma")
    return share


def _find_problem(message: Message, local_message: Release) -> str:
    """Return why a message cannot be added to the local one, or ""."""
    return message.refused or ("" if message.schema == local_message.schema else "it is of another head")


def _read_numbers(message: Message | Release) -> NDArray[np.uint64]:
    """Return the numbers uint64[n] of a masked message."""
    return np.ascontiguousarray(message.vector, np.uint8).view("<u8").astype(np.uint64)


def _open_sum(site: Site, method: Method, summed_steps: NDArray[np.int64], n_sites: int) -> None:
    head, total = require_head(site.mixing_learner(method).model), summed_steps / STEPS_PER_UNIT
    variances = head.released[len(total) :].cpu().numpy()
    n = sum(units for units, _ in site.announced_units.values()) or _MAX_ROWS
    statistics = torch.from_numpy(np.concatenate([total, variances * n_sites]))
    if problem := explain_invalid_statistics(head.layout, statistics, n, rows=False):
        raise WsiFlError(f"the sum is void, no honest messages add up to it: {problem}; go on with train --resume")
    mean = np.concatenate([total / n_sites, variances]).astype(np.float32)
    method.payload.load_mixture(site.mixing_learner(method), mean, n_sites)
    site.push = PushSum(mean, 1.0)
