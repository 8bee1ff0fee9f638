"""Tissue source sites of TCGA: which institution the second field of a barcode stands for.

A code is an institution *and* a study, so an institution has many. Built in are those of the four institutions that
ProxyFL's study of TCGA has for sites; the table of all, tissueSourceSite.tsv of the GDC's code tables, is read where
there is one.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from wsi_fl.slides.layouts.rows import rows_of

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
