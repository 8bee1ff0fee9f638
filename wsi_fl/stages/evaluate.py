"""`evaluate`: every site's private model on the merged multi-centric test set, and on each site's part."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.config import Pipeline, Site
from wsi_fl.files import write_json, write_text
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities
from wsi_fl.learning.metrics import (
    SCORES,
    bootstrap_intervals,
    calibration,
    confusion,
    mean_and_sd,
    scores,
    slide_level,
)
from wsi_fl.runs import RunFolder
from wsi_fl.stages.console import Silent, Watcher, say, stderr
from wsi_fl.stages.devices import device_of_rank
from wsi_fl.stages.trained import inputs_of, method_of, private_model
from wsi_fl.stages.workshop import (
    examples_of,
    input_px,
    may_merge,
    open_store,
    store_digest,
)
from wsi_fl.study import Study, load_pipeline
from wsi_fl.types import PatchTable, WsiFlError

Probabilities = NDArray[np.float64]


def evaluate(study: Study, run_name: str, *, watcher: Watcher | None = None) -> dict[str, Any]:
    """Evaluates a run, writes evaluation.json and each site's predictions.csv, returns the document.

    Where a site is real and does not let its patches be read by others, each model is evaluated on its own
    site's part alone and `merged` is null.
    """
    watcher = watcher or Silent()
    run = RunFolder(study.run(run_name))
    pipeline = load_pipeline(run.path / "config.toml")
    sites = study.sites(pipeline)
    merged = may_merge(sites)
    if not merged:  # a hospital has its own store alone
        sites = [site for site in sites if study.store(site.name).exists()]
    parts = {site.name: _test_part(study, pipeline, site) for site in sites}
    if not any(len(part) for part, _ in parts.values()):
        raise WsiFlError("no site has test patches; tile with tile.test_fraction above 0")
    rows = []
    lost = {loss["site"] for loss in run.losses()}
    for index, site in enumerate(sites):
        if site.name in lost:
            continue
        watcher.update("evaluate", index, len(sites), site.name)
        seen = parts if merged else {site.name: parts[site.name]}
        rows.append(_evaluate_site(study, run, pipeline, site, seen))
        watcher.update("evaluate", index + 1, len(sites), site.name)
    document = {
        "run": study.relative(run.path),
        "method": method_of(run),
        "merged": {name: mean_and_sd([row[name] for row in rows]) for name in SCORES} if merged else None,
        "sites": rows,
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }
    write_json(run.path / "evaluation.json", document)
    return document


def _test_part(study: Study, pipeline: Pipeline, site: Site) -> tuple[Examples, PatchTable]:
    store = open_store(study, site.name)
    table = store.table.take(np.flatnonzero(store.table.split == "test"))
    return examples_of(store, "test", input_px(pipeline, store)), table


def _evaluate_site(
    study: Study,
    run: RunFolder,
    pipeline: Pipeline,
    site: Site,
    seen: Mapping[str, tuple[Examples, PatchTable]],
) -> dict[str, Any]:
    """One model on the parts that it may see: its own, or everybody's."""
    store = open_store(study, site.name)
    run.site(site.name).remember_store(store_digest(store))
    device = device_of_rank()
    model = private_model(run, pipeline, site, inputs_of(pipeline, store), device)
    import torch

    with torch.no_grad():
        predicted = {
            name: probabilities(model, examples, device)
            for name, (examples, _) in seen.items()
            if len(examples)
        }
    folder = run.site(site.name).path
    tables = {name: seen[name][1] for name in predicted}
    write_text(folder / "predictions.csv", _predictions(predicted, tables, store.meta.classes))
    repeats = pipeline.evaluate.bootstrap
    slides = store.meta.spec.mpp > 0  # images of a partitioned data set are no slides
    own = (
        _metrics(predicted[site.name], tables[site.name], repeats, slides=slides)
        if site.name in predicted
        else {"n": 0} | dict.fromkeys(SCORES)
    )
    everything = (
        _metrics(np.concatenate(list(predicted.values())), _pooled(tables), repeats, slides=slides)
        if len(seen) > 1
        else own
    )
    return {
        "site": site.name,
        **everything,
        "own": own,
        "parts": {name: scores(p, tables[name].label) for name, p in predicted.items()},
    }


def _metrics(predicted: Probabilities, table: PatchTable, repeats: int, *, slides: bool) -> dict[str, Any]:
    """Everything said about one model on one set, at patch and slide level."""
    by_slide = slide_level(predicted, table.label, table.slide) if slides else None
    return {
        **_level(predicted, table.label, table.patient, repeats),
        "slides": _level(by_slide[0], by_slide[1], table.patient[by_slide[2]], repeats) if by_slide else None,
    }


def _level(
    predicted: Probabilities, labels: NDArray[np.int64], patient: NDArray[np.str_], repeats: int
) -> dict[str, Any]:
    """Scores, intervals clustered by patient, confusion and calibration."""
    return {
        **scores(predicted, labels),
        "intervals": bootstrap_intervals(predicted, labels, patient, repeats=repeats),
        "confusion": confusion(predicted, labels),
        "calibration": calibration(predicted, labels),
    }


def _pooled(tables: Mapping[str, PatchTable]) -> PatchTable:
    """The rows of all sites; slides and patients of different sites stay apart where their names agree."""
    named = [
        replace(
            table,
            slide=np.array([f"{site}/{name}" for name in table.slide]),
            patient=np.array([f"{site}/{name}" for name in table.patient]),
        )
        for site, table in tables.items()
    ]
    return PatchTable.concat(named)


def _predictions(
    predicted: Mapping[str, Probabilities], tables: Mapping[str, PatchTable], classes: tuple[str, ...]
) -> str:
    """predictions.csv: a row per test patch."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["site", "slide", "patient", "x_l0", "y_l0", "label", *(f"p_{name}" for name in classes)])
    for site, values in predicted.items():
        table = tables[site]
        for row, p in enumerate(values):
            x, y = table.xy_l0[row]
            truth = classes[table.label[row]]
            writer.writerow(
                [site, table.slide[row], table.patient[row], x, y, truth, *(f"{v:.6f}" for v in p)]
            )
    return text.getvalue()


def print_evaluation(document: dict[str, Any]) -> None:
    """A row per site, then mean ± sd."""
    from rich.table import Table

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    where = "merged test set" if document["merged"] is not None else "own test set"
    table = Table(title=f"private models on the {where}", title_justify="left")
    for heading in ("site", "n", "accuracy", "macro-acc.", "AUROC", "own part"):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for row in document["sites"]:
        table.add_row(
            row["site"],
            str(row["n"]),
            *(number(row[name]) for name in SCORES),
            number(row["own"]["accuracy"]),
        )
    if document["merged"] is not None:
        means = (f"{number(m['mean'])} ± {number(m['sd'])}" for m in document["merged"].values())
        table.add_section()
        table.add_row("mean ± sd", "", *means, "")
    stderr.print(table)
    say(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")
