"""`audit`: attacks on the models of a run, by those who know the most, and what they show of its ε.

What comes out are rates and bounds; no example, no loss of one, and no coin of a canary is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wsi_fl.federation.methods import Method
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import losses_of
from wsi_fl.learning.units import Canaries
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.audit import (
    ADJACENCY,
    alarming,
    auroc,
    auroc_interval,
    canary_bound,
    level_of_each,
    roc,
    said_of_tests,
    tpr_at,
)
from wsi_fl.report import exposed
from wsi_fl.report.words import number
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.exposure import EXPOSURE, exposure_of, influence_of
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.training.learners import build_model
from wsi_fl.stages.training.workshop import agreed_canaries, learned_from
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json, write_json
from wsi_fl.types import WsiFlError

CONFIDENCE = 0.95
"""Of a bound alone, and of all that is called broken in a run together."""
_RATES = (0.01, 0.001)


def audit(study: Study, run_name: str, *, watcher: Watcher | None = None) -> dict[str, Any]:
    """Audits a finished run, writes audit/audit.json, returns the document.

    A hospital that keeps its patches to itself is audited where its store is, on its own examples alone.

    Raises:
        WsiFlError: when the run has not finished, or no store of its sites is here.
    """
    watcher = watcher or Silent()
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    run.finished()
    with RunContext.of_run(study, run) as party:
        document = _document(party, watcher)
    write_json(run.path / "audit" / "audit.json", document)
    return document


def _document(party: RunContext, watcher: Watcher) -> dict[str, Any]:
    tests, merged = _n_tests(party), party.may_merge and len(party.members) > 1
    here, level = _sites_here(party, merged), level_of_each(CONFIDENCE, tests)
    rows = []
    for done, index in enumerate(here):
        name = party.names[index]
        watcher.update("audit", done, len(here), name)
        rows.append(_audit_site(party, index, merged=merged, level=level))
        watcher.update("audit", done + 1, len(here), name)
    return {
        "run": party.study.relative(party.run.path),
        "method": party.name,
        "examples": party.examples,
        "confidence": CONFIDENCE,
        "tests": tests,
        "level": level,
        "tested": said_of_tests(tests, CONFIDENCE) if tests else None,
        "adjacency": ADJACENCY,
        "sites": rows,
        "influence": influence_of(party, [row["site"] for row in rows]) if party.method.once else [],
    }


def _sites_here(party: RunContext, merged: bool) -> list[int]:
    """The places in the run of the sites that finished and whose stores are here."""
    lost = party.lost
    here = [
        index
        for index, name in enumerate(party.names)
        if name not in lost and name not in party.receivers and (merged or party.has_store(name))
    ]
    if not here:
        raise WsiFlError(f"{party.study.root}/stores: no store of a site of this run; an audit needs one")
    return here


def _n_tests(party: RunContext) -> int:
    """How many models of the run have an ε that canaries test: all sites', wherever they are audited."""
    if not party.pipeline.audit.canaries:
        return 0
    sites, lost = (party.run.summary() or {}).get("sites", ()), party.lost
    tested = [site for site in sites if site["guarantee"] != "none" and site["site"] not in lost]
    return len(tested) * sum(_with_dp(party, role) for _, role in _models_of(party.method))


def _models_of(method: Method) -> list[tuple[str, str]]:
    """(name, role) of what each site is left with and of what it sent."""
    kept = "central" if method.learns_from == "everybody" or method.travels == "private" else "private"
    if method.travels is None:
        return [(kept, "private")]
    return [(kept, "private"), ("proxy" if method.travels == "proxy" else "released", method.travels)]


def _with_dp(party: RunContext, role: str) -> bool:
    return party.pipeline.privacy.enabled and (role == "proxy" or "proxy" not in party.method.learners)


@dataclass(frozen=True)
class _Attacked:
    """A trained model of a site.

    Attributes:
        name: "private"; "proxy" or "released", as it left the site in its last round; "central", all sites'.
        dp: whether it was trained with differential privacy.
    """

    name: str
    dp: bool
    network: nn.Module


def _audit_site(party: RunContext, index: int, *, merged: bool, level: float) -> dict[str, Any]:
    name, device, pipeline = party.names[index], device_of_rank(), party.pipeline
    data, folder = party.data(name), party.run.site(name)
    folder.remember_store(data.digest(), data.facts())
    members, _ = learned_from(party, name)
    others = {"own": data.held_out}
    if merged:
        others["merged"] = party.merged()
    account = read_json(folder.path / "ledger.json")
    if pipeline.audit.canaries and folder.kept("canaries") is None:
        raise WsiFlError(
            f"{folder.path}/canaries.json is missing, the only record of what was planted; restore it"
        )
    planted = agreed_canaries(folder, pipeline, data)
    rows = []
    for model in _attacked(party, index):
        found: dict[str, Any] = {"model": model.name, "dp": model.dp}
        found["membership"] = _membership(model, members, others, pipeline.evaluate.bootstrap, device)
        upper = account["epsilon"] if model.dp and account["guarantee"] != "none" else None
        found["canaries"] = _canaries(model, planted, upper, account["delta"], level, device)
        rows.append(found)
    kept = ("epsilon", "delta", "guarantee", "unit")
    wrote = party.method.once and (not party.by_files or name in party.releases)
    tail = exposure_of(party, name) if wrote else None
    return {"site": name, **{key: account[key] for key in kept}, "models": rows, "tail": tail}


def _attacked(party: RunContext, index: int) -> list[_Attacked]:
    """What a site has trained: the model it keeps, and what it sent, from the checkpoint before the last exchange."""
    method, site = party.method, party.sites[index]
    folder, data = party.run.site(site.name), party.data(site.name)
    rounds = folder.checkpoints()
    if not rounds:
        raise WsiFlError(
            f"{folder.path}/state: no checkpoint, so what {site.name} released cannot be audited"
        )
    state, _ = folder.load_checkpoint(rounds[-1])

    def of_role(name: str, role: str, tensors: Mapping[str, torch.Tensor]) -> _Attacked:
        common = method.travels == "private"
        network = build_model(site, party.pipeline, data, role, index, common=common, state=tensors)
        if isinstance(network, SharedHead) and name != kept:
            network.forget()  # what left is the letter alone
        return _Attacked(name, _with_dp(party, role), network.to(device_of_rank()).eval())

    def sent(role: str) -> dict[str, torch.Tensor]:
        prefix = f"{role}/model/"
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    (kept, role), *released = _models_of(method)
    found = [of_role(kept, role, folder.load_model(role))]
    return found + [of_role(name, role, sent(role)) for name, role in released]


def _membership(
    model: _Attacked, members: Examples, others: Mapping[str, Examples], repeats: int, device: torch.device
) -> dict[str, Any]:
    """Membership by a threshold on the loss (Yeom et al., 2018), against each set of examples never trained on."""
    scores = -losses_of(model.network, members, device)
    found = {}
    for name, examples in others.items():
        against = -losses_of(model.network, examples, device)
        interval = auroc_interval(scores, against, members.patient, examples.patient, repeats=repeats)
        found[name] = {
            "members": len(scores),
            "non_members": len(against),
            "auroc": auroc(scores, against),
            "interval": interval,
            "alarm": alarming(interval),
            "tpr_at_fpr": {f"{rate:g}": tpr_at(scores, against, rate) for rate in _RATES},
            "roc": [list(point) for point in roc(scores, against)],
        }
    return found


def _canaries(
    model: _Attacked,
    planted: Canaries | None,
    upper: float | None,
    delta: float,
    level: float,
    device: torch.device,
) -> dict[str, Any] | None:
    """What the loss of each canary tells, and the least ε that explains it; None without canaries.

    The loss after training alone: minus that before, which varies from one to the next, it tells less.

    Args:
        upper: ε that is promised; None where nothing is.
        level: confidence at which the bound must be above it to call it broken.
    """
    if planted is None:
        return None
    scores = -losses_of(model.network, planted.examples, device)
    bound, among_all = (
        canary_bound(scores, planted.included, delta, confidence=confidence)
        for confidence in (CONFIDENCE, level)
    )
    return {
        "n": bound.n,
        "accuracy": bound.accuracy,
        "guesses": bound.guesses,
        "right": bound.right,
        "epsilon_lower": bound.epsilon,
        "epsilon_lower_corrected": among_all.epsilon,
        "epsilon_upper": upper,
        "delta": delta,
        "broken": None if upper is None else among_all.epsilon > upper,
    }


def audit_lines(document: dict[str, Any]) -> Lines:
    """A row per model; then what is alarming."""
    rows = []
    for site in document["sites"]:
        for model in site["models"]:
            own, planted = model["membership"]["own"], model["canaries"] or {}
            interval = own["interval"]
            rows.append(
                [
                    f"{site['site']}, {model['model']}",
                    number(own["auroc"]),
                    "–" if interval is None else f"{interval[0]:.3f}–{interval[1]:.3f}",
                    *(number(own["tpr_at_fpr"][f"{rate:g}"]) for rate in _RATES),
                    number(planted.get("epsilon_lower"), 2),
                    number(planted.get("epsilon_upper"), 2),
                ]
            )
    title = f"audit of {document['run']}: members against the site's own test {document['examples']}"
    yield Table(title, ("site, model", "AUROC", "95 %", "TPR 1 %", "0.1 %", "ε ≥", "ε ≤"), rows)
    for name, headings, cells in exposed.tables(document):
        yield Table(name, headings, cells)
    for sentence, style in _said(document):
        yield Line(f"  {sentence}", style)
    yield Line(f"{document['run']} audited; next: wsi-fl report {document['run']}")


def _said(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Sentences and their colours."""
    found = []
    for site in document["sites"]:
        for model in site["models"]:
            who = f"{site['site']}, {model['model']} model"
            if model["membership"]["own"]["alarm"]:
                found.append((f"{who}: its losses tell who was in the training data", "yellow"))
            if (model["canaries"] or {}).get("broken"):
                found.append((f"{who}: its {site['guarantee']} ε is refuted by its canaries", "red"))
    found += [(said, "red" if bad else "yellow") for said, bad in exposed.findings(document)]
    if exposed.tables(document):
        found.append(
            (f"sites/*/{EXPOSURE} lists all, the most exposed first; it names patients and stays here", "")
        )
    if document["tests"]:
        found += [(document["tested"], ""), (document["adjacency"], "")]
    if not any(model["canaries"] for site in document["sites"] for model in site["models"]):
        found.append(("no canaries: train with --set audit.canaries=400 to bound ε from below", ""))
    return found
