"""`report`: gathers what a run left behind and renders it as one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.report import words
from wsi_fl.report.run import render
from wsi_fl.report.sections import Page
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.between import between_of
from wsi_fl.stages.answers.clinical import described_runs
from wsi_fl.stages.answers.compare_runs import Run, runs_of
from wsi_fl.stages.answers.compare_worth import compared_over_all
from wsi_fl.stages.answers.predictions import read_predictions
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.work.console import say
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import value_of
from wsi_fl.system.files import write_text
from wsi_fl.types import UNLABELLED, WsiFlError

_SAMPLES_PER_CLASS = 6
_Patch = tuple[str, NDArray[np.uint8]]
"""Class and pixels."""


def report(study: Study, run_name: str, *, pictures: bool = False) -> Path:
    """Write `report/index.html` of a run and return its path.

    Args:
        pictures: whether patches, overviews and generated images of real sites are shown too. The page then opens with
            a banner; without them it says in their places that they were left out.

    Raises:
        WsiFlError: when the run has not finished, or no store of its sites is here.
    """
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    path = run.path / "report" / "index.html"
    with RunContext.of_run(study, run) as party:
        page = _page(party, pictures=pictures)
    write_text(path, render(page))
    if page.left_out:
        names = ", ".join(_once(page.left_out))
        say(
            f"  pictures of patients of {names} were left out; `wsi-fl report {run.name} --pictures` shows them, on a "
            "page that must not leave the hospital",
            "yellow",
        )
    return path


def _page(party: RunContext, *, pictures: bool) -> Page:
    study, run = party.study, party.run
    here = [site for site in party.members if party.has_store(site.name)]
    here = here or [party.site(name) for name in party.receivers if party.has_store(name)]
    if not here:
        raise WsiFlError(f"{study.root}/stores: no store of a site of this run; a report needs one")
    shown = here if len(here) == 1 else [site for site in here if site.allows("patches")]
    opened = {site.name: party.data(site.name) for site in (shown or here[:1])}
    with_pixels = {site.name: s for site in shown if isinstance(s := opened[site.name].store, PatchStore)}
    this = Run.of(run.path)
    places = [run.site(path.parent.name) for path in sorted(run.path.glob("sites/*/ledger.json"))]
    ledgers = {place.path.name: place.account() for place in places}
    asked = {  # as `clinical` was asked last
        name: value for name, value in (run.clinical() or {}).items() if name in ("prevalence", "by", "least")
    }
    return Page(
        run=run.name,
        method=party.name,
        pipeline=run.manifest["pipeline"],
        classes=_counted(next(iter(opened.values())))[0],
        config_toml=(run.path / "config.toml").read_text(encoding="utf-8"),
        manifest=run.manifest | {"inputs": this.inputs},
        summary=this.summary,
        evaluation=run.evaluation(),
        metrics={one.name: run.site(one.name).metrics() for one in party.members},
        baselines=list(baselines(party, this)),
        stores=[_store_row(data) for data in opened.values()],
        groups={site: found["group"] for site, found in ledgers.items() if found.get("group")},
        clinical=described_runs([party], **asked) if party.task.kind == "classes" else None,
        audit=run.audit(),
        between=between_of(party),
        mpcpa=run.mpcpa(),
        examples=party.examples,
        scores=party.task.scores,
        task=party.task.kind,
        outputs=next(iter(opened.values())).classes,
        **_pictures(party, with_pixels, of_patients=pictures),
    )


def _pictures(party: RunContext, stores: dict[str, PatchStore], *, of_patients: bool) -> dict[str, Any]:
    """What the page shows of pixels and single patients, what it leaves out, and whose patients it shows.

    Images of a denoiser that learned from patients count as pictures of them.
    """
    study, simulated = party.study, {site.name for site in party.sites if not site.real}
    keys: dict[str, str] = {}  # of each denoiser that a site of this run learned from
    for site in party.names:
        keys = (party.run.site(site).kept("package") or {"images": {}})["images"] | keys
    generated = {name: path for name in sorted(keys) if (path := study.generated(keys[name])).exists()}
    found: dict[str, dict[str, Callable[[], Any]]] = {
        "patches": {name: partial(_samples, store) for name, store in stores.items()},
        "overviews": {},
        "generated": {name: partial(_generated_samples, path) for name, path in generated.items()},
        "said": {name: partial(tuple, said) for name, said in _said(party).items()},
    }
    for name, store in stores.items():
        folder = study.store(name).parent / "overview"
        if drawn := {slide: path for slide in store.slides if (path := folder / f"{slide}.png").exists()}:
            found["overviews"][name] = partial(_read, drawn)
    real = {kind: [name for name in makers if name not in simulated] for kind, makers in found.items()}
    hidden = {} if of_patients else {kind: names for kind, names in real.items() if names}
    shown = {
        kind: {name: make() for name, make in makers.items() if name not in hidden.get(kind, ())}
        for kind, makers in found.items()
    }
    return shown | {"left_out": hidden, "patients_of": _once(real) if of_patients else []}


def _once(sites: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in sites.values() for name in names))


def _said(party: RunContext) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of each member whose predictions lie here, (truth, answers) on its own test part, where no classes are asked.

    Each dot and step in their figures is a patient.
    """
    if party.task.kind == "classes":
        return {}
    found = {site.name: read_predictions(party.run.site(site.name), party.task) for site in party.members}
    own = {name: one.own for name, one in found.items() if one is not None}
    return {name: (one.truth.reshape(len(one), -1), one.answers) for name, one in own.items() if len(one)}


def baselines(party: RunContext, this: Run) -> Iterable[dict[str, Any]]:
    """Other evaluated runs on the very same examples and splits, the last of each method and privacy setting,
    of this seed where there is one."""
    latest: dict[tuple[str, bool], dict[str, Any]] = {}
    runs: dict[tuple[str, bool], Run] = {}
    oldest_first = [*runs_of(party.study)][::-1]
    for other in sorted(oldest_first, key=lambda other: other.seed == this.seed):
        evaluation = other.folder.evaluation()
        if other.folder.name == party.run.name or not evaluation or evaluation["merged"] is None:
            continue
        if tuple(evaluation["scores"]) != party.task.scores or _asked(other) != _asked(this):
            continue
        key = "mpcpa.per_class"
        if other.method == "mpcpa" and value_of(other.pipeline, key) != value_of(party.pipeline, key):
            continue  # a point of the curve over generated images
        sites = other.summary["sites"]
        epsilons, guarantee = [row["epsilon"] for row in sites], sites[0]["guarantee"]
        dp = guarantee != "none"
        runs[other.method, dp] = other
        latest[other.method, dp] = {
            "run": other.folder.name,
            "method": other.method,
            "dp": dp,
            "epsilon": max(epsilons) if dp and None not in epsilons else None,
            "guarantee": guarantee,
            **{name: evaluation["merged"].get(name) for name in party.task.scores},
        }
    if words.is_federated(this.method):
        pooled = next((runs[key] for key in sorted(runs, key=itemgetter(1)) if words.is_pooled(key[0])), None)
        for (method, dp), row in latest.items():
            if words.is_alone(method) and not dp:
                known = {"local": runs[method, dp], "federated": this, "pooled": pooled}
                found = compared_over_all({kind: [run] for kind, run in known.items() if run}, "merged")
                row["gain"] = found if found["gain"] else None
    return latest.values()


def _asked(run: Run) -> tuple[object, ...]:
    """What says which patients of which stores a run tests, by which pipeline: of folds, the seed draws them."""
    train = run.pipeline.train
    divided = (train.folds, train.fold, train.left_out, train.seed if train.folds else None)
    return run.inputs, run.folder.manifest["pipeline"], *divided


def _store_row(data: Data) -> dict[str, object]:
    store, table, (names, kind) = data.store, data.table, _counted(data)
    counts = {
        split: {c: int(((kind == k) & (table.split == split)).sum()) for k, c in enumerate(names)}
        for split in ("train", "val", "test")
    }
    return {
        "site": data.site,
        **{c: sum(counts[split][c] for split in counts) for c in names},
        "train": sum(counts["train"].values()),
        "test": sum(counts["test"].values()),
        "patients": len(np.unique(table.patient)),
        "slides": len(np.unique(table.slide)),
        **_mosaics(data),
        "size_px": store.meta.spec.size_px,
        "mpp": store.meta.spec.mpp,
        "table": {split: values for split, values in counts.items() if sum(values.values())},
    }


def _counted(data: Data) -> tuple[tuple[str, ...], NDArray[Any]]:
    """What examples are counted by, and the position in it of each: classes, or whether the event was seen."""
    label = data.table.label
    if data.receives:
        return UNLABELLED, label
    if data.task.kind == "survival":
        return ("censored", "event"), label[:, 1].astype(int)
    return (data.classes, label) if data.task.kind == "classes" else (data.classes, np.zeros(len(label), int))


def _mosaics(data: Data) -> dict[str, object]:
    """What the bags of a site are like; nothing where models are asked about patches."""
    store = data.store
    if not isinstance(store, BagStore) or data.pipeline.example != "slide":
        return {}
    sizes = store.sizes
    bag = {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())}
    return {"n_features": store.n_features, "encoder": store.meta.encoder, "bag": bag}


def _read(pictures: Mapping[str, Path]) -> list[tuple[str, bytes]]:
    return [(slide, path.read_bytes()) for slide, path in pictures.items()]


def _generated_samples(path: Path) -> list[_Patch]:
    with PatchStore(path) as store:
        return _samples(store)


def _samples(store: PatchStore) -> list[_Patch]:
    """A few patches of each class, the same ones at every call."""
    rng = np.random.default_rng(0)
    out = []
    for k, name in enumerate(store.meta.classes):
        rows = np.flatnonzero(store.table.label == k)
        chosen = np.sort(rng.permutation(rows)[:_SAMPLES_PER_CLASS])
        out += [(name, pixels) for pixels in store.read(chosen)]
    return out
