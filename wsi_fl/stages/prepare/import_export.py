"""`wsi-fl import` and `wsi-fl export`: convert features of other tools to a site's store, and a store to their layouts.

Every file is read twice: once for its metadata, and once to write it. One bag is in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from wsi_fl.models.golden import GOLDEN_MPP, GOLDEN_SLIDE, select_golden
from wsi_fl.models.presets import PRESETS, find_preset, match_variants
from wsi_fl.slides.patching.scan_copies import describe_copies, drop_leaks, list_scans
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.label_tables import match_table
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.site.encoders import require_golden_vectors
from wsi_fl.stages.site.site_data import open_bags
from wsi_fl.stores.bag_store import Bag, BagMeta, hash_features, write_bags
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.stores.foreign_slides import FeatureLayout, FileFacts
from wsi_fl.stores.foreign_writers import write_clam, write_clini, write_labels
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import slide_of
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import ExcludedSlide, GridSpec, SlideRecord, UsageError, WsiFlError, encoder_label

_MAX_MPP_RATIO = 1.5
"""Largest ratio of a resolution to the nominal one of its magnification: TRIDENT calls 0.3 to 0.6 µm 20×."""


@dataclass(frozen=True)
class ImportFacts:
    """Facts on features given as options, where files lack them.

    Attributes:
        new_name: the encoder's new name, whatever its files call it.
    """

    encoder: str | None = None
    patch_px: int | None = None
    mpp: float | None = None
    new_name: str | None = None


@dataclass(frozen=True)
class FeatureFile:
    """An intact file of features of d dimensions, and what it says of them."""

    path: Path
    n_features: int
    facts: FileFacts


@dataclass(frozen=True)
class _ImportedSlide(FeatureFile):
    """A slide with its file: n patches, and a digest of their features."""

    record: SlideRecord
    n_patches: int
    mark: str
    note: str = ""

    @property
    def mpp_l0(self) -> float | None:
        """µm per level-0 pixel of the slide: from the table or site file, else from the features' file."""
        return self.record.mpp_override or self.facts.mpp_l0


def import_features(
    study: Study,
    *,
    form: str,
    source: Path,
    labels: Path,
    facts: ImportFacts | None = None,
    watcher: Watcher | None = None,
    **scope: Unpack[slide_lists.Scope],
) -> slide_lists.BagsDocument:
    """Write a site's feature store from the files in a folder; return the `--json` document, that of `mosaic`.

    Args:
        form: a key of LAYOUTS.
        source: the folder.
        labels: a table of slides with patients and labels.

    Raises:
        UsageError: when encoders, widths or patch sizes of slides differ or are unknown; names a slide.
        WsiFlError: when no slide is left.
    """
    start, progress = time.perf_counter(), watcher or SilentProgress()
    facts = facts or ImportFacts()
    layout, files = find_feature_files(form, source, facts)
    golden_file = files.pop(GOLDEN_SLIDE, None)
    pipeline, (site_file,) = slide_lists.select_sites(study, **scope)
    site = site_file.name
    diagnoses = slide_lists.store_classes(site_file, pipeline.subtypes) if pipeline.subtypes else ()
    table_rows = match_table(labels, files, site_file, diagnoses=diagnoses)
    progress.print_message(f"  {site}: {table_rows.account}")
    records, unfit = slide_lists.select_labelled(table_rows.records, pipeline.subtypes, site_file)
    if not records:
        why = table_rows.mismatch or slide_lists.first_failure([*unfit, *table_rows.excluded])
        raise UsageError(f"{labels}: none of its slides has a label and features in {source}: {why}")
    # a table that contradicts itself is refused before files are read
    assign_splits(records, test_fraction=pipeline.slides.test_fraction)
    with site_lock(study.mosaic_path(site).parent, site) as work:
        slides, unreadable = _read_slides(records, files, layout, progress)
        slides, leaks, copies = _assign_splits(slides, records, pipeline.slides.test_fraction)
        failed = [*table_rows.excluded, *unfit, *unreadable, *leaks]
        if not slides:
            raise WsiFlError(f"site {site}: no slide could be imported; {slide_lists.first_failure(failed)}")
        meta = _merge_metadata(site_file, pipeline, slides, facts)
        if golden_file is not None:
            meta, note = _add_golden(study, pipeline, meta, golden_file, layout)
            progress.print_message(f"  {site}: {note}")
        slides = [_rescale_slide(slide, meta.spec) for slide in slides]
        table = slide_lists.build_bag_table([slide.record for slide in slides], pipeline.subtypes, site_file)
        bags, sizes = _reread_bags(slides, layout, progress, len(records)), [slide.n_patches for slide in slides]
        scales = [slide.mpp_l0 for slide in slides]
        mpp_l0 = None if None in scales else np.array(scales, np.float64)
        with work.stage_file(study.mosaic_path(site)) as staged:
            write_bags(staged, meta, table, bags, mpp_l0, sizes=sizes)
    row = slide_lists.build_mosaic_row(
        study,
        meta,
        table,
        n_patches=sum(sizes),
        failed=failed,
        notes={slide.record.slide: slide.note for slide in slides},
        copies=copies,
        n_slides=len(table_rows.records) + len(table_rows.excluded),
    )
    row["seconds"] = time.perf_counter() - start
    return {"sites": [row], "next": slide_lists.next_commands(study, "mosaics", form=form, **scope)}


_GOLDEN_NOTES = (
    "its golden patches are not those of the picture (0.5 µm/px, cut from its corner): features are compared by name",
    "its golden patches will be compared with those of other sites",
    "its golden patches have the features of this encoder here, and will be compared with those of other sites",
)


def _add_golden(
    study: Study, pipeline: Pipeline, meta: BagMeta, golden_file: Path, layout: FeatureLayout
) -> tuple[BagMeta, str]:
    """Return metadata with the vectors of the golden patches, and a note; without vectors if the encoder is no preset.

    Vectors of an encoder made from patients would tell of them. Patches of another resolution are not those of the
    picture.
    """
    if (encoder := meta.encoder.split(";")[0]) not in PRESETS:
        return meta, f"{encoder} is no preset, so others may not know it: features are compared by name"
    bag = layout.read(golden_file).build_bag(GOLDEN_MPP)
    if isclose(meta.spec.mpp, GOLDEN_MPP, rel_tol=0.01):
        vectors = select_golden(bag.features, bag.xy_l0, replace(meta.spec, mpp=GOLDEN_MPP))
        meta = replace(meta, golden=vectors)
    is_compared = require_golden_vectors(study, pipeline, meta, golden_file)
    return meta, _GOLDEN_NOTES[bool(meta.golden) + is_compared]


def find_feature_files(form: str, source: Path, facts: ImportFacts) -> tuple[FeatureLayout, dict[str, Path]]:
    """Return a layout, and the files of slides by name, in a folder or a single one.

    Raises:
        UsageError: for an unknown layout, or without such a folder or files.
    """
    if form not in LAYOUTS:
        raise UsageError(f"--format {form!r}: use {', '.join(LAYOUTS)}")
    layout = LAYOUTS[form]
    if layout.takes_encoder:
        layout = replace(layout, read=partial(layout.read, encoder=facts.encoder))
    if source.is_file():
        return layout, {slide_of(source): source}
    if not source.is_dir():
        raise UsageError(f"--from {source}: no such folder")
    return layout, layout.find(source)


def _assign_splits(
    slides: Sequence[_ImportedSlide], records: Sequence[SlideRecord], test_fraction: float
) -> tuple[list[_ImportedSlide], list[ExcludedSlide], list[str]]:
    """Return slides with their splits, slides excluded as leaks, and a line for each scan present several times."""
    marks = {imported.record.slide: frozenset({imported.mark}) for imported in slides}
    records, leaks = drop_leaks(assign_splits(records, test_fraction=test_fraction, marks=marks), marks)
    by_slide = {record.slide: record for record in records}
    split_slides = [
        replace(slide, record=by_slide[slide.record.slide]) for slide in slides if slide.record.slide in by_slide
    ]
    return split_slides, leaks, describe_copies(list_scans([slide.record for slide in split_slides], marks))


def _read_slides(
    records: Sequence[SlideRecord], files: Mapping[str, Path], layout: FeatureLayout, progress: Watcher
) -> tuple[list[_ImportedSlide], list[ExcludedSlide]]:
    """Read the file of each slide; progress counts this as the first half of the work."""
    slides: list[_ImportedSlide] = []
    excluded: list[ExcludedSlide] = []
    for number, record in enumerate(records, 1):
        try:
            slides.append(_read_slide(record, files[record.slide], layout))
        except WsiFlError as error:
            excluded.append(ExcludedSlide(record.slide, str(error)))
        progress.update(record.site, number, 2 * len(records), record.slide)
    return slides, excluded


def _read_slide(record: SlideRecord, path: Path, layout: FeatureLayout) -> _ImportedSlide:
    """Return the metadata in a slide's file; WsiFlError for an invalid file, or one that contradicts the table."""
    foreign = layout.read(path)
    table_mpp, file_mpp = record.mpp_override, None if foreign.facts.nominal else foreign.facts.mpp_l0
    if table_mpp and file_mpp and not isclose(table_mpp, file_mpp, rel_tol=0.01):
        raise WsiFlError(f"{path.name} says {file_mpp:g} µm per pixel of the slide, the table {table_mpp:g}")
    n_patches, n_features = foreign.features.shape
    slide = _ImportedSlide(path, n_features, foreign.facts, record, n_patches, hash_features(foreign.features))
    if foreign.build_bag(slide.mpp_l0).has_places:
        return slide
    if foreign.xy is None and n_patches == 1:
        why = "one vector stands for the whole slide"
    elif foreign.xy is None:
        why = "its file has no coordinates"
    elif slide.mpp_l0 is None:
        why = "its coordinates are µm, and the size of a pixel of the slide is unknown (column mpp, or mpp_override)"
    else:
        why = "its coordinates are all −1"
    return replace(slide, note=f"the places of its patches are unknown: {why}; heatmaps need them")


def _rescale_slide(slide: _ImportedSlide, spec: GridSpec) -> _ImportedSlide:
    """Compute a slide's resolution from the common patch size, where its file has only a nominal magnification and the
    patch's side in level-0 pixels: this side stays, whatever resolution the table or site file has.
    """
    facts = slide.facts
    if not facts.nominal or not facts.mpp or not facts.mpp_l0:
        return slide
    facts = replace(facts, mpp=spec.mpp, mpp_l0=facts.mpp_l0 * spec.mpp / facts.mpp)
    return replace(slide, facts=facts, record=replace(slide.record, mpp_override=None))


def _merge_metadata(
    site: SiteFile, pipeline: Pipeline, slides: Sequence[_ImportedSlide], facts: ImportFacts
) -> BagMeta:
    """Return the metadata of the store, from all files and the options."""
    _require_facts(slides, facts)
    encoder = resolve_encoder(slides, facts)
    patch_size = _require_equal(slides, "patch size", lambda slide: slide.facts.size_px)
    size = _resolve_value(patch_size, facts.patch_px, slides, "--patch-px")
    mpp = _resolve_mpp(slides, facts.mpp)
    overlap = _require_equal(slides, "overlap", lambda slide: slide.facts.overlap_px) or 0
    subtypes = {tumor_type: tuple(names) for tumor_type, names in pipeline.subtypes.items()}
    spec = GridSpec(int(size), mpp, int(size) - overlap)
    return BagMeta(site.name, slide_lists.store_classes(site, subtypes), encoder, spec, "import", subtypes)


def _require_facts(slides: Sequence[_ImportedSlide], facts: ImportFacts) -> None:
    """Refuse features without required facts; the error names all of them."""
    fact_names = {name for slide in slides for name, value in vars(slide.facts).items() if value is not None}
    needed = (
        ("encoder", "--encoder", "encoder", facts.encoder or facts.new_name),
        ("patch size", "--patch-px", "size_px", facts.patch_px),
        ("resolution", "--mpp", "mpp", facts.mpp),
    )
    missing = {fact: option for fact, option, name, value in needed if value is None and name not in fact_names}
    if missing:
        complaint = f"{slides[0].path.name} and the others do not say their {', '.join(missing)}"
        raise UsageError(f"{complaint}; add {', '.join(missing.values())}")


def resolve_encoder(slides: Sequence[FeatureFile], facts: ImportFacts) -> str:
    """Return the encoder's label: a preset's name where widths agree, and the name in the files.

    Raises:
        UsageError: when widths or encoders differ, or the files and the options; names two files.
    """
    if facts.encoder is None and facts.new_name is None and not any(slide.facts.encoder for slide in slides):
        raise UsageError(f"{slides[0].path}: does not say its encoder; add --encoder NAME")
    width = int(_require_equal(slides, "features of width", lambda slide: slide.n_features))
    encoder = _require_equal(slides, "encoder", lambda slide: _resolve_file_encoder(slide, facts))
    if facts.new_name is None:
        name = str(_resolve_value(encoder, _resolve_preset(facts.encoder, width), slides, "--encoder"))
    else:
        name = find_preset(facts.new_name) or facts.new_name
        if name in PRESETS and PRESETS[name].n_features != width:
            n_expected = PRESETS[name].n_features
            raise UsageError(
                f"--encoder-name {facts.new_name}: it has {n_expected} features, {slides[0].path.name} has {width}"
            )
    original_name = next((slide.facts.encoder for slide in slides if slide.facts.encoder), name)
    origin = ["so called on import"] if facts.new_name else []
    return name if original_name == name else encoder_label(name, [f"written as {original_name}", *origin])


def _resolve_file_encoder(slide: FeatureFile, options: ImportFacts) -> str | None:
    """Return the encoder of a file: the preset with the preprocessing that the file states, else a name that tells it.

    Raises:
        UsageError: when several presets fit, of the same weights, and no option names one.
    """
    facts = slide.facts
    name = _resolve_preset(facts.encoder, slide.n_features)
    if name is None or name not in PRESETS or not (facts.input_px or facts.transform):
        return name
    variants = match_variants(name, facts.size_px, facts.input_px, facts.transform)
    if not variants:
        return f"{name} with other preprocessing{f', at {facts.input_px} px' if facts.input_px else ''}"
    if len(variants) > 1 and options.new_name is None:
        raise UsageError(
            f"{slide.path.name} does not say whether its patches were cropped, and versions of its tool differ; add "
            f"--encoder-name {' or '.join(variants)}"
        )
    return variants[0]


def _resolve_preset(name: str | None, width: int) -> str | None:
    """Return the preset of a name, where its features have this width; else the name."""
    preset = find_preset(name) if name else None
    return preset if preset and PRESETS[preset].n_features == width else name


def _resolve_mpp(slides: Sequence[_ImportedSlide], option_mpp: float | None) -> float:
    """Return the resolution of the patches; a measured one goes before the nominal one of a magnification."""
    file_mpp = _require_equal(slides, "resolution", lambda slide: slide.facts.mpp)
    if option_mpp is None or not any(slide.facts.nominal for slide in slides):
        return float(_resolve_value(file_mpp, option_mpp, slides, "--mpp"))
    if not 1 / _MAX_MPP_RATIO <= option_mpp / file_mpp <= _MAX_MPP_RATIO:
        raise UsageError(
            f"--mpp {option_mpp:g}: {slides[0].path.name} says about {file_mpp:g} µm per pixel (its magnification)"
        )
    return option_mpp


def _resolve_value(file_value: Any, option_value: Any, slides: Sequence[FeatureFile], option: str) -> Any:
    """Return the value of the files, or that of the option where they have none; UsageError where both differ."""
    if file_value is not None and option_value is not None and not _is_same(file_value, option_value):
        advice = f", or say --encoder-name {option_value} if they are the same" if option == "--encoder" else ""
        raise UsageError(
            f"{option} {option_value}: {slides[0].path.name} says {file_value}; leave {option} out{advice}"
        )
    return option_value if file_value is None else file_value


def _require_equal(slides: Sequence[FeatureFile], quantity: str, read_value: Callable[[FeatureFile], Any]) -> Any:
    """Return the common value of all slides with one, or None; UsageError names two slides that differ."""
    values = [(slide_of(slide.path), value) for slide in slides if (value := read_value(slide)) is not None]
    for slide, value in values:
        if not _is_same(value, values[0][1]):
            raise UsageError(
                f"slides differ: {values[0][0]} has {quantity} {values[0][1]}, {slide} {value}; import one kind"
            )
    return values[0][1] if values else None


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _reread_bags(
    slides: Sequence[_ImportedSlide], layout: FeatureLayout, progress: Watcher, n_slides: int
) -> Iterator[Bag]:
    """Yield the bag of each file, read again; progress counts this as the second half of the work."""
    for number, slide in enumerate(slides, 1):
        try:
            yield layout.read(slide.path).build_bag(slide.mpp_l0)
        except WsiFlError as error:
            raise WsiFlError(f"{error}; it changed while it was imported, import again") from None
        done = n_slides + number * n_slides / len(slides)
        progress.update(slide.record.site, done, 2 * n_slides, slide.record.slide)


class _ExportDocument(TypedDict):
    """The document of `export --site`: number of bags, and the paths of the folder, its features and its table.

    For STAMP `clini` is the table of patients, and `unlabelled` the number of them without a label in it.
    """

    site: str
    format: str
    bags: int
    out: str
    features: str
    table: str
    clini: str | None
    unlabelled: int
    pt: bool


def export_features(
    study: Study, *, site: str, form: str, out: Path | None = None, tensors: bool = False
) -> _ExportDocument:
    """Write a site's mosaics on this machine for another tool; return the `--json` document.

    Args:
        tensors: whether CLAM's `.pt` files are written too.

    Raises:
        UsageError: for an unknown format, or `.pt` files of another tool than CLAM.
        WsiFlError: when the site has no feature store, or the store lacks the resolution of slides.
    """
    writers = {name: layout.write for name, layout in LAYOUTS.items() if layout.write}
    if form not in writers:
        raise UsageError(f"--format {form!r}: use {', '.join(writers)}")
    if tensors and form != "clam":
        raise UsageError(f"--pt: {form} reads no .pt files; leave it out")
    study.load_site(site)
    folder = out or study.root / "exports" / form / site
    write = partial(write_clam, tensors=True) if tensors else writers[form]
    table, clini = folder / f"{site}.csv", folder / f"{site}_clini.csv"
    with open_bags(study, site, "mosaics") as store:
        files = write(store, folder)
        write_labels(store, table, is_stamp=form == "stamp")
        n_unlabelled = write_clini(store, clini) if form == "stamp" else 0
    return {
        "site": site,
        "format": form,
        "bags": len(files),
        "out": study.relative_path(folder),
        "features": study.relative_path(files[0].parent),
        "table": study.relative_path(table),
        "clini": study.relative_path(clini) if form == "stamp" else None,
        "unlabelled": n_unlabelled,
        "pt": tensors,
    }


def render_feature_export(document: _ExportDocument) -> Lines:
    """Yield the places of the files, and hints for CLAM and STAMP."""
    yield TextLine(f"{document['bags']} slides in {document['features']}, labels in {document['table']}")
    if document["format"] == "clam" and not document["pt"]:
        yield TextLine("  CLAM's training reads .pt files: add --pt, or call load_from_h5(True) on its data set")
    if document["clini"]:
        yield TextLine(f"  STAMP's slide_table is {document['table']}, its clini_table {document['clini']}")
    if n := document["unlabelled"]:
        yield TextLine(f"  without a label there, as their slides have several: {n} patients, whom STAMP leaves out")
