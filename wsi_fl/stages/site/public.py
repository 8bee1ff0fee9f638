"""Whether slides, features and weights are nobody's secret: what is made of them leaves without a ledger's line.

A hospital that has no public tissue would take its own. So a source is refused where anything says that it is of a
hospital's patients, unless somebody says that it is public.
"""

from __future__ import annotations

from pathlib import Path

from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.reading.formats import is_slide_folder
from wsi_fl.slides.reading.formats.dicom import place_of
from wsi_fl.stages.site.data import slides_of
from wsi_fl.stages.site.party import method_for
from wsi_fl.stores.bags import BagStore
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.types import UsageError, WsiFlError

_WAY_OUT = (
    "what is made of it leaves without any ε: give public tissue, or say --public if it is nobody's secret"
)


def require_public(study: Study, source: Path) -> None:
    """Refuse a slide, picture or feature store that is of a hospital's patients.

    It is where it lies in `stores/` of a study whose site of that name is not simulated, is one of the slides that a
    real site of the study names (under this name or another), or is a store of a real site, or one that names patients
    and is no simulated site's of the study. A study's site without a readable file counts as real.

    Raises:
        UsageError: in one line that names the reason.
    """
    if (site := _site_by_place(source)) is not None:
        raise UsageError(f"{source}: lies in the stores of real site {site}; {_WAY_OUT}")
    if source.suffix == ".h5":
        _require_public_store(study, source)
    elif (site := _site_by_slides(study, source)) is not None:
        raise UsageError(f"{source}: is a slide of real site {site}; {_WAY_OUT}")


def require_published(weights: Path, key: str) -> None:
    """Refuse weights that lie where a study keeps what a real site's patients made, as no ε covers what starts there.

    That is the folder of a store, and a run's models but for those that travelled under differential privacy.

    Raises:
        UsageError: naming the key of the pipeline.
    """
    if (site := _site_by_place(weights)) is not None:
        raise UsageError(
            f"{key}: {weights} was made of the patients of real site {site}, and no ε covers what starts from it; name "
            "published weights, or set privacy.enabled = false"
        )


def _is_simulated(study: Study, site: str) -> bool:
    try:
        return not study.site(site).real
    except WsiFlError:
        return False


def _site_by_place(source: Path) -> str | None:
    """Return the real site of any study in whose store's folder, or among whose private models, a file lies."""
    for path in {source.absolute(), source.resolve()}:
        for folder in path.parents:
            root, site = folder.parent.parent, folder.name
            if folder.parent.name == "sites" and root.parent.name == "runs":
                if _travelled_with_dp(RunFolder(root), path.stem):
                    return None
                root = root.parent.parent
            elif folder.parent.name != "stores":
                continue
            if (root / "sites").is_dir():
                return None if _is_simulated(Study(root), site) else site
    return None


def _travelled_with_dp(run: RunFolder, role: str) -> bool:
    try:
        pipeline = load_pipeline(run.path / "config.toml")
        travels = method_for(str(run.manifest["method"]), pipeline).travels
    except (WsiFlError, OSError, KeyError, TypeError):
        return False
    return pipeline.privacy.enabled and travels == role


def _require_public_store(study: Study, source: Path) -> None:
    with BagStore(source) as store:
        site, table = store.meta.site, store.patches
        if site in study.site_names():
            if not _is_simulated(study, site):
                raise UsageError(f"{source}: features of real site {site}; {_WAY_OUT}")
            return
        if ((table.patient != "") & (table.patient != table.slide)).any():
            raise UsageError(f"{source}: a feature store that names patients; {_WAY_OUT}")


def _site_by_slides(study: Study, source: Path) -> str | None:
    """Return the real site of the study among whose slides a file or folder is, whatever name or link leads to it."""
    if not source.exists():
        return None
    for name in study.site_names():
        if _is_simulated(study, name):
            continue
        paths = slides_of(study, study.site(name))
        slides = (path for path in paths if path.is_file() or is_slide_folder(path))
        if any(_are_one_slide(slide, source) for slide in slides):
            return name
    return None


def _are_one_slide(slide: Path, source: Path) -> bool:
    """Return whether two paths lead to one file, or to a folder and what lies in it; DICOM files stand for theirs."""
    a, b = place_of(slide), place_of(source)
    return slide.samefile(source) or a.is_relative_to(b) or b.is_relative_to(a)
