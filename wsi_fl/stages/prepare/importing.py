"""`import` and `export`: features of other tools become a site's store, and a store lies as they want it.

Every file is read twice: once to find out what it holds, and once to write it. One bag is in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.models.presets import PRESETS, preset_called
from wsi_fl.slides.patching.copies import describe_copies, drop_leaks, scans_of
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stages.prepare import sources
from wsi_fl.stages.site.data import open_bags
from wsi_fl.stages.work.console import Line, Lines, Silent, Watcher
from wsi_fl.stores.bags import Bag, BagMeta, mark_of, write_bags
from wsi_fl.stores.exchange import LAYOUTS, Facts, Layout, write_clam, write_labels
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import locked
from wsi_fl.types import GridSpec, SetAside, SlideRecord, UsageError, WsiFlError, encoder_label

_ROUNDED = 1.5
"""How far off the resolution may be that a magnification stands for: TRIDENT calls 0.3 to 0.6 µm 20×."""


@dataclass(frozen=True)
class ImportFacts:
    """What is said on the command line of features whose files do not say it.

    Attributes:
        called: what the encoder is called from now on, whatever its files call it.
    """

    encoder: str | None = None
    patch_px: int | None = None
    mpp: float | None = None
    called: str | None = None


@dataclass(frozen=True)
class _Looked:
    """A slide whose file is whole: n patches of d features, and a digest of them."""

    record: SlideRecord
    path: Path
    n: int
    d: int
    facts: Facts
    mark: str
    note: str = ""

    @property
    def mpp_l0(self) -> float | None:
        """µm per level-0 pixel of the slide: as the table or site file says, else the features' file."""
        return self.record.mpp_override or self.facts.mpp_l0


def import_features(
    study: Study,
    *,
    site: str,
    form: str,
    source: Path,
    labels: Path,
    said: ImportFacts | None = None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> sources.Bags:
    """Write a site's feature store of the files in a folder; return the `--json` document, that of `mosaic`.

    Args:
        form: a key of LAYOUTS.
        source: the folder.
        labels: a table of slides with patients and labels.

    Raises:
        UsageError: when slides are of several encoders, widths or patch sizes, or nobody says which; names a slide.
        WsiFlError: when no slide is left.
    """
    began, told, said = time.perf_counter(), watcher or Silent(), said or ImportFacts()
    if form not in LAYOUTS:
        raise UsageError(f"--format {form!r}: use {', '.join(LAYOUTS)}")
    which: sources.Which = {"site": site, "pipeline_name": pipeline_name, "overrides": overrides}
    pipeline, (file,) = sources.asked_for(study, **which)
    if not source.is_dir():
        raise UsageError(f"--from {source}: no such folder")
    layout = LAYOUTS[form]
    files = layout.find(source)
    diagnoses = sources.stored_classes(file, pipeline.subtypes) if pipeline.subtypes else ()
    table_rows = sources.matched(labels, files, file, diagnoses=diagnoses)
    told.say(f"  {site}: {table_rows.account}")
    records, unfit = sources.labelled(table_rows.records, pipeline.subtypes, file)
    looked: list[_Looked] = []
    failed = [*table_rows.aside, *unfit]
    if not records:
        why = table_rows.mismatch or sources.first_reason([*unfit, *table_rows.aside])
        raise UsageError(f"{labels}: none of its slides has a label and features in {source}: {why}")
    n_slides, fraction = len(records) + len(failed), pipeline.slides.test_fraction
    # a table that contradicts itself is refused before files are read
    assign_splits(records, test_fraction=fraction)
    with locked(study.mosaic(site).parent, site):
        for number, record in enumerate(records):
            one = _look(record, files[record.slide], layout)
            if isinstance(one, SetAside):
                failed.append(one)
            else:
                looked.append(one)
            told.update(site, number + 1, 2 * len(records), record.slide)
        looked, leaks, copies = _with_splits(looked, records, fraction)
        failed += leaks
        if not looked:
            raise WsiFlError(f"site {site}: no slide could be imported; {sources.first_reason(failed)}")
        meta = _meta(file, pipeline, looked, said)
        looked = [_at_scale(one, meta.spec) for one in looked]
        table = sources.table_of([one.record for one in looked], pipeline.subtypes, file)
        each = [one.mpp_l0 for one in looked]
        mpp_l0 = None if None in each else np.array(each, np.float64)
        bags = _bags(looked, layout, told, site, len(records))
        write_bags(study.mosaic(site), meta, table, bags, mpp_l0, sizes=[one.n for one in looked])
    row = sources.mosaic_row(
        study,
        meta,
        table,
        n_patches=sum(one.n for one in looked),
        failed=failed,
        notes={one.record.slide: one.note for one in looked},
        copies=copies,
        n_slides=n_slides,
    )
    row["seconds"] = time.perf_counter() - began
    return {"sites": [row], "next": sources.after_mosaics(study, **which)}


def _with_splits(
    looked: Sequence[_Looked], records: Sequence[SlideRecord], test_fraction: float
) -> tuple[list[_Looked], list[SetAside], list[str]]:
    """Return slides with the splits of all records, those whose scan a table puts into two splits, and a line for each
    scan that is there several times.
    """
    marks = {slide.record.slide: frozenset({slide.mark}) for slide in looked}
    records, leaks = drop_leaks(assign_splits(records, test_fraction=test_fraction, marks=marks), marks)
    by_slide = {record.slide: record for record in records}
    rest = [
        replace(slide, record=by_slide[slide.record.slide])
        for slide in looked
        if slide.record.slide in by_slide
    ]
    return rest, leaks, describe_copies(scans_of([slide.record for slide in rest], marks))


def _look(record: SlideRecord, path: Path, layout: Layout) -> _Looked | SetAside:
    """Read a slide's file once, whole."""
    try:
        foreign = layout.read(path)
    except WsiFlError as error:
        return SetAside(record.slide, str(error))
    given, own = record.mpp_override, foreign.facts
    if given and own.mpp_l0 and not own.nominal and not isclose(given, own.mpp_l0, rel_tol=0.01):
        return SetAside(
            record.slide, f"{path.name} says {own.mpp_l0:g} µm per pixel of the slide, the table {given:g}"
        )
    n, d = foreign.features.shape
    looked = _Looked(record, path, n, d, own, mark_of(foreign.features))
    if foreign.bag(looked.mpp_l0).placed:
        return looked
    if foreign.xy is None and n == 1:
        why = "one vector stands for the whole slide"
    elif foreign.xy is None:
        why = "its file has no coordinates"
    elif looked.mpp_l0 is None:
        why = "its coordinates are µm, and nobody says how large a pixel of the slide is (column mpp, or mpp_override)"
    else:
        why = "its coordinates are all −1"
    return replace(looked, note=f"nobody knows where its patches lie: {why}; heatmaps need that")


def _at_scale(one: _Looked, spec: GridSpec) -> _Looked:
    """Measure a slide by its own patches, where its file knows their side in level-0 pixels and a round magnification
    alone, and neither the table nor the site file says more.
    """
    facts = one.facts
    if not facts.nominal or one.record.mpp_override or not facts.mpp or not facts.mpp_l0:
        return one
    return replace(one, facts=replace(facts, mpp=spec.mpp, mpp_l0=facts.mpp_l0 * spec.mpp / facts.mpp))


def _meta(site: SiteFile, pipeline: Pipeline, looked: Sequence[_Looked], said: ImportFacts) -> BagMeta:
    """What holds for all slides, as all files and the command line say."""
    _require_said(looked, said)
    encoder = _encoder(looked, said)
    found = _agreed(looked, "patch size", lambda one: one.facts.size_px)
    size = _settled(found, said.patch_px, looked, "--patch-px")
    mpp = _mpp(looked, said.mpp)
    overlap = _agreed(looked, "overlap", lambda one: one.facts.overlap_px) or 0
    subtypes = {one: tuple(names) for one, names in pipeline.subtypes.items()}
    spec = GridSpec(int(size), mpp, int(size) - overlap)
    return BagMeta(site.name, sources.stored_classes(site, subtypes), encoder, spec, "import", subtypes)


def _require_said(looked: Sequence[_Looked], said: ImportFacts) -> None:
    """Refuse features of which nobody says all that is needed; it names everything that is missing."""
    known = {name for one in looked for name, value in vars(one.facts).items() if value is not None}
    needed = (
        ("encoder", "--encoder", "encoder", said.encoder or said.called),
        ("patch size", "--patch-px", "size_px", said.patch_px),
        ("resolution", "--mpp", "mpp", said.mpp),
    )
    lacks = {what: option for what, option, name, given in needed if given is None and name not in known}
    if lacks:
        whose = f"{looked[0].path.name} and the others do not say their {', '.join(lacks)}"
        raise UsageError(f"{whose}; add {', '.join(lacks.values())}")


def _encoder(looked: Sequence[_Looked], said: ImportFacts) -> str:
    """Return the encoder's label: a preset's name where the features can be its own, and what the files call it."""
    width = int(_agreed(looked, "features of width", lambda one: one.d))
    written = _agreed(looked, "encoder", lambda one: _known(one.facts.encoder, width))
    if said.called is None:
        name = str(_settled(written, _known(said.encoder, width), looked, "--encoder"))
    else:
        name = preset_called(said.called) or said.called
        if name in PRESETS and PRESETS[name].n_features != width:
            gives = PRESETS[name].n_features
            raise UsageError(
                f"--encoder-name {said.called}: it gives {gives} numbers for a patch, {looked[0].path.name} has {width}"
            )
    theirs = next((one.facts.encoder for one in looked if one.facts.encoder), name)
    word = ["so called on import"] if said.called else []
    return name if theirs == name else encoder_label(name, [f"written as {theirs}", *word])


def _known(name: str | None, width: int) -> str | None:
    """Return the preset that a name stands for, where its features are as wide; else the name."""
    preset = preset_called(name) if name else None
    return preset if preset and PRESETS[preset].n_features == width else name


def _mpp(looked: Sequence[_Looked], said: float | None) -> float:
    """The resolution of the patches; one that is measured goes before one that a magnification stands for."""
    found = _agreed(looked, "resolution", lambda one: one.facts.mpp)
    if said is None or not any(one.facts.nominal for one in looked):
        return float(_settled(found, said, looked, "--mpp"))
    if not 1 / _ROUNDED <= said / found <= _ROUNDED:
        raise UsageError(
            f"--mpp {said:g}: {looked[0].path.name} says about {found:g} µm per pixel (its magnification)"
        )
    return said


def _settled(found: Any, said: Any, looked: Sequence[_Looked], option: str) -> Any:
    """What all files say, or the command line where they say nothing."""
    if found is not None and said is not None and not _same(found, said):
        same = f", or say --encoder-name {said} if they are the same" if option == "--encoder" else ""
        raise UsageError(f"{option} {said}: {looked[0].path.name} says {found}; leave {option} out{same}")
    return said if found is None else found


def _agreed(looked: Sequence[_Looked], what: str, of: Callable[[_Looked], Any]) -> Any:
    """What all say that say anything, or None; UsageError names a slide of each where two differ."""
    told = [(one.record.slide, value) for one in looked if (value := of(one)) is not None]
    for slide, value in told:
        if not _same(value, told[0][1]):
            raise UsageError(
                f"slides are not alike: {told[0][0]} has {what} {told[0][1]}, {slide} {value}; import one kind"
            )
    return told[0][1] if told else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _bags(looked: Sequence[_Looked], layout: Layout, told: Watcher, site: str, n: int) -> Iterator[Bag]:
    """Read each file again; of n slides so many are written, which is the second half of the work."""
    for number, one in enumerate(looked, 1):
        try:
            yield layout.read(one.path).bag(one.mpp_l0)
        except WsiFlError as error:
            raise WsiFlError(f"{error}; it changed while it was imported, import again") from None
        told.update(site, n + number * n / len(looked), 2 * n, one.record.slide)


def export(
    study: Study, *, site: str, form: str, out: Path | None = None, tensors: bool = False
) -> dict[str, Any]:
    """Write a site's mosaics for another tool; return the `--json` document. Nothing leaves this machine.

    Args:
        tensors: whether CLAM's `.pt` files are written too.

    Raises:
        UsageError: for an unknown format, or `.pt` files of another tool than CLAM.
        WsiFlError: when the site has no feature store, or it does not say how large its patches are on the slides.
    """
    written = {name: layout.write for name, layout in LAYOUTS.items() if layout.write}
    if form not in written:
        raise UsageError(f"--format {form!r}: use {', '.join(written)}")
    if tensors and form != "clam":
        raise UsageError(f"--pt: {form} reads no .pt files; leave it out")
    study.site(site)
    folder = out or study.root / "exports" / form / site
    write = partial(write_clam, tensors=True) if tensors else written[form]
    table = folder / f"{site}.csv"
    with open_bags(study, site, "mosaics") as store:
        files = write(store, folder)
        write_labels(store, table)
    return {
        "site": site,
        "format": form,
        "bags": len(files),
        "out": study.relative(folder),
        "features": study.relative(files[0].parent),
        "table": study.relative(table),
        "pt": tensors,
    }


def export_lines(document: dict[str, Any]) -> Lines:
    """Say where the files are, and what CLAM's users need."""
    yield Line(f"{document['bags']} slides in {document['features']}, labels in {document['table']}")
    if document["format"] == "clam" and not document["pt"]:
        yield Line("  CLAM's training reads .pt files: add --pt, or call load_from_h5(True) on its data set")
