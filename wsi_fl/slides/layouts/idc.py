"""Slides of the Imaging Data Commons, in folders as its client lays them: COLLECTION/PATIENT/STUDY/MODALITY_UID.

They come without labels: their table, for the generic layout, is written from the headers of their files.
"""

from __future__ import annotations

import csv
import glob
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from wsi_fl.slides.layouts.common import ArchiveSite, group_pairs, group_sites, name_series
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.slides.reading.formats.dicom_headers import SERIES_FOLDER, read_volume
from wsi_fl.system.file_names import glob_paths
from wsi_fl.types import UsageError

TABLE = "slides.csv"
_MODALITY_FOLDER = re.compile(r"([A-Z]+)_[0-9.]+")
_MAX_FOLDER_NAMES = 3


def lacks_table(archive: Path, layout: str) -> bool:
    """Return whether an archive has series of slides, and no table of them for the generic layout."""
    if layout != "generic" or (archive / TABLE).is_file():
        return False
    return any(SERIES_FOLDER.fullmatch(path.name) for path, _ in _iterate_series(archive))


def describe_series(archive: Path) -> tuple[list[ArchiveSite], str, list[str]]:
    """Return the sites of an archive, which are its collections; the text of its table; lines on what else is there.

    Raises:
        UsageError: when no slide has a readable header.
    """
    modalities = dict(sorted(_iterate_series(archive)))
    headers = {path: read_volume(path) for path in modalities if SERIES_FOLDER.fullmatch(path.name)}
    unread_names = [path.name for path, header in headers.items() if header is None]
    collections = group_pairs((_find_collection(path, archive), path) for path, header in headers.items() if header)
    if not collections:
        raise UsageError(f"{archive}: none of its {len(unread_names)} SM folders holds a slide; download them again")
    text, notes, site_patterns = io.StringIO(), [], []
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("slide", "patient", "site", "label", "series"))
    for collection, paths in collections.items():
        by_name = group_pairs((slide_name(path), path) for path in paths)
        for path, slide in name_series(by_name).items():
            if header := headers[path]:
                patient = header.patient or path.parents[1].name
                writer.writerow((slide, patient, collection.name, "", header.series))
                site_patterns.append((collection.name, f"{glob.escape(str(collection))}/**/SM_*"))
        notes += [
            f"{collection.name}: {len(series)} series of glass slide {name} are named by their folders"
            for name, series in by_name.items()
            if len(series) > 1
        ]
    if counts := Counter(modality for path, modality in modalities.items() if path not in headers):
        count_text = ", ".join(f"{n} {modality}" for modality, n in sorted(counts.items()))
        notes.append(f"series of other modalities are ignored: {count_text}")
    if unread_names:
        first_names = ", ".join(unread_names[:_MAX_FOLDER_NAMES])
        notes.append(f"SM folders without a readable slide: {len(unread_names)} ({first_names}); download them again")
    return group_sites(site_patterns, None, TABLE), text.getvalue(), notes


def _find_collection(series: Path, archive: Path) -> Path:
    """Return the folder of a series' collection, above study and patient; the archive if that is within it."""
    folder = series.parents[:3][-1]
    return folder if archive in (folder, *folder.parents) else archive


def _iterate_series(archive: Path) -> Iterator[tuple[Path, str]]:
    """Yield (folder, modality) of the DICOM series in an archive."""
    for path in glob_paths(f"{glob.escape(str(archive))}/**/*_*"):
        if (match := _MODALITY_FOLDER.fullmatch(path.name)) and path.is_dir():
            yield path, match[1]
