"""Edits of files as users make them."""

from pathlib import Path

from conftest import REAL

from wsi_fl.study.folder import Study


def edit(path: Path, old: str = "", new: str = "", *, more: str = "") -> None:
    """Replace text of a file and append to it."""
    text = path.read_text()
    assert old in text, f"{path.name} does not say {old!r}"
    path.write_text(text.replace(old, new) + more)


def site_file(study: Study, site: str) -> Path:
    return study.root / "sites" / f"{site}.toml"


def make_real(study: Study, *sites: str, says: str = REAL) -> None:
    """Turn simulated sites of a study, all or some, into real hospitals."""
    for site in sites or study.site_names():
        edit(site_file(study, site), "real = false", says)
