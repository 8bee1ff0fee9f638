"""Sums of all sites with noise that is added once in total; nobody can read more than the sum.

Each site adds a share of discrete noise and hides what comes out under masks that cancel in the sum (Bonawitz et al.,
CCS 2017; Kairouz, Liu and Steinke, ICML 2021). All who see the sum are told no more than its ε says, and so are up to
t sites that put together what they know. A site that vanishes makes the sum unreadable. The others begin again with
fresh noise, which the account is charged for once more. What a peer says never makes a site begin again: it does so
while it has no sum, and a few times under each approval of its people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Round
from wsi_fl.federation.message import BUFFERS, BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum
from wsi_fl.federation.site import Schedule, Site, checkpoint
from wsi_fl.models import schema
from wsi_fl.models.shared_head import SharedHead
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
from wsi_fl.privacy.masks import KeyPair, masked, opened
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

_MOST = 1 << 30
"""More rows than any sum has; a larger total is invalid."""
_FURTHEST = 100
"""How many attempts one site's count may be ahead of another's."""
_REFUSALS = {
    "budget": "its max_epsilon does not allow another attempt at the sum",
    "finished": "it has the sum, and makes another one only after its people approve the plan again",
    "approval": f"its approval was good for {MOST_ATTEMPTS} attempts at the sum; let its people approve the plan again",
}


class Offer(TypedDict):
    """What a site tells before it masks its sums.

    Attributes:
        public: its fresh key; empty where it takes no part.
        done: whether it holds the sum already, from before a restart.
        attempt: the first round of its ledger that is not final; every attempt at a sum takes one.
        refuses: why it makes no further attempt; "" where it does.
    """

    public: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    done: bool
    attempt: Round
    refuses: Literal["", "budget", "finished", "approval"]


def share_sums(
    sites: Sequence[Site],
    method: Method,
    comm: Comm,
    schedule: Schedule,
    present: Sequence[int],
    *,
    round_: int,
) -> None:
    """Add up the sums of all sites that are present, and give each site their mean.

    Args:
        present: indices of the sites that take part.

    Raises:
        UsageError: when there are too few sites for the number that may collude.
        NoCommonPlan: when a site makes no further attempt.
        WsiFlError: when a message is not what was agreed on; the sum is void then.
    """
    colluding = schedule.colluding
    assert colluding is not None
    if len(present) < colluding + 2:
        raise UsageError(
            f"a sum of {len(present)} sites hides nothing from {colluding} that collude; privacy.noise = 'shared' "
            f"needs {colluding + 2} sites or more"
        )
    here = [site for site in sites if site.index in present]
    keys = {site.index: KeyPair.fresh() for site in here}
    mine: list[Offer] = [
        {
            "public": keys[site.index].public.hex() if site.index in keys else "",
            "done": _is_done(site, method),
            "attempt": site.ledger.last_sent() + 1,
            "refuses": _refusal(site, method),
        }
        for site in sites
    ]
    told = dict(zip(comm.running, comm.gather(mine, Offer), strict=True))
    if not here or all(told[index]["done"] for index in present):
        return
    if refusing := [index for index in present if told[index]["refuses"]]:
        raise NoCommonPlan(
            f"site {refusing[0]}: {_REFUSALS[told[refusing[0]]['refuses']]}; nothing was sent. The others can go on "
            "--without it"
        )
    attempt = max(told[index]["attempt"] for index in present)
    if attempt > min(told[index]["attempt"] for index in present) + _FURTHEST:
        raise WsiFlError(f"a site says that this is attempt {attempt} at the sum; start a new run")
    sum_ = _Sum(method, colluding, schedule.insecure_seed, attempt, list(present))
    publics = [bytes.fromhex(told[index]["public"]) for index in present]
    messages = {site.index: _masked(site, sum_, keys[site.index], publics) for site in here}
    size = len(_head(here[0], method).exact[:-1]) * 8
    outgoing = [
        Outgoing(index, to, 1.0, message)
        for index, message in messages.items()
        for to in present
        if to != index
    ]
    expected = [(sender, k.index) for k in here for sender in present if sender != k.index]
    arrived = comm.exchange(outgoing, expected, round_=attempt, hop=BUFFERS, size=size, kind=BYTES)
    for site in here:
        others = [message for message in arrived if message.receiver == site.index]
        _open(site, method, messages[site.index], others, len(present))
        checkpoint(site, round_)


def _refusal(site: Site, method: Method) -> Literal["", "budget", "finished", "approval"]:
    """Return why a site makes no further attempt, whatever others say; "" where it makes one."""
    affords = site.plan is None or site.ledger.affords(site.ledger.last_sent() + 1, site.plan)
    approved = site.ledger.named.get("approved", "")
    tried = attempts_of(site.ledger.entries, site.name, approved)
    if tried and _is_done(site, method):
        return "finished"
    if approved and tried >= MOST_ATTEMPTS:
        return "approval"
    return "" if affords else "budget"


def _is_done(site: Site, method: Method) -> bool:
    return int(_head(site, method).n_sites) > 0


def _head(site: Site, method: Method) -> SharedHead:
    head = site.traveller(method).model
    assert isinstance(head, SharedHead)
    return head


@dataclass(frozen=True)
class _Sum:
    """What all sites know of a sum: method, how many may collude, the seed of tests, the attempt, and who is in it."""

    method: Method
    colluding: int
    insecure_seed: int | None
    attempt: int
    present: list[int]

    def context(self, site: Site) -> bytes:
        """Return what the masks are bound to, so that a mask fits this sum alone."""
        who = ",".join(map(str, self.present))
        return f"{run_id(site.ledger.run)} attempt {self.attempt} of {who}".encode()


def _masked(site: Site, sum_: _Sum, keys: KeyPair, publics: Sequence[bytes]) -> Release:
    """Return the site's masked sums with its share of the noise, recorded in its ledger as about to leave."""
    head = _head(site, sum_.method)
    exact = head.exact[:-1].cpu().numpy()
    values, share = quantised(exact, SCALE), 0.0
    if site.plan is not None and site.plan.sigma > 0:
        share = _share_of(site.plan, len(exact), len(sum_.present), sum_.colluding)
        values = values + _noise(share, len(values), sum_, site.index)
    head.hold(torch.from_numpy(exact), torch.from_numpy(values / SCALE), (share / SCALE) ** 2)
    hidden = masked(values, sum_.present.index(site.index), keys, publics, sum_.context(site))
    release = site.ledger.release(
        sum_.attempt,
        hidden.astype("<u8").view(np.uint8),
        schema=schema(head),
        mechanism=site.plan,
        content=sum_.method.mixed.content if sum_.method.mixed else "model",
    )
    site.ledger.sending(release.round, release.digest)
    return release


def _share_of(plan: PrivacyPlan, n: int, n_sites: int, colluding: int) -> float:
    """Return the σ of one site's share, in steps: the shares of the honest sites add up to the plan's noise.

    Raises:
        WsiFlError: when they do not.
    """
    sensitivity = sensitivity_of(plan.clip, SCALE, n)
    share = share_sigma(plan.sigma * sensitivity * (1 + A_LITTLE), n_sites, colluding)
    if noise_multiplier(share, n_sites, colluding, sensitivity, n) < plan.sigma:
        raise WsiFlError(
            f"noise in shares of {share:g} steps adds up to less than the plan's; raise privacy.sigma"
        )
    return share


def _noise(share: float, n: int, sum_: _Sum, index: int) -> NDArray[np.int64]:
    seed = sum_.insecure_seed
    stream = CipherStream.fresh() if seed is None else CipherStream.seeded(seed, "shares", index)
    return discrete_gaussian(share, n, stream)


def _open(site: Site, method: Method, own: Release, others: Sequence[Message], n_sites: int) -> None:
    """Put the mean of all sums into the site's head.

    Raises:
        WsiFlError: when a message cannot be used, or the total is too large to be a sum of rows.
    """
    head = _head(site, method)
    for message in others:
        problem = message.refused or ("" if message.schema == own.schema else "it is of another head")
        if problem:
            raise WsiFlError(
                f"the sum is void: the message of site {message.sender} cannot be used, {problem}"
            )
    vectors = [own.vector, *(message.vector for message in others)]
    hidden = [np.ascontiguousarray(one, np.uint8).view("<u8").astype(np.uint64) for one in vectors]
    total = opened(hidden) / SCALE
    if np.abs(total).max() > _MOST:
        raise WsiFlError("the sum is void: the messages add up to too much; go on with train --resume")
    mean = np.concatenate([total / n_sites, [float(head.released[-1])]]).astype(np.float32)
    site.traveller(method).load_vector(mean, n_sites=n_sites)
    site.push = PushSum(mean, 1.0)
