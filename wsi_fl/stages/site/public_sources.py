"""Checks that slides, features and weights are public, as results from them leave without a ledger entry.

A source is refused on any sign that it is of a hospital's patients, unless declared public.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.slides.reading.formats import is_slide_folder, slide_name
from wsi_fl.slides.reading.formats.dicom_headers import is_dicom, resolve_slide_path
from wsi_fl.stages.site.run_context import find_method
from wsi_fl.stages.site.slide_files import list_slides
from wsi_fl.stores.bag_store import BagStore, Features, hash_rows
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.system.file_names import compose_text, drop_suffixes, slide_of
from wsi_fl.types import PatchTable, UsageError, WsiFlError

PrivateSlides = Mapping[str | bytes, str]
"""Key of the name of a slide or patient, or hash of the features of a patch → real site."""
_MAX_ROWS = 1 << 18
"""Patches of a store that are compared, equally many of every slide; two samples of a store of 10⁷ patches share about
7 000."""
_PUBLIC_HINT = "results from it leave without any ε: give public reference slides, or --public if it is public"


@dataclass(frozen=True)
class SourceCheck:
    """The check that sources are of no patients of a study's real sites, nor of any real site whose stores they are in.

    Attributes:
        is_declared: whether the user declares all sources public; then none is refused.
    """

    study: Study
    is_declared: bool = False

    @cached_property
    def _private_slides(self) -> PrivateSlides:
        return index_private_slides(self.study)

    def require_public(self, source: Path) -> None:
        """Refuse a slide, picture, patch or feature store of a hospital's patients.

        Such a source is in `stores/` of a study whose site of that name is not simulated, is a slide of a real site of
        the study (under any name), is a store of a real site, or is of no simulated site of the study and names
        patients, or slides or features of a real site. A site without a readable file counts as real.

        Raises:
            UsageError: in one line that names the reason.
        """
        if self.is_declared:
            return
        if (site := _find_site_by_place(source)) is not None:
            raise UsageError(f"{source}: lies in the stores of real site {site}; {_PUBLIC_HINT}")
        if source.suffix == ".h5":
            self._require_public_store(source)
        elif (site := _find_site_by_slides(self.study, source)) is not None:
            raise UsageError(f"{source}: is a slide of real site {site}; {_PUBLIC_HINT}")

    def require_public_features(self, source: Path, features: Features, *, names_patients: bool) -> None:
        """Refuse another tool's file, or a table, with features float32[m, d] of a hospital's patients.

        Such a file lies in the stores of a real site, names patients, or has the name of a slide or the features of a
        patch of a real site.

        Raises:
            UsageError: in one line that names the reason.
        """
        if self.is_declared:
            return
        if names_patients:
            raise UsageError(f"{source}: features that name patients; {_PUBLIC_HINT}")
        if (site := _find_site_by_place(source)) is not None:
            raise UsageError(f"{source}: features of real site {site}; {_PUBLIC_HINT}")
        self._require_other_slides(source, {_normalize_name(slide_of(source))}, _hash_patches(features))

    def _require_public_store(self, source: Path) -> None:
        with _open_store(source) as store:
            site, table = store.meta.site, store.table if isinstance(store, PatchStore) else store.patch_table
            if site in self.study.site_names():
                if not _is_simulated(self.study, site):
                    raise UsageError(f"{source}: of real site {site}; {_PUBLIC_HINT}")
                return
            if ((table.patient != "") & (table.patient != table.slide)).any():
                raise UsageError(f"{source}: a store that names patients; {_PUBLIC_HINT}")
            rows = set[bytes]() if isinstance(store, PatchStore) else _hash_store(store)
        self._require_other_slides(source, _list_names(table), rows)

    def _require_other_slides(self, source: Path, names: set[str], rows: set[bytes]) -> None:
        """Refuse names of a real site, and patches: no other patch has the same features, even rounded to float16."""
        site_of = self._private_slides
        if private_names := names & site_of.keys():
            name = min(private_names)
            raise UsageError(f"{source}: {name} is a slide or patient of real site {site_of[name]}; {_PUBLIC_HINT}")
        if private_rows := rows & site_of.keys():
            where = f"{len(private_rows)} of its rows are features of real site {site_of[min(private_rows)]}"
            raise UsageError(f"{source}: {where}; {_PUBLIC_HINT}")


def sample_indices(n: int, n_max: int) -> NDArray[np.int64]:
    """Return a sorted, bounded sample of n indices, the same every time."""
    return np.sort(np.random.default_rng(0).permutation(n)[:n_max])


def _normalize_name(name: str) -> str:
    """Return the key by which names of slides and patients are compared."""
    return drop_suffixes(compose_text(name)).casefold()


def _list_names(table: PatchTable) -> set[str]:
    return {_normalize_name(name) for name in {*table.slide.tolist(), *table.patient.tolist()} - {""}}


def _hash_patches(features: Features) -> set[bytes]:
    """Return hashes of rows, without rows of one number, such as the zeros of a patch that could not be read."""
    return set(hash_rows(features[np.ptp(features, axis=1) > 0]))


def _hash_store(store: BagStore) -> set[bytes]:
    """Return hashes of the patches of a store, or of a sample of each slide's; UsageError for damage."""
    n_per_slide, hashes = max(1, _MAX_ROWS // len(store)), set[bytes]()
    try:
        for rows in map(store.bag_rows, range(len(store))):
            hashes |= _hash_patches(store.read(rows.start + sample_indices(rows.stop - rows.start, n_per_slide)))
    except WsiFlError as error:  # no fault for which a source may be skipped, as the rest would go unchecked
        raise UsageError(str(error)) from None
    return hashes


def index_private_slides(study: Study) -> PrivateSlides:
    """Return the slides, patients and patches of real sites, from the slides that they name and their stores.

    Raises:
        UsageError: for an unreadable site file or store, without which nothing can be compared.
    """
    sites = [site for site in study.site_names() if not _is_simulated(study, site)]
    try:
        return {key: site for site in sites for key in _list_private_slides(study, site)}
    except WsiFlError as error:
        raise UsageError(f"{error}; or state --public if all sources are public") from None


def _list_private_slides(study: Study, site: str) -> Iterator[str | bytes]:
    for path in list_slides(study, study.load_site(site)):
        yield _normalize_name(slide_name(path.parent if is_dicom(path) else path))
    if (path := study.store_path(site)).exists():
        with PatchStore(path) as patches:
            yield from _list_names(patches.table)
    for path in (study.mosaic_path(site), study.features_path(site)):
        if path.exists():
            with BagStore(path) as store:
                yield from _list_names(store.patch_table)
                yield from _hash_store(store)


def require_published(weights: Path, key: str) -> None:
    """Refuse weights from a real site's folders, as no ε covers models that start there.

    Such are the folder of a store, and a run's models except those exchanged with differential privacy.

    Raises:
        UsageError: naming the key of the pipeline.
    """
    if (site := _find_site_by_place(weights)) is not None:
        raise UsageError(
            f"{key}: {weights} is of the patients of real site {site}, and no ε covers what starts from it; name "
            "published weights, or set privacy.enabled = false"
        )


def _is_simulated(study: Study, site: str) -> bool:
    try:
        return not study.load_site(site).real
    except WsiFlError:
        return False


def _find_site_by_place(source: Path) -> str | None:
    """Return the real site of any study in whose store's folder, or among whose private models, a file is."""
    for path in {source.absolute(), source.resolve()}:
        for folder in path.parents:
            root, site = folder.parent.parent, folder.name
            if folder.parent.name == "sites" and root.parent.name == "runs":
                if _is_dp_release(RunFolder(root), path.stem):
                    return None
                root = root.parent.parent
            elif folder.parent.name != "stores":
                continue
            if (root / "sites").is_dir():
                return None if _is_simulated(Study(root), site) else site
    return None


def _is_dp_release(run: RunFolder, role: str) -> bool:
    try:
        pipeline = load_run_pipeline(run.path / "config.toml")
        travels = find_method(str(run.manifest["method"]), pipeline).mixing_role
    except (WsiFlError, OSError, KeyError, TypeError):
        return False
    return pipeline.privacy.enabled and travels == role


def _open_store(source: Path) -> BagStore | PatchStore:
    with suppress(WsiFlError):
        return PatchStore(source)
    return BagStore(source)


def _find_site_by_slides(study: Study, source: Path) -> str | None:
    """Return the real site of the study that has a file or folder among its slides, by any name or link."""
    if not source.exists():
        return None
    for name in study.site_names():
        if _is_simulated(study, name):
            continue
        paths = list_slides(study, study.load_site(name))
        slides = (path for path in paths if path.is_file() or is_slide_folder(path))
        if any(_is_same_slide(slide, source) for slide in slides):
            return name
    return None


def _is_same_slide(slide: Path, source: Path) -> bool:
    """Return whether two paths are the same file, or a folder and a file in it; a DICOM file stands for its folder."""
    a, b = resolve_slide_path(slide), resolve_slide_path(source)
    return slide.samefile(source) or a.is_relative_to(b) or b.is_relative_to(a)
