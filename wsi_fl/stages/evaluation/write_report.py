"""`write_report`: the files of a run as one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.report import formatting
from wsi_fl.report.formatting import Json
from wsi_fl.report.run_page import render_run_page
from wsi_fl.report.run_sections import Page
from wsi_fl.report.sections import find_benefit_measure
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.write_predictions import read_predictions
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.public_sources import sample_indices
from wsi_fl.stages.site.run_context import RunContext, find_method, restore_study
from wsi_fl.stages.site.site_data import SiteData
from wsi_fl.stages.site.study_hooks import find_hooks
from wsi_fl.stages.training.finished_runs import FinishedRun, find_finished_runs
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text
from wsi_fl.types import UNLABELLED, WsiFlError

_SAMPLES_PER_CLASS = 6
_MAX_OVERVIEWS = 200
"""On a page, of all sites together: reading one takes a tenth of a second, and they share the page's bytes."""
_Patch = tuple[str, NDArray[np.uint8]]
"""Class and pixels."""


def write_report(study: Study, run_name: str, *, pictures: bool = False) -> Path:
    """Write `report/index.html` of a run and return its path.

    Args:
        pictures: whether patches, overviews and generated images of real sites are shown, below a banner; else the page
            has notes in their places.

    Raises:
        WsiFlError: when the run is not finished, or no store of its sites is here.
    """
    run = RunFolder(study.find_run(run_name))
    study = restore_study(study, run)
    path = run.path / "report" / "index.html"
    with RunContext.restore(study, run) as context:
        page = _build_page(context, pictures=pictures)
        write_text(path, render_run_page(page, context))
    if page.left_out:
        names = ", ".join(_unique_names(page.left_out))
        print_message(
            f"  pictures of patients of {names} were left out; `wsi-fl report {run.name} --pictures` shows them, on a "
            "page that must not leave the hospital",
            "yellow",
        )
    return path


def _build_page(context: RunContext, *, pictures: bool) -> Page:
    study, run = context.study, context.run
    sites_with_store = [site for site in context.members if context.has_store(site.name)]
    sites_with_store = sites_with_store or [
        context.find_site(name) for name in context.receivers if context.has_store(name)
    ]
    if not sites_with_store:
        raise WsiFlError(f"{study.root}/stores: no store of a site of this run; a report needs one")
    pictured = (
        sites_with_store
        if len(sites_with_store) == 1
        else [site for site in sites_with_store if site.allows("patches")]
    )
    site_data = {site.name: context.open_data(site.name) for site in (pictured or sites_with_store[:1])}
    with_pixels = {site.name: store for site in pictured if isinstance(store := site_data[site.name].store, PatchStore)}
    own_run = FinishedRun.load(run.path)
    accounts = [run.site_folder(path.parent.name) for path in sorted(run.path.glob("sites/*/ledger.json"))]
    groups = {folder.path.name: folder.read_account().get("group") for folder in accounts}
    return Page(
        run=run.name,
        method=context.name,
        pipeline=run.manifest["pipeline"],
        classes=_counting_classes(next(iter(site_data.values())))[0],
        config_toml=(run.path / "config.toml").read_text(encoding="utf-8"),
        manifest=run.manifest | {"inputs": own_run.inputs},
        summary=own_run.summary,
        evaluation=run.read("evaluation"),
        metrics={site.name: run.site_folder(site.name).read_metrics() for site in context.members},
        baselines=list(find_baselines(context, own_run)),
        stores=[_describe_store(data) for data in site_data.values()],
        groups={site: group for site, group in groups.items() if group},
        between=context.load_cross_site_scores(),
        examples=context.kind.plural,
        scores=context.task.scores,
        task=context.task.kind,
        outputs=next(iter(site_data.values())).classes,
        **_collect_pictures(context, with_pixels, of_patients=pictures),
    )


def _collect_pictures(context: RunContext, stores: dict[str, PatchStore], *, of_patients: bool) -> Json:
    """Return the page's pictures and values of single patients, the omitted ones, and the sites of shown patients.

    Images of a denoiser that was trained on patients count as pictures of them.
    """
    study, simulated = context.study, {site.name for site in context.sites if not site.real}
    pictures: dict[str, dict[str, object]] = {kind: {} for kind in ("patches", "overviews", "generated", "predictions")}
    real: dict[str, list[str]] = {}
    n_slides: dict[str, int] = {}

    def add(kind: str, name: str, values: Iterable[object]) -> None:
        if name not in simulated:
            real.setdefault(kind, []).append(name)
        if of_patients or name in simulated:
            pictures[kind][name] = list(values)  # read only if they are shown

    for name, store in stores.items():
        add("patches", name, _sample_patches(store))
        folder = study.store_path(name).parent / "overview"
        slides = [slide for slide in store.slides if (folder / f"{slide}.png").exists()]
        if slides:
            rows = sample_indices(len(slides), max(1, _MAX_OVERVIEWS // len(stores))).tolist()
            add("overviews", name, ((slides[k], (folder / f"{slides[k]}.png").read_bytes()) for k in rows))
            n_slides[name] = len(slides)
    keys: dict[str, str] = {}  # of each denoiser used by a site of this run
    for site in context.names:
        keys = (context.run.site_folder(site).read_document("package") or {"images": {}})["images"] | keys
    for name in sorted(keys):
        if (path := study.synthetic_path(keys[name])).exists():
            add("generated", name, _sample_generated(path))
    for name, values in _collect_values(context).items():
        add("predictions", name, values)
    return (
        pictures
        | {"n_slides": n_slides}
        | ({"patients_of": _unique_names(real)} if of_patients else {"left_out": real})
    )


def _unique_names(sites: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in sites.values() for name in names))


def _collect_values(context: RunContext) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return (truth, predictions) of each member on its local test part, for numbers and survival."""
    if context.task.kind == "classes":
        return {}
    values = {}
    for site in context.members:
        table = read_predictions(context.run.site_folder(site.name), context.task)
        if table is not None and len(rows := table.local_rows):
            values[site.name] = rows.truth.reshape(len(rows), -1), rows.model_predictions
    return values


def find_baselines(context: RunContext, reference: FinishedRun) -> Iterable[Json]:
    """Return other evaluated runs on the same examples and splits: the last of each method and privacy setting,
    preferably of this seed."""
    latest: dict[tuple[str, bool], dict[str, object]] = {}
    runs: dict[tuple[str, bool], FinishedRun] = {}
    oldest_first = [*find_finished_runs(context.study)][::-1]
    for other in sorted(oldest_first, key=lambda other: other.seed == reference.seed):
        evaluation = other.folder.read("evaluation")
        if other.folder.name == context.run.name or not evaluation or evaluation["merged"] is None:
            continue
        if tuple(evaluation["scores"]) != context.task.scores or _test_set_key(other) != _test_set_key(reference):
            continue
        hooks = find_hooks(find_method(other.method, other.pipeline))
        if hooks.distinguishing_settings(other.pipeline) != hooks.distinguishing_settings(context.pipeline):
            continue
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
            **{name: evaluation["merged"].get(name) for name in context.task.scores},
        }
    if (benefit := find_benefit_measure()) and formatting.is_federated(reference.method):
        pooled = next((runs[key] for key in sorted(runs, key=itemgetter(1)) if formatting.is_pooled(key[0])), None)
        for (method, dp), row in latest.items():
            if formatting.is_local(method) and not dp:
                runs_by_kind = {"local": runs[method, dp], "federated": reference, "pooled": pooled}
                gain = benefit.measure_benefit({kind: [run] for kind, run in runs_by_kind.items() if run}, "merged")
                row["gain"] = gain if gain["gain"] else None
    return latest.values()


def _test_set_key(run: FinishedRun) -> tuple[object, ...]:
    """Return the values that determine a run's test set: stores, pipeline, fold, and with folds the seed."""
    train = run.pipeline.train
    divided = (train.folds, train.fold, train.left_out, train.seed if train.folds else None)
    return run.inputs, run.folder.manifest["pipeline"], *divided


def _describe_store(data: SiteData) -> dict[str, object]:
    store, obs, (names, kind) = data.store, data.cohort.obs, _counting_classes(data)
    counts = {
        split: {c: int(((kind == k) & (obs["split"] == split)).sum()) for k, c in enumerate(names)}
        for split in ("train", "val", "test")
    }
    return {
        "site": data.site,
        **{c: sum(counts[split][c] for split in counts) for c in names},
        "train": sum(counts["train"].values()),
        "test": sum(counts["test"].values()),
        "patients": obs["patient"].nunique(),
        "slides": obs["slide"].nunique(),
        **_describe_bags(data),
        "size_px": store.meta.spec.size_px,
        "mpp": store.meta.spec.mpp,
        "table": {split: values for split, values in counts.items() if sum(values.values())},
    }


def _counting_classes(data: SiteData) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the counted categories, classes or whether the event was observed, and their index by example."""
    label = data.cohort.label
    if data.receives:
        return UNLABELLED, label
    if data.task.kind == "survival":
        return ("censored", "event"), label[:, 1].astype(int)
    return (data.classes, label) if data.task.kind == "classes" else (data.classes, np.zeros(len(label), int))


def _describe_bags(data: SiteData) -> dict[str, object]:
    """Return the encoder and sizes of a site's bags; {} for other examples."""
    store = data.store
    if not isinstance(store, BagStore) or data.pipeline.example_level != "slide":
        return {}
    sizes = store.bag_sizes
    bag = {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())}
    return {"n_features": store.n_features, "encoder": store.meta.encoder, "bag": bag}


def _sample_generated(path: Path) -> Iterator[_Patch]:
    with PatchStore(path) as store:
        yield from _sample_patches(store)


def _sample_patches(store: PatchStore) -> Iterator[_Patch]:
    """Yield a few patches of each class, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(store.meta.classes):
        rows = np.flatnonzero(store.label == k)
        chosen = np.sort(rng.permutation(rows)[:_SAMPLES_PER_CLASS])
        yield from ((name, pixels) for pixels in store.read(chosen))
