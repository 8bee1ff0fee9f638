"""The GDC's manifests: which files were to be downloaded, and whether they arrived whole."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from wsi_fl.slides.layouts.checksums import digests
from wsi_fl.slides.layouts.common import Sources
from wsi_fl.slides.layouts.rows import rows_of
from wsi_fl.types import SetAside, SlideRecord, UsageError


class Expected(NamedTuple):
    """A line of a manifest; empty where it says nothing."""

    md5: str
    size: str


def manifest_of(sources: Sources) -> dict[str, Expected]:
    """What the site's manifests say of its slides, by file name; other sites' files are left out."""
    names = [Path(pattern).name for pattern in sources.slides]
    expected: dict[str, Expected] = {}
    for pattern in sources.manifests:
        paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 absolute patterns
        if not paths:
            raise UsageError(f"{sources.label}: manifest: no such file ({pattern})")
        for path in paths:
            for row in rows_of(Path(path), ("id", "filename", "md5", "size")):
                name = Path(row["filename"]).name
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in names):
                    said = Expected(row["md5"].lower(), row["size"])
                    if expected.setdefault(name, said) != said:
                        raise UsageError(f"{row.where}: {name} has another size or MD5 than in a line above")
    return expected


def damaged(
    records: Collection[SlideRecord], expected: dict[str, Expected], sources: Sources
) -> list[SetAside]:
    """The slides that are not what the manifest says. Sizes are compared first: they cost nothing."""
    named = [record for record in records if record.path.name in expected]
    aside = {record.path: _wrong_size(record, expected[record.path.name]) for record in named}
    whole = [record.path for record in named if aside[record.path] is None]
    for path, md5 in digests(whole, sources.verified, sources.progress).items():
        wanted = expected[path.name].md5
        if md5 is None:
            aside[path] = "the file cannot be read"
        elif md5 != wanted:
            aside[path] = f"MD5 is {md5}, but the manifest says {wanted}: damaged; download it again"
    return [SetAside(record.slide, reason) for record in named if (reason := aside[record.path])]


def _wrong_size(record: SlideRecord, expected: Expected) -> str | None:
    if not expected.md5 or not expected.size.isdecimal():
        what = "size" if expected.md5 else "MD5"
        return f"the manifest says no {what} of it, so it cannot be verified"
    n_bytes = record.path.stat().st_size
    if n_bytes != int(expected.size):
        return f"has {n_bytes} bytes, but the manifest says {expected.size}: download it again"
    return None
