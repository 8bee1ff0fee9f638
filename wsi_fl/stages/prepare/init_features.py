"""`wsi-fl init` from public features of TCGA: a natural federation, with a site for each institution."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import tomli_w

from wsi_fl.slides.layouts.common import group_pairs
from wsi_fl.slides.layouts.tcga import list_slides, name_site, parse_barcode, read_institutions
from wsi_fl.slides.layouts.tcga_targets import (
    SURVIVAL,
    SURVIVAL_COLUMNS,
    SURVIVAL_INTERVALS,
    list_institutions,
    read_clinical,
    read_target,
)
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.types import SlideRecord, UsageError

LABEL_TABLE, MIN_PATIENTS = "labels.csv", 25
_COLUMNS = ("site", "slide", "patient", "split", "label")
_TEST_FRACTION = 0.2
_MAX_NAMED = 6


class FeatureFederation(NamedTuple):
    """The institutions of an archive of features: the text of a table with site, split and targets of each slide, the
    text of a pipeline for each target, the patients and slides of each site, and notes.
    """

    label_table: str
    pipelines: Mapping[str, str]
    sites: Mapping[str, tuple[int, int]]
    notes: list[str]


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
    by_institution: bool = True,
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
    columns, values = zip(*(read_target(rows, text) for text in dict.fromkeys(targets)), strict=True)
    if shared := {*_COLUMNS}.intersection(*columns):
        raise UsageError(f"--target {min(shared)}: the label table has a column of this name; rename it in --clinical")
    records = _list_records(archive, list_institutions(rows) | read_institutions(codes) if by_institution else {})
    labelled = {patient for by_patient in values for patient in by_patient}
    groups = group_pairs((record.site, record) for record in records if record.patient in labelled)
    patients = {site: len({record.patient for record in group}) for site, group in sorted(groups.items())}
    small = {site: n for site, n in patients.items() if n < min_patients}
    if len(sites := [site for site in patients if site not in small]) < 2:
        raise UsageError(
            f"{archive}: {len(sites)} of {len(patients)} institutions have {min_patients} patients with a target; two "
            "are needed: lower --min-patients, or compare barcodes in --clinical and --from"
        )
    selected = [record for site in sites for record in assign_splits(groups[site], test_fraction=_TEST_FRACTION)]
    labels = pd.DataFrame([(record.site, record.slide, record.patient, record.split) for record in selected])
    labels = labels.set_axis(_COLUMNS[:-1], axis=1).assign(label="tumor")  # as `import` wants to know
    notes, pipelines = list[str](), dict[str, str]()
    for names, by_patient in zip(columns, values, strict=True):
        labels, counts = _add_target(labels, names, by_patient)
        name, text = _render_pipeline(names, sorted(counts), pipeline)
        pipelines[name] = text
        frequent = ", ".join(f"{n} {value}" for value, n in counts.most_common(_MAX_NAMED))
        notes.append(
            f"{names[-1]}: {counts.total()} patients: {frequent}" + (", …" if len(counts) > _MAX_NAMED else "")
        )
    if n_unlabelled := sum(record.patient not in labelled for record in records):
        notes.append(f"slides left out, as --clinical has no target of their patient or several: {n_unlabelled}")
    if small:
        n = f"{len(small)} with {sum(small.values())} patients ({', '.join(small)})"
        notes.append(f"institutions with fewer than {min_patients} patients, left out: {n}")
    numbers = {site: (patients[site], len(groups[site])) for site in sites}
    return FeatureFederation(labels.to_csv(index=False, lineterminator="\n"), pipelines, numbers, notes)


def _add_target(
    labels: pd.DataFrame, columns: tuple[str, ...], values: Mapping[str, tuple[str, ...]]
) -> tuple[pd.DataFrame, Counter[str]]:
    """Return the table with the columns of a target, and the number of patients by its last value."""
    cells = [values.get(patient, ("",) * len(columns)) for patient in labels["patient"]]
    table = labels.assign(**dict(zip(columns, zip(*cells, strict=True), strict=True)))
    return table, Counter(values[name][-1] for name in {*labels["patient"]} & values.keys())


def _list_records(archive: Path, institutions: Mapping[str, str]) -> list[SlideRecord]:
    """Return the diagnostic slides of tumours, each at its institution or else its source site."""
    records = []
    for slide, path in LAYOUTS["trident"].find(archive).items():
        barcode = parse_barcode(slide)
        if barcode is not None and barcode.kind == "DX" and barcode.is_tumor:
            site = name_site(institutions.get(barcode.tss, barcode.tss))
            records.append(SlideRecord(path, slide, barcode.patient, site, "weak", positive=True))
    return records


def _render_pipeline(columns: tuple[str, ...], classes: Sequence[str], text: str) -> tuple[str, str]:
    """Return the name and text of a pipeline with a target."""
    target: dict[str, object] = {"column": columns[0], "classes": classes, "per": "patient"}
    if columns == SURVIVAL_COLUMNS:
        target = {**dict(zip(("time", "event"), columns, strict=True)), "intervals": [*SURVIVAL_INTERVALS]}
    name = SURVIVAL if columns == SURVIVAL_COLUMNS else re.sub(r"\W+", "_", columns[0].lower())
    return name, text.replace("features", name, 1) + "\n" + tomli_w.dumps({"target": target})
