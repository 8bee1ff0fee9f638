"""`audit`: attacks on the models of a run, by those who know the most, and what they show of its ε.

What comes out are rates and bounds; no example, no loss of one, and no coin of a canary is written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.federation.methods import Method
from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.local import losses_of, probabilities
from wsi_fl.learning.metrics import choose_classes
from wsi_fl.learning.units import Canaries, Units
from wsi_fl.learning.validation import COMMON
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy import audit as attacks
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.sums import NoisySums, impossible, without
from wsi_fl.report.audit import findings, tables
from wsi_fl.report.words import number
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.trained import with_dp
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.training.checks import traits_of
from wsi_fl.stages.training.workshop import agreed_canaries, build_model, learned_from
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import clash
from wsi_fl.system.files import write_csv
from wsi_fl.types import WsiFlError

_CONFIDENCE = 0.95
"""Of a bound alone, and of all that is called broken in a run together."""
_PLANTED = 400
"""Canaries that bound ε well from below."""
_RATES = (0.01, 0.001)
_EXPOSURE = "exposure.csv"
"""Of a site: how far each unit moves its letter. It names patients, and stays at home."""


class _Audit(TypedDict):
    """The document of `audit`."""

    run: str
    method: str
    examples: str
    confidence: float
    tests: int
    level: float
    tested: str | None
    adjacency: str
    sites: list[dict[str, Any]]
    influence: list[dict[str, object]]
    may_plant: bool


def audit(study: Study, run_name: str, *, watcher: Watcher | None = None) -> _Audit:
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
    run.write("audit", document)
    return document


def _document(party: RunContext, watcher: Watcher) -> _Audit:
    merged, lost = party.may_merge and len(party.members) > 1, party.lost
    finished = [name for name in party.names if name not in lost and name not in party.receivers]
    here = [name for name in finished if merged or party.has_store(name)]
    if not here:
        raise WsiFlError(f"{party.study.root}/stores: no store of a site of this run; an audit needs one")
    tests = 0
    if party.pipeline.audit.canaries:  # of all sites, wherever they are audited
        summary = party.run.finished()
        promised = [row["site"] for row in summary["sites"] if row["guarantee"] != "none"]
        roles = [role for _, role in _models_of(party.method) if with_dp(party, role)]
        tests = len(set(promised) - lost) * len(roles)
    level, rows = attacks.level_of_each(_CONFIDENCE, tests), []
    for done, name in enumerate(here):
        watcher.update("audit", done, len(here), name)
        rows.append(_audit_site(party, party.names.index(name), merged=merged, level=level))
        watcher.update("audit", done + 1, len(here), name)
    return {
        "run": party.study.relative(party.run.path),
        "method": party.name,
        "examples": party.examples,
        "confidence": _CONFIDENCE,
        "tests": tests,
        "level": level,
        "tested": attacks.said_of_tests(tests, _CONFIDENCE) if tests else None,
        "adjacency": attacks.ADJACENCY,
        "sites": rows,
        "influence": _influence_of(party, here) if party.method.once else [],
        "may_plant": not party.pipeline.audit.canaries and _may_plant(party),
    }


def _may_plant(party: RunContext) -> bool:
    """Return whether a run like this one may have canaries."""
    return not clash(party.pipeline.changed(audit={"canaries": _PLANTED}), traits_of(party.method))


def _models_of(method: Method) -> list[tuple[str, str]]:
    """(name, role) of what each site is left with, and of what it sent if it sent something."""
    kept = "central" if method.learns_from == "everybody" or method.travels == "private" else "private"
    if method.travels is None:
        return [(kept, "private")]
    return [(kept, "private"), (method.travels if method.travels in COMMON else "released", method.travels)]


class _Attacked(NamedTuple):
    """A trained model of a site: "private"; "proxy", "shared" or "released", as it left the site in its last round;
    "central", all sites'. And whether it was trained with differential privacy."""

    name: str
    dp: bool
    network: nn.Module


def _audit_site(party: RunContext, index: int, *, merged: bool, level: float) -> dict[str, Any]:
    name, pipeline = party.names[index], party.pipeline
    data, folder = party.data(name), party.run.site(name)
    folder.remember_store(data.digest(), data.facts())
    members = learned_from(party, name).train
    others = {"own": data.held_out}
    if merged:
        others["merged"] = party.merged()
    account = folder.account()
    if pipeline.audit.canaries and folder.kept("canaries") is None:
        raise WsiFlError(
            f"{folder.path}/canaries.json is missing, the only record of what was planted; restore it"
        )
    planted = agreed_canaries(party, name)
    rows = []
    for model in _attacked(party, index):
        upper = account["epsilon"] if model.dp and account["guarantee"] != "none" else None
        found: dict[str, object] = {"model": model.name, "dp": model.dp}
        found["membership"] = _membership(model, members, others, pipeline.evaluate.bootstrap)
        found["canaries"] = _canaries(model, planted, upper, account["delta"], level) if planted else None
        rows.append(found)
    wrote = party.method.once and (not party.by_files or name in party.releases)
    return {
        "site": name,
        **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
        "models": rows,
        "tail": _exposure_of(party, name) if wrote else None,
    }


def _attacked(party: RunContext, index: int) -> list[_Attacked]:
    """What a site has trained: the model it keeps, and what it sent, from the checkpoint before the last exchange."""
    method, name = party.method, party.names[index]
    folder = party.run.site(name)
    rounds = folder.checkpoints()
    if not rounds:
        raise WsiFlError(f"{folder.path}/state: no checkpoint, so what {name} released cannot be audited")
    state, _ = folder.load_checkpoint(rounds[-1])
    found: list[_Attacked] = []
    for called, role in _models_of(method):
        prefix, sent = f"{role}/model/", bool(found)
        last = {key.removeprefix(prefix): one for key, one in state.items() if key.startswith(prefix)}
        tensors = last if sent else folder.load_model(role)
        common = method.travels == "private"
        network = build_model(party, index, role, common=common, state=tensors)
        if isinstance(network, SharedHead) and sent:
            network.forget()  # what left is the letter alone
        found.append(_Attacked(called, with_dp(party, role), network.to(device_of_rank()).eval()))
    return found


def _membership(
    model: _Attacked, members: Examples, others: Mapping[str, Examples], repeats: int
) -> dict[str, dict[str, object]]:
    """Membership by a threshold on the loss (Yeom et al., 2018), against each set of examples never trained on."""
    scores = -losses_of(model.network, members, device_of_rank())
    found: dict[str, dict[str, object]] = {}
    for name, examples in others.items():
        against = -losses_of(model.network, examples, device_of_rank())
        interval = attacks.auroc_interval(scores, against, members.patient, examples.patient, repeats=repeats)
        found[name] = {
            "members": len(scores),
            "non_members": len(against),
            "auroc": attacks.auroc(scores, against),
            "interval": interval,
            "alarm": attacks.alarming(interval),
            "tpr_at_fpr": {f"{rate:g}": attacks.tpr_at(scores, against, rate) for rate in _RATES},
            "roc": [list(point) for point in attacks.roc(scores, against)],
        }
    return found


def _canaries(
    model: _Attacked, planted: Canaries, upper: float | None, delta: float, level: float
) -> dict[str, float | None]:
    """What the loss of each canary tells, and the least ε that explains it.

    The loss after training alone: minus that before, which varies from one to the next, it tells less. The promised ε,
    `upper`, is broken when the bound is above it at the confidence `level`.
    """
    scores = -losses_of(model.network, planted.examples, device_of_rank())
    bound, among_all = (
        attacks.canary_bound(scores, planted.included, delta, confidence=confidence)
        for confidence in (_CONFIDENCE, level)
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


def audit_lines(document: _Audit) -> Lines:
    """A row per model; then what is alarming."""
    rows = []
    for site in document["sites"]:
        for model in site["models"]:
            own, planted = model["membership"]["own"], model["canaries"] or {}
            interval = "–" if own["interval"] is None else "–".join(f"{end:.3f}" for end in own["interval"])
            rates = (number(own["tpr_at_fpr"][f"{rate:g}"]) for rate in _RATES)
            bounds = (number(planted.get(f"epsilon_{end}"), 2) for end in ("lower", "upper"))
            rows.append(
                [f"{site['site']}, {model['model']}", number(own["auroc"]), interval, *rates, *bounds]
            )
    title = f"audit of {document['run']}: members against the site's own test {document['examples']}"
    yield Table(title, ("site, model", "AUROC", "95 %", "TPR 1 %", "0.1 %", "ε ≥", "ε ≤"), rows)
    letters = tables(document)
    yield from (Table(*one) for one in letters)
    for said in findings(document):
        yield Line(f"  {said.text}", "red" if said.tone == "bad" else "yellow")
    if letters:
        yield Line(
            f"  sites/*/{_EXPOSURE} lists all, the most exposed first; it names patients and stays here"
        )
    if document["tests"]:
        yield from (Line(f"  {said}") for said in (document["tested"], document["adjacency"]))
    if document["may_plant"]:
        yield Line(f"  no canaries: train with --set audit.canaries={_PLANTED} to bound ε from below")
    yield Line(f"{document['run']} audited; next: wsi-fl report {document['run']}")


def _exposure_of(party: RunContext, name: str) -> dict[str, object]:
    """Attack every unit of a site's letter, keep what each is exposed to in its folder, and return what groups are.

    Where patients have more rows than a letter takes of each, rows are drawn anew.
    """
    train, _, every = learned_from(party, name)
    units, folder, stream = every.with_rows(), party.run.site(name), CipherStream.fresh()
    sigma = (folder.kept("plan") or {}).get("sigma", 0.0)
    if party.by_files:
        sigma = party.releases[name].facts.sigma
    mechanism = NoisySums(sigma, 1.0, units.n, units.kind)
    parts = _parts(_head(party, name), mechanism, train, units, units.rows(np.arange(units.n), stream))
    empty = torch.zeros(parts.shape[1], dtype=torch.float64)
    groups = _groups(party.data(name).classes, train, units)
    told = attacks.tail_of(parts, sigma, groups, lambda: mechanism.noisy(empty, stream).numpy())
    known, unknown = (attacks.distances(parts, sigma, others_known=others) for others in (True, False))
    _keep(folder.path / _EXPOSURE, known, unknown, train, units)
    return {"unit": units.kind, "n": units.n, **told}


def _head(party: RunContext, name: str) -> SharedHead:
    """Return a site's head as its run left it."""
    state = party.run.site(name).load_model("shared")
    head = build_model(party, party.names.index(name), "shared", state=state)
    assert isinstance(head, SharedHead)
    return head.to(device_of_rank()).eval()


def _parts(
    head: SharedHead, mechanism: NoisySums, train: Examples, units: Units, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return float64[units, k], the letter of each unit alone: letters add up."""
    ((x, y),) = batches(train, iter([rows]), augment=None, device=device_of_rank())
    z, y, of = head.embedded(x).cpu(), train.task.columns(y.cpu()), units.of_row[rows]
    whose, head = torch.from_numpy(of), head.cpu()
    order = np.argsort(of, kind="stable")
    each = np.split(order, np.searchsorted(of[order], np.arange(1, units.n)))
    return np.stack(
        [mechanism.clipped(head, z[k], y[k], whose[k]).numpy() for k in map(torch.from_numpy, each)]
    )


def _groups(classes: Sequence[str], train: Examples, units: Units) -> dict[str, NDArray[np.bool_]]:
    """Return which units are of each class, and have how many slides where some have several."""
    label = train.label[np.unique(units.of_row, return_index=True)[1]]
    slide_of = np.unique(train.slide, return_inverse=True)[1]
    slides = np.bincount(np.unique([units.of_row, slide_of], axis=1)[0], minlength=units.n).clip(max=3)
    of_classes = enumerate(classes) if train.task.kind == "classes" else ()
    groups = {f"class {name}": label == k for k, name in of_classes}
    names = ("1 slide", "2 slides", "3 slides or more") if slides.max() > 1 else ()
    groups |= {name: slides == k for k, name in enumerate(names, 1)}
    return {name: of for name, of in groups.items() if of.any()}


def _keep(
    path: Path, known: NDArray[np.float64], unknown: NDArray[np.float64], train: Examples, units: Units
) -> None:
    """Write μ of all units, the most exposed first, to one who knows all others and to one who knows none."""
    _, row, n_rows = np.unique(units.of_row, return_index=True, return_counts=True)
    slide = train.slide[row] if units.kind == "row" else [""] * units.n

    def lines() -> Iterator[tuple[object, ...]]:
        yield "patient", "slide", "rows", "mu", "found_at_0.01", "mu_population"
        for k in np.lexsort((-unknown, -known)):
            numbers = (f"{value:.6g}" for value in (known[k], attacks.found(known[k], 0.01), unknown[k]))
            yield train.patient[row[k]], slide[k], n_rows[k], *numbers

    write_csv(path, lines())


def _influence_of(party: RunContext, here: list[str]) -> list[dict[str, object]]:
    """Return what each letter that is here adds to the head of all, and what the head would be without it.

    A letter is a sum of n units, each at most 1 long, and noise; so n is the most that a site moves the sum by.

    Args:
        here: sites whose stores are here; on their own test parts answers are compared.
    """
    heads = {name: _head(party, name) for name in here}
    head = heads[here[0]]
    if int(head.n_sites) < 2:
        return []
    letters: Mapping[str, Tensor] = {name: one.released.clone() for name, one in heads.items()}
    n_units = {row["site"]: row["n_units"] for row in (party.run.summary() or {})["sites"]}
    if party.by_files:
        n_units = {name: one.facts.n for name, one in party.releases.items()}
        letters = {name: torch.from_numpy(one.vector).double() for name, one in party.releases.items()}
    head.forget()
    tests = [one for name in here if len(one := party.data(name).held_out)]
    weights, answers = head.head()[0], _answers(head, tests)
    length = float(weights.norm())
    rows = party.pipeline.privacy.unit == "row" and not party.pipeline.audit.canaries

    def row_of(name: str, letter: Tensor) -> dict[str, object]:
        refused = impossible(head, letter, n_units[name], rows=rows)  # as where it arrived
        left = head if refused else without(head, letter)
        moved = (
            float((left.head()[0] - weights).norm()) / length if length else None
        )  # noise may leave no weight
        named = len(answers) and head.kind == "classes"
        changed = float((_answers(left, tests) != answers).mean()) if named else None
        told = {"site": name, "n": n_units[name], "length": float(letter[: -head.shape[0]].norm())}
        return told | {"refused": refused, "moved": moved, "answers_changed": changed}

    return [row_of(name, letter) for name, letter in letters.items()]


def _answers(head: SharedHead, tests: list[Examples]) -> NDArray[np.int64]:
    """Return the class that a head names for every example."""
    said = [choose_classes(probabilities(head.as_released(), one, device_of_rank())) for one in tests]
    return np.concatenate(said) if said else np.zeros(0, np.int64)
