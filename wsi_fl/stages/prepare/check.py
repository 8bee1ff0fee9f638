"""`wsi-fl check`: read every byte of a site's stores and generators; report damage with its repair.

One patch or one bag is in memory at a time; nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypedDict, Unpack

from wsi_fl.plugins import entries
from wsi_fl.slides.patching.copies import Scan, describe_copies, describe_shared
from wsi_fl.stages.prepare.sources import Which, asked_for, copies_lines
from wsi_fl.stages.site.data import open_bags, open_store, scans_in
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stores.bags import read_bag_shard
from wsi_fl.stores.fields import DAMAGE, first_line
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.files import FileUnavailable, why_unavailable
from wsi_fl.system.names import drop_companions
from wsi_fl.types import WsiFlError

_NAMED = 5
"""Damaged patches listed per slide."""
_FOUND = (WsiFlError, *DAMAGE, MemoryError)

_Step = tuple[str, Callable[[], object]]
"""(name of a part, function that reads it and raises WsiFlError for damage)."""


class _SiteRow(TypedDict):
    """A site: how many shards, bags and other files were read; a line for each damage (where, what, remedy), each store
    unreadable at the moment, and each scan stored several times."""

    site: str
    read: int
    damaged: list[str]
    unavailable: list[str]
    copies: list[str]
    seconds: float


class _Checked(TypedDict):
    """All sites, scans shared between sites, and whether all was read without damage."""

    sites: list[_SiteRow]
    copies: list[str]
    ok: bool


def check(study: Study, *, watcher: Watcher | None = None, **which: Unpack[Which]) -> _Checked:
    """Read all stores of one site, or of every site of the pipeline; return the `--json` document.

    Raises:
        WsiFlError: when there is nothing to check.
    """
    _, sites = asked_for(study, **which)
    scans: dict[str, list[Scan]] = {}
    rows = [_check_site(study, one.name, watcher or Silent(), scans) for one in sites]
    if not any(row["read"] for row in rows):
        again = "--all" if which["site"] is None else f"--site {which['site']}"
        slides = any(one.slides is not None for one in sites)
        maker = (
            f"`wsi-fl tile {again}`"
            if slides
            else "`wsi-fl import` for features, `wsi-fl partition` for images"
        )
        raise WsiFlError(f"nothing is stored yet; run {maker}")
    copies = list(dict.fromkeys(line for some in scans.values() for line in describe_shared(some)))
    return {
        "sites": rows,
        "copies": copies,
        "ok": not any(row["damaged"] or row["unavailable"] for row in rows),
    }


def _check_site(study: Study, site: str, watcher: Watcher, scans: dict[str, list[Scan]]) -> _SiteRow:
    """Read all stores of a site; append its scans to `scans`, by kind of store."""
    began, n_read = time.perf_counter(), 0
    damaged: list[str] = []
    unavailable: list[str] = []

    def note(error: BaseException) -> None:
        """Record damage, foreseen by a reader or not; the other stores and sites are read all the same."""
        if (reason := why_unavailable(error)) or isinstance(error, FileUnavailable):
            unavailable.append(f"{site}: {reason}" if reason else str(error))
        else:
            damaged.append(
                str(error) if isinstance(error, WsiFlError) else f"{site}: damaged ({first_line(error)})"
            )

    opened: list[Iterator[list[_Step]]] = []
    by_store: dict[str, list[Scan]] = {}
    for path, part, shards, command in (
        (study.store(site), _patches, "slides", "tile"),
        (study.features(site), partial(_bags, "features"), "features", "features"),
        (study.mosaic(site), partial(_bags, "mosaics"), "mosaics", "mosaic"),
    ):
        if path.exists():
            opened.append(part(study, site, by_store))
        elif drop_companions((path.parent / shards).glob("*.h5")):
            n_read += 1
            damaged.append(
                f"{path}: missing, though its shards are there; run `wsi-fl {command} --site {site}` again"
            )
    opened += [of_plugin(study, site) for of_plugin in entries("wsi_fl.checks").values()]  # of extensions
    for steps in opened:
        try:
            for known in steps:  # yielded once the store is open
                for done, (name, read) in enumerate(known):
                    watcher.update(site, done, len(known), name)
                    n_read += 1
                    try:
                        read()
                    except _FOUND as error:
                        note(error)
                watcher.update(site, len(known), len(known))
        except _FOUND as error:  # the store does not open
            n_read += 1
            note(error)
    for kind, some in by_store.items():
        scans.setdefault(kind, []).extend(some)
    copies = list(dict.fromkeys(line for some in by_store.values() for line in describe_copies(some)))
    seconds = time.perf_counter() - began
    return {
        "site": site,
        "read": n_read,
        "damaged": damaged,
        "unavailable": unavailable,
        "copies": copies,
        "seconds": seconds,
    }


def _patches(study: Study, site: str, scans: dict[str, list[Scan]]) -> Iterator[list[_Step]]:
    with open_store(study, site) as store:
        scans["patches"] = scans_in(store)
        yield [(slide, partial(_read_slide, store, slide)) for slide in store.slides]


def _read_slide(store: PatchStore, slide: str) -> None:
    if damaged := store.verify(slide):
        shown = ", ".join(map(str, damaged[:_NAMED])) + (", …" if len(damaged) > _NAMED else "")
        raise WsiFlError(
            f"{store.path}: {len(damaged)} patches in the shard of slide {slide} are damaged ({shown}); "
            f"{store.mend}"
        )


def _bags(data: str, study: Study, site: str, scans: dict[str, list[Scan]]) -> Iterator[list[_Step]]:
    with open_bags(study, site, data) as store:
        scans[data] = scans_in(store)
        steps: list[_Step] = [
            (str(slide), partial(store.bag, k)) for k, slide in enumerate(store.table.slide)
        ]
        shards = drop_companions((store.path.parent / data).glob("*.h5"))
        yield [*steps, *((path.stem, partial(read_bag_shard, path)) for path in shards)]


def check_lines(document: _Checked) -> Lines:
    """Yield a table with a row per site, and a line for each damage."""
    sites = document["sites"]
    rows = [[row["site"], row["read"], len(row["damaged"]), f"{row['seconds']:.1f}"] for row in sites]
    yield Table("check", ["site", "read", "damaged", "s"], rows)
    yield from (Line(f"  {line}", "bold red") for row in sites for line in row["damaged"])
    yield from (Line(f"  {line}", "bold yellow") for row in sites for line in row["unavailable"])
    yield from copies_lines(document)
    damaged = any(row["damaged"] for row in sites)
    unread = "" if document["ok"] or damaged else "not all could be read; see above, then check again"
    yield Line(unread or ("damaged; see above for the repair" if damaged else "nothing is damaged"))
