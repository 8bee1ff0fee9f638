"""`wsi-fl init` from public features of TCGA: a natural federation, with a site for each institution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import tomli_w

from wsi_fl.slides.layouts.common import group_pairs
from wsi_fl.slides.layouts.tcga import GROUPINGS, list_slides, name_site, parse_barcode, read_institutions
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

LABEL_TABLE, _MIN_PATIENTS = "labels.csv", 25
_COLUMNS = ("site", "slide", "patient", "split", "label")
_TEST_FRACTION = 0.2
_MAX_NAMED = 6


@dataclass(frozen=True)
class ArchiveTables:
    """Options of a TCGA archive: the meaning of a site, and tables from outside the archive.

    Attributes:
        group_by: "institution" or "tss".
        clinical: the table of diagnoses; of features several, with the targets.
        codes: the table of source sites.
        columns: how the clinical table's columns are called, as KEY=NAME.
        targets, min_patients: of features: what is predicted, and patients of the smallest institution.
    """

    group_by: str | None = None
    clinical: Sequence[Path] = ()
    codes: Path | None = None
    columns: Sequence[str] = ()
    targets: Sequence[str] = ()
    min_patients: int | None = None

    def __post_init__(self) -> None:
        if self.group_by not in (None, *GROUPINGS):
            raise UsageError(f"unknown grouping {self.group_by!r}; known: {', '.join(GROUPINGS)}")


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


def survey_features(archive: Path, tables: ArchiveTables, pipeline: str) -> FeatureFederation:
    """Return the institutions of features of TCGA's slides that have enough patients with a target.

    Diagnostic slides of tumours count. A fifth of the patients of each institution is for testing.

    Args:
        tables: its clinical tables are of the GDC or cBioPortal; for its targets see `read_target`.
        pipeline: the text of the pipeline to which each target is added.

    Raises:
        UsageError: for invalid tables or targets, or without two institutions.
    """
    rows, min_patients = read_clinical(tables.clinical), tables.min_patients or _MIN_PATIENTS
    columns, values = zip(*(read_target(rows, text) for text in dict.fromkeys(tables.targets)), strict=True)
    if shared := {*_COLUMNS}.intersection(*columns):
        raise UsageError(f"--target {min(shared)}: the label table has a column of this name; rename it in --clinical")
    is_by_code = tables.group_by == "tss"
    records = _list_records(archive, {} if is_by_code else list_institutions(rows) | read_institutions(tables.codes))
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
        labels[[*names]] = [by_patient.get(patient, ("",) * len(names)) for patient in labels["patient"]]
        counts = labels[labels[names[-1]] != ""].drop_duplicates("patient")[names[-1]].value_counts()
        name, text = _render_pipeline(names, sorted(counts.index), pipeline)
        pipelines[name] = text
        frequent = [f"{n} {value}" for value, n in counts.head(_MAX_NAMED).items()] + ["…"] * (len(counts) > _MAX_NAMED)
        notes.append(f"{names[-1]}: {counts.sum()} patients: {', '.join(frequent)}")
    if n_unlabelled := sum(record.patient not in labelled for record in records):
        notes.append(f"slides left out, as --clinical has no target of their patient or several: {n_unlabelled}")
    if small:
        n = f"{len(small)} with {sum(small.values())} patients ({', '.join(small)})"
        notes.append(f"institutions with fewer than {min_patients} patients, left out: {n}")
    numbers = {site: (patients[site], len(groups[site])) for site in sites}
    return FeatureFederation(labels.to_csv(index=False, lineterminator="\n"), pipelines, numbers, notes)


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
