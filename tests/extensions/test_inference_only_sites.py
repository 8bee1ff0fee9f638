"""Tests of sites without labels, and of heads solved from the class statistics present so far."""

import csv
import json
import shutil
from datetime import date, timedelta

import numpy as np
import pytest
import torch
from conftest import model, refused, same, write_features
from file_changes import edit, make_real, site_file
from test_import import labels, of_trident
from test_oneshot import head_of, make_hospitals, rows_of
from test_released_statistics import HEADS, NOISE, released, sums_at

from wsi_fl.demo import simulated_slides
from wsi_fl.evidence.compare import compare_methods
from wsi_fl.hospitals.dossier.dossier_page import build_dossier
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.planned_run import read_planned_run
from wsi_fl.hospitals.plans.review import review_lines, review_plan
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines
from wsi_fl.stages.evaluation.export_model import build_card, find_model
from wsi_fl.stages.evaluation.model_formats import ExportResult
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.prepare.import_export import import_features
from wsi_fl.stages.prepare.tile import render_tile_lines, tile_slides
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import open_data
from wsi_fl.stages.training.plan_dry_run import dry_run_plan
from wsi_fl.stages.training.run_cost import dry_run, plan_lines
from wsi_fl.stages.training.train import resume_run, summary_lines, train
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.types import UNLABELLED, WsiFlError

QUIET = [*HEADS, "privacy.sigma=0.5"]
FILES = [*NOISE, "train.from_released=true"]
LABELLED = ["S0", "S1", "S2"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Three hospitals with labels, and S3 without any."""
    made = make_hospitals(tmp_path_factory.mktemp("receive") / "study")
    unlabelled(made, "S3")
    return made


def unlabelled(study, name):
    """Add an inference-only site to a study."""
    file = f'name = "{name}"\nrole = "receiver"\nreal = false\n'
    (study.root / f"sites/{name}.toml").write_text(file)
    x, _ = rows_of(80, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conftest.CLASSES", UNLABELLED)
        write_features(study, name, x, np.zeros(80, int), [f"p{k}" for k in range(80)], ["train"] * 80)


@pytest.fixture(scope="module")
def evaluated(hospitals, tmp_path_factory):
    """The study with a run over the statistics of all sites, the run's name and its evaluation."""
    study = Study(shutil.copytree(hospitals.root, tmp_path_factory.mktemp("evaluated") / "study"))
    release_statistics(study, site=None, overrides=QUIET)
    run = train_from_files(study)["run"]
    return study, run, evaluate(study, run)


@pytest.fixture
def study(hospitals, tmp_path):
    return Study(shutil.copytree(hospitals.root, tmp_path / "study"))


def train_from_files(study, *overrides):
    return train(study, method="oneshot", backend="local", overrides=[*FILES, *overrides])


def said(lines):
    return "\n".join(line.text for line in lines if hasattr(line, "text"))


def make_all_real(study):
    make_real(study, *LABELLED)
    make_real(study, "S3", says="real = true")


def list_sites(document):
    return [row["site"] for row in document["sites"]]


def test_an_inference_only_site_has_the_one_shot_global_head_and_releases_nothing(study, capfd):
    assert list_sites(release_statistics(study, site=None, overrides=QUIET)) == LABELLED
    assert not study.release_path("S3").exists()
    planned = dry_run(study, method="oneshot", overrides=FILES, backend="local")
    assert "receives the head and spends nothing: S3" in capfd.readouterr().err
    assert "S3" not in said(plan_lines(planned))
    summary = train_from_files(study)
    assert "receives the head and spends nothing: S3" in capfd.readouterr().err
    for document in (planned, summary):
        assert document["inference_sites"] == ["S3"] and list_sites(document) == LABELLED
    assert "S3: without labels" in said(summary_lines(summary))
    assert not study.ledger_path("S3").exists()
    run = study.root / summary["run"]
    head = head_of(run, "S3")
    letters = [torch.from_numpy(sums_at(study.release_path(name)).vector).double() for name in LABELLED]
    torch.testing.assert_close(head.sum_of_other_sites(), sum(letters), rtol=1e-6, atol=1e-5)
    assert not (head.local_sums.any() or head.released.any() or head.scatter.any())
    x = torch.from_numpy(rows_of(20, 9)[0])
    assert torch.equal(head(x), head_of(run, "S0").solve_released_head()(x))
    assert not (run / "sites/S3/private.safetensors").exists()
    assert resume_run(study, summary["run"], backend="local") == summary


def test_an_inference_only_site_receives_the_expected_performance(evaluated):
    study, run, document = evaluated
    told = document["inference_sites"]
    assert told["sites"] == [{"site": "S3", "n": 80, "model": "shared"}]
    assert list_sites(document) == told["reference_sites"] == LABELLED
    with (study.root / run / "sites/S3/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 80 and all(row["truth"] == "" and row["model"] == "shared" for row in rows)
    truth = rows_of(80, 7)[1]  # which the test knows
    right = np.mean([(float(row["p_tumor"]) > 0.5) == label for row, label in zip(rows, truth, strict=True)])
    expected = told["expected"]["accuracy"]
    assert expected["low"] <= expected["mean"] <= expected["high"]
    assert 0.8 < right == pytest.approx(expected["mean"], abs=0.1)
    words = f"accuracy {expected['mean']:.3f} ({expected['low']:.3f} to {expected['high']:.3f})"
    assert words in said(render_evaluation_lines(document)) and words in write_report(study, run).read_text()
    assert "the test parts of S0, S1, S2" in said(render_evaluation_lines(document))
    with RunContext.restore(study, RunFolder(study.find_run(run))) as party:
        card = build_card(find_model(party, "shared", "S3"), ExportResult([], 0.0, "", ""), study.root)
    assert card["sites"] == LABELLED  # whose patients are in it


def test_labels_of_an_inference_only_site_are_never_read_and_a_role_changes_with_the_next_run(evaluated, tmp_path):
    """S3 gets labels, all wrong; its predictions stay the same."""
    study, first = Study(shutil.copytree(evaluated[0].root, tmp_path / "study")), evaluated[1]
    x, labels = rows_of(80, 7)
    write_features(study, "S3", x, 1 - labels, [f"p{k}" for k in range(80)], ["train"] * 80)
    second = train_from_files(study)["run"]
    evaluate(study, second)
    one, other = ((study.root / run / "sites/S3/predictions.csv").read_text() for run in (first, second))
    assert one == other
    edit(site_file(study, "S3"), "receiver", "member")
    assert evaluate(study, second)["inference_sites"]["sites"][0]["site"] == "S3"


def test_a_real_inference_only_site_needs_only_the_released_files_and_no_budget(study):
    make_all_real(study)
    for name in LABELLED:
        release_statistics(study, site=name, overrides=QUIET)
        shutil.rmtree(study.store_path(name).parent)
        shutil.rmtree(study.ledger_path(name).parent, ignore_errors=True)
    summary = train_from_files(study)
    assert summary["sites"] == [] and summary["inference_sites"] == ["S3"]
    document = evaluate(study, summary["run"])
    assert document["inference_sites"]["sites"][0]["n"] == 80 and document["inference_sites"]["expected"] == {}
    assert "none is here" in said(render_evaluation_lines(document))
    refused(lambda: compare_methods(study, ["1"]), "only a site without labels")
    assert "S3 is a site without labels" in write_report(study, summary["run"]).read_text()
    assert not study.ledger_path("S3").exists()


def test_an_inference_only_site_gets_the_head_of_the_others_and_does_not_change_it(study):
    """The hub of the star is a site with labels, even where the name of a site without labels sorts first."""

    def once():
        known = [*NOISE, "privacy.insecure_seed=1"]
        summary = train(study, method="oneshot", overrides=known, backend="local")
        return summary, study.root / summary["run"]

    summary, run = once()
    assert summary["inference_sites"] == ["S3"] and list_sites(summary) == LABELLED
    assert summary["communication"]["messages"] == 2 + 3  # two letters to the hub, three heads from it
    head = head_of(run, "S3")
    assert int(head.n_sites) == 3 and not (head.local_sums.any() or head.released.any())
    assert not (study.ledger_path("S3").exists() or (run / "sites/S3/private.safetensors").exists())
    assert torch.equal(head.sums, head_of(run, "S1").sums)
    told = evaluate(study, summary["run"])["inference_sites"]
    assert told["sites"][0]["n"] == 80 and told["reference_sites"] == LABELLED
    assert resume_run(study, summary["run"], backend="local") == summary
    site_file(study, "S3").unlink()
    without = once()[1]
    heads = [model(one, "S1", "shared")["sums"] for one in (run, without)]
    torch.testing.assert_close(*heads, rtol=1e-6, atol=1e-6)  # the hub gives away fourths, and thirds
    unlabelled(study, "R3")  # it comes first
    unlabelled(study, "S3")
    first = once()[1]
    assert same(*(model(first, one, "shared") for one in ("R3", "S3")))
    assert torch.equal(*(model(first, one, "shared")["sums"] for one in ("R3", "S1")))


def test_a_plan_names_the_inference_only_site_and_its_hospital_signs_without_a_budget(study, tmp_path):
    make_all_real(study)
    sets = [*HEADS, "privacy.target_epsilon=1"]
    plan = make_plan(study, method="oneshot", overrides=sets, out=tmp_path / "plan")
    assert [site["role"] for site in plan.document["sites"]] == ["member"] * 3 + ["receiver"]
    shutil.rmtree(study.features_path("S0").parent)
    looked = review_plan(study, plan, "S3")
    assert looked.cost is not None and looked.cost.epsilon is None and not study.ledger_path("S3").exists()
    words = said(review_lines(looked))
    assert "nothing of its records leaves it" in words and "class statistics (" not in words
    assert "class statistics (" in said(review_lines(review_plan(study, plan, "S1")))
    for site in ("S1", "S3"):
        dossier = build_dossier(study, plan, study.load_site(site), None)
        leaves, facts = dossier["plan"]["leaves"], " ".join(dossier["assessment"][0]["facts"])
        assert [row["what"].startswith("class statistics") for row in leaves].count(True) == (site == "S1")
        assert (f"wsi-fl class-means --site {site} --from PUBLIC_SLIDES" in facts) == (site == "S1")
    tried = dry_run_plan(study, read_planned_run(study, tmp_path / "plan", "S1"))
    assert tried["all_bytes"] == 5 * tried["sent_bytes"] and not study.ledger_path("S1").exists()
    refused(lambda: read_planned_run(study, tmp_path / "plan", "S3"), "S3 receives")
    edit(site_file(study, "S3"), "receiver", "member")
    refused(lambda: review_plan(study, plan, "S3"), 'role = "receiver"', 'says "member"')


def test_an_inference_only_site_takes_no_part_in_other_runs(study):
    shared = [*NOISE, "privacy.noise=shared"]
    refused(lambda: train(study, method="oneshot", overrides=shared, backend="local"), "S3.toml", "'own'")
    refused(lambda: released(study, "S3"), "S3.toml", "releases no statistics")
    summary = train(study, method="regular", overrides=[*HEADS, "train.rounds=1"], backend="local")
    assert list_sites(summary) == LABELLED and not summary["inference_sites"]
    release_statistics(study, site=None, overrides=QUIET)
    for run in (summary["run"], train_from_files(study)["run"]):
        evaluate(study, run)
    assert {row["n_sites"] for row in compare_methods(study, ["1", "2"])["rows"]} == {3}
    edit(site_file(study, "S3"), "receiver", "member")
    refused(lambda: released(study, "S3"), "S3", "without labels", "receiver")


def test_stores_of_an_inference_only_site_come_from_tables_without_labels(study, tmp_path):
    folder = study.root / "new"
    folder.mkdir()
    slide = simulated_slides.plan_slides(1, 1, 512, seed=9)[0]
    simulated_slides.write_pyramid(folder / "a.tif", simulated_slides.simulate_slide(slide), 0.5)
    (folder / "slides.csv").write_text("slide,patient,site\na,p,S3\n")
    edit(site_file(study, "S3"), more='slides = "new/*.tif"\nlabels = "new/slides.csv"\n')
    small = ["tile.size_px=64", "tile.mpp=1.0"]
    made = tile_slides(study, site="S3", overrides=small)
    with PatchStore(study.store_path("S3")) as store:
        assert store.meta.classes == UNLABELLED and made["sites"][0]["patches"] == len(store) > 0
        assert np.isnan(store.table.tumor_fraction).all()
    list(render_tile_lines(made))
    features, _ = of_trident(tmp_path / "job")
    bare = labels(tmp_path / "labels.csv", heading="slide_id,case_id,ward")
    brought = {"site": "S3", "form": "trident", "source": features, "labels": bare}
    import_features(study, **brought)
    with BagStore(study.mosaic_path("S3")) as store:
        assert store.meta.classes == UNLABELLED and not store.table.label.any() and len(store) == 4
    of_no_table = ["target.column=grade", 'target.classes=["low", "high"]', "target.per=patient"]
    pipeline = study.load_pipeline(study.pipeline_name(None), ["train.data=mosaics", *of_no_table])
    with open_data(study, "S3", pipeline) as data:
        assert data.classes == ("low", "high") and len(data.test_examples) == 4
        assert not len(data.load_examples("train")) and not data.test_examples.label.any()
    edit(site_file(study, "S3"), "receiver", "member")
    refused(lambda: tile_slides(study, site="S3", overrides=small), "column 'label' is missing")
    refused(lambda: import_features(study, **brought), "no column label")


@pytest.mark.slow
def test_an_inference_only_site_runs_in_a_separate_rank(study, wsi_fl):
    release_statistics(study, site=None, overrides=QUIET)
    settings = [word for override in FILES for word in ("--set", override)]
    done = wsi_fl("train", "--method", "oneshot", "--json", *settings, cwd=study.root)
    assert done.returncode == 0, done.stderr[-2000:]
    by_ranks, by_one = json.loads(done.stdout), train_from_files(study)
    assert by_ranks["inference_sites"] == ["S3"] and by_ranks["statistics"] == by_one["statistics"]
    assert same(*(model(study.root / run["run"], "S3", "shared") for run in (by_ranks, by_one)))


def test_heads_are_solved_once_enough_statistics_arrive_and_again_with_more(study):
    def waits(words, *overrides):
        refused(lambda: train_from_files(study, *overrides), *words, error=WsiFlError)

    released(study, "S0")
    tomorrow, yesterday = (f"{date.today() + timedelta(days)}" for days in (1, -1))
    waits(("statistics of 1 of 3 sites", "missing: S1, S2", "train.min_sites = 1"))
    until, two_at_least = f"train.deadline={tomorrow}", "train.min_sites=2"
    waits((f"awaited until {tomorrow}",), until)
    waits(("and 2 are needed",), two_at_least, until)
    refused(lambda: train_from_files(study, "train.min_sites=4"), "only 3 sites release any")
    assert list(train_from_files(study, f"train.deadline={yesterday}")["statistics"]) == ["S0"]
    released(study, "S1")
    before = {name: study.ledger_path(name).read_text() for name in ("S0", "S1")}
    two, again = (train_from_files(study, two_at_least, until) for _ in range(2))
    released(study, "S2")
    three = train_from_files(study, two_at_least, until)
    known = {name: sums_at(study.release_path(name)).digest[:8] for name in LABELLED}
    assert three["statistics"] == known and two["statistics"] == {name: known[name] for name in ("S0", "S1")}
    made = f"made of 3 class statistics: S0 {known['S0']}"
    assert made in said(summary_lines(three)) and made in write_report(study, three["run"]).read_text()
    heads = [model(study.root / run["run"], "S3", "shared") for run in (two, again, three)]
    assert same(heads[0], heads[1])
    assert not torch.equal(heads[1]["sums"], heads[2]["sums"]) and int(heads[2]["n_sites"]) == 3
    assert {name: study.ledger_path(name).read_text() for name in before} == before


def test_a_run_keeps_the_class_statistics_it_began_with(study):
    released(study, "S0")
    summary = train_from_files(study, "train.min_sites=1")
    (study.root / summary["run"] / "summary.json").unlink()
    released(study, "S1")
    refused(lambda: resume_run(study, summary["run"], backend="local"), "class statistics of S1", "statistics/")


@pytest.mark.parametrize("wrong", ["train.deadline=soon", "train.min_sites=0"])
def test_wrong_terms_of_waiting_for_statistics_are_refused(study, wrong):
    refused(lambda: train_from_files(study, wrong), wrong.split("=")[0])
