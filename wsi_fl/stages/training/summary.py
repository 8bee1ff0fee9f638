"""The summary of a training job: a row per site, which all sites get to know, and what they sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count, Name, Round, Words
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import Group, group_of
from wsi_fl.stages.site.party import RunContext

if TYPE_CHECKING:
    from wsi_fl.federation.site import Site  # and with it PyTorch; who reads summaries need not wait for it


class _SiteRow(TypedDict):
    """A site's row of a summary; None also for what a real site keeps to itself.

    Attributes:
        rounds: how many it took part in.
        rounds_completed: which: the first and the last round of each stretch.
    """

    site: Name
    epsilon: Amount | None
    lifetime_epsilon: Amount | None
    lifetime_guarantee: Guarantee
    real: bool
    max_epsilon: Amount | None
    delta: Amount
    guarantee: Guarantee
    unit: Words
    batch_size: Count | None
    sigma: Amount | None
    rounds: Round
    rounds_completed: list[Annotated[list[Round], Field(min_length=2, max_length=2)]]
    rejected: Count
    n_train: Count | None
    n_units: Count
    canaries: Count
    max_tpr_at_fpr_1pct: Amount | None
    group: Group | None


class SummaryRow(_SiteRow):
    """What all sites tell each other at the end: a row, and what of it is added up over all of them."""

    receives: bool
    trained_seconds: Amount | None
    messages: Count
    bytes: Count
    communication_seconds: Amount | None


class _Loss(TypedDict):
    """A site that was lost and has not come back."""

    site: Name
    round: Round
    reason: Words
    time: Words


class _Communication(TypedDict):
    """What all sites sent together."""

    messages: Count
    bytes: Count
    seconds: Amount


class Summary(TypedDict):
    """What all sites know of a run that has finished.

    Attributes:
        run: its folder, relative to the study.
        sites: what each site has spent and done; receivers have spent nothing.
        statistics: site → beginning of the digest of its letter, where heads were made of files.
    """

    run: Words
    method: Words
    seconds: Amount
    sites: list[_SiteRow]
    inference_sites: list[Name]
    statistics: dict[Name, Words]
    lost: list[Name]
    losses: list[_Loss]
    communication: _Communication


def row_of(site: Site) -> SummaryRow:
    """Return a site's row, of all rounds, those before a restart too."""
    lines = site.folder.metrics()
    took_part = [line["round"] for line in lines if line["takes_part"]]
    terms = site.ledger.terms
    sent = site.folder.transfers()
    waited = sum(line["communication_seconds"] for line in lines) + sum(line["seconds"] for line in sent)
    return {
        "site": site.name,
        "epsilon": site.ledger.epsilon(),
        "lifetime_epsilon": site.ledger.epsilon(lifetime=True),
        "lifetime_guarantee": site.ledger.guarantee(lifetime=True),
        "real": terms.lifetime,
        "max_epsilon": terms.max_epsilon,
        "delta": terms.delta,
        "guarantee": site.ledger.guarantee(),
        "unit": terms.unit,
        "batch_size": site.plan.batch_size if site.plan else None,
        "sigma": site.plan.sigma if site.plan else None,
        "rounds": len(took_part),
        "rounds_completed": _stretches(took_part),
        "rejected": sum(len(line.get("rejected", ())) for line in lines),
        "n_train": rows_for_others(site),
        "n_units": site.units.n,
        "canaries": site.n_canaries,
        "max_tpr_at_fpr_1pct": site.ledger.detection(),
        "group": None if terms.lifetime else group_of(site),
        "receives": site.receives,
        # time grows with the rows that were drawn, so a real hospital keeps its own
        "trained_seconds": None if terms.lifetime else sum(line["seconds"] for line in lines),
        "messages": sum(line["messages"] for line in lines) + len(sent),
        "bytes": sum(line["bytes"] for line in [*lines, *sent]),
        "communication_seconds": None if terms.lifetime else float(waited),
    }


def rows_for_others(site: Site) -> int | None:
    """Return how many training rows a site tells others.

    A real one tells n: where patients are protected, how many rows they have is theirs, and how many are left once some
    are held out would say of whom the settings hold out whether they are there.
    """
    if not site.ledger.terms.lifetime:
        return len(site.train)
    return None if site.ledger.terms.unit == "patient" else site.units.n - site.n_canaries


def _stretches(rounds: Sequence[int]) -> list[list[int]]:
    """Return the first and the last of each stretch of rising rounds without a gap."""
    found: list[list[int]] = []
    for round_ in rounds:
        if found and round_ == found[-1][1] + 1:
            found[-1][1] = round_
        else:
            found.append([round_, round_])
    return found


def finished_in(run: RunFolder) -> Summary | None:
    """Return the summary of a run; None where it has not finished; WsiFlError when it is damaged."""
    return cast(Summary | None, run.summary())


def summary_of(party: RunContext, rows: Sequence[SummaryRow], seconds: float) -> Summary:
    """Return the summary of a run, made of what all sites told."""
    run = party.run
    communication: _Communication = {
        "messages": sum(row["messages"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "seconds": max(row["communication_seconds"] or 0.0 for row in rows),
    }
    return {
        "run": party.study.relative(run.path),
        "method": party.name,
        "seconds": max([seconds, *(row["trained_seconds"] or 0.0 for row in rows)]),
        "sites": [_own(row) for row in rows if not row["receives"]],
        "inference_sites": [row["site"] for row in rows if row["receives"]],
        "statistics": {name: one.digest[:8] for name, one in party.releases.items()},
        "lost": [loss["site"] for loss in run.losses()],
        "losses": [cast(_Loss, {key: loss[key] for key in _Loss.__annotations__}) for loss in run.losses()],
        "communication": communication,
    }


def _own(row: SummaryRow) -> _SiteRow:
    return cast(_SiteRow, {key: value for key, value in row.items() if key in _SiteRow.__annotations__})
