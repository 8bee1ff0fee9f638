"""Small archives with the names and tables of the real ones: nothing is set by hand."""

import json

import pytest
from small_archives import CLINICAL_HEADERS, TCGA_SOURCES, write_camelyon16, write_camelyon17, write_tcga

from wsi_fl.slides.layouts import read_site
from wsi_fl.stages.prepare.estimate_tiling import estimate_tiling
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.slide_lists import resolve_sources
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.study.folder import Study

INSTITUTIONS = ["tcga-pittsburgh", "tcga-indivumed", "tcga-asterand", "tcga-mskcc"]


def selected_sites(study):
    return study.load_sites(study.load_pipeline(study.pipeline_name(None)))


@pytest.mark.parametrize(
    ("write", "options", "sites", "note"),
    [
        (write_camelyon17, {"n_centres": 5}, ["C1", "C2", "C3", "C4"], "without C5; delete it for all"),
        (write_camelyon16, {}, ["RUMC", "UMCU"], "1 test slide (test_001)"),
    ],
)
def test_camelyon_is_read_and_cut_as_it_is_downloaded(tmp_path, write, options, sites, note):
    archive = write(tmp_path / "archive", patients=1, size_px=512, **options)
    document = init_study(tmp_path / "study", archive=archive, pipeline="camelyon17_small")
    study = Study(tmp_path / "study")
    assert [site.name for site in selected_sites(study)] == sites
    assert any(note in line for line in document["notes"])
    assert sum(row["slides"] for row in document["sites"]) == 2 * len(document["sites"])
    for site in selected_sites(study):
        records, excluded = read_site(site.layout, resolve_sources(study, site))
        assert excluded == [] and sorted(r.supervision for r in records) == ["annotated", "negative"]
    estimate = estimate_tiling(study, site=None)
    assert all(row["failed"] == 0 and row["patches"] > 6 for row in estimate["sites"])
    (eager,) = estimate_tiling(study, site=sites[0], overrides=["tile.min_tumor=0"])["sites"]
    assert eager["patches"] > estimate["sites"][0]["patches"]
    for command in (estimate_tiling, tile_slides):
        (limited,) = command(study, site=sites[0], overrides=["tile.max_per_site=6"])["sites"]
        assert limited["patches"] == 6


@pytest.mark.parametrize("header", CLINICAL_HEADERS)
def test_tcga_is_read_as_the_gdc_has_it(tmp_path, header):
    archive = write_tcga(tmp_path / "TCGA", patients=1, size_px=512, header=header)
    document = init_study(tmp_path / "study", archive=archive)
    assert document["subtypes"] == {"breast": ["BRCA"], "gastrointestinal": ["COAD"], "pulmonary": ["LUAD", "LUSC"]}
    study = Study(tmp_path / "study")
    assert [site.name for site in selected_sites(study)] == INSTITUTIONS
    for site in selected_sites(study):
        records, excluded = read_site("tcga", resolve_sources(study, site))
        assert excluded == [] and len(records) == 3
        assert {f"TCGA-{r.diagnosis}" for r in records} <= set(TCGA_SOURCES.values())
    assert any("without tcga-44" in note for note in document["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "pipeline", "n_sites"),
    [
        (write_camelyon17, "camelyon17_small", 4),
        (write_camelyon16, "camelyon17_small", 2),
        (write_tcga, "tcga_small", 4),
    ],
)
def test_the_commands_walk_through_an_archive_with_a_rank_per_site(
    tmp_path, wsi_fl, tiny_weights, write, pipeline, n_sites
):
    archive = write(tmp_path / "archive", patients=4)

    def run(*words, cwd=tmp_path / "study"):
        done = wsi_fl(*words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done

    run("init", "study", "--from", archive, "--pipeline", pipeline, cwd=tmp_path)
    encoder = ["--set", "mosaic.encoder=test_efficientnet", "--set", f"mosaic.weights={tiny_weights}"]
    run(*(["mosaic", "--all", *encoder] if write is write_tcga else ["tile", "--all"]))
    run("train", "--method", "proxyfl")
    document = json.loads(run("evaluate", "1", "--json").stdout)
    assert len(document["sites"]) == n_sites and document["merged"]["accuracy"]["mean"] is not None
    summary = json.loads((tmp_path / "study" / document["run"] / "summary.json").read_text())
    assert len(summary["sites"]) == n_sites and summary["communication"]["messages"] > 0
    if write is write_tcga:
        assert set(document["unscored"]) <= {"breast", "gastrointestinal"}
        assert all(set(row["tumor_types"]) <= {"pulmonary"} for row in document["sites"])
