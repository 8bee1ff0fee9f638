"""Tests of `predict`: agreement with `evaluate`, outlines of tumour, and files for QuPath."""

import json
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import shapely
from conftest import refused
from file_changes import edit, site_file
from PIL import Image
from test_export import predict_as_monai
from training_runs import csv_rows

from wsi_fl.demo import simulated_slides
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.slides.patching.grid import grid_positions
from wsi_fl.slides.pictures import heatmap
from wsi_fl.slides.pictures.heatmap import PatchPredictions, find_leading_class, patch_boxes, score_class, write_geojson
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.evaluation import predict as stage
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.evaluation.predict import choose_colors, predict, write_patch_table
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.training.train import train
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_sealed
from wsi_fl.types import CLASSES, GridSpec, UsageError, WsiFlError

SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.min_tissue=0.3"]
TRAINING = [
    *SETTINGS,
    "train.rounds=1",
    "train.input_px=24",
    "privacy.enabled=false",
    "model.private=gn_cnn_small",
    "evaluate.bootstrap=0",
]


@cache
def trained_on(archive, root):
    """Make a read-only study with a run, once for all tests of predictions."""
    study = Study(root)
    init_study(study.root, archive=archive)
    tile_slides(study, site=None, overrides=SETTINGS)
    return study, train(study, method="regular", overrides=TRAINING, backend="local")["run"]


@pytest.fixture(scope="session")
def trained(archive, tmp_path_factory):
    """A study with a run, evaluated, and the slides of its first site."""
    study, run = trained_on(archive, tmp_path_factory.getbasetemp() / "trained")
    evaluate(study, run)
    return study, run, sorted((archive / "training" / "center_0").glob("*.tif"))


@pytest.fixture(scope="session")
def predicted(trained):
    study, run, slides = trained
    return predict(study, run, site="C1", slides=slides)


@pytest.fixture
def study_copy(trained, tmp_path):
    """A copy of the study for a test to break, its run and the slides."""
    study, run, slides = trained
    shutil.copytree(study.root, tmp_path / "copy")
    return Study(tmp_path / "copy"), run, slides


def heat(probabilities, boxes, classes=CLASSES, threshold=0.5):
    p = np.asarray(probabilities, float)
    return PatchPredictions(np.asarray(boxes), classes, np.stack([1 - p, p], 1) if p.ndim == 1 else p, threshold)


def random_heat(seed, spec, slide_mpp, size_l0=(1500, 1130)):
    rng = np.random.default_rng(seed)
    boxes = patch_boxes(grid_positions(size_l0, spec, slide_mpp), spec, slide_mpp, size_l0)
    return heat(rng.random(len(boxes)), boxes, threshold=0.45)


def test_probabilities_equal_those_of_evaluate_on_the_same_patches(trained, predicted):
    study, run, _ = trained
    ours = {
        (row["slide"], p["x_l0"], p["y_l0"]): float(p["p_tumor"])
        for row in predicted["slides"]
        for p in csv_rows(study.root / row["csv"])
    }
    told = csv_rows(study.root / run / "sites/C1/predictions.csv")
    theirs = [p for p in told if p["part"] == "C1" and p["selected"] == "True"]
    assert len(theirs) > 15
    for p in theirs:
        assert ours[p["slide"], p["x_l0"], p["y_l0"]] == pytest.approx(float(p["p_tumor"]), abs=1e-5)
    assert len(ours) > len(theirs)


@pytest.mark.filterwarnings("ignore:parsing config_file")
def test_probabilities_equal_those_of_monais_run_of_the_exported_bundle(trained, predicted, tmp_path, monai_bundle):
    study, run, _ = trained
    folder, rows = tmp_path / "bundle", np.arange(12)
    export_model(study, run, model_name="private", form="monai-bundle", site="C1", private=True, out=folder)
    with PatchStore(study.store_path("C1")) as store:
        pixels, table = store.read(rows), store.table
    theirs = predict_as_monai(monai_bundle, folder, pixels, tmp_path)
    files = {row["slide"]: csv_rows(study.root / row["csv"]) for row in predicted["slides"]}
    for k in rows:
        place = [str(number) for number in table.xy_l0[k]]
        (ours,) = [p["p_tumor"] for p in files[table.slide[k]] if [p["x_l0"], p["y_l0"]] == place]
        assert theirs[k, 1] == pytest.approx(float(ours), abs=1e-5)


def test_the_document_names_files_that_agree_with_each_other(trained, predicted):
    study, run, slides = trained
    assert set(predicted) == {
        "run",
        "site",
        "model",
        "slides",
        "failed",
        "done",
        "missing",
        "missing_parts",
        "table",
        "seconds",
    }
    assert (predicted["run"], predicted["site"], predicted["failed"]) == (run, "C1", [])
    assert [row["slide"] for row in predicted["slides"]] == [path.stem for path in slides]
    for row in predicted["slides"]:
        assert set(row) == {"slide", "patches", "excluded", "score", "heatmap", "geojson", "csv", "json"}
        lines = csv_rows(study.root / row["csv"])
        p = np.sort([float(line["p_tumor"]) for line in lines])[::-1]
        wanted = {"max": p[0], "top_k_mean": p[:20].mean(), "fraction": (p >= 0.5).mean()}
        assert row["patches"] == len(p) and row["score"] == pytest.approx(wanted, abs=1e-5)
        kept = json.loads((study.root / row["json"]).read_text())
        assert kept["score"] == row["score"] == kept["classes"]["tumor"]
        features = json.loads((study.root / row["geojson"]).read_text())["features"]
        tiles = [one["geometry"] for one in features if one["properties"]["objectType"] == "tile"]
        corners = [shapely.geometry.shape(one).bounds[:2] for one in tiles]
        assert corners == [(int(line["x_l0"]), int(line["y_l0"])) for line in lines]
        assert Image.open(study.root / row["heatmap"]).format == "PNG"


def test_one_table_has_a_row_for_every_slide_of_a_folder_over_several_calls(trained, tmp_path):
    study, run, slides = trained
    for path in slides[:2]:
        document = predict(study, run, site="C1", slides=[path], out=tmp_path)
    rows = csv_rows(tmp_path / "slides.csv")
    assert Path(document["table"]) == tmp_path / "slides.csv"
    assert [row["slide"] for row in rows] == sorted(path.stem for path in slides[:2])
    told = {row["slide"]: row for row in rows}[document["slides"][0]["slide"]]
    assert float(told["score_top_k_mean"]) == document["slides"][0]["score"]["top_k_mean"]
    assert told["score_of"] == "tumor" and "class" not in told  # which is no answer for the slide


def test_progress_never_goes_back(trained, tmp_path):
    study, run, slides = trained
    shares: list[float] = []

    class Seen(SilentProgress):
        def update(self, part, done, total, note=""):
            shares.append(done / total)

    predict(study, run, site="C1", slides=slides[:3], out=tmp_path, watcher=Seen())
    assert shares == sorted(shares) and shares[-1] == 1


def test_a_slide_without_a_resolution_is_predicted_with_the_given_one(trained, predicted, tmp_path):
    study, run, slides = trained
    with Slide(slides[0]) as slide:
        picture = slide.thumbnail(max(slide.size_l0))[0]
        mpp = slide.mpp
    Image.fromarray(picture).save(tmp_path / "bare.png")
    asked = {"site": "C1", "slides": [tmp_path / "bare.png"], "out": tmp_path}
    (failed,) = predict(study, run, **asked)["failed"]
    assert "µm per pixel" in failed["reason"] or "mpp" in failed["reason"]
    (row,) = predict(study, run, **asked, mpp=mpp)["slides"]
    assert row["patches"] == predicted["slides"][0]["patches"]


def test_a_slide_is_cut_at_the_resolution_in_the_table_of_its_site_as_tile_cuts_it(study_copy, tmp_path):
    study, run, slides = study_copy
    with Slide(slides[0]) as slide:
        picture, mpp = slide.thumbnail(max(slide.size_l0))[0], slide.mpp
    (tmp_path / "slides").mkdir()
    Image.fromarray(picture).save(tmp_path / "slides" / "bare.png")
    table = tmp_path / "slides.csv"
    table.write_text(f"slide,patient,site,label,mpp\nbare,p1,C1,tumor,{mpp / 2}\n")
    file = study.root / "sites" / "C1.toml"
    file.write_text(f'name = "C1"\nreal = false\nslides = "{tmp_path}/slides/*.png"\nlabels = "{table}"\n')
    asked = {"site": "C1", "slides": [tmp_path / "slides" / "bare.png"], "out": tmp_path / "out"}

    def side(**said):
        (row,) = predict(study, run, **asked, **said)["slides"]
        return float(csv_rows(study.root / row["csv"])[0]["size_l0"])

    assert side() == pytest.approx(2 * side(mpp=mpp), abs=0.01)


def test_predict_needs_only_the_run_and_the_slide_and_uses_the_tiling_of_the_store(study_copy, predicted, trained):
    study, run, slides = study_copy
    shutil.rmtree(study.root / "stores")
    shutil.rmtree(study.root / run / "sites" / "C2")
    site_file(study, "C2").write_text("what another hospital says is never read")
    edit(study.root / run / "config.toml", "size_px = 64", "size_px = 100")
    edit(study.root / run / "config.toml", "min_tissue = 0.3", "min_tissue = 0.9")
    (row,) = predict(study, run, site="C1", slides=slides[:1])["slides"]
    before = trained[0].root / predicted["slides"][0]["csv"]
    assert (study.root / row["csv"]).read_bytes() == before.read_bytes()


@pytest.mark.parametrize("fact", [{"channels": 1}, {"spec": {"size_px": 64, "mpp": 0.0, "stride_px": 64}}])
def test_a_run_trained_on_images_predicts_no_slides(study_copy, fact):
    study, run, slides = study_copy
    known = study.root / run / "sites/C1/store.json"
    facts = json.loads(known.read_text()) | fact
    write_sealed(known, facts)  # it really learned from them
    refused(lambda: predict(study, run, site="C1", slides=slides[:1]), "learned from images, not slides")


@pytest.mark.parametrize(("seed", "spec"), enumerate([GridSpec(96, 0.5, 96), GridSpec(64, 1.0, 32)]))
def test_regions_are_the_exact_union_of_patches_above_the_threshold(seed, spec):
    found = random_heat(seed, spec, slide_mpp=0.23 if seed else 0.5)
    polygons = [region.polygon for region in found.regions]
    assert all(p.is_valid and p.geom_type == "Polygon" and p.exterior.is_ccw for p in polygons)
    assert all(not hole.is_ccw for p in polygons for hole in p.interiors)
    boxes = found.boxes_l0[found.is_above]
    wanted = shapely.union_all(shapely.box(*boxes.T))
    assert shapely.equals(shapely.union_all(polygons), wanted)
    assert sum(p.area for p in polygons) == wanted.area
    if spec.stride_px == spec.size_px:
        assert wanted.area == shapely.area(shapely.box(*boxes.T)).sum()  # neighbours touch and never overlap
        assert sum(region.n_patches for region in found.regions) == found.is_above.sum()
        assert not any(shapely.area(shapely.Polygon(h)) < 100 for p in polygons for h in p.interiors)


def test_geojson_has_the_structure_that_qupath_documents(tmp_path):
    found = random_heat(1, GridSpec(96, 0.5, 96), 0.5)
    path = tmp_path / "tumor.geojson"
    write_geojson(path, found, choose_colors(CLASSES), "run/C1/slide")
    document = json.loads(path.read_text())
    assert document["type"] == "FeatureCollection" and set(document) == {"type", "features"}
    kinds = {"annotation": [], "tile": []}
    for feature in document["features"]:
        properties = feature["properties"]
        kinds[properties["objectType"]].append(feature)
        assert feature["type"] == "Feature" and feature["geometry"]["type"] == "Polygon"
        assert all(ring[0] == ring[-1] and len(ring) >= 5 for ring in feature["geometry"]["coordinates"])
        assert shapely.geometry.shape(feature["geometry"]).is_valid
        assert all(isinstance(v, int) and 0 <= v <= 255 for v in properties["classification"]["color"])
        assert 0 <= properties["measurements"]["Tumor probability"] <= 1
        assert all(type(v) in (int, float) for v in properties["measurements"].values())
    annotations, tiles = kinds["annotation"], kinds["tile"]
    assert len({uuid.UUID(f["id"]) for f in annotations}) == len(annotations)
    assert [f["properties"]["name"] for f in annotations][:2] == ["Tumor 1", "Tumor 2"]
    for feature, region in zip(annotations, found.regions, strict=True):
        properties = feature["properties"]
        known = {"objectType", "name", "classification", "isLocked", "measurements"}
        assert set(properties) == known and properties["isLocked"] is False
        assert properties["classification"] == {"name": "Tumor", "color": [200, 0, 0]}
        assert properties["measurements"]["Patches"] == region.n_patches
        assert properties["measurements"]["Tumor probability max"] == pytest.approx(region.max_probability, abs=1e-6)
    names = [feature["properties"]["classification"]["name"] for feature in tiles]
    assert names == ["Tumor" if above else "Healthy" for above in found.is_above]


def test_each_of_three_classes_has_separate_regions_and_scores():
    p = [[0.8, 0.1, 0.1], [0.1, 0.7, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]
    boxes = [[k * 10, 0, k * 10 + 10, 10] for k in range(4)]
    found = heat(p, boxes, ("a", "b", "c"))
    assert [(found.classes[r.class_index], r.polygon.area) for r in found.regions] == [("b", 200), ("a", 100)]
    assert find_leading_class(found) == 1
    assert score_class(found, 1, 1) == pytest.approx({"max": 0.7, "top_k_mean": 0.7, "fraction": 0.5})
    assert score_class(found, 2, 1) == pytest.approx({"max": 0.4, "top_k_mean": 0.4, "fraction": 0})
    titles = [
        f["properties"]["classification"]["name"] for f in heatmap._iterate_features(found, choose_colors("abc"), "x")
    ]
    assert titles == ["B", "A", "A", "B", "B", "C"]
    unsure = heat([[0.3, 0.3, 0.4], [0.4, 0.3, 0.3], [0.3, 0.25, 0.45]], boxes[:3], ("a", "b", "c"))
    assert find_leading_class(unsure) == 2 and score_class(unsure, 2)["max"] == 0.45


def test_a_slide_of_uncertain_patches_has_the_class_of_most():
    boxes = [[k * 10, 0, k * 10 + 10, 10] for k in range(3)]
    found = heat([[0.3, 0.3, 0.4], [0.2, 0.35, 0.45], [0.4, 0.3, 0.3]], boxes, ("a", "b", "c"))
    assert find_leading_class(found) == 2 and not found.regions
    assert score_class(found, 2, 2) == pytest.approx({"max": 0.45, "top_k_mean": 0.425, "fraction": 0})


def test_two_ranks_share_the_slides_and_predict_the_same(predicted, trained, tmp_path, as_ranks):
    study, run, (*slides, _, _) = trained
    out = tmp_path / "out"
    document, nothing = as_ranks(2, lambda: predict(study, run, site="C1", slides=slides, out=out))
    assert not nothing  # said once
    assert [row["slide"] for row in document["slides"]] == [slide.stem for slide in slides]
    for row, expected in zip(document["slides"], predicted["slides"], strict=False):
        assert row["patches"] == expected["patches"]
        assert row["score"]["max"] == pytest.approx(expected["score"]["max"], abs=1e-5)
        assert (tmp_path / "out" / row["slide"] / "heatmap.png").exists()


def test_jobs_share_the_slides_that_they_have_in_common(predicted, trained, tmp_path):
    study, run, slides = trained
    where = {"site": "C1", "out": tmp_path / "out"}
    lists = (slides[:-1], slides[1:])
    with ThreadPoolExecutor(2) as threads:
        documents = list(threads.map(lambda some: predict(study, run, slides=some, **where), lists))
    assert sum(document["done"] for document in documents) == len(slides)
    for document, some in zip(documents, lists, strict=True):
        assert [row["slide"] for row in document["slides"]] == [path.stem for path in some]
        assert document["missing"] == 0
    assert len(csv_rows(tmp_path / "out" / "slides.csv")) == len(slides)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*(s.stem for s in slides), "slides.csv"]


def test_the_table_keeps_rows_that_another_job_adds_while_it_is_written(trained, tmp_path, monkeypatch):
    """The other predicts its slide between the reading of the rows and their writing."""
    study, run, slides = trained
    out, real, others = tmp_path / "out", stage.write_csv, []

    def predict_slide(path):
        return predict(study, run, site="C1", slides=[path], out=out)

    def write_late(path, rows):
        monkeypatch.setattr(stage, "write_csv", real)
        others.append(threads.submit(predict_slide, slides[1]))
        wait(others, timeout=1.5)
        real(path, rows)

    monkeypatch.setattr(stage, "write_csv", write_late)
    with ThreadPoolExecutor(1) as threads:
        predict_slide(slides[0])
        others[0].result()
    assert [row["slide"] for row in csv_rows(out / "slides.csv")] == sorted(path.stem for path in slides[:2])


def test_a_part_predicts_its_slides_and_leaves_the_others(trained, tmp_path, wsi_fl):
    study, run, slides = trained
    arguments = [
        "predict",
        run,
        "--site",
        "C1",
        "--out",
        tmp_path / "out",
        *(w for s in slides for w in ("--slide", s)),
    ]
    documents = []
    for k in (1, 2):
        done = wsi_fl(*arguments, "--part", f"{k}/2", "--json", cwd=study.root)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
    assert [one["done"] for one in documents] == [2, 2] and [one["missing"] for one in documents] == [2, 0]
    assert [row["slide"] for row in documents[1]["slides"]] == [path.stem for path in slides]


@pytest.fixture
def blank(tmp_path):
    path = tmp_path / "blank.tif"
    simulated_slides.write_pyramid(path, np.full((1024, 1024, 3), 243, np.uint8), 0.5)
    return path


def test_a_failed_slide_is_named_and_the_others_are_predicted(trained, blank, tmp_path, wsi_fl):
    study, run, slides = trained
    arguments = ["predict", run, "--site", "C1", "--json", "--out", tmp_path / "out", "--slide", blank]
    some = wsi_fl(*arguments, "--slide", slides[0], "--slide", tmp_path / "gone.tif", cwd=study.root)
    document = json.loads(some.stdout)
    (row,) = document["slides"]
    assert some.returncode == 0 and row["slide"] == slides[0].stem
    assert [row["slide"] for row in document["failed"]] == ["blank", "gone"]
    assert "no tissue" in document["failed"][0]["reason"]
    assert "no such slide" in document["failed"][1]["reason"]
    assert all("\n" not in row["reason"] for row in document["failed"])
    assert all(Path(row[k]).parent == tmp_path / "out" / slides[0].stem for k in ("csv", "json"))
    none = wsi_fl(*arguments, cwd=study.root)
    assert none.returncode == 1 and json.loads(none.stdout)["slides"] == []
    assert sum("no tissue" in line for line in none.stderr.splitlines()) == 1
    errors = [line for line in none.stderr.splitlines() if line.startswith("wsi-fl: error:")]
    assert errors == ["wsi-fl: error: no slide could be predicted; see above"]


def test_only_the_prediction_model_can_be_changed_for_a_finished_run(trained, tmp_path):
    study, run, slides = trained
    where = {"site": "C1", "slides": slides[:1], "out": tmp_path}
    (row,) = predict(study, run, **where, overrides=["predict.model=private"])["slides"]
    assert json.loads((study.root / row["json"]).read_text())["model"] == "private"
    refused(lambda: predict(study, run, **where, overrides=["train.lr=1"]), "only predict.*")
    refused(lambda: predict(study, run, **where, overrides=["predict.modle=mean"]), "did you mean 'model'")


def test_bad_input_is_refused_in_one_line(study_copy, tmp_path):
    study, run, slides = study_copy

    def refuses(*words, site="C1", run=run, slides=slides[:1], error=WsiFlError):
        refused(lambda: predict(study, run, site=site, slides=slides), *words, error=error)

    refuses("no run '77'", run="77", error=UsageError)
    refuses("unknown site 'C9'", site="C9", error=UsageError)
    shutil.copy(site_file(study, "C1"), site_file(study, "C3"))
    edit(site_file(study, "C3"), 'name = "C1"', 'name = "C3"')
    refuses("took no part", "C1, C2", site="C3", error=UsageError)
    refuses("two slides have the name", slides=[slides[0], tmp_path / slides[0].name], error=UsageError)
    RunFolder(study.root / run).record_dropout("C2", "killed")
    refuses("dropped out in round 2", site="C2")
    folder = study.root / run / "sites" / "C1"
    (folder / "private.safetensors").rename(tmp_path / "kept")
    refuses("no such model")
    (tmp_path / "kept").rename(folder / "private.safetensors")
    (folder / "site.toml").unlink()  # runs of earlier versions have none
    edit(site_file(study, "C1"), more='private_model = "cnn1"\n')
    refuses("does not fit cnn1", "sites/C1.toml")


def test_a_table_of_patches_has_all_digits_of_the_probabilities(tmp_path):
    """Six decimals would round the probabilities of a confident model to one."""
    said = {"p_tumor": np.array([1e-9, 2e-9, 1 - 1e-9, 1.0, 1 / 3]), "burden": np.arange(5) / 7 * 1e9}
    write_patch_table(tmp_path / "patches.csv", np.zeros((5, 2), np.int64), 512.0, said)
    rows = csv_rows(tmp_path / "patches.csv")
    for name, values in said.items():
        assert [float(row[name]) for row in rows] == values.tolist()
