"""Tests of the report of a run: numbers, sentences, pictures left out, and display in a browser."""

import io
import math
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import CHROMIUM, browser
from conftest import REAL, interrupted_after, make_study, metrics, nightly
from file_changes import edit, make_real, site_file
from PIL import Image

from wsi_fl.evidence.verdict import Estimate, decide_verdict
from wsi_fl.report.run_page import render_run_page
from wsi_fl.report.run_sections import Page, build_headline
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.study.folder import Study

CLASSES = ("healthy", "tumor")
PATCHES = f'{REAL}\nallow = ["patches"]'
RUN = "00003-proxyfl-camelyon17_small"
OURS = "ProxyFL (this run) proxies travel, no centre"
PARTS = ("own", "parts", "intervals", "confusion", "calibration", "slides")
SENT = {"messages": 1, "bytes": 403_000, "communication_seconds": 0.031, "seconds": 21.4}
SPENT = {"delta": 1e-5, "guarantee": "nominal", "unit": "patch", "max_epsilon": 8.0, "sigma": 1.4}
STORE = {"train": 943, "test": 250, "slides": 16, "size_px": 96, "mpp": 0.972}


def scores(level):
    return {"accuracy": level, "macro_accuracy": level - 0.008, "auroc": min(0.995, level + 0.07)}


def make_evaluation(rng, level, n, classes):
    """Return an evaluation of a model as `evaluate --json` writes it."""
    bins = [{"confidence": c, "accuracy": 0.9 * c, "n": 70} for c in (0.55, 0.75, 0.97)]
    bins.append({"confidence": None, "accuracy": None, "n": 0})
    return scores(level) | {
        "n": n,
        "intervals": {name: [v - 0.06, min(1.0, v + 0.05)] for name, v in scores(level).items()},
        "confusion": rng.multinomial(n // 2, np.full(len(classes), 1 / len(classes)), len(classes)).tolist(),
        "calibration": {"ece": 0.0931, "brier": 0.2113, "bins": bins},
        "slides": {"n": 24, "accuracy": 0.8333, "auroc": 0.8712},
    }


def history(rounds, merged):
    lines = []
    for r in range(1, rounds + 1):
        rise = 1 - math.exp(-4 * r / rounds)
        level = 0.5 + (merged - 0.5) * rise
        line = {"round": r, "epsilon": 0.62 * math.sqrt(r), "merged": scores(level) if r % 2 == 0 else None}
        line["loss"] = {"private": 0.72 - 0.34 * rise, "proxy": 0.74 - 0.16 * rise}
        lines.append(SENT | line | {"own": {"accuracy": level + 0.1}, "proxy": {"accuracy": level - 0.04}})
    return lines


def picture(rng):
    """Return a colourful PNG."""
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (45, 60, 3), np.uint8)).resize((300, 225)).save(out, "PNG")
    return out.getvalue()


def other_run(number, method, epsilon, accuracy, sd):
    """Return the entry of another run in a comparison."""
    privacy = {"dp": bool(epsilon), "epsilon": epsilon, "guarantee": "guaranteed" if epsilon else "none"}
    means = {name: {"mean": mean, "sd": sd} for name, mean in scores(accuracy).items()}
    return {"run": f"0000{number}-{method}-camelyon17_small", "method": method, **privacy, **means}


def make_page(n_sites=4, *, rounds=20, classes=CLASSES, names=None, n_overviews=1):
    rng = np.random.default_rng(7)
    names = names or [f"C{i + 1}" for i in range(n_sites)]
    sites = []
    for i, name in enumerate(names):
        levels = {other: 0.81 if other == name else 0.67 + 0.01 * (j % 7) for j, other in enumerate(names)}
        parts = {other: make_evaluation(rng, level, 150, classes) for other, level in levels.items()}
        whole = make_evaluation(rng, 0.695 + 0.01 * (i % 5), 600, classes)
        sites.append({"site": name, **whole, "own": parts[name], "parts": parts})
    spent = [2.7727 + 0.01 * (i % 5) for i in range(len(names))]
    tables = {"train": 470, "test": 125}
    return Page(
        run=RUN,
        method="proxyfl",
        pipeline="camelyon17_small",
        classes=classes,
        config_toml="# wsi-fl train --pipeline camelyon17_small\n[train]\nrounds = 20\n",
        manifest={
            "created": "2025-03-07T10:12:44+00:00",
            "argv": ["wsi-fl", "train", "--method", "proxyfl", "--pipeline", "camelyon17_small"],
            "versions": {"wsi_fl": "0.1.0", "torch": "2.6.0", "python": "3.11.9"},
            "git": "4f1c2ab",
            "inputs": {name: f"sha256:{i:02d}9c1e77ab2f40c1" for i, name in enumerate(names)},
        },
        summary={
            "run": RUN,
            "method": "proxyfl",
            "seconds": 431.2,
            "sites": [
                SPENT | {"site": name, "epsilon": epsilon, "rounds": rounds, "batch_size": 32}
                for name, epsilon in zip(names, spent, strict=True)
            ],
            "lost": [],
            "communication": {"messages": rounds, "bytes": rounds * 403_000, "seconds": 2.48},
        },
        evaluation={
            "run": RUN,
            "merged": {name: {"mean": value, "sd": 0.0213} for name, value in scores(0.7123).items()},
            "sites": sites,
            "bootstrap": {"repeats": 1000, "cluster": "patient", "level": 0.95},
        },
        metrics={name: history(rounds, site["accuracy"]) for name, site in zip(names, sites, strict=True)},
        baselines=[
            other_run(1, "regular", 2.8114, 0.5541, 0.0312),
            other_run(2, "regular", None, 0.6408, 0.0287),
            other_run(4, "joint", None, 0.8269, 0.0),
            other_run(5, "fedavg", 2.8114, 0.6012, 0.0),
        ],
        stores=[
            {"site": name, "patients": 10 + i, **STORE}
            | {"table": {split: dict.fromkeys(classes, n) for split, n in tables.items()}}
            for i, name in enumerate(names)
        ],
        patches={name: [(c, rng.integers(60, 200, (96, 96, 3), np.uint8)) for c in classes] for name in names},
        overviews={name: [(f"{name}_node_{k}", picture(rng)) for k in range(n_overviews)] for name in names},
    )


def text_of(element):
    return " ".join(" ".join(element.itertext()).split())


class Document:
    """The parsed page, whose tags are balanced as in XML."""

    def __init__(self, html):
        closed = re.sub(r"<(meta|link|img|br|hr|input)\b([^>]*)>", r"<\1\2/>", html.removeprefix("<!doctype html>"))
        root = ElementTree.fromstring(closed.replace("<html", '<html xmlns:xlink="xlink"', 1))
        root.find("head").remove(root.find("head/style"))
        self.tags = [(one.tag, one.attrib) for one in root.iter()]
        self.tables = [[[text_of(cell) for cell in row] for row in table.iter("tr")] for table in root.iter("table")]
        self.text = text_of(root)

    def table(self, *headings):
        """Return the rows of the table with these headings, by their first cell."""
        for rows in self.tables:
            for i, row in enumerate(rows):
                if set(headings) <= set(row):
                    return {r[0]: r[1:] for r in rows[i + 1 :]}
        raise AssertionError(f"no table with {headings}")


@pytest.fixture(scope="module")
def page():
    return make_page()


@pytest.fixture(scope="module")
def small():
    """The same study, quick to draw: no curves, no pictures."""
    page = replace(make_page(n_overviews=0), metrics={}, patches={}, overviews={})
    return sites_of(page, lambda site: {**site, "calibration": {"ece": 0.1, "brier": 0.2}})


@pytest.fixture(scope="module")
def html(page):
    return render_run_page(page)


@pytest.fixture(scope="module")
def document(html):
    return Document(html)


def walk(value, change):
    """Copy a JSON value with every number changed, except counts and orders."""
    if isinstance(value, dict):
        return {k: v if k in ("round", "dp") else walk(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [walk(v, change) for v in value]
    return change(value) if isinstance(value, int | float) else value


def sites_of(page, change):
    """Make the page with every site of its evaluation changed."""
    sites = [change(site) for site in page.evaluation["sites"]]
    return replace(page, evaluation={**page.evaluation, "sites": sites})


def test_the_page_needs_no_other_file(html, document):
    for _, attributes in document.tags:
        for name in ("src", "href", "{xlink}href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/jpeg;base64,")), attributes
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in document.tags}
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import|https?://", html)


def test_the_page_is_accessible(document):
    tags = [tag for tag, _ in document.tags]
    assert dict(document.tags)["html"]["lang"] == "en" and tags.count("h1") == 1
    assert {"header", "nav", "main", "footer"} <= set(tags)
    ids = [a["id"] for _, a in document.tags if "id" in a]
    assert len(ids) == len(set(ids)), "an id is used twice"
    for tag, attributes in document.tags:
        link = attributes.get("href", attributes.get("{xlink}href", ""))
        assert not link.startswith("#") or link[1:] in ids, f"{link} leads nowhere"
        assert set(re.findall(r"url\(#([^)]+)\)", " ".join(attributes.values()))) <= set(ids)
        assert tag != "img" or attributes["alt"]
        assert tag != "th" or attributes["scope"] in ("row", "col", "colgroup")
        assert attributes.get("role") != "img" or len(attributes["aria-label"]) > 20
    n_charts = sum("chart" in a.get("class", "").split() for _, a in document.tags)
    assert n_charts == sum(a.get("role") == "img" for _, a in document.tags) == tags.count("svg") > 10


def test_tables_hold_the_numbers_of_the_run(page, document):
    merged = document.table("Model of", "Macro-accuracy", "ECE")
    heat = document.table("model ↓ tested on →", "C1", "C4")
    for site in page.evaluation["sites"]:
        name, within = site["site"], site["intervals"]
        shown = [f"{site[m]:.3f} [{within[m][0]:.3f}, {within[m][1]:.3f}]" for m in scores(0)]
        assert merged[name] == ["600", *shown, "0.093", "0.211", "24", "0.833", "0.871"]
        values = {other: part["accuracy"] for other, part in site["parts"].items()}
        away = np.mean([value for other, value in values.items() if other != name])
        assert heat[name] == [f"{value:.3f}" for value in [*values.values(), away]]
    ours = ["0.712 ± 0.021", "0.704 ± 0.021", "0.782 ± 0.021"]
    assert merged["Mean ± sd"][1:4] == ours
    compared = document.table("Method", "Run")
    assert [name.split()[0] for name in compared] == ["Joint", "ProxyFL", "Regular", "FedAvg"]
    assert compared["Joint all data pooled"][:5] == ["0.827", "0.819", "0.897", "off", "–"]
    assert compared[OURS] == [*ours, "on", "2.77–2.80 nominal", page.run]
    data = document.table("Site", "Patients", "healthy", "sum")
    assert data["C2"] == ["11", "16", "470", "470", "940", "125", "125", "250"]
    assert data["Sum"] == ["46", "64", "1,880", "1,880", "3,760", "500", "500", "1,000"]
    assert document.table("Site", "Budget")["C1"] == ["2.77", "nominal", "10⁻⁵", "8.00", "20", "32", "1.40"]
    assert document.table("Site", "Messages sent")["C4"] == ["20", "20", "8.1 MB", "620 ms", "7 min 8 s"]
    (a, b), _ = page.evaluation["sites"][0]["confusion"]
    row = document.table("true ↓ predicted →", "tumor")["healthy"]
    assert row == [f"{a} {100 * a / (a + b):.0f} %", f"{b} {100 * b / (a + b):.0f} %"]


def _changed_baseline(page, **changes):
    return {**page.baselines[1], "run": "00009-regular", **changes}


def spent(page, n_sites=9, **changes):
    """Return the summary with other values of its first sites."""
    sites = page.summary["sites"]
    return page.summary | {"sites": [*(site | changes for site in sites[:n_sites]), *sites[n_sites:]]}


OFF = {"epsilon": None, "delta": None, "guarantee": "none"}
SILENT = {"communication": {"messages": 0, "bytes": 0, "seconds": 0.0}}
FEDERATION = ("no slide left its site", "Federation")
SAYS = {
    "all there is": (
        lambda p: {},
        (
            "Four sites trained together with ProxyFL; no slide left its site.",
            "On the merged test set of 600 patches from 24 slides their private models reach an accuracy of",
            "a local model without DP 0.64 ± 0.03 , a local model with DP 0.55 ± 0.03 , all data pooled without DP",
            "In this run federation reaches 0.71 in accuracy, +0.072 over a local model without DP: these runs do not",
            "ε = 2.77–2.80 at δ = 10⁻⁵ , nominal ( what that means )",
            "KL term against a private model that was itself trained without DP",
        ),
        (),
    ),
    "the best run of its kind": (
        lambda p: {"baselines": [*p.baselines, _changed_baseline(p, accuracy={"mean": 0.75, "sd": 0.01})]},
        ("accuracy, −0.038 over a local model without DP", "a local model without DP 0.75 ± 0.01"),
        (),
    ),
    "what noise costs is no gain": (
        lambda p: {"baselines": [_changed_baseline(p, dp=True, accuracy={"mean": 0.5, "sd": 0.01})]},
        ("whose model is trained with noise",),
        ("federation helped",),
    ),
    "pooled": (lambda p: {"method": "joint"}, ("were pooled: a reference, not a federation",), FEDERATION),
    "alone": (lambda p: {"method": "regular"}, ("trained local models; nothing was exchanged",), FEDERATION),
    "lost": (lambda p: {"summary": {**p.summary, "lost": ["C3"]}}, ("Dropped out during training: C3.",), ()),
    "no merged numbers": (
        lambda p: {"evaluation": {**p.evaluation, "merged": None}},
        (
            "evaluated on its own site's part alone",
            "Each model on the test part of its site. Rows of",
            "wsi-fl compare compares",
        ),
        ("reach an accuracy of", "On the merged test set", "Merged test set. Rows"),
    ),
    "before evaluation": (
        lambda p: {"evaluation": None, "baselines": (), "stores": ()},
        ("wsi-fl evaluate runs/00003-proxyfl", "wsi-fl compare runs/00003-proxyfl", "wsi-fl tile draws one per slide"),
        ("accuracy of",),
    ),
    "a single site": (
        lambda p: vars(replace(make_page(n_sites=1, rounds=1, n_overviews=0), patches={})),
        ("without a second site there is no federation", "there is no cross-site evaluation"),
        ("Federation",),
    ),
    "guaranteed at all sites": (
        lambda p: {"baselines": (), "summary": spent(p, guarantee="guaranteed")},
        ("at δ = 10⁻⁵ , guaranteed .", "C1 2.77 guaranteed 10⁻⁵"),
        (),
    ),
    "the weakest guarantee of any site counts for all": (
        lambda p: {"summary": spent(p, 3, guarantee="guaranteed")},
        ("at δ = 10⁻⁵ , nominal",),
        (),
    ),
    "no privacy": (
        lambda p: {"summary": spent(p, **OFF)},
        (
            "Differential privacy was off in this run. The messages between sites",
            f"{OURS} 0.712 ± 0.021 0.704 ± 0.021 0.782 ± 0.021 off – {RUN}",
        ),
        (),
    ),
    "no privacy and no messages": (
        lambda p: {"method": "regular", "summary": spent(p, **OFF) | SILENT},
        ("Nothing was sent between the sites",),
        (),
    ),
}


@pytest.mark.parametrize("case", SAYS)
def test_sentences_describe_the_run(small, case):
    change, said, unsaid = SAYS[case]
    text = Document(render_run_page(replace(small, **change(small)))).text
    assert all(words in text for words in said) and not any(words in text for words in unsaid)


@pytest.mark.parametrize(
    ("low", "high", "tone", "said"),
    [
        (0.03, 0.09, "good", "on average federation pays"),
        (-0.09, -0.03, "bad", "on average federation does not pay"),
        (-0.02, 0.09, "unclear", "these runs do not show whether federation pays on average"),
    ],
)
def test_the_verdict_is_that_of_the_gain(small, low, high, tone, said):
    gain = Estimate((low + high) / 2, low, high)
    known = {"federated": {"mean": 0.71}, "gain": gain.build_document(), "gap_closed": None, "measure": "accuracy"}
    regular = {**small.baselines[1], "gain": {**known, "verdict": decide_verdict(gain, None)}}
    (found,) = build_headline(replace(small, baselines=[regular]), 4)["verdicts"]
    assert found.tone == tone and said in found.text and "federation reaches 0.71" in found.text


@pytest.mark.parametrize(("merged", "n"), [(True, "9"), (False, "18")])
def test_slides_of_a_tumour_type_are_counted_once(merged, n):
    page = make_page(n_sites=2, rounds=3, n_overviews=0)
    lung = {"lung": {"n": 9, "accuracy": 0.8, "macro_accuracy": 0.7}}
    page = sites_of(page, lambda site: site | {"tumor_types": lung})
    page = page if merged else replace(page, evaluation={**page.evaluation, "merged": None})
    assert Document(render_run_page(page)).table("Tumour type", "Slides")["lung"][0] == n


@pytest.mark.parametrize("nothing", [None, *nightly(float("nan"))])
def test_numbers_that_could_not_be_computed_are_dashes(nothing):
    page = sites_of(make_page(n_sites=2, rounds=3, n_overviews=0), lambda site: {**site, "confusion": None})
    parts = ("summary", "evaluation", "metrics", "baselines", "stores")
    changed = {name: walk(getattr(page, name), lambda _: nothing) for name in parts}
    document = Document(render_run_page(replace(page, **changed)))
    assert not re.search(r"\b(None|nan|NaN|Undefined)\b", document.text)
    assert document.table("Model of", "ECE")["C1"] == ["–"] * 9


@pytest.mark.parametrize("value", [{}, dict.fromkeys(PARTS)], ids=["absent", "none"])
def test_any_part_of_an_evaluation_may_be_missing(small, value):
    changed = sites_of(small, lambda site: {k: v for k, v in site.items() if k not in PARTS} | value)
    text = Document(render_run_page(changed)).text
    assert all(site["site"] in text for site in small.evaluation["sites"])
    assert not re.search(r"\b(None|nan|NaN|Undefined)\b", text)


def test_names_cannot_break_the_page():
    names = ['<b>bold</b>"', "$\\frac{1$ & 'x'", "</style><script>alert(1)</script>", "患者 🏥"]
    page = make_page(names=names, rounds=3, classes=("<i>healthy", "tu\"mor'"))
    page = replace(page, run="00001-<u>run</u>", pipeline="</title>", config_toml="</pre><script>x</script>")
    document = Document(render_run_page(page))
    assert not {"b", "i", "u", "script"} & {tag for tag, _ in document.tags}
    assert all(" ".join(name.split()) in document.text for name in names)
    assert set(document.table("Model of", "ECE")) == {*names, "Mean ± sd"}


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory):
    """(study, run) of a simulated site, S0, and a real one, S1, trained on images of S1's denoiser."""
    study = make_study(tmp_path_factory.mktemp("report") / "study", n_sites=2)
    run = train(study, method="regular", overrides=["train.rounds=1"], backend="local")["run"]
    evaluate(study, run)
    for name in ("S0", "S1"):
        overviews = study.store_path(name).parent / "overview"
        overviews.mkdir()
        (overviews / f"{name}_slide_0.png").write_bytes(picture(np.random.default_rng(0)))
    shutil.copytree(study.store_path("S1").parent, study.synthetic_path("key").parent)
    RunFolder(study.root / run).site_folder("S0").write_document("package", {"images": {"S1": "key"}})
    make_real(study, "S1", says=PATCHES)
    return study, run


def test_of_many_slides_a_sample_is_shown_and_their_number(mixed_run, monkeypatch):
    study, run = mixed_run
    folder = study.store_path("S0").parent / "overview"
    added = [folder / f"S0_slide_{k}.png" for k in (1, 2)]
    for path in added:
        path.write_bytes(picture(np.random.default_rng(1)))
    monkeypatch.setattr("wsi_fl.stages.evaluation.write_report._MAX_OVERVIEWS", 2)  # one of each site
    text = write_report(study, run, pictures=True).read_text()
    for path in added:
        path.unlink()
    assert text.count("<figcaption>S0_slide_") == 1 and "1 of 3 slides" in text and text.count("of 1 slide") == 0


def test_pictures_of_patients_are_left_out_with_a_notice(mixed_run, wsi_fl):
    study, run = mixed_run
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


def test_a_page_with_pictures_of_patients_has_a_banner_against_sharing(mixed_run, capsys):
    study, run = mixed_run
    html = write_report(study, run, pictures=True).read_text(encoding="utf-8")
    text = Document(html).text
    banner = "This page holds pictures of patients of S1. It must not leave the hospital"
    assert 0 < text.index(banner) < text.index("report of a run")
    assert html.count("data:image") == 2 * 13 + 12 and "left out" not in text
    assert "left out" not in capsys.readouterr().err


def test_the_page_of_simulated_sites_shows_their_pictures_without_a_banner(mixed_run, tmp_path, capsys):
    study, run = Study(shutil.copytree(mixed_run[0].root, tmp_path / "study")), mixed_run[1]
    edit(site_file(study, "S1"), PATCHES, "real = false")
    html = write_report(study, run).read_text(encoding="utf-8")
    assert html.count("data:image") == 2 * 13 + 12
    assert "left out" not in html + capsys.readouterr().err and "must not leave" not in html


MEASURE = """document.readyState == 'complete' && document.querySelector('svg') && [
  document.documentElement.scrollWidth, innerWidth,
  Math.min(...[...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')].map(t =>
    parseFloat(t.style.fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width)))]"""


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: the page is not looked at")
@pytest.mark.parametrize(("width", "n_sites"), [(390, 4), *nightly((1280, 60))])
def test_nothing_overflows_and_chart_text_is_legible(tmp_path, width, n_sites):
    path = tmp_path / "page.html"
    path.write_text(render_run_page(make_page(n_sites=n_sites, rounds=4, n_overviews=0)))
    with browser(tmp_path / "profile") as page:
        page.size(width, 3000)
        page.goto(path.as_uri())
        content_width, window_width, smallest_font = page.until(MEASURE)
    assert window_width == width
    assert content_width <= width, "the page scrolls sideways"
    assert smallest_font >= 8


def test_pages_do_not_pass_over_the_cost_of_a_site_that_dropped_out(pair):
    with interrupted_after(4):
        train(pair, method="fedavg", overrides=["train.rounds=5"], backend="local")
    summary = resume_run(pair, "1", without=["S1"], backend="local")
    (loss,), (last, *_) = summary["losses"], reversed(metrics(pair.root / summary["run"], "S1"))
    assert [row["site"] for row in summary["sites"]] == ["S0"] and loss["round"] > 1
    sentence = f"S1 dropped out in round {loss['round']}. What it had released by then is not among these numbers: "
    assert f"{sentence}ε = {last['epsilon']:.2f}." in write_report(pair, "1").read_text(encoding="utf-8")
    out = export_model(pair, "1", model_name="shared", form="wsinfer")["out"]
    card = (pair.root / out / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"Not in the table: S1, which dropped out in round {loss['round']}; its own ledger has the ε" in card
