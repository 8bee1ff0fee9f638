from __future__ import annotations

import io
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REAL, make_study, nightly
from PIL import Image

from wsi_fl.learning.verdict import Estimate, verdict
from wsi_fl.report.run import render
from wsi_fl.report.sections import Page, headline
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

CONFIG = """# wsi-fl train --pipeline camelyon17_small
[train]
rounds = 20
batch_size = 32

[privacy]
enabled = true
mode = "paper"
sigma = 1.4
clip = 0.7
delta = 1e-5
"""
CLASSES = ("healthy", "tumor")
MAIN = {"accuracy": 0.7123, "macro_accuracy": 0.7044, "auroc": 0.7811}


def measured(rng: np.random.Generator, level: float, n: int, classes: tuple[str, ...]) -> dict[str, Any]:
    """One evaluation of one model, shaped as `evaluate --json` writes it."""
    values = {"accuracy": level, "macro_accuracy": level - 0.008, "auroc": min(0.995, level + 0.07)}
    values = {k: float(np.clip(v + rng.normal(0, 0.004), 0, 1)) for k, v in values.items()}
    k = len(classes)
    rows = rng.multinomial(n, rng.dirichlet(np.full(k, 30.0)))
    confusion = [
        rng.multinomial(row, [level if i == j else (1 - level) / max(k - 1, 1) for j in range(k)]).tolist()
        for i, row in enumerate(rows)
    ]
    confidences = np.linspace(1 / k + 0.05, 0.97, 8)
    bins = [
        {
            "confidence": float(c),
            "accuracy": float(np.clip(c - 0.12 * c + rng.normal(0, 0.03), 0, 1)),
            "n": 70,
        }
        for c in confidences
    ]
    return {
        "n": n,
        **values,
        "intervals": {m: [v - 0.06, min(1.0, v + 0.05)] for m, v in values.items()},
        "confusion": confusion,
        "calibration": {
            "ece": 0.0931,
            "brier": 0.2113,
            "bins": [*bins, {"confidence": None, "accuracy": None, "n": 0}],
        },
        "slides": {"n": 24, "accuracy": 0.8333, "auroc": 0.8712},
    }


def history(rng: np.random.Generator, rounds: int, own: float, merged: float) -> list[dict[str, Any]]:
    lines = []
    for r in range(1, rounds + 1):
        rise = 1 - math.exp(-r / (rounds / 4))
        noise = rng.normal(0, 0.008, 3)
        lines.append(
            {
                "round": r,
                "seconds": 21.4,
                "loss": {"private": 0.72 - 0.34 * rise + noise[0], "proxy": 0.74 - 0.16 * rise + noise[1]},
                "epsilon": 0.62 * math.sqrt(r),
                "own": {"accuracy": 0.5 + (own - 0.5) * rise + noise[0]},
                "merged": None
                if r % 2 and r != rounds
                else {
                    "accuracy": 0.5 + (merged - 0.5) * rise + noise[1],
                    "macro_accuracy": 0.5 + (merged - 0.51) * rise + noise[1],
                    "auroc": 0.5 + (merged - 0.43) * rise + noise[2],
                },
                "proxy": {"accuracy": 0.5 + (merged - 0.54) * rise + noise[2]},
                "messages": 1,
                "bytes": 403_000,
                "communication_seconds": 0.031,
            }
        )
    return lines


def patch(rng: np.random.Generator, tumor: bool, tint: int) -> np.ndarray:
    """Something pink, 96 px."""
    return rng.integers(60, 200, (96, 96, 3), np.uint8) // (1 + tumor) + np.uint8(
        [40 + 9 * (tint % 4), 0, 30]
    )


def overview(rng: np.random.Generator) -> bytes:
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (45, 60, 3), np.uint8)).resize((300, 225)).save(out, "PNG")
    return out.getvalue()


def make_page(
    n_sites: int = 4,
    *,
    rounds: int = 20,
    classes: tuple[str, ...] = CLASSES,
    names: list[str] | None = None,
    level: float = 0.71,
    n_overviews: int = 3,
) -> Page:
    rng = np.random.default_rng(7)
    names = names or [f"C{i + 1}" for i in range(n_sites)]
    run = "00003-proxyfl-camelyon17_small"
    sites = []
    for i, name in enumerate(names):
        own = measured(rng, min(0.97, level + 0.1), 150, classes)
        parts = {
            other: {
                k: v
                for k, v in measured(
                    rng, level + (0.1 if other == name else 0.01 * (j % 7) - 0.04), 150, classes
                ).items()
                if k in ("n", "accuracy", "macro_accuracy", "auroc")
            }
            for j, other in enumerate(names)
        }
        sites.append(
            {
                "site": name,
                **measured(rng, level + 0.01 * (i % 5 - 1.5), 600, classes),
                "own": own,
                "parts": parts,
            }
        )
    baseline = {"dp": True, "epsilon": 2.8114, "guarantee": "guaranteed"}
    off = {"dp": False, "epsilon": None, "guarantee": "none"}

    def numbers(a: float, sd: float) -> dict[str, Any]:
        return {
            "accuracy": {"mean": a, "sd": sd},
            "macro_accuracy": {"mean": a - 0.009, "sd": sd},
            "auroc": {"mean": a + 0.068, "sd": sd},
        }

    return Page(
        run=run,
        method="proxyfl",
        pipeline="camelyon17_small",
        classes=classes,
        config_toml=CONFIG,
        manifest={
            "created": "2025-03-07T10:12:44+00:00",
            "argv": ["wsi-fl", "train", "--method", "proxyfl", "--pipeline", "camelyon17_small"],
            "versions": {"wsi_fl": "0.1.0", "torch": "2.6.0", "python": "3.11.9"},
            "git": "4f1c2ab",
            "inputs": {name: f"sha256:{i:02d}9c1e77ab2f40c1" for i, name in enumerate(names)},
        },
        summary={
            "run": run,
            "method": "proxyfl",
            "seconds": 431.2,
            "sites": [
                {
                    "site": name,
                    "epsilon": 2.7727 + 0.01 * (i % 5),
                    "delta": 1e-5,
                    "guarantee": "nominal",
                    "unit": "patch",
                    "rounds": rounds,
                    "max_epsilon": 8.0,
                    "batch_size": 32,
                    "sigma": 1.4,
                }
                for i, name in enumerate(names)
            ],
            "lost": [],
            "communication": {
                "messages": rounds * n_sites,
                "bytes": rounds * n_sites * 403_000,
                "seconds": 2.48,
            },
        },
        evaluation={
            "run": run,
            "merged": {m: {"mean": v, "sd": 0.0213} for m, v in MAIN.items()},
            "sites": sites,
            "bootstrap": {"repeats": 1000, "cluster": "patient", "level": 0.95},
        },
        metrics={
            name: history(rng, rounds, 0.82, level + 0.012 * (i % 5 - 1.5)) for i, name in enumerate(names)
        },
        baselines=[
            {
                "run": "00001-regular-camelyon17_small",
                "method": "regular",
                **baseline,
                **numbers(0.5541, 0.0312),
            },
            {"run": "00002-regular-camelyon17_small", "method": "regular", **off, **numbers(0.6408, 0.0287)},
            {"run": "00004-joint-camelyon17_small", "method": "joint", **off, **numbers(0.8269, 0.0)},
            {"run": "00005-fedavg-camelyon17_small", "method": "fedavg", **baseline, **numbers(0.6012, 0.0)},
        ],
        stores=[
            {
                "site": name,
                "healthy": 590 + i,
                "tumor": 603,
                "train": 943 + i,
                "test": 250,
                "patients": 10 + i,
                "slides": 16,
                "size_px": 96,
                "mpp": 0.972,
                "table": {"train": dict.fromkeys(classes, 470 + i), "test": dict.fromkeys(classes, 125)},
            }
            for i, name in enumerate(names)
        ],
        patches={
            name: [(c, patch(rng, j > 0, i)) for j, c in enumerate(classes) for _ in range(6)]
            for i, name in enumerate(names)
        },
        overviews={
            name: [(f"patient_{i}{k:02d}_node_{k}", overview(rng)) for k in range(n_overviews)]
            for i, name in enumerate(names)
        },
    )


class Document(HTMLParser):
    """The page as a reader's software sees it: balanced tags, attributes, texts and tables."""

    VOID = frozenset(
        ["meta", "link", "img", "br", "hr", "input", "path", "use", "image", "rect", "line", "circle"]
    )

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] = " ".join(f"{self.tables[-1][-1][-1]} {data}".split())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, *headings: str) -> dict[str, list[str]]:
        """Rows by their first cell of the table that has these headings."""
        for rows in self.tables:
            for i, row in enumerate(rows):
                if set(headings) <= set(row):
                    return {r[0]: r[1:] for r in rows[i + 1 :]}
        raise AssertionError(f"no table with {headings}")


@pytest.fixture(scope="module")
def page() -> Page:
    return make_page()


@pytest.fixture(scope="module")
def small() -> Page:
    """The same study, quick to draw: no curves, no pictures."""
    return replace(make_page(n_overviews=0), metrics={}, patches={})


@pytest.fixture(scope="module")
def document(page: Page) -> Document:
    return Document(render(page))


def walk(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON value with every number changed; keys that count or order things are kept."""
    if isinstance(value, dict):
        return {k: v if k in ("round", "dp") else walk(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [walk(v, change) for v in value]
    return change(value) if isinstance(value, int | float) else value


def changed(page: Page, change: Callable[[Any], Any]) -> Page:
    evaluation = walk(page.evaluation, change)
    return replace(
        page,
        summary=walk(page.summary, change),
        evaluation=evaluation,
        metrics=walk(page.metrics, change),
        baselines=walk(page.baselines, change),
        stores=walk(page.stores, change),
    )


def without_confusion(page: Page) -> Page:
    assert page.evaluation
    sites = [{**s, "confusion": None} for s in page.evaluation["sites"]]
    return replace(page, evaluation={**page.evaluation, "sites": sites})


def test_the_page_needs_nothing_beside_it(page: Page, document: Document) -> None:
    html = render(page)
    for _, attributes in document.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/jpeg;base64,")), attributes
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in document.tags}
    assert not re.search(r"url\(\s*['\"]?(?!#)", html)
    assert "@import" not in html
    assert "http://" not in html and "https://" not in html


def test_the_page_is_accessible(document: Document) -> None:
    tags = [tag for tag, _ in document.tags]
    assert dict(document.tags)["html"]["lang"] == "en"
    assert {"header", "nav", "main", "footer"} <= set(tags)
    assert tags.count("h1") == 1
    ids = [a["id"] for _, a in document.tags if "id" in a]
    assert len(ids) == len(set(ids)), "an id is used twice"
    for tag, attributes in document.tags:
        link = attributes.get("href", attributes.get("xlink:href", ""))
        if link.startswith("#"):
            assert link[1:] in ids, f"{link} leads nowhere"
        for reference in re.findall(r"url\(#([^)]+)\)", " ".join(attributes.values())):
            assert reference in ids
        if tag == "img":
            assert attributes["alt"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col", "colgroup")
        if attributes.get("role") == "img":
            assert len(attributes["aria-label"]) > 20
    n_charts = sum("chart" in a.get("class", "").split() for _, a in document.tags)
    assert n_charts == sum(a.get("role") == "img" for _, a in document.tags) == tags.count("svg") > 10


def test_tables_hold_the_numbers_of_the_run(page: Page, document: Document) -> None:
    assert page.evaluation
    merged = document.table("Model of", "Macro-accuracy", "ECE")
    for site in page.evaluation["sites"]:
        cells = merged[site["site"]]
        assert cells[0] == "600"
        for cell, metric in zip(cells[1:4], MAIN, strict=True):
            low, high = site["intervals"][metric]
            assert cell == f"{site[metric]:.3f} [{low:.3f}, {high:.3f}]"
        assert cells[4:] == ["0.093", "0.211", "24", "0.833", "0.871"]
    assert merged["Mean ± sd"][1:4] == ["0.712 ± 0.021", "0.704 ± 0.021", "0.781 ± 0.021"]

    compared = document.table("Method", "Run")
    assert list(compared) == [
        "Joint all data pooled",
        "ProxyFL (this run) proxies travel, no centre",
        "Regular each site alone",
        "FedAvg one averaged model, central",
    ]
    assert compared["Joint all data pooled"][:5] == ["0.827", "0.818", "0.895", "off", "–"]
    ours = compared["ProxyFL (this run) proxies travel, no centre"]
    assert ours == ["0.712 ± 0.021", "0.704 ± 0.021", "0.781 ± 0.021", "on", "2.77–2.80 nominal", page.run]

    data = document.table("Site", "Patients", "healthy", "sum")
    assert data["C2"] == ["11", "16", "471", "471", "942", "125", "125", "250"]
    assert data["Sum"] == ["46", "64", "1,886", "1,886", "3,772", "500", "500", "1,000"]
    spent = document.table("Site", "Budget")
    assert spent["C1"] == ["2.77", "nominal", "10⁻⁵", "8.00", "20", "32", "1.40"]
    traffic = document.table("Site", "Messages sent")
    assert traffic["C4"] == ["20", "20", "8.1 MB", "620 ms", "7 min 8 s"]


def test_the_heatmap_holds_every_model_on_every_part(page: Page, document: Document) -> None:
    assert page.evaluation
    rows = document.table("model ↓ tested on →", "C1", "C4")
    for site in page.evaluation["sites"]:
        values = [site["parts"][other]["accuracy"] for other in ("C1", "C2", "C3", "C4")]
        away = [v for other, v in zip(("C1", "C2", "C3", "C4"), values, strict=True) if other != site["site"]]
        assert rows[site["site"]] == [f"{v:.3f}" for v in [*values, np.mean(away)]]


def test_confusion_shows_counts_and_shares_of_the_true_class(page: Page, document: Document) -> None:
    assert page.evaluation
    (a, b), _ = page.evaluation["sites"][0]["confusion"]
    row = document.table("true ↓ predicted →", "tumor")["healthy"]
    assert row == [f"{a} {100 * a / (a + b):.0f} %", f"{b} {100 * b / (a + b):.0f} %"]


def test_the_opening_is_composed_from_the_data(document: Document) -> None:
    for words_ in (
        "Four sites trained together with ProxyFL; no slide left its site.",
        "On the merged test set of 600 patches from 24 slides their private models reach an accuracy of",
        "a site alone without DP 0.64 ± 0.03 , a site alone with DP 0.55 ± 0.03 , all data pooled without DP 0.83",
        "In this run joining reaches 0.71 in accuracy, +0.072 over a site alone without DP: these runs do not show",
    ):
        assert words_ in document.text


@pytest.mark.parametrize(
    ("low", "high", "tone", "said"),
    [
        (0.03, 0.09, "good", "on average joining pays"),
        (-0.09, -0.03, "bad", "on average joining does not pay"),
        (-0.02, 0.09, "unclear", "these runs do not show whether joining pays on average"),
    ],
)
def test_the_verdict_is_that_of_the_gain(small: Page, low: float, high: float, tone: str, said: str) -> None:
    gain = Estimate((low + high) / 2, low, high)
    known = {"joined": {"mean": 0.71}, "gain": gain.document(), "headroom": None, "measure": "accuracy"}
    runs = [
        {**one, "gain": {**known, "verdict": verdict(gain, None)}} if one["method"] == "regular" else one
        for one in small.baselines
    ]
    (found,) = {
        (one.tone, one.text)
        for one in headline(replace(small, baselines=runs), 4)["verdicts"]
        if "noise" not in one.text
    }
    assert found[0] == tone and said in found[1] and "joining reaches 0.71" in found[1]


def test_the_comparison_is_with_the_best_run_of_its_kind(small: Page) -> None:
    better = {**small.baselines[1], "run": "00009-regular", "accuracy": {"mean": 0.75, "sd": 0.01}}
    text = Document(render(replace(small, baselines=[*small.baselines, better]))).text
    assert "In this run joining reaches 0.71 in accuracy, −0.038 over a site alone without DP" in text
    assert "a site alone without DP 0.75 ± 0.01" in text


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("joint", "were pooled: a reference, not a federation"),
        ("regular", "each on its own; nothing was exchanged"),
    ],
)
def test_methods_without_federation_claim_none(small: Page, method: str, said: str) -> None:
    text = Document(render(replace(small, method=method))).text
    assert said in text
    assert "no slide left its site" not in text and "Federation" not in text


def test_epsilon_is_never_without_its_kind(small: Page, document: Document) -> None:
    assert "ε = 2.77–2.80 at δ = 10⁻⁵ , nominal ( what that means )" in document.text
    assert "KL term against a private model that was itself trained without DP" in document.text
    sites = [{**s, "guarantee": "guaranteed"} for s in small.summary["sites"]]
    strict = Document(render(replace(small, baselines=(), summary={**small.summary, "sites": sites})))
    assert "at δ = 10⁻⁵ , guaranteed ." in strict.text
    assert strict.table("Site", "Budget")["C1"][1] == "guaranteed"
    sites[2] = {**sites[2], "guarantee": "nominal"}
    mixed = Document(render(replace(small, summary={**small.summary, "sites": sites})))
    assert "at δ = 10⁻⁵ , nominal" in mixed.text, "the weakest guarantee of any site counts for all"


def test_a_run_without_privacy_says_so(page: Page) -> None:
    off = {"epsilon": None, "delta": None, "guarantee": "none"}
    summary = {**page.summary, "sites": [{**s, **off} for s in page.summary["sites"]]}
    metrics = {k: [{**line, "epsilon": None} for line in v] for k, v in page.metrics.items()}
    document = Document(render(replace(page, summary=summary, metrics=metrics)))
    assert "Differential privacy was off in this run. Whatever the sites sent" in document.text
    assert document.table("Method", "Run")["ProxyFL (this run) proxies travel, no centre"][3:5] == [
        "off",
        "–",
    ]
    silent = {**summary, "communication": {"messages": 0, "bytes": 0, "seconds": 0.0}}
    text = Document(render(replace(page, method="regular", summary=silent, metrics=metrics))).text
    assert "Nothing was sent between the sites" in text


def test_a_lost_site_is_named(small: Page) -> None:
    text = Document(render(replace(small, summary={**small.summary, "lost": ["C3"]}))).text
    assert "Lost during training: C3." in text


def test_before_evaluation_the_page_says_how_to_get_it(page: Page) -> None:
    bare = replace(page, evaluation=None, metrics={}, baselines=(), stores=(), patches={}, overviews={})
    document = Document(render(bare))
    assert f"wsi-fl evaluate runs/{page.run}" in document.text
    assert "trains each site alone" in document.text
    assert "wsi-fl tile draws one per slide" in document.text
    assert "accuracy of" not in document.text


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_numbers_that_could_not_be_computed_are_dashes(nothing: float | None) -> None:
    page = without_confusion(make_page(n_sites=2, rounds=3, n_overviews=0))
    document = Document(render(changed(page, lambda _: nothing)))
    assert not re.search(r"\b(None|nan|NaN|Undefined)\b", document.text)
    assert document.table("Model of", "ECE")["C1"] == ["–"] * 9


@pytest.mark.parametrize(
    "part", ["own", *nightly("parts", "intervals", "confusion", "calibration", "slides")]
)
def test_any_part_of_an_evaluation_may_be_missing(part: str) -> None:
    page = make_page(n_sites=2, rounds=3, n_overviews=0)
    assert page.evaluation
    for missing in ({}, {part: None}):
        sites = [{k: v for k, v in s.items() if k != part} | missing for s in page.evaluation["sites"]]
        Document(render(replace(page, evaluation={**page.evaluation, "sites": sites})))


def test_names_cannot_break_the_page() -> None:
    names = ['<b>bold</b>"', "$\\frac{1$ & 'x'", "</style><script>alert(1)</script>", "患者 🏥"]
    page = make_page(names=names, rounds=3, classes=("<i>healthy", "tu\"mor'"))
    page = replace(page, run="00001-<u>run</u>", pipeline="</title>", config_toml="</pre><script>x</script>")
    document = Document(render(page))
    assert not {"b", "i", "u", "script"} & {tag for tag, _ in document.tags}
    for name in names:
        assert " ".join(name.split()) in document.text
    assert set(document.table("Model of", "ECE")) == {*names, "Mean ± sd"}


def test_a_single_site_has_nobody_to_learn_with() -> None:
    text = Document(render(make_page(n_sites=1))).text
    assert "without a second site there is nobody to learn with" in text
    assert "nobody else to generalise to" in text
    assert "Federation" not in text


@pytest.mark.slow
def test_sixty_sites_stay_readable_and_quick() -> None:
    page = make_page(n_sites=60, rounds=6, n_overviews=0)
    start = time.perf_counter()
    html = render(page)
    assert time.perf_counter() - start < 10
    document = Document(html)
    assert "Faint lines are the 60 sites" in document.text
    assert sum(tag == "svg" for tag, _ in document.tags) < 20
    assert len(document.table("Model of", "ECE")) == 61
    assert page.evaluation
    pooled = np.sum([s["confusion"] for s in page.evaluation["sites"]], axis=0)
    shown = document.table("true ↓ predicted →", "tumor")["tumor"][1]
    assert shown.startswith(f"{pooled[1][1]:,} ")


def mixed(study: Study) -> str:
    """A run of a simulated site, S0, and of a real one, S1, that learned from images of S1's denoiser."""
    run = train(study, method="regular", overrides=["train.rounds=1"], backend="local")["run"]
    evaluate(study, run)
    for name in ("S0", "S1"):
        overviews = study.store(name).parent / "overview"
        overviews.mkdir()
        (overviews / f"{name}_slide_0.png").write_bytes(overview(np.random.default_rng(0)))
    shutil.copytree(study.store("S1").parent, study.generated("key").parent)
    RunFolder(study.root / run).site("S0").keep("package", {"images": {"S1": "key"}})
    file = study.root / "sites" / "S1.toml"
    file.write_text(file.read_text().replace("real = false", f'{REAL}\nallow = ["patches"]'))
    return run


def test_pictures_of_patients_are_left_out_and_the_page_says_so(tmp_path: Path, wsi_fl: Any) -> None:
    study = make_study(tmp_path / "study", n_sites=2)
    run = mixed(study)
    done = wsi_fl("report", run, cwd=study.root)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "left out" in line]
    assert "patients of S1" in said and "--pictures" in said
    html = (study.root / done.stdout.strip()).read_text(encoding="utf-8")
    document = Document(html)
    alts = [attributes["alt"] for tag, attributes in document.tags if tag == "img"]
    assert len(alts) == 13, "of S0: six patches of each label, one overview"
    assert all(alt.endswith("of S0") for alt in alts)
    assert html.count("data:image") == 13 and "S1_slide_0" not in html
    for what in ("Sample patches", "Overviews"):
        assert f"{what} of S1 are pictures of patients and were left out." in document.text
    assert "from the denoisers of S1 come from pictures of patients and were left out." in document.text
    assert "This page holds pictures of patients" not in html


def test_a_page_with_pictures_of_patients_says_at_its_top_that_it_must_stay(
    tmp_path: Path, wsi_fl: Any
) -> None:
    study = make_study(tmp_path / "study", n_sites=2)
    run = mixed(study)
    done = wsi_fl("report", run, "--pictures", cwd=study.root)
    assert done.returncode == 0 and "left out" not in done.stderr, done.stderr
    html = (study.root / done.stdout.strip()).read_text(encoding="utf-8")
    text = Document(html).text
    banner = "This page holds pictures of patients of S1. It must not leave the hospital"
    assert 0 < text.index(banner) < text.index("report of a run")
    assert html.count("data:image") == 2 * 13 + 12 and "left out" not in text


def test_the_page_of_simulated_sites_shows_their_pictures_without_a_banner(
    tmp_path: Path, capsys: Any
) -> None:
    study = make_study(tmp_path / "study", n_sites=1)
    run = train(study, method="regular", overrides=["train.rounds=1"], backend="local")["run"]
    for pictures_too in (False, True):
        html = report(study, run, pictures=pictures_too).read_text(encoding="utf-8")
        assert html.count("data:image") == 12
        assert "left out" not in html and "must not leave" not in html
    assert "left out" not in capsys.readouterr().err


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
MEASURE = """<script>addEventListener('load', () => {
  const sizes = [...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')].map(t =>
    parseFloat(t.style.fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width));
  parent.postMessage([document.documentElement.scrollWidth, innerWidth, Math.min(...sizes).toFixed(1)].join(' '), '*')
})</script></body>"""
WRAPPER = """<!doctype html><title>waiting</title><body style="margin:0">
<script>addEventListener('message', e => document.title = 'measured ' + e.data)</script>
<iframe src="page.html" style="width:{width}px;height:3000px;border:0"></iframe>"""


def chromium(profile: Path, *arguments: str) -> str:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--hide-scrollbars", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: the page is not looked at")
@pytest.mark.parametrize(("width", "n_sites"), [(390, 4), *nightly((1280, 60))])
def test_nothing_overflows_and_chart_text_is_legible(tmp_path: Path, width: int, n_sites: int) -> None:
    html = render(make_page(n_sites=n_sites, rounds=4, n_overviews=0))
    (tmp_path / "page.html").write_text(html.replace("</body>", MEASURE))
    (tmp_path / "wrapper.html").write_text(WRAPPER.format(width=width))
    dom = chromium(
        tmp_path / "profile", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/wrapper.html"
    )
    found = re.search(r"<title>measured (\d+) (\d+) ([\d.]+)</title>", dom)
    assert found, dom[:300]
    assert int(found[2]) == width
    assert int(found[1]) <= width, "the page scrolls sideways"
    assert float(found[3]) >= 8


def test_hospitals_that_keep_their_patches_to_themselves_get_a_page_without_merged_numbers(
    page: Page,
) -> None:
    assert page.evaluation
    text = Document(render(replace(page, evaluation={**page.evaluation, "merged": None}))).text
    assert "evaluated on its own site's part alone" in text
    assert "reach an accuracy of" not in text


def test_what_noise_costs_is_not_called_a_gain_of_federation(small: Page) -> None:
    with_noise = {
        **small.baselines[1],
        "run": "00009-regular",
        "dp": True,
        "accuracy": {"mean": 0.5, "sd": 0.01},
    }
    text = Document(render(replace(small, baselines=[with_noise]))).text
    assert "whose model carries the noise itself" in text and "federation helped" not in text
