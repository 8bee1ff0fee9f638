"""Names of files, slides and patients, compared independently of the system that wrote them.

macOS decomposes letters ("ü" as "u" and two dots), Windows writes paths with backslashes, and both leave companion
files that look like data.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path, PurePosixPath
from unicodedata import normalize

_MISSING = frozenset(
    {
        *("", "#n/a", "#n/a n/a", "#na", "-nan", "<na>", "n/a", "na", "nan", "nat", "none", "null"),
        *("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan", "-", "--", "'--", "–", "—", "?"),
        *("unknown", "[unknown]", "not available", "[not available]", "not reported", "not provided"),
    }
)
"""Missing values in tables, in lower case: those of pandas, and the words of archives."""
_COMPANIONS = {
    *("thumbs.db", "desktop.ini", "ehthumbs.db", "__macosx", "$recycle.bin", "system volume information"),
    *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "lost+found"),  # of network disks
}
_UUID = re.compile(r"[._ -]?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_BARCODE = re.compile(r"^(tcga-[^.]+)\..*$", re.IGNORECASE)
_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_SUFFIXES = re.compile(
    r"(\.(ome|q?ptiff|tiff?|svs|ndpi|mrxs|scn|bif|czi|vsi|dcm|dicom|zarr|isyntax|vms|vmu|svslide|png|jpe?g|jp2|webp|p[gp]m|bmp|h5|hdf5|"
    r"h5ad|pth?|np[yz]|zip))+$",
    re.IGNORECASE,
)
_MAX_NAMES_SHOWN = 3


def compose_text(text: str) -> str:
    """Return a text in Unicode's composed form (NFC), for comparison.

    Example:
        >>> compose_text("Dru" + chr(0x308) + "se") == "Drüse"
        True
    """
    return normalize("NFC", text)


def is_missing(text: str) -> bool:
    """Return whether a field of a table is a missing value.

    Example:
        >>> is_missing(" NaN"), is_missing("N/A"), is_missing("0")
        (True, True, False)
    """
    return text.strip().lower() in _MISSING


def file_name_of(text: str) -> str:
    """Return the composed last part of a path of any system.

    Example:
        >>> [file_name_of(name) for name in ("D:\\\\scans\\\\w.tif", "/mnt/u.tif", "a.svs")]
        ['w.tif', 'u.tif', 'a.svs']
    """
    return PurePosixPath(compose_text(text).replace("\\", "/")).name


def stem_of(text: str) -> str:
    """Return the composed last part of a path without the suffix of a slide, picture or features.

    Example:
        >>> stem_of("D:\\\\scans\\\\w.tif"), stem_of("B12.3")
        ('w', 'B12.3')
    """
    name = file_name_of(text)
    return Path(name).stem if _SUFFIXES.search(name) else name


def slide_of(path: Path) -> str:
    """Return a slide's name: its file's name without the suffix, composed."""
    return compose_text(path.stem)


def drop_suffixes(name: str) -> str:
    """Return the name of a slide without the suffixes of slides, pictures and features at its end.

    Example:
        >>> drop_suffixes("a.ome.tif.h5"), drop_suffixes("B12.3")
        ('a', 'B12.3')
    """
    return _SUFFIXES.sub("", name)


def is_companion(path: Path, root: Path | None = None) -> bool:
    """Return whether a file or folder is hidden, a lock, a backup copy, or a companion of macOS, Windows or a network
    disk; with `root` also whether it lies in such a folder below that.

    Example:
        >>> [is_companion(Path(name)) for name in ("._S0.h5", "Thumbs.db", "~$a.csv", "a.svs~", "S0.h5")]
        [True, True, True, True, False]
    """
    names = [path.name] if root is None else path.relative_to(root).parts
    return any(name.startswith((".", "~$")) or name.endswith("~") or name.lower() in _COMPANIONS for name in names)


def drop_companions(paths: Iterable[Path], root: Path | None = None) -> list[Path]:
    """Return paths in order, without companions of files; with `root` without what lies in companion folders below."""
    return sorted(path for path in paths if not is_companion(path, root))


def glob_paths(pattern: str) -> Iterator[Path]:
    """Yield matches of a glob pattern without companions; without a match, of its other Unicode forms."""
    for spelling in dict.fromkeys((pattern, compose_text(pattern), normalize("NFD", pattern))):
        names = glob.glob(spelling, recursive=True)  # noqa: PTH207 patterns may be absolute
        fixed_parts = takewhile(lambda part: not glob.has_magic(part), Path(spelling).parent.parts)
        n_fixed = len(list(fixed_parts))
        paths = (path for path in map(Path, names) if not is_companion(path))
        yield from (path for path in paths if _COMPANIONS.isdisjoint(map(str.lower, path.parts[n_fixed:-1])))
        if names:
            return


def find_file(path: Path) -> Path:
    """Return an existing path, or the only one in its folder with an equal name in Unicode."""
    if str(path).isascii() or path.exists():
        return path
    folder = find_file(path.parent) if path.parent != path else path
    try:
        entries = [entry for entry in folder.iterdir() if compose_text(entry.name) == compose_text(path.name)]
    except OSError:
        return path
    return entries[0] if len(entries) == 1 else path


_LIKENESSES: Mapping[str, Callable[[str], str]] = {
    "upper and lower case": str.casefold,
    "suffixes": drop_suffixes,
    "leading zeros": lambda name: _ZEROS.sub("", name),
    "the UUID": lambda name: _BARCODE.sub(r"\1", _UUID.sub("", name)),
    "spaces, dots, dashes and underscores": lambda name: re.sub(r"[\s._-]+", "", name),
}
"""Difference of two names → function that removes it."""


def describe_mismatch(table_names: Collection[str], site_names: Collection[str]) -> str:
    """Return the message on names of a table without files: some of each, and their difference where it is single.

    Example:
        >>> describe_mismatch(["s1", "s2"], ["S1", "S2", "S3"])
        'the table has s1, s2, the site S1, S2, S3; s1 and S1 differ in upper and lower case'
    """
    text = f"the table has {_shorten_list(table_names)}, the site {_shorten_list(site_names)}"
    for difference, plain in _LIKENESSES.items():
        by_form = {plain(name): name for name in sorted(site_names, reverse=True)}
        for name in sorted(table_names):
            if (other := by_form.get(plain(name))) is not None and other != name:
                return f"{text}; {name} and {other} differ in {difference}"
    return text


def _shorten_list(names: Collection[str]) -> str:
    first_names = sorted(names)[:_MAX_NAMES_SHOWN]
    return ", ".join(first_names) + (
        f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    )
