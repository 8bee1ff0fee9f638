"""The summary of a training job: a row per site, disclosed to all sites, and total traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count, PrintableText, RoundNumber, SiteName
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.privacy_account import Group, compute_group
from wsi_fl.stages.site.run_context import RunContext

if TYPE_CHECKING:
    from wsi_fl.federation.site_state import Site  # and with it PyTorch; who reads summaries need not wait for it

_T = TypeVar("_T")


class _SiteSummary(TypedDict):
    """A site's row of a summary; None also for values that stay at a real site.

    Attributes:
        rounds: number of rounds completed.
        rounds_completed: first and last round of each stretch of completed rounds.
    """

    site: SiteName
    epsilon: Amount | None
    lifetime_epsilon: Amount | None
    lifetime_guarantee: Guarantee
    real: bool
    max_epsilon: Amount | None
    delta: Amount
    guarantee: Guarantee
    unit: PrintableText
    batch_size: Count | None
    sigma: Amount | None
    rounds: RoundNumber
    rounds_completed: list[Annotated[list[RoundNumber], Field(min_length=2, max_length=2)]]
    rejected: Count
    n_train: Count | None
    n_units: Count
    canaries: Count
    max_tpr_at_fpr_1pct: Amount | None
    group: Group | None


class SummaryRow(_SiteSummary):
    """The document that sites exchange at the end: a row, and values for totals."""

    receives: bool
    trained_seconds: Amount | None
    messages: Count
    bytes: Count
    communication_seconds: Amount | None


class _SiteLoss(TypedDict):
    """A site that dropped out and has not returned."""

    site: SiteName
    round: RoundNumber
    reason: PrintableText
    time: PrintableText


class _TrafficTotals(TypedDict):
    """Total traffic of all sites."""

    messages: Count
    bytes: Count
    seconds: Amount


class Summary(TypedDict):
    """The summary of a finished run, the same at all sites.

    Attributes:
        run: its folder, relative to the study.
        sites: spending and work of each site with labels.
        statistics: site → first digits of the digest of its statistics, where heads were computed from files.
    """

    run: PrintableText
    method: PrintableText
    seconds: Amount
    sites: list[_SiteSummary]
    inference_sites: list[SiteName]
    statistics: dict[SiteName, PrintableText]
    lost: list[SiteName]
    losses: list[_SiteLoss]
    communication: _TrafficTotals


def build_row(site: Site) -> SummaryRow:
    """Return a site's row, over all rounds, those before a restart included."""
    lines = site.folder.read_metrics()
    took_part = [line["round"] for line in lines if line["takes_part"]]
    terms = site.ledger.terms
    sent = site.folder.list_transfers()
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
        "rounds_completed": _find_stretches(took_part),
        "rejected": sum(len(line.get("rejected", ())) for line in lines),
        "n_train": _count_public_rows(site),
        "n_units": site.units.n,
        "canaries": site.n_canaries,
        "max_tpr_at_fpr_1pct": site.ledger.max_tpr(),
        "group": None if terms.lifetime else compute_group(site),
        "receives": site.receives,
        # not disclosed by a real hospital, as time grows with the number of drawn rows
        "trained_seconds": None if terms.lifetime else sum(line["seconds"] for line in lines),
        "messages": sum(line["messages"] for line in lines) + len(sent),
        "bytes": sum(line["bytes"] for line in [*lines, *sent]),
        "communication_seconds": None if terms.lifetime else float(waited),
    }


def _count_public_rows(site: Site) -> int | None:
    """Return the number of training rows that a site discloses.

    A real one discloses n: with patients as units their number of rows stays at the site, and the number after the
    held-out draw would disclose whether patients that settings hold out are there.
    """
    if not site.ledger.terms.lifetime:
        return len(site.train)
    return None if site.ledger.terms.unit == "patient" else site.units.n - site.n_canaries


def _find_stretches(rounds: Sequence[int]) -> list[list[int]]:
    """Return the first and last round of each stretch without a gap."""
    stretches = (list(pairs) for _, pairs in groupby(enumerate(rounds), lambda pair: pair[1] - pair[0]))
    return [[pairs[0][1], pairs[-1][1]] for pairs in stretches]


def load_summary(run: RunFolder) -> Summary | None:
    """Return the summary of a run; None where it has not finished; WsiFlError for a damaged one."""
    return cast(Summary | None, run.read("summary"))


def build_summary(context: RunContext, rows: Sequence[SummaryRow], seconds: float) -> Summary:
    """Return the summary of a run from the rows of all sites."""
    run = context.run
    return {
        "run": context.study.relative_path(run.path),
        "method": context.name,
        "seconds": max([seconds, *(row["trained_seconds"] or 0.0 for row in rows)]),
        "sites": [_select_keys(_SiteSummary, row) for row in rows if not row["receives"]],
        "inference_sites": [row["site"] for row in rows if row["receives"]],
        "statistics": {name: statistics.digest[:8] for name, statistics in context.statistics.items()},
        "lost": [loss["site"] for loss in run.list_dropouts()],
        "losses": [_select_keys(_SiteLoss, loss) for loss in run.list_dropouts()],
        "communication": {
            "messages": sum(row["messages"] for row in rows),
            "bytes": sum(row["bytes"] for row in rows),
            "seconds": max(row["communication_seconds"] or 0.0 for row in rows),
        },
    }


def _select_keys(kind: type[_T], document: Mapping[str, object]) -> _T:
    return cast(_T, {key: document[key] for key in kind.__annotations__})
