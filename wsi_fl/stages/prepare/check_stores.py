"""`wsi-fl check`: read every byte of a site's stores and generators; report damage with its repair.

One patch or one bag is in memory at a time; nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypedDict, Unpack

from wsi_fl.plugins import load_entries
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared
from wsi_fl.stages.prepare.slide_lists import Scope, name_scope, render_copy_lines, select_sites
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.site.site_data import list_scans, open_bags, open_store
from wsi_fl.stores.bag_shards import read_bag_shard
from wsi_fl.stores.fields import DAMAGE, first_line
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.files import FileUnavailable, explain_unavailable
from wsi_fl.types import WsiFlError

_MAX_NAMED_PATCHES = 5
"""Damaged patches listed per slide."""
_DAMAGE_ERRORS = (WsiFlError, *DAMAGE, MemoryError)

_Step = tuple[str, Callable[[], object]]
"""(name of a part, function that reads it and raises WsiFlError for damage)."""


class _SiteCheck(TypedDict):
    """A site: how many shards, bags and other files were read; a line for each damage (where, what, remedy), each store
    unreadable at the moment, and each scan stored several times."""

    site: str
    read: int
    damaged: list[str]
    unavailable: list[str]
    copies: list[str]
    seconds: float


class _CheckDocument(TypedDict):
    """All sites, scans shared between sites, and whether all was read without damage."""

    sites: list[_SiteCheck]
    copies: list[str]
    ok: bool


def check_sites(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> _CheckDocument:
    """Read all stores of one site, or of every site of the pipeline; return the `--json` document.

    Raises:
        WsiFlError: when there is nothing to check.
    """
    pipeline, sites = select_sites(study, **scope)
    scans: dict[str, list[Scan]] = {}
    rows = [_check_site(study, pipeline, site.name, watcher or SilentProgress(), scans) for site in sites]
    if not any(row["read"] for row in rows):
        has_slides = any(site.slides is not None for site in sites)
        command = (
            f"`wsi-fl tile {name_scope(scope)}`"
            if has_slides
            else "`wsi-fl import` for features, `wsi-fl partition` for images"
        )
        raise WsiFlError(f"nothing is stored yet; run {command}")
    copies = list(dict.fromkeys(line for site_scans in scans.values() for line in describe_shared(site_scans)))
    return {"sites": rows, "copies": copies, "ok": not any(row["damaged"] or row["unavailable"] for row in rows)}


def _check_site(
    study: Study, pipeline: Pipeline, site: str, watcher: Watcher, scans: dict[str, list[Scan]]
) -> _SiteCheck:
    """Read all stores of a site; append its scans to `scans`, by kind of store."""
    start, n_read = time.perf_counter(), 0
    damaged: list[str] = []
    unavailable: list[str] = []

    def record_damage(error: BaseException) -> None:
        """Record damage, foreseen by a reader or not; the other stores and sites are read all the same."""
        if (cause := explain_unavailable(error)) or isinstance(error, FileUnavailable):
            unavailable.append(f"{site}: {cause}" if cause else str(error))
        else:
            damaged.append(str(error) if isinstance(error, WsiFlError) else f"{site}: damaged ({first_line(error)})")

    store_scans: dict[str, list[Scan]] = {}
    for steps in _list_steps(study, pipeline, site, store_scans):
        try:
            for store_steps in steps:  # yielded once the store is open
                for done, (name, read) in enumerate(store_steps):
                    watcher.update(site, done, len(store_steps), name)
                    n_read += 1
                    try:
                        read()
                    except _DAMAGE_ERRORS as error:
                        record_damage(error)
                watcher.update(site, len(store_steps), len(store_steps))
        except _DAMAGE_ERRORS as error:  # the store does not open
            n_read += 1
            record_damage(error)
    for kind, kind_scans in store_scans.items():
        scans.setdefault(kind, []).extend(kind_scans)
    copies = list(dict.fromkeys(line for kind_scans in store_scans.values() for line in describe_copies(kind_scans)))
    seconds = time.perf_counter() - start
    return {
        "site": site,
        "read": n_read,
        "damaged": damaged,
        "unavailable": unavailable,
        "copies": copies,
        "seconds": seconds,
    }


def _list_steps(
    study: Study, pipeline: Pipeline, site: str, scans: dict[str, list[Scan]]
) -> Iterator[Iterator[list[_Step]]]:
    """Yield the steps of each store of a site, and those of extensions."""
    for path, list_store_steps, shards, command in (
        (study.store_path(site), _patch_steps, "slides", "tile"),
        (study.features_path(site), partial(_bag_steps, "features", pipeline), "features", "features"),
        (study.mosaic_path(site), partial(_bag_steps, "mosaics", pipeline), "mosaics", "mosaic"),
    ):
        if path.exists():
            yield list_store_steps(study, site, scans)
        elif drop_companions((path.parent / shards).glob("*.h5")):
            problem = f"{path}: missing, though its shards are there; run `wsi-fl {command} --site {site}` again"
            yield iter([[(path.stem, partial(_refuse_missing, problem))]])
    for list_plugin_steps in load_entries("wsi_fl.checks").values():
        yield list_plugin_steps(study, site)


def _refuse_missing(message: str) -> None:
    raise WsiFlError(message)


def _patch_steps(study: Study, site: str, scans: dict[str, list[Scan]]) -> Iterator[list[_Step]]:
    with open_store(study, site) as store:
        scans["patches"] = list_scans(store)
        yield [(slide, partial(_read_slide, store, slide)) for slide in store.slides]


def _read_slide(store: PatchStore, slide: str) -> None:
    if damaged := store.verify(slide):
        rows_text = ", ".join(map(str, damaged[:_MAX_NAMED_PATCHES])) + (
            ", …" if len(damaged) > _MAX_NAMED_PATCHES else ""
        )
        raise WsiFlError(
            f"{store.path}: {len(damaged)} patches in the shard of slide {slide} are damaged ({rows_text}); "
            f"{store.repair_advice}"
        )


def _bag_steps(
    data: str, pipeline: Pipeline, study: Study, site: str, scans: dict[str, list[Scan]]
) -> Iterator[list[_Step]]:
    with open_bags(study, site, data) as store:
        scans[data] = list_scans(store)
        steps: list[_Step] = [(str(slide), partial(store.read_bag, k)) for k, slide in enumerate(store.table.slide)]
        if store.meta.made_by == "import":
            from wsi_fl.stages.site.encoders import require_golden_vectors  # with PyTorch

            steps.append(("golden patches", partial(require_golden_vectors, study, pipeline, store.meta, store.path)))
        shards = drop_companions((store.path.parent / data).glob("*.h5"))
        yield [*steps, *((path.stem, partial(read_bag_shard, path)) for path in shards)]


def render_check_lines(document: _CheckDocument) -> Lines:
    """Yield a table with a row per site, and a line for each damage."""
    sites = document["sites"]
    rows = [[row["site"], row["read"], len(row["damaged"]), f"{row['seconds']:.1f}"] for row in sites]
    yield TextTable("check", ["site", "slides and files read", "damaged", "s"], rows)
    yield from (TextLine(f"  {line}", "bold red") for row in sites for line in row["damaged"])
    yield from (TextLine(f"  {line}", "bold yellow") for row in sites for line in row["unavailable"])
    yield from render_copy_lines(document)
    damaged = any(row["damaged"] for row in sites)
    unread = "" if document["ok"] or damaged else "not all could be read; see above, then check again"
    yield TextLine(unread or ("damaged; see above for the repair" if damaged else "nothing is damaged"))
