"""Tests of TCGA archives: barcodes, institutions, manifests, clinical tables and the study made by `init`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import pytest
from file_changes import edit
from test_archive_layouts import generic

from wsi_fl.demo.simulated_slides import write_pyramid
from wsi_fl.slides.layouts import Sources, detect_layout, list_site, list_sites, read_site
from wsi_fl.slides.layouts.tcga import _TYPE_OF_PROJECT, name_site, parse_barcode
from wsi_fl.stages.prepare.init_features import ArchiveTables
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.slide_lists import resolve_sources
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.types import WsiFlError

refused = partial(conftest.refused, error=WsiFlError)

UUID = "0123abcd-0000-4000-8000-{:012d}"

DUCTAL, LOBULAR = "Infiltrating duct carcinoma, NOS", "Lobular carcinoma, NOS"
ADENO = 'Adenocarcinoma, "NOS"'

CASES = {
    "TCGA-BH-A001": ("TCGA-BRCA", "Breast", DUCTAL),
    "TCGA-BH-A002": ("TCGA-BRCA", "Breast", LOBULAR),
    "TCGA-34-2600": ("TCGA-LUSC", "Lung", "Squamous cell carcinoma, NOS"),
    "TCGA-A8-A003": ("TCGA-BRCA", "Breast", DUCTAL),
    "TCGA-05-4244": ("TCGA-LUAD", "Lung", ADENO.replace('"', "'")),
    "TCGA-AO-A004": ("TCGA-BRCA", "Breast", DUCTAL),
    "TCGA-13-0700": ("TCGA-OV", "Ovary / Fallopian tube", "Serous cystadenocarcinoma, NOS"),
    "TCGA-NA-A5I1": ("TCGA-UCS", "Uterus", "Carcinosarcoma, NOS"),
}

HEADER = ("bcr_patient_barcode", "project", "tumor_type", "primary_diagnosis")


def slide_name(patient: str, kind: str = "DX1", sample: str = "01Z-00", number: int = 1) -> str:
    return f"{patient}-{sample}-{kind}.{UUID.format(number)}.svs"


def write_clinical(path: Path, cases=CASES, header=HEADER, extra=()) -> Path:
    rows = [header, *((patient, *case) for patient, case in cases.items()), *extra]
    path.write_text("\n".join("\t".join(row) for row in rows) + "\n")
    return path


def write_manifest(archive: Path, *more: str) -> Path:
    """Write a manifest of all existing slides and of further ones of five bytes."""
    slides = sorted(archive.rglob("*.svs"))
    rows = [(path.parent.name, path.name, str(path.stat().st_size)) for path in slides]
    rows += [("x", name, "5") for name in more]
    lines = [f"{key}\t{name}\t{'0' * 32}\t{size}\treleased\n" for key, name, size in rows]
    path = archive / "gdc_manifest.2024-01-01.txt"
    path.write_text("id\tfilename\tmd5\tsize\tstate\n" + "".join(lines))
    return path


def add(archive: Path, name: str, *, flat: bool = False) -> Path:
    folder = archive if flat else archive / f"id-{len(list(archive.iterdir())):04d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(name.encode())
    return folder / name


@pytest.fixture
def archive(tmp_path) -> Path:
    """One diagnostic and one frozen slide per patient; its files are no images."""
    archive = tmp_path / "t"
    archive.mkdir()
    for number, patient in enumerate(CASES):
        add(archive, slide_name(patient, number=number))
        add(archive, slide_name(patient, "TS1", "01A-01", number))
    (archive / "id-0000" / "logs").mkdir()
    (archive / "id-0000" / "logs" / "TCGA-BH-A001.svs.parcel").touch()
    write_clinical(archive / "clinical.tsv")
    return archive


def sources(archive: Path, site: str = "tcga-pittsburgh", **more) -> Sources:
    found = next(one for one in list_sites(archive, "tcga") if one.name == site)
    labels = Path(found.labels or "")
    return Sources(site, f"sites/{site}.toml", found.slides, None, labels, manifests=found.manifests, **more)


def read(archive: Path, *site: str, **more):
    return read_site("tcga", sources(archive, *site, **more))


def list_excluded(archive: Path, *words: str, **more) -> None:
    refused(lambda: read(archive, **more), *words)


def test_barcodes_are_read_as_strings():
    for name, fields in (
        (slide_name("TCGA-05-4244"), ("05", "4244", "01", "DX", "1", UUID.format(1))),
        (slide_name("TCGA-NA-A5I1", "TSA", "01A-03"), ("NA", "A5I1", "01", "TS", "A", UUID.format(1))),
        ("TCGA-02-0001-11A-01-BS12.tiff", ("02", "0001", "11", "BS", "12", None)),
        ("TCGA-BH-A0B3-01Z-00-DX1", ("BH", "A0B3", "01", "DX", "1", None)),
    ):
        barcode = parse_barcode(name)
        assert barcode is not None and tuple(barcode) == fields and barcode.patient == name[:12]


def test_spellings_of_an_institution_are_one_site():
    for names, site in (
        (("MSKCC", " Memorial  Sloan Kettering", "Memorial Sloan-Kettering Cancer Center"), "tcga-mskcc"),
        (("St. Joseph's Hospital (AZ)", "St. Joseph's Hospital Arizona"), "tcga-st-josephs-arizona"),
        (("St Joseph's Medical Center (MD)", "St. Joseph's Medical Center-(MD)"), "tcga-st-josephs-maryland"),
        (("University of São Paulo",), "tcga-university-of-sao-paulo"),
    ):
        assert {name_site(name) for name in names} == {site}


def test_an_archive_is_recognised_and_grouped(archive, tmp_path):
    archive = archive.rename(tmp_path / "T [1]")
    add(archive, slide_name("TCGA-BH-A002", "DX2", number=50), flat=True)
    assert detect_layout(archive) == "tcga"
    found = list_sites(archive, "tcga")
    assert [(site.name.removeprefix("tcga-"), site.n_slides, site.unknown_codes) for site in found] == [
        ("indivumed", 2, ()),
        ("mskcc", 2, ()),
        ("na", 1, ("NA",)),
        ("pittsburgh", 4, ()),
    ]
    assert [Path(pattern).name for pattern in found[3].slides] == ["TCGA-34-*.svs", "TCGA-BH-*.svs"]
    for site in found:
        records, aside = read(archive, site.name)
        assert len(records) == site.n_slides and aside == []
    by_code = list_sites(archive, "tcga", group_by="tss")
    codes = ("05", "13", "34", "a8", "ao", "bh", "na")
    assert [site.name for site in by_code] == [f"tcga-{code}" for code in codes]


def test_a_table_of_source_sites_names_unknown_institutions(archive, tmp_path):
    codes = tmp_path / "codes.csv"
    codes.write_text('"TSS Code","Source Site","Study Name"\n"NA","Duke University","x"\n"B6","Duke","y"\n')
    assert "tcga-duke" in [site.name for site in list_sites(archive, "tcga", codes=codes)]
    (archive / "tissueSourceSite.tsv").write_text("TSS Code\tSource Site\nNA\tDuke University\n")
    assert "tcga-duke" in [site.name for site in list_sites(archive, "tcga")]


def test_slides_are_labelled_with_their_patients_diagnosis(archive):
    records, aside = read(archive, mpp_override=0.25)
    assert aside == []
    assert [(r.patient, r.diagnosis, r.tumor_type) for r in records] == [
        ("TCGA-34-2600", "Squamous cell carcinoma, NOS", "Lung"),
        ("TCGA-BH-A001", DUCTAL, "Breast"),
        ("TCGA-BH-A002", LOBULAR, "Breast"),
    ]
    for record in records:
        assert (record.supervision, record.positive, record.mpp_override) == ("weak", True, 0.25)
        assert record.slide == record.path.stem and "-DX1." in record.slide


def test_other_kinds_of_slides_are_included_on_request(archive):
    add(archive, slide_name("TCGA-BH-A001", "BS1", "11A-01", 60))
    records, aside = read(archive, slide_types=("TS", "BS"))
    assert len(records) == 3 and all("-TS1." in record.slide for record in records)
    assert [one.reason for one in aside] == ["not a slide of a tumour (sample type 11)"]
    list_excluded(archive, "none of its 7 slides", "MS", slide_types=("MS",))


def test_slides_without_a_diagnosis_are_excluded(archive):
    cases = {k: v for k, v in CASES.items() if k != "TCGA-BH-A001"}
    write_clinical(archive / "clinical.tsv", cases | {"TCGA-34-2600": ("TCGA-LUSC", "Lung", "'--")})
    add(archive, "TCGA-BH-strange.svs")
    records, aside = read(archive)
    assert [record.patient for record in records] == ["TCGA-BH-A002"]
    assert [one.reason for one in aside] == [
        "patient TCGA-34-2600 has no diagnosis in clinical.tsv",
        "patient TCGA-BH-A001 is not in clinical.tsv",
        "not named by a TCGA barcode",
    ]
    write_clinical(archive / "clinical.tsv", {"TCGA-XX-0000": ("p", "t", "d")})
    list_excluded(archive, "none of its slides", "is not in clinical.tsv")


def test_columns_may_have_other_names_and_rows_may_repeat(archive):
    write_clinical(archive / "clinical.tsv", header=("who", "project", "organ", "what"))
    list_excluded(archive, "'bcr_patient_barcode'", "--column patient=")
    list_excluded(archive, "column 'nothing' is missing", columns={"diagnosis": "nothing"})
    columns = {"patient": "who", "diagnosis": "what"}
    records, _ = read(archive, columns=columns | {"tumor_type": "organ"})
    assert [record.tumor_type for record in records] == ["Lung", "Breast", "Breast"]
    records, _ = read(archive, columns=columns)  # then the project tells the type
    assert [(r.diagnosis, r.tumor_type) for r in records[:2]] == [
        ("Squamous cell carcinoma, NOS", "pulmonary"),
        (DUCTAL, "breast"),
    ]
    again = [("TCGA-BH-A001", "TCGA-BRCA", "70", LOBULAR)]  # of another treatment or tumour
    for header in (
        ("case_submitter_id", "project_id", "age", "primary_diagnosis"),
        ("cases.submitter_id", "project.project_id", "demographic.age_at_index", "diagnoses.primary_diagnosis"),
        ("cases.submitter_id", "cases.project.project_id", "demographic.age_at_index", "diagnoses.primary_diagnosis"),
    ):
        write_clinical(archive / "clinical.tsv", header=header, extra=again)
        records, aside = read(archive)
        assert aside == []
        assert [(r.diagnosis, r.tumor_type) for r in records] == [("LUSC", "pulmonary"), *[("BRCA", "breast")] * 2]
    records, _ = read(archive, "tcga-indivumed", columns={"tumor_type": "cases.project.project_id"})
    assert (records[0].diagnosis, records[0].tumor_type) == (ADENO.replace('"', "'"), "TCGA-LUAD")
    write_clinical(archive / "clinical.tsv", CASES | {"TCGA-34-2600": ("CPTAC-3", "", "")}, header)
    assert [one.reason.split(";")[0] for one in read(archive)[1]] == [
        "patient TCGA-34-2600: project 'CPTAC-3' has no tumour type"
    ]


def test_other_tumours_of_a_patient_are_no_diagnosis(archive):
    header = (*HEADER, "diagnoses.classification_of_tumor")
    cases = {patient: (*case, "primary") for patient, case in CASES.items()}
    other = ("TCGA-BH-A001", "TCGA-BRCA", "Breast", LOBULAR, "Prior primary")
    write_clinical(archive / "clinical.tsv", cases, header, [other])
    assert [r.diagnosis for r in read(archive)[0]][1] == DUCTAL
    write_clinical(archive / "clinical.tsv", cases, header, [(*other[:4], "not reported")])
    list_excluded(archive, "TCGA-BH-A001", "contradict", DUCTAL, LOBULAR)


def test_the_table_of_types_has_each_project_of_tcga_once():
    everything = (
        "ACC BLCA BRCA CESC CHOL COAD DLBC ESCA GBM HNSC KICH KIRC KIRP LGG LIHC LUAD LUSC MESO OV PAAD PCPG PRAD "
        "READ SARC SKCM STAD TGCT THCA THYM UCEC UCS UVM"
    )
    assert sorted(_TYPE_OF_PROJECT) == everything.split()
    assert len(_TYPE_OF_PROJECT) == 32 and len(set(_TYPE_OF_PROJECT.values())) == 13


def test_an_archive_without_a_choice_of_diagnosis_is_refused(archive, tmp_path):
    header = ("case_submitter_id", "project_id", "age", "primary_diagnosis")
    write_clinical(archive / "clinical.tsv", header=header)
    document = init_study(tmp_path / "study", archive=archive)
    assert document["subtypes"]["pulmonary"] == ["LUAD", "LUSC"] and document["subtypes"]["breast"] == ["BRCA"]
    assert document["notes"][-1].startswith("4 of 8 slides are trained on and not scored: one diagnosis for breast (")
    only = {patient: case for patient, case in CASES.items() if case[0] in {"TCGA-BRCA", "TCGA-LUAD"}}
    write_clinical(archive / "clinical.tsv", only, header)
    words = "no tumour type has two diagnoses", "breast: BRCA; pulmonary: LUAD", "--column tumor_type=NAME"
    refused(lambda: init_study(tmp_path / "other", archive=archive), *words)
    refused(lambda: Study(tmp_path / "study").load_pipeline("tcga_subtypes", ['subtypes={lung=["LUAD"]}']), words[0])


def test_rows_that_contradict_each_other_are_refused(archive, tmp_path):
    for row, words in (
        (("TCGA-BRCA", "Breast", LOBULAR), (DUCTAL, LOBULAR)),
        (("TCGA-BRCA", "Ovary", DUCTAL), ("'Breast' and 'Ovary'",)),
    ):
        write_clinical(archive / "clinical.tsv", extra=[("TCGA-BH-A001", *row)])
        list_excluded(archive, "TCGA-BH-A001", "contradict", *words)
        assert len(read(archive, "tcga-indivumed")[0]) == 2
    refused(lambda: init_study(tmp_path / "s", archive=archive), "TCGA-BH-A001")
    assert not (tmp_path / "s").exists()


def test_slides_that_differ_from_the_manifest_are_excluded(archive):
    short, unsaid = (add(archive, slide_name("TCGA-BH-A001", f"DX{n}", number=n)) for n in (2, 3))
    absent = slide_name("TCGA-BH-A009", number=9)
    others = slide_name("TCGA-BH-A010", "TS1", "01A-01"), slide_name("TCGA-A8-A011")  # frozen, and foreign
    manifest = write_manifest(archive, absent, *others)
    line = f"{unsaid.name}\t{'0' * 32}\t"
    edit(manifest, f"{line}{unsaid.stat().st_size}", line)
    short.write_bytes(b"short")
    records, aside = read(archive)
    found = {one.slide: one.reason for one in aside}
    assert len(records) == 3 and list(found) == sorted(found)
    assert found.pop(Path(absent).stem) == "in the manifest but not in the archive"
    assert found[short.stem].startswith("has 5 bytes, but the manifest says")
    assert "the manifest says nothing" in found[unsaid.stem]
    assert len(found) == 2 and all("\n" not in reason for reason in found.values())


def test_the_manifest_of_a_site_file_must_exist_and_be_valid(archive):
    good = vars(sources(archive))

    def unread(*words, read=read_site, layout="tcga", **change):
        refused(lambda: read(layout, Sources(**{**good, **change})), *words)

    words = "sites/tcga-pittsburgh.toml: manifest: no such file"
    unread(words, manifests=(f"{archive}/none*.txt",))
    (archive / "manifest.txt").write_text("file\n")
    unread("manifest.txt", "column 'id' is missing", manifests=(f"{archive}/manifest.txt",))
    unread("labels is missing", labels=None)
    unread("manifest is for layout tcga", read=list_site, layout="generic", manifests=("x",))


def test_the_sites_of_an_archive_study_agree_on_its_subtypes(archive, tmp_path):
    manifest = write_manifest(archive)
    add(archive, slide_name("TCGA-E9-A0XX"))  # no clinical row
    document = init_study(tmp_path / "study", archive=archive)
    assert document["layout"] == "tcga" and document["pipelines"] == ["tcga_subtypes"]
    names = ("indivumed", "mskcc", "na", "pittsburgh")
    assert [row["site"] for row in document["sites"]] == [f"tcga-{name}" for name in names]
    notes = "\n".join(document["notes"])
    assert "tcga-asterand is left out" in notes and "not in clinical.tsv" in notes
    assert "source sites: NA;" in notes
    study = Study(tmp_path / "study")
    agreed = {
        "Breast": [DUCTAL, LOBULAR],
        "Lung": ["Adenocarcinoma, 'NOS'", "Squamous cell carcinoma, NOS"],
        "Ovary / Fallopian tube": ["Serous cystadenocarcinoma, NOS"],
        "Uterus": ["Carcinosarcoma, NOS"],
    }
    assert study.load_pipeline(study.pipeline_name(None)).subtypes == document["subtypes"] == agreed
    text = (study.root / "pipelines" / "tcga_subtypes.toml").read_text()
    assert text.startswith((find_shipped_folder("pipelines") / "tcga_subtypes.toml").read_text())
    site = study.load_site("tcga-pittsburgh")
    assert (site.real, site.layout, site.slide_types) == (False, "tcga", ["DX"])
    assert site.manifest == str(manifest)
    records, aside = read_site("tcga", resolve_sources(study, site))
    assert len(records) == 3 and aside == []


def test_options_of_an_archive_are_checked(archive, tmp_path):
    clinical = write_clinical(tmp_path / "cases.tsv", header=("who", "project", "tumor_type", "what"))
    columns = ("patient=who", "diagnosis = what")
    study = Study(tmp_path / "study")
    init_study(study.root, archive=archive, tables=ArchiveTables("tss", (clinical,), None, columns))
    site = study.load_site("tcga-bh")
    assert site.labels == str(clinical) and site.columns == {"patient": "who", "diagnosis": "what"}
    assert len(read_site("tcga", resolve_sources(study, site))[0]) == 2

    def fails(*words, archive=archive, **tables):
        refused(lambda: init_study(tmp_path / "other", archive=archive, tables=ArchiveTables(**tables)), *words)

    fails("unknown grouping 'country'", "institution, tss", group_by="country")
    fails("--clinical: no such file", clinical=[tmp_path / "none"])
    fails("--codes: no such file", codes=tmp_path / "none")
    fails("--column 'diagnosis'", "KEY=NAME", columns=("diagnosis",))
    keys = "'patient', 'diagnosis', 'tumor_type' or 'project'"
    fails("--column", "diagnose", keys, columns=("diagnose=x",))
    plain = generic(tmp_path / "g", "slide,patient,site,label\na,p1,north,tumor\n")
    fails("--group-by", "layout tcga", archive=plain, group_by="tss")
    write_clinical(archive / "clinical.2.tsv")
    fails("has clinical.2.tsv and clinical.tsv", "--clinical")
    for name in ("clinical.2.tsv", "clinical.tsv"):
        (archive / name).unlink()
    fails("no clinical*.tsv", "--clinical FILE")
    assert not (tmp_path / "other").exists()


def test_generic_archives_may_have_diagnoses(tmp_path):
    archive = generic(
        tmp_path / "g",
        "slide,patient,site,label,diagnosis,tumor_type\n"
        "a,p1,north,tumor,Ductal,Breast\nb,p2,south,tumor,Lobular,Breast\nc,p3,south,tumor,,\n",
    )
    document = init_study(tmp_path / "study", archive=archive, pipeline="tcga_subtypes")
    assert document["subtypes"] == {"Breast": ["Ductal", "Lobular"]}
    study = Study(tmp_path / "study")
    records, _ = read_site("generic", resolve_sources(study, study.load_site("south")))
    assert [(r.diagnosis, r.tumor_type) for r in records] == [("Lobular", "Breast"), ("", "")]
    assert "subtypes" not in init_study(tmp_path / "plain", archive=archive)
    bare = {"archive": generic(tmp_path / "h", "slide,patient,site,label\na,p1,north,tumor\n")}
    words = "none of its slides has a diagnosis"
    refused(lambda: init_study(tmp_path / "bare", **bare, pipeline="tcga_subtypes"), words)


def paint(path: Path, seed: int) -> None:
    """Write a slide with a patch of tissue on white glass under a TCGA name."""
    rng = np.random.default_rng(seed)
    pixels = np.full((256, 256, 3), 244, np.uint8)
    pixels[32:224, 32:224] = np.array([180, 110, 160]) + rng.integers(-25, 25, (192, 192, 3))
    path.parent.mkdir(parents=True)
    write_pyramid(path, pixels, 1.0)


def test_init_creates_a_study_with_readable_slides(tmp_path, wsi_fl):
    archive = tmp_path / "TCGA"
    for number, patient in enumerate(("TCGA-BH-A001", "TCGA-BH-A002", "TCGA-A8-A003")):
        paint(archive / f"id-{number}" / slide_name(patient, number=number), number)
    write_manifest(archive, slide_name("TCGA-BH-A009"))
    clinical = write_clinical(tmp_path / "cases.tsv", header=(*HEADER[:3], "what"))
    start = ["--from", archive, "--layout", "tcga", "--group-by", "institution", "--clinical", clinical]
    named = ["--column", "diagnosis=what"]
    done = wsi_fl("init", "study", *start, *named, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    slides = {row["site"]: row["slides"] for row in document["sites"]}
    assert slides == {"tcga-indivumed": 1, "tcga-pittsburgh": 2}
    assert document["subtypes"] == {"Breast": [DUCTAL, LOBULAR]}
    overrides = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]
    (row,) = tile_slides(Study(tmp_path / "study"), site="tcga-pittsburgh", overrides=overrides)["sites"]
    assert row["patches"] > 0
    assert row["failed"][0]["reason"].startswith("in the manifest but not in the archive")
    people = wsi_fl("init", "again", *start, *named, cwd=tmp_path)
    assert people.returncode == 0 and "wsi-fl mosaic --all" in people.stderr
    wrong = wsi_fl("init", "wrong", *start, "--column", "diagnosis=no", cwd=tmp_path)
    assert wrong.returncode == 2 and "'no' is missing" in wrong.stderr
    assert len(wrong.stderr.strip().split("\n")) == 1 and not (tmp_path / "wrong").exists()
