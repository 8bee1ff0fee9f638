"""`wsi-fl init` from public features of TCGA: a natural federation, with a site for each institution."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from wsi_fl.slides.layouts.common import group_pairs
from wsi_fl.slides.layouts.tcga import list_slides, name_site, parse_barcode, read_institutions
from wsi_fl.slides.layouts.tcga_targets import (
    SURVIVAL_COLUMNS,
    SURVIVAL_INTERVALS,
    PatientTarget,
    list_institutions,
    read_clinical,
    read_target,
)
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.types import SlideRecord, UsageError

LABEL_TABLE = "labels.csv"
_COLUMNS = ("site", "slide", "patient", "split", "label")
MIN_PATIENTS = 25
_TEST_FRACTION = 0.2
_MAX_NAMED = 6


@dataclass(frozen=True)
class FeatureFederation:
    """The institutions of an archive of features.

    Attributes:
        label_table: the text of a table with a row for each slide: its site, patient, split and targets.
        pipelines: name → text of a pipeline for each target.
        slides, patients: numbers by site.
    """

    label_table: str
    pipelines: Mapping[str, str]
    slides: Mapping[str, int]
    patients: Mapping[str, int]
    notes: Sequence[str]


def has_features(archive: Path) -> bool:
    """Return whether a folder holds files of features named by TCGA's barcodes, and no slides."""
    files = (path.stem for path in archive.rglob("TCGA-*.h5"))
    return any(map(parse_barcode, files)) and next(list_slides(archive), None) is None


def survey_features(
    archive: Path,
    tables: Sequence[Path],
    targets: Sequence[str],
    *,
    pipeline: str,
    codes: Path | None = None,
    group_by: str = "institution",
    min_patients: int = MIN_PATIENTS,
) -> FeatureFederation:
    """Return the institutions of features of TCGA's slides that have enough patients with a target.

    Diagnostic slides of tumours count. A fifth of the patients of each institution is for testing.

    Args:
        tables: clinical tables, of the GDC or cBioPortal.
        targets: see `read_target`.
        pipeline: the text of the pipeline to which each target is added.

    Raises:
        UsageError: for invalid tables or targets, or without two institutions.
    """
    rows = read_clinical(tables)
    patient_targets = [read_target(rows, text) for text in dict.fromkeys(targets)]
    if shared := {name for target in patient_targets for name in target.columns} & {*_COLUMNS}:
        raise UsageError(f"--target {min(shared)}: the label table has a column of this name; rename it in --clinical")
    institutions = list_institutions(rows) | read_institutions(codes) if group_by == "institution" else {}
    records = _list_records(archive, institutions)
    labelled = {patient for target in patient_targets for patient in target.values}
    by_site = group_pairs((record.site, record) for record in records if record.patient in labelled)
    patients = {site: len({record.patient for record in group}) for site, group in sorted(by_site.items())}
    small = {site: n for site, n in patients.items() if n < min_patients}
    if len(patients) < len(small) + 2:
        raise UsageError(
            f"{archive}: {len(patients) - len(small)} of {len(patients)} institutions have {min_patients} patients "
            "with a target; two are needed: lower --min-patients, or compare barcodes in --clinical and --from"
        )
    selected = {site: assign_splits(by_site[site], test_fraction=_TEST_FRACTION) for site in patients.keys() - small}
    split_records = [record for site in sorted(selected) for record in selected[site]]
    notes = _describe_targets(patient_targets, {record.patient for record in split_records})
    if n_unlabelled := sum(record.patient not in labelled for record in records):
        notes.append(f"slides without a target of their patient in --clinical, left out: {n_unlabelled}")
    if small:
        names = ", ".join([*small][:_MAX_NAMED]) + (", …" if len(small) > _MAX_NAMED else "")
        notes.append(
            f"institutions with fewer than {min_patients} patients, left out: {len(small)} with {sum(small.values())} "
            f"patients ({names})"
        )
    return FeatureFederation(
        _render_labels(split_records, patient_targets),
        dict(_render_pipeline(target, pipeline) for target in patient_targets),
        {site: len(selected[site]) for site in sorted(selected)},
        {site: patients[site] for site in sorted(selected)},
        notes,
    )


def _list_records(archive: Path, institutions: Mapping[str, str]) -> list[SlideRecord]:
    """Return the diagnostic slides of tumours, each at its institution or else its source site."""
    barcodes = [(path, parse_barcode(slide)) for slide, path in LAYOUTS["trident"].find(archive).items()]
    return [
        SlideRecord(
            path,
            path.stem,
            barcode.patient,
            name_site(institutions.get(barcode.tss, barcode.tss)),
            "weak",
            positive=True,
        )
        for path, barcode in barcodes
        if barcode is not None and barcode.kind == "DX" and barcode.is_tumor
    ]


def _describe_targets(targets: Sequence[PatientTarget], patients: set[str]) -> list[str]:
    """Return a line on the values of each target among the patients."""
    lines = []
    for target in targets:
        values = [target.values[patient][-1] for patient in sorted(patients & target.values.keys())]
        classes = target.classes or ["0", "1"]
        shown = [f"{values.count(name)} {name}" for name in classes[:_MAX_NAMED]]
        text = f"{len(values)} patients: " + ", ".join(shown) + (", …" if len(classes) > len(shown) else "")
        if not target.classes:
            text = f"{len(values)} patients, {values.count('1')} died"
        left_out = f"; {target.n_contradictions} left out: their rows differ" if target.n_contradictions else ""
        lines.append(f"{target.name}: {text}{left_out}")
    return lines


def _render_labels(records: Sequence[SlideRecord], targets: Sequence[PatientTarget]) -> str:
    """Return the table of labels as CSV; `label` is for `import`, which tells tumours from healthy tissue."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(name for target in targets for name in target.columns)])
    for record in records:
        values = (target.values.get(record.patient, ("",) * len(target.columns)) for target in targets)
        row = (record.site, record.slide, record.patient, record.split, "tumor")
        writer.writerow([*row, *(cell for cells in values for cell in cells)])
    return out.getvalue()


def _render_pipeline(target: PatientTarget, text: str) -> tuple[str, str]:
    """Return the name and text of a pipeline with a target."""
    name = re.sub(r"[^a-z0-9]+", "_", target.name.lower()).strip("_")
    settings: dict[str, object] = {"column": target.name, "classes": target.classes, "per": "patient"}
    if not target.classes:
        settings = {**dict(zip(("time", "event"), SURVIVAL_COLUMNS, strict=True)), "intervals": [*SURVIVAL_INTERVALS]}
    head, _, body = text.partition("\n")
    return name, head.replace("features", name) + "\n" + body + "\n" + tomli_w.dumps({"target": settings})
