"""`init`: a study folder, empty or written from an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wsi_fl.config import Site, dump_toml, validated
from wsi_fl.files import write_text
from wsi_fl.slides.layouts import LAYOUTS, ArchiveSite, describe, detect
from wsi_fl.stages.console import say
from wsi_fl.study import shipped
from wsi_fl.types import UsageError


def init(
    folder: Path,
    *,
    archive: Path | None = None,
    layout: str | None = None,
    real: bool = False,
    pipeline: str = "camelyon17",
) -> dict[str, Any]:
    """Writes `pipelines/` and, from an archive, `sites/*.toml`. Nothing that exists is overwritten.

    Args:
        archive: folder of slides; its layout is recognised unless `layout` names it.
        real: whether the sites are real hospitals, whose patches no other site may read.
        pipeline: the shipped pipeline that a study of an archive gets; a study made without one gets all.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if archive is None and (layout is not None or real):
        raise UsageError("--layout and --real go with --from ARCHIVE")
    written = [name for name in ("sites", "pipelines") if any((folder / name).glob("*"))]
    if "sites" in written or (archive is None and written):
        raise UsageError(f"{folder}: is a study already ({written[0]}/ exists); choose another folder")
    found: list[ArchiveSite] = []
    if archive is not None:
        layout = layout or detect(archive)
        found = describe(archive, layout)
    texts = {site.name: _site_file(site, layout or "", real) for site in found}
    unfinished = folder / "sites.unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    for path in sorted(shipped("pipelines").glob("*.toml")):
        target = folder / "pipelines" / path.name
        if (archive is None or path.stem == pipeline) and not target.exists():
            write_text(target, path.read_text(encoding="utf-8"))
    for name, text in texts.items():
        write_text(unfinished / f"{name}.toml", text)
    unfinished.rename(folder / "sites")  # a folder with sites/ is a whole study
    return {
        "study": str(folder),
        "layout": layout,
        "pipelines": sorted(p.stem for p in (folder / "pipelines").glob("*.toml")),
        "sites": [{"site": site.name, "slides": site.n_slides} for site in found],
    }


def _site_file(found: ArchiveSite, layout: str, real: bool) -> str:
    """The site file of what was found, checked by the model that will read it."""
    site = validated(
        Site,
        {
            "name": found.name,
            "real": real,
            "layout": layout,
            "slides": found.slides[0] if len(found.slides) == 1 else list(found.slides),
            "annotations": found.annotations,
            "labels": found.labels,
        },
        f"site {found.name!r} of the archive",
    )
    values = site.model_copy(update={"allow": None})
    note = "a real hospital" if real else "simulated: other sites' evaluation may read its test patches"
    return dump_toml(values, f"# wsi-fl tile --site {found.name}    ({note})")


def print_init(document: dict[str, Any]) -> None:
    for row in document["sites"]:
        say(f"  sites/{row['site']}.toml: {row['slides']} slides")
    say(f"  pipelines/: {', '.join(document['pipelines'])}")
    if document["sites"]:
        say(f"study ready; next: cd {document['study']} && wsi-fl tile --all")
    else:
        say(
            f"study ready; write a site file for each hospital in {document['study']}/sites, then wsi-fl tile --all"
        )
