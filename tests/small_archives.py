"""Archives with the names and tables of the real ones at a hundredth of the size; their slides are drawings.

    python tests/small_archives.py camelyon17 ARCHIVE --size-px 2048

Camelyon17 as its organisers give it (centres, `lesion_annotations`, `stage_labels.csv`, test patients, masks),
Camelyon16 (`normal`, `tumor`, test slides and their table), and TCGA as `gdc-client` leaves it (a folder per file,
manifest, logs, the cart's clinical tables).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import numpy as np

from wsi_fl.demo.simulated_slides import plan_slides, simulate_archive, simulate_slide, write_pyramid

TCGA_SOURCES = {
    "34": "TCGA-LUSC",
    "50": "TCGA-LUAD",
    "BH": "TCGA-BRCA",
    "66": "TCGA-LUSC",
    "05": "TCGA-LUAD",
    "A8": "TCGA-BRCA",
    "85": "TCGA-LUSC",
    "86": "TCGA-LUAD",
    "E9": "TCGA-BRCA",
    "39": "TCGA-LUSC",
    "CM": "TCGA-COAD",
    "AO": "TCGA-BRCA",
    "44": "TCGA-LUAD",
}
"""Tissue source site → its project: three of each of the published study's institutions, and one of another."""
_PRIMARY = {
    "TCGA-LUAD": "Adenocarcinoma, NOS",
    "TCGA-LUSC": "Squamous cell carcinoma, NOS",
    "TCGA-BRCA": "Infiltrating duct carcinoma, NOS",
    "TCGA-COAD": "Adenocarcinoma, NOS",
}
_TINTS = {"TCGA-LUAD": (1, 0.9, 1), "TCGA-LUSC": (0.9, 1, 1), "TCGA-BRCA": (1, 1, 0.9), "TCGA-COAD": (1, 0.85, 0.85)}
"""By project, so that a diagnosis can be seen at all."""
CLINICAL_HEADERS = {
    "old": ("case_id", "case_submitter_id", "project_id", "age_at_index", "primary_diagnosis", "treatment_type"),
    "new": (
        "project.project_id",
        "cases.case_id",
        "cases.submitter_id",
        "demographic.age_at_index",
        "diagnoses.primary_diagnosis",
        "treatments.treatment_type",
    ),
}
"""Columns of the GDC's clinical.tsv before and since 2024, a few of some two hundred."""


def write_camelyon17(out: Path, *, n_centres: int = 5, patients: int = 3, size_px: int = 1024) -> Path:
    """Write centres of so many training patients with two slides each, and a test patient; return `out`."""
    simulate_archive(out, n_sites=n_centres, patients_per_site=patients, size_px=size_px)
    training, slides = out / "training", sorted(out.rglob("*.tif"))
    for folder in sorted(training.glob("center_*")):
        folder.rename(training / folder.name.replace("center", "centre"))
    (out / "annotations").rename(training / "lesion_annotations")
    (out / "stages.csv").rename(training / "stage_labels.csv")
    first = training / "centre_0" / slides[0].name
    for other in ("testing/patients/patient_100_node_0.tif", f"masks/{slides[1].stem}_mask.tif"):
        (out / other).parent.mkdir(parents=True)
        shutil.copy(first, out / other)
    return out


def write_camelyon16(out: Path, *, patients: int = 3, size_px: int = 1024) -> Path:
    """Write so many normal and tumour slides of both hospitals, and a test slide; return `out`."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = simulate_archive(folder, n_sites=2, patients_per_site=patients, size_px=size_px)
        for kind, first_of_umcu in (("normal", 101), ("tumor", 71)):
            for slide in sorted(drawn.rglob(f"*_node_{int(kind == 'tumor')}.tif")):
                site, number = divmod(int(slide.stem[8:11]), 20)
                name = f"{kind}_{number + (first_of_umcu if site else 1):03d}"
                _move(slide, out / "training" / kind / f"{name}.tif")
                if kind == "tumor":
                    outline = drawn / "annotations" / f"{slide.stem}.xml"
                    _move(outline, out / "training" / "lesion_annotations" / f"{name}.xml")
    tests = out / "testing"
    (tests / "images").mkdir(parents=True)
    shutil.copy(out / "training" / "tumor" / "tumor_001.tif", tests / "images" / "test_001.tif")
    (tests / "lesion_annotations").mkdir()
    shutil.copy(out / "training" / "lesion_annotations" / "tumor_001.xml", tests / "lesion_annotations/test_001.xml")
    (tests / "reference.csv").write_text("test_001,Tumor,IDC,Macro\n")
    return out


def write_tcga(out: Path, *, patients: int = 4, size_px: int = 1024, header: str = "new") -> Path:
    """Write so many patients of each source site with a diagnostic slide, and a frozen one; return `out`."""
    numbered = [(tss, f"TCGA-{tss}-{k:04d}") for tss in TCGA_SOURCES for k in range(patients)]
    lines, plans = ["id\tfilename\tmd5\tsize\tstate"], plan_slides(4, 20, size_px, 0)[:: max(1, 160 // len(numbered))]
    for k, (tss, patient) in enumerate([*numbered, numbered[0]]):
        kind = "01Z-00-DX1" if k < len(numbered) else "01A-01-TS1"
        uuid, name = (str(uuid5(NAMESPACE_URL, f"{patient}-{kind}-{part}")) for part in ("folder", "file"))
        path = out / uuid / f"{patient}-{kind}.{name.upper()}.svs"
        (path.parent / "logs").mkdir(parents=True)
        (path.parent / "logs" / f"{path.name}.parcel").touch()
        pixels = simulate_slide(plans[k % len(plans)]) * np.array(_TINTS[TCGA_SOURCES[tss]])
        write_pyramid(path, pixels.round().astype(np.uint8), 0.5)
        data = path.read_bytes()
        lines.append(f"{uuid}\t{path.name}\t{hashlib.md5(data).hexdigest()}\t{len(data)}\treleased")
    (out / "gdc_manifest.2024-05-01.123456.txt").write_text("\n".join(lines) + "\n")
    cart = out / "clinical.cart.2024-05-01"
    cart.mkdir()
    for name in ("exposure", "family_history", "follow_up", "pathology_detail"):
        (cart / f"{name}.tsv").write_text("\t".join(CLINICAL_HEADERS[header][:3]) + "\n")
    rows = list(_clinical_rows((patient, TCGA_SOURCES[tss]) for tss, patient in numbered))
    table = [CLINICAL_HEADERS[header], *(_order_fields(row, header) for row in rows)]
    (cart / "clinical.tsv").write_text("\n".join("\t".join(fields) for fields in table) + "\n")
    return out


def _clinical_rows(patients: Iterable[tuple[str, str]]) -> Iterable[tuple[str, ...]]:
    """Yield (project, case, patient, age, diagnosis, treatment), a row per treatment, as the GDC does."""
    for patient, project in patients:
        case = str(uuid5(NAMESPACE_URL, patient))
        for treatment in ("Pharmaceutical Therapy, NOS", "Radiation Therapy, NOS"):
            yield project, case, patient, "'--", _PRIMARY[project], treatment


def _order_fields(row: Sequence[str], header: str) -> Sequence[str]:
    project, case, patient, *others = row
    return row if header == "new" else (case, patient, project, *others)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)


WRITERS: dict[str, Callable[..., Path]] = {
    "camelyon17": write_camelyon17,
    "camelyon16": write_camelyon16,
    "tcga": write_tcga,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=WRITERS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--patients", type=int, default=4)
    parser.add_argument("--size-px", type=int, default=1024, help="side of a slide, in pixels of 0.5 µm")
    arguments = parser.parse_args()
    WRITERS[arguments.layout](arguments.out, patients=arguments.patients, size_px=arguments.size_px)
