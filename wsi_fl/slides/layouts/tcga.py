"""TCGA as the GDC's client leaves it: `<id>/<barcode>.<UUID>.svs`, a manifest, a clinical table.

The second field of a barcode is a tissue source site: an institution *and* a study, so an institution has many. Here
are those of the four institutions that ProxyFL's study of TCGA has for sites; the table of all, tissueSourceSite.tsv
of the GDC's code tables, is read where there is one.
"""

from __future__ import annotations

import fnmatch
import glob
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wsi_fl.slides.layouts.clinical import Clinical
from wsi_fl.slides.layouts.common import ArchiveSite, Sources, divided, slide_files
from wsi_fl.slides.layouts.rows import rows_of
from wsi_fl.types import SetAside, SlideRecord, UsageError

_BUILT_IN = {
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
"""How one institution is written in several ways: the whole name in lower case, and what its site is called."""


def institutions(table: Path | None = None) -> dict[str, str]:
    """The institution of each code, as written in the GDC's table.

    Args:
        table: `TSS Code` and `Source Site`, separated by tabs or commas, besides the codes that are built in.
    """
    known = {code: name for name, codes in _BUILT_IN.items() for code in codes.split()}
    if table is None:
        return known
    rows = rows_of(table, ("TSS Code", "Source Site"))
    return known | {row["TSS Code"]: row["Source Site"] for row in rows if row["Source Site"]}


def site_of(institution: str) -> str:
    """The site that stands for an institution, however it is spelt.

    Example:
        >>> site_of("MSKCC"), site_of("Memorial Sloan Kettering"), site_of("University of São Paulo")
        ('tcga-mskcc', 'tcga-mskcc', 'tcga-university-of-sao-paulo')
    """
    plain = unicodedata.normalize("NFKD", institution).encode("ascii", "ignore").decode()
    name = " ".join(plain.lower().split())
    for spelling, slug in _SPELLINGS:
        if match := re.fullmatch(spelling, name):
            name = match.expand(slug)
            break
    return "tcga-" + re.sub(r"[^a-z0-9]+", "-", name.replace("'", "")).strip("-")


def _manifest_of(sources: Sources) -> dict[str, str]:
    """The size that the site's manifests give each of its slides, by file name; other sites' files are left out.

    `gdc-client` compares MD5 digests itself; a size tells what was cut on a later way.
    """
    names = [Path(pattern).name for pattern in sources.slides]
    expected: dict[str, str] = {}
    for pattern in sources.manifests:
        paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 absolute patterns
        if not paths:
            raise UsageError(f"{sources.label}: manifest: no such file ({pattern})")
        for path in paths:
            for row in rows_of(Path(path), ("id", "filename", "size")):
                name = Path(row["filename"]).name
                known = any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
                if known and expected.setdefault(name, row["size"]) != row["size"]:
                    raise UsageError(f"{row.where}: {name} has another size than in a line above")
    return expected


def cut(records: Collection[SlideRecord], expected: Mapping[str, str]) -> list[SetAside]:
    """The slides whose size is not what the manifest says."""
    named = [record for record in records if record.path.name in expected]
    reasons = {record.slide: _wrong_size(record, expected[record.path.name]) for record in named}
    return [SetAside(slide, reason) for slide, reason in reasons.items() if reason]


def _wrong_size(record: SlideRecord, expected: str) -> str | None:
    n_bytes = record.path.stat().st_size
    if str(n_bytes) != expected:
        return f"has {n_bytes} bytes, but the manifest says {expected or 'nothing'}: download it again"
    return None


SUFFIXES = (".svs", ".tif", ".tiff")

GROUPINGS = ("institution", "tss")

_DIAGNOSTIC = ("DX",)
"""Slides of embedded tissue, from which diagnoses are made; TS and BS are frozen sections beside the samples."""

_BARCODE = re.compile(
    r"TCGA-(?P<tss>[A-Z0-9]{2})-(?P<participant>[A-Z0-9]{4})-(?P<sample>\d{2})[A-Z]"
    r"-\d{2}-(?P<kind>DX|TS|BS|MS)(?P<number>[A-Z0-9]+)(?:\.(?P<uuid>[^.]+))?"
)

_NORMAL = range(10, 20)
"""Sample types that are healthy tissue or blood."""


class Barcode(NamedTuple):
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


def parse_barcode(name: str) -> Barcode | None:
    """The barcode that a slide's file is named by, or None.

    Example:
        >>> parse_barcode("TCGA-05-4244-01Z-00-DX1.d4ff32cd-38cf-40ea-8213-45c2b100ac01.svs")[:5]
        ('05', '4244', '01', 'DX', '1')
    """
    path = Path(name)
    match = _BARCODE.fullmatch(path.stem if path.suffix.lower() in SUFFIXES else path.name)
    return Barcode(**match.groupdict()) if match else None


def slides_of(archive: Path) -> Iterator[tuple[Path, Barcode]]:
    """The slides below a folder that are named by barcodes, in order."""
    pattern = f"{glob.escape(str(archive))}/**/TCGA-*"
    for name in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207 as the site's own pattern will
        path = Path(name)
        barcode = parse_barcode(path.name) if path.suffix.lower() in SUFFIXES else None
        if barcode is not None and path.is_file():
            yield path, barcode


@dataclass
class _Group:
    patterns: set[str] = field(default_factory=set)
    unknown_codes: set[str] = field(default_factory=set)
    n_slides: int = 0


def describe_tcga(
    archive: Path, group_by: str = "institution", codes: Path | None = None, clinical: Path | None = None
) -> list[ArchiveSite]:
    """The institutions of an archive, or with "tss" its source sites; a site's slides are those of its codes.

    Args:
        codes: table of all source sites; default: the archive's own tissueSourceSite.tsv, if any.
        clinical: default: the archive's own clinical*.tsv.
    """
    known = institutions(codes or _one_of(archive, "tissueSourceSite*.[tc]sv", "--codes"))
    groups = _grouped(archive, known if group_by == "institution" else None)
    table = clinical or (_one_of(archive, "clinical*.tsv", "--clinical") if groups else None)
    if groups and table is None:
        raise UsageError(
            f"{archive}: no clinical*.tsv in it; name the table of diagnoses with --clinical FILE"
        )
    manifests = tuple(
        glob.escape(str(path))
        for path in sorted(archive.glob("*.txt"))
        if "manifest" in path.name.lower() and path.is_file()
    )
    return [
        ArchiveSite(
            name,
            tuple(sorted(group.patterns)),
            None,
            str(table.resolve()) if table else None,
            group.n_slides,
            manifests,
            tuple(sorted(group.unknown_codes)),
        )
        for name, group in sorted(groups.items())
    ]


def _grouped(archive: Path, known: dict[str, str] | None) -> dict[str, _Group]:
    """Diagnostic slides by site: by the institutions that are known, or with None by code."""
    groups: dict[str, _Group] = {}
    for path, barcode in slides_of(archive):
        if barcode.kind not in _DIAGNOSTIC:
            continue
        institution = (known or {}).get(barcode.tss)
        name = site_of(institution) if institution else f"tcga-{barcode.tss.lower()}"
        group = groups.setdefault(name, _Group())
        group.patterns.add(f"{glob.escape(str(archive))}/**/TCGA-{barcode.tss}-*{path.suffix}")
        group.n_slides += 1
        if known is not None and institution is None:
            group.unknown_codes.add(barcode.tss)
    return groups


def _one_of(archive: Path, pattern: str, option: str) -> Path | None:
    """The archive's only file of this name, at its top or else one folder further down."""
    for depth in ("", "*/"):
        found = sorted(path for path in archive.glob(depth + pattern) if path.is_file())
        if len(found) > 1:
            names = " and ".join(path.relative_to(archive).as_posix() for path in found[:2])
            raise UsageError(f"{archive}: has {names}; choose with {option} FILE")
        if found:
            return found[0]
    return None


def read_tcga(sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at the clinical table")
    clinical = Clinical(sources.labels, sources.columns)
    expected = _manifest_of(sources)
    files = sorted(slide_files(sources), key=lambda path: path.name)
    patients = {barcode.patient for path in files if (barcode := parse_barcode(path.name))}
    sources.account(sources.labels, clinical.rows, clinical.n_rows(patients))
    found: list[SlideRecord | SetAside] = []
    for path in files:
        barcode = parse_barcode(path.name)
        if barcode is None:
            found.append(SetAside(path.stem, "not named by a TCGA barcode"))
        elif barcode.kind in sources.slide_types:
            found.append(_record(path, barcode, clinical, sources))
    found += _absent(expected.keys() - {path.name for path in files}, sources)
    if not found:
        kinds = ", ".join(sources.slide_types)
        raise UsageError(f"{sources.label}: none of its {len(files)} slides is of slide_types {kinds}")
    records = [one for one in found if isinstance(one, SlideRecord)]
    bad = {one.slide: one for one in cut(records, expected)}
    records, aside = divided((bad.get(one.slide, one) for one in found), sources)
    return records, sorted(aside, key=lambda one: one.slide)


def _absent(names: Collection[str], sources: Sources) -> list[SetAside]:
    """Slides of the manifest that are not there, as far as they would have been taken."""
    barcodes = {name: parse_barcode(name) for name in names}
    return [
        SetAside(Path(name).stem, "in the manifest but not in the archive")
        for name, barcode in barcodes.items()
        if barcode is not None and barcode.kind in sources.slide_types
    ]


def _record(path: Path, barcode: Barcode, clinical: Clinical, sources: Sources) -> SlideRecord | SetAside:
    if int(barcode.sample) in _NORMAL:
        return SetAside(path.stem, f"not a slide of a tumour (sample type {barcode.sample})")
    if reason := clinical.reason(barcode.patient):
        return SetAside(path.stem, reason)
    diagnosis, tumor_type = clinical.labels(barcode.patient)
    return SlideRecord(
        path,
        path.stem,
        barcode.patient,
        sources.site,
        "weak",
        True,
        mpp_override=sources.mpp_override,
        diagnosis=diagnosis,
        tumor_type=tumor_type,
    )
