"""Changes of files that tests make as their users would."""

from pathlib import Path

from conftest import REAL

from wsi_fl.study.folder import Study


def edit(path: Path, old: str = "", new: str = "", *, more: str = "") -> None:
    """Puts other words into a file, and more at its end."""
    text = path.read_text()
    assert old in text, f"{path.name} does not say {old!r}"
    path.write_text(text.replace(old, new) + more)


def site_file(study: Study, site: str) -> Path:
    return study.root / "sites" / f"{site}.toml"


def make_real(study: Study, *sites: str, says: str = REAL) -> None:
    """Simulated sites, all of a study or some, are real hospitals from now on."""
    for site in sites or study.site_names():
        edit(site_file(study, site), "real = false", says)
