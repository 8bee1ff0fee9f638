"""A plan as people see it on a terminal before they sign it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wsi_fl.hospitals.plans.approving import Cost, Looked
from wsi_fl.hospitals.plans.making import PlanDocument
from wsi_fl.hospitals.trust.making import fingerprint_line
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS
from wsi_fl.report.words import count, detected, size
from wsi_fl.stages.site.account import group_words
from wsi_fl.stages.work.console import Line, Lines, Table


def look_lines(looked: Looked) -> Lines:
    """Show people what they are about to sign."""
    said, privacy = looked.document, looked.document["privacy"]
    yield Line(
        f"plan {looked.plan.digest[:8]}: {said['does']} Pipeline {said['pipeline']}, {said['rounds']} rounds."
    )
    yield Table("who takes part", ("site", "real", "allows", "max ε", "δ"), _rows_of_sites(said))
    for site in said["sites"]:
        yield fingerprint_line(site["name"], site["key"] or "not pinned")
    learned = said["learns"]
    classes = ", ".join(learned["classes"] or ["unknown classes"])
    trained = f"trained on {learned['data']} ({learned['encoder'] or 'pixels'})"
    yield Line(f"  {trained} to answer {learned['asks']}: {classes}. {learned['says']}")
    if learned["weights"] is not None:
        yield Line(f"  models start from weights with the SHA-256 {learned['weights']}")
    if learned["directions"] is not None:
        yield Line(f"  features are summed along directions: {learned['directions']}")
    yield Line(f"  {privacy['says']}", "" if privacy["differential_privacy"] else "yellow")
    yield Line("what leaves your hospital:")
    for one in said["leaves"]:
        each = f", {size(one['bytes'])} each" if one["bytes"] is not None else ""
        yield Line(f"  {one['what']} → {one['to']}; {one['often']}{each}. Protection: {one['protected_by']}")
    yield Line(f"what never leaves: {'; '.join(said['stays'])}")
    if looked.cost is not None:
        yield Line(cost_words(looked.cost))
        if looked.cost.group is not None:
            yield Line(f"  {_patient_words(looked.cost)}", "red" if looked.cost.above else "")
    for note in looked.notes:
        yield Line(f"  {note}", "yellow")


def _rows_of_sites(said: PlanDocument) -> list[tuple[str, ...]]:
    return [
        (
            one["name"],
            "yes" if one["real"] else "no",
            _allowed(one["allow"]) if one["real"] else "everything without DP",
            *("–" if value is None else f"{value:g}" for value in (one["max_epsilon"], one["delta"])),
        )
        for one in said["sites"]
    ]


def _allowed(kinds: Sequence[str]) -> str:
    """What a site allows by name; masked sums of shared noise are under differential privacy, all else is not."""
    bare = ", ".join(kind for kind in kinds if kind != "shared")
    said = [f"{bare} without DP"] if bare else ["nothing without DP"]
    return "; ".join([*said, *(["shared noise"] if "shared" in kinds else [])])


def cost_words(cost: Cost) -> str:
    """Say in one sentence what a plan costs a hospital."""
    of = f"{count(cost.n_units)} {'patients' if cost.unit == 'patient' else 'rows'} at your hospital"
    if cost.epsilon is None or cost.lifetime_epsilon is None:
        return f"{of}: no ε is spent, for there is no differential privacy"
    limit = "no limit" if cost.max_epsilon is None else f"{cost.max_epsilon:g}"
    tried = (
        ""
        if cost.most_epsilon is None
        else f"; a sum that a site spoils is tried again, {MOST_ATTEMPTS} times in all at ε = {cost.most_epsilon:.2f}"
    )
    found = "" if cost.detection is None else f"; {detected(cost.detection, cost.unit)}"
    return (
        f"{of}: all rounds cost ε = {cost.epsilon:.2f} at δ = {cost.delta:g}; with everything spent before "
        f"{cost.lifetime_epsilon:.2f} of {limit}{tried}{found}"
    )


def _patient_words(cost: Cost) -> str:
    """What ε per row is worth to the patient with the most rows."""
    assert cost.group is not None and cost.lifetime_group is not None
    ever = cost.lifetime_group["epsilon"]
    return f"{group_words(cost.group)}{'' if ever is None else f'; with everything spent before {ever:.1f}'}"


def above_words(cost: Cost | None) -> str:
    """Say what is above the budget though ε per row is not; "" where nothing is."""
    if cost is None or cost.above is None:
        return ""
    return f"{_patient_words(cost)}, which is above your max_epsilon = {cost.max_epsilon:g}"


def signed_lines(document: dict[str, Any]) -> Lines:
    """Say where the approval lies, and what to do with it."""
    yield Line(
        f"{document['site']} signed plan {document['plan'][:8]}; send {document['approval']} to the coordinator, then "
        "start your kit"
    )
