"""The GDC's manifests: which files were to be downloaded, and of which size."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection, Mapping
from pathlib import Path

from wsi_fl.slides.layouts.common import Sources
from wsi_fl.slides.layouts.rows import rows_of
from wsi_fl.types import SetAside, SlideRecord, UsageError


def manifest_of(sources: Sources) -> dict[str, str]:
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
