"""TCGA as downloaded by the GDC's client: `<id>/<barcode>.<UUID>.svs`, a manifest, a clinical table with diagnosis and
tumour type of each patient.

The second field of a barcode is a tissue source site: an institution *and* a study, so an institution has many. Built
in are the codes of the four institutions in ProxyFL's study of TCGA; the table of all, tissueSourceSite.tsv of the
GDC's code tables, is read where there is one.
"""

from __future__ import annotations

import fnmatch
import glob
import re
import tomllib
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from wsi_fl.slides.layouts.common import ArchiveSite, Sources, apply_splits, group_sites, list_files, read_rows
from wsi_fl.system.file_names import drop_companions, file_name_of, glob_paths, is_companion
from wsi_fl.types import ExcludedSlide, SlideRecord, UsageError

_INSTITUTION_CODES = {
    "University of Pittsburgh": "34 50 61 AZ B0 B1 BD BG BH BI BJ BT CI CN EJ ER FZ IC IN K1 LK N6 P8",
    "Indivumed": "05 66 A8 AA AG C4 CG CH",
    "Asterand": "85 86 BR E7 E8 E9 EA EB EC ED F4 F5 F6 F7 F9 FA FB FC IG UE",
    "MSKCC": "39 AO AP BP BQ CM DC HW KL MX N5 XM YV",
    "Memorial Sloan Kettering": "13 DJ DK DX IR IS KH SC",
    "Memorial Sloan Kettering Cancer Center": "2A RS",
}

_SPELLINGS = (
    (r"mskcc|memorial sloan[ -]kettering( cancer center)?", "mskcc"),
    (r"university of pittsburgh", "pittsburgh"),
    (r"(university of texas )?m\.? ?d\.? anderson( cancer center)?", "md-anderson"),
    (r"unc|university of north carolina", "unc"),
    (r"ucsf|university of california,? san francisco", "ucsf"),
    (r"mayo( clinic)?( *-? *rochester)?", "mayo"),
    (r"(duke|yale|vanderbilt|emory)( university)?", r"\1"),
    (r"(fox chase|roswell|hartford)( park| cancer center| hospital)?", r"\1"),
    (r"cleveland clinic( foundation)?", "cleveland-clinic"),
    (r"(the )?(ohio state university)", r"\2"),
    (r"(gundersen lutheran)( health system)?", r"\1"),
    (r"(university of kansas)( medical center)?", r"\1"),
    (r"(university health network)(, toronto)?", r"\1"),
    (r"(bc|british columbia) cancer agency", "bc-cancer-agency"),
    (r"(washington university)[ -]*(st\.? louis)?", r"\1"),
    (r"christiana (health)?care", "christiana"),
    (r"greenville health systems?", "greenville"),
    (r"proteogenex(, inc)?\.?", "proteogenex"),
    (r"international genomics con[os]+rtium", "international-genomics-consortium"),
    (r"ontario institute for cancer research( \(oicr\))?", "oicr"),
    (r"st\.? joseph'?s hospital[ (]+(az|arizona)\)?", "st-josephs-arizona"),
    (r"st\.? joseph'?s medical center[ (-]+md\)?", "st-josephs-maryland"),
)
"""(pattern of an institution's lower-case names, name of its site)."""


def name_site(institution: str) -> str:
    """Return the site of an institution, whatever its spelling.

    Example:
        >>> name_site("MSKCC"), name_site("Memorial Sloan Kettering"), name_site("University of São Paulo")
        ('tcga-mskcc', 'tcga-mskcc', 'tcga-university-of-sao-paulo')
    """
    plain = unicodedata.normalize("NFKD", institution).encode("ascii", "ignore").decode()
    name = " ".join(plain.lower().split())
    for spelling, slug in _SPELLINGS:
        if match := re.fullmatch(spelling, name):
            name = match.expand(slug)
            break
    return "tcga-" + re.sub(r"[^a-z0-9]+", "-", name.replace("'", "")).strip("-")


def _read_manifests(sources: Sources) -> dict[str, str]:
    """Return file name → size in the manifests, for the slides of the site.

    `gdc-client` compares MD5 digests itself; sizes detect files cut later.
    """
    names = [Path(pattern).name for pattern in sources.slides]
    expected: dict[str, str] = {}
    for pattern in sources.manifests:
        paths = sorted(glob_paths(pattern))
        if not paths:
            raise UsageError(f"{sources.label}: manifest: no such file ({pattern})")
        for path in paths:
            for row in read_rows(path, ("id", "filename", "size")):
                name = file_name_of(row["filename"])
                is_own = any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
                if is_own and expected.setdefault(name, row["size"]) != row["size"]:
                    raise UsageError(f"{row.where}: {name} has another size than in a line above")
    return expected


_TYPE_OF_PROJECT = {
    project: tumor_type
    for tumor_type, projects in tomllib.loads(
        Path(__file__).with_name("tcga_types.toml").read_text(encoding="utf-8")
    ).items()
    for project in projects
}
"""Project without `TCGA-` → its tumour type."""
_SUFFIXES = (".svs", ".tif", ".tiff")
GROUPINGS = ("institution", "tss")
_DIAGNOSTIC = ("DX",)
"""Diagnostic slides of embedded tissue; TS and BS are frozen sections beside the samples."""
_BARCODE = re.compile(
    r"TCGA-(?P<tss>[A-Z0-9]{2})-(?P<participant>[A-Z0-9]{4})-(?P<sample>\d{2})[A-Z]"
    r"-\d{2}-(?P<kind>DX|TS|BS|MS)(?P<number>[A-Z0-9]+)(?:\.(?P<uuid>[0-9A-Fa-f-]+))?"
)
_NORMAL = range(10, 20)
"""Sample types of healthy tissue or blood."""


class _Barcode(NamedTuple):
    """The fields of a slide's barcode; all are strings (`05`, `NA`)."""

    tss: str
    participant: str
    sample: str
    kind: str
    number: str
    uuid: str | None

    @property
    def patient(self) -> str:
        return f"TCGA-{self.tss}-{self.participant}"

    @property
    def is_tumor(self) -> bool:
        return int(self.sample) not in _NORMAL


def parse_barcode(name: str) -> _Barcode | None:
    """Return the barcode in a slide's file name, or None.

    Example:
        >>> parse_barcode("TCGA-05-4244-01Z-00-DX1.d4ff32cd-38cf-40ea-8213-45c2b100ac01.svs")[:5]
        ('05', '4244', '01', 'DX', '1')
    """
    path = Path(name)
    match = _BARCODE.fullmatch(path.stem if path.suffix.lower() in _SUFFIXES else path.name)
    return _Barcode(**match.groupdict()) if match else None


def list_slides(archive: Path) -> Iterator[tuple[Path, _Barcode]]:
    """Yield the slides named by barcodes below a folder, in order."""
    pattern = f"{glob.escape(str(archive))}/**/TCGA-*"
    for path in sorted(glob_paths(pattern)):
        barcode = parse_barcode(path.name) if path.suffix.lower() in _SUFFIXES else None
        if barcode is not None and path.is_file():
            yield path, barcode


def read_institutions(codes: Path | None) -> dict[str, str]:
    """Return code of a tissue source site → its institution: those built in, and those of the GDC's table."""
    institutions = {code: name for name, codes_text in _INSTITUTION_CODES.items() for code in codes_text.split()}
    rows = read_rows(codes, ("TSS Code", "Source Site")) if codes else []
    return institutions | {row["TSS Code"]: row["Source Site"] for row in rows if row["Source Site"]}


def describe_tcga(
    archive: Path, group_by: str = "institution", codes: Path | None = None, clinical: Path | None = None
) -> list[ArchiveSite]:
    """Return the institutions of an archive, or with "tss" its source sites; codes assign slides to sites.

    The tables of source sites and diagnoses are by default the archive's own.
    """
    institutions = read_institutions(codes or _find_only(archive, "tissueSourceSite*.[tc]sv", "--codes"))
    pairs: list[tuple[str, str]] = []
    unknown: dict[str, set[str]] = {}
    for path, barcode in list_slides(archive):
        if barcode.kind not in _DIAGNOSTIC:
            continue
        institution = institutions.get(barcode.tss) if group_by == "institution" else None
        name = name_site(institution) if institution else f"tcga-{barcode.tss.lower()}"
        pairs.append((name, f"{glob.escape(str(archive))}/**/TCGA-{barcode.tss}-*{path.suffix}"))
        if group_by == "institution" and institution is None:
            unknown.setdefault(name, set()).add(barcode.tss)
    table = clinical or (_find_only(archive, "clinical*.tsv", "--clinical") if pairs else None)
    if pairs and table is None:
        raise UsageError(f"{archive}: no clinical*.tsv in it; name the table of diagnoses with --clinical FILE")
    manifests = tuple(
        glob.escape(str(path))
        for path in sorted(archive.glob("*.txt"))
        if "manifest" in path.name.lower() and path.is_file() and not is_companion(path)
    )
    sites = group_sites(pairs, None, str(table.resolve()) if table else None)
    return [
        replace(site, manifests=manifests, unknown_codes=tuple(sorted(unknown.get(site.name, ())))) for site in sites
    ]


def _find_only(archive: Path, pattern: str, option: str) -> Path | None:
    """Return the archive's only file of this pattern, at its top or else one folder below."""
    for depth in ("", "*/"):
        paths = drop_companions(path for path in archive.glob(depth + pattern) if path.is_file())
        if len(paths) > 1:
            names = " and ".join(path.relative_to(archive).as_posix() for path in paths[:2])
            raise UsageError(f"{archive}: has {names}; choose with {option} FILE")
        if paths:
            return paths[0]
    return None


def read_tcga(sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at the clinical table")
    clinical = _ClinicalTable(sources.labels, sources.columns)
    expected = _read_manifests(sources)
    files = sorted(list_files(sources), key=lambda path: path.name)
    patients = {barcode.patient for path in files if (barcode := parse_barcode(path.name))}
    sources.report_rows(sources.labels, clinical.rows, sum(patient in patients for patient in clinical.patients))
    results: list[SlideRecord | ExcludedSlide] = []
    for path in files:
        barcode = parse_barcode(path.name)
        if barcode is None:
            results.append(ExcludedSlide(path.stem, "not named by a TCGA barcode"))
        elif barcode.kind in sources.slide_types:
            results.append(_read_slide(path, barcode, clinical, sources, expected.get(path.name)))
    for name in expected.keys() - {path.name for path in files}:
        barcode = parse_barcode(name)
        if barcode is not None and barcode.kind in sources.slide_types:
            results.append(ExcludedSlide(Path(name).stem, "in the manifest but not in the archive"))
    if not results:
        kinds = ", ".join(sources.slide_types)
        raise UsageError(f"{sources.label}: none of its {len(files)} slides is of slide_types {kinds}")
    records, excluded = apply_splits(results, sources)
    return records, sorted(excluded, key=lambda slide: slide.slide)


def _read_slide(
    path: Path, barcode: _Barcode, clinical: _ClinicalTable, sources: Sources, expected: str | None
) -> SlideRecord | ExcludedSlide:
    """Return the record of a slide, or the slide as excluded; its size must be that of the manifest."""
    if not barcode.is_tumor:
        return ExcludedSlide(path.stem, f"not a slide of a tumour (sample type {barcode.sample})")
    labels = clinical.find_labels(barcode.patient)
    if isinstance(labels, str):
        return ExcludedSlide(path.stem, labels)
    if expected is not None and expected != str(n_bytes := path.stat().st_size):
        reason = f"has {n_bytes} bytes, but the manifest says {expected or 'nothing'}: download it again"
        return ExcludedSlide(path.stem, reason)
    return SlideRecord(
        path,
        path.stem,
        barcode.patient,
        sources.site,
        "weak",
        True,
        mpp_override=sources.mpp_override,
        diagnosis=labels[0],
        tumor_type=labels[1],
    )


_COLUMN_NAMES = {
    "patient": ("bcr_patient_barcode", "case_submitter_id", "cases.submitter_id"),
    "diagnosis": ("primary_diagnosis", "diagnoses.primary_diagnosis"),
    "tumor_type": ("tumor_type",),
    "project": ("project", "project_id", "project.project_id", "cases.project.project_id"),
    "classification": ("classification_of_tumor", "diagnoses.classification_of_tumor"),
}
"""Names of columns by default: of the GDC's tables before and since 2024, and of others."""
_PRIMARY = {"", "primary", "not reported", "unknown"}
"""Classifications of the tumour of which slides are; the GDC lists recurrences and earlier tumours too."""
_NO_TYPES = "name a column of tumour types with --column tumor_type=NAME"
_PATIENT_CHARS = len("TCGA-BH-A0B3")


def _parse_project(text: str) -> str:
    """Return a project without its programme, such as LUAD of TCGA-LUAD."""
    return text.upper().removeprefix("TCGA-")


class _ClinicalTable:
    """The patients of a clinical table; several rows of a patient must agree.

    The diagnosis is the project and the tumour type that of the project (`_TYPE_OF_PROJECT`), where the table has
    projects of TCGA and no tumour types. Elsewhere both are columns.

    `columns` gives unusual names of columns (patient, diagnosis, tumor_type, project). `patients` holds the patient of
    each of the `rows`.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.path, self.rows = path, read_rows(path, columns.values())
        if not self.rows:
            raise UsageError(f"{path}: has no patient")
        names = {key: _find_column(key, self.rows[0], columns) for key in _COLUMN_NAMES}
        projects = {_parse_project(row.read_value(names["project"])) for row in self.rows}
        self._by_project = not names["tumor_type"] and not projects.isdisjoint(_TYPE_OF_PROJECT)
        if self._by_project and "diagnosis" not in columns:
            names["diagnosis"] = names["project"]
        for key in ("patient", "diagnosis"):
            if not names[key]:
                raise UsageError(_describe_missing(path, key, self.rows[0]))
        self.patients: list[str] = []
        self._cases: dict[str, tuple[list[str], list[str]]] = {}
        for row in self.rows:
            value = {key: row.read_value(name) for key, name in names.items()}
            patient = value["patient"].upper()[:_PATIENT_CHARS]
            self.patients.append(patient)
            if names["diagnosis"] == names["project"]:
                value["diagnosis"] = _parse_project(value["diagnosis"])
            elif value["classification"].lower() not in _PRIMARY:
                value["diagnosis"] = ""
            case_values = value["diagnosis"], value["tumor_type"] or value["project"]
            for values, case_value in zip(self._cases.setdefault(patient, ([], [])), case_values, strict=True):
                if case_value and case_value not in values:
                    values.append(case_value)

    def find_labels(self, patient: str) -> tuple[str, str] | str:
        """Return (diagnosis, tumour type or "") of a patient; or why the patient's slides have no label."""
        if patient not in self._cases:
            return f"patient {patient} is not in {self.path.name}"
        diagnoses, kinds = self._cases[patient]
        if not diagnoses:
            return f"patient {patient} has no diagnosis in {self.path.name}"
        for values in (diagnoses, kinds):
            if len(values) > 1:
                raise UsageError(
                    f"{self.path.name}: rows of patient {patient} contradict each other "
                    f"({values[0]!r} and {values[1]!r}); keep the right one"
                )
        kind = kinds[0] if kinds else ""
        if not self._by_project:
            return diagnoses[0], kind
        tumor_type = _TYPE_OF_PROJECT.get(_parse_project(kind))
        if tumor_type is None:
            return f"patient {patient}: project {kind!r} has no tumour type; {_NO_TYPES}"
        return diagnoses[0], tumor_type


def _find_column(key: str, header: Collection[str], columns: Mapping[str, str]) -> str:
    """Return the column of a key; "" where it is missing."""
    names = (columns[key],) if key in columns else _COLUMN_NAMES[key]
    return next((name for name in names if name in header), "")


def _describe_missing(path: Path, key: str, header: Collection[str]) -> str:
    """Return the message of a missing column."""
    return (
        f"{path}: column {_COLUMN_NAMES[key][0]!r} is missing; has {', '.join(header)}; "
        f"name another with --column {key}=NAME, or {key} in the site file's [columns]"
    )
