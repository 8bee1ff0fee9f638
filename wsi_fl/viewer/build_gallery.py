"""Slides for `view`, of a site or with predictions, and their layers.

With a site, only its slides are shown. Without a site, predictions of a run are shown by the rule for patches in
reports: of the only site with predictions here, else of the sites that allow `patches`; their slides may then be those
of any site that allows it. Predictions by another site's model are shown where this model left its site, or may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.slides.layouts import list_site
from wsi_fl.slides.reading.formats.dicom_headers import resolve_slide_path
from wsi_fl.stages.prepare.slide_lists import list_table_slides, resolve_sources
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.run_context import restore_study
from wsi_fl.stages.site.slide_files import list_slides
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import SlideRecord, UsageError, natural_key
from wsi_fl.viewer.gallery import Exhibit, Gallery
from wsi_fl.viewer.site_layers import Prediction, SiteLayers, read_prediction


def build_gallery(
    study: Study,
    *,
    site: str | None = None,
    run: str | None = None,
    predictions: Path | None = None,
    pipeline: str | None = None,
) -> Gallery:
    """Return the gallery of a site's slides, or of predictions in a run or a folder.

    Args:
        pipeline: the pipeline of a site without a store.

    Raises:
        UsageError, WsiFlError: without slides to show, or where they may not be shown.
    """
    if run is None and predictions is None:
        if site is None:
            raise UsageError("view needs --site NAME for a site's slides, or --run RUN for predictions")
        return _build_site_gallery(study, site, pipeline)
    if pipeline is not None:
        raise UsageError("--pipeline is for the slides of a site; a run keeps its own")
    return _build_prediction_gallery(study, run, predictions, site)


def _build_site_gallery(study: Study, name: str, pipeline_name: str | None) -> Gallery:
    site, pipeline = study.load_site(name), study.load_pipeline(study.pipeline_name(pipeline_name))
    records, excluded = list_site(site.layout, resolve_sources(study, site))
    layers = SiteLayers(study, name, pipeline)
    if layers.store is None and layers.mosaic is None:
        message = f"has no store yet (`wsi-fl tile --site {name}`); its slides are shown as they are"
        print_message(f"  site {name} {message}", "yellow")
    exhibits = [
        Exhibit(
            record.slide,
            record.path,
            layers.summarize_slide(record.slide),
            None,
            record.mpp_override,
            layers.list_overlays(record),
        )
        for record in records
    ]
    exhibits += [Exhibit(slide.slide, None, slide.reason) for slide in excluded]
    return Gallery(f"slides of {name}", _sort_exhibits(exhibits), _real_names([site]))


def _build_prediction_gallery(study: Study, run_name: str | None, folder: Path | None, site: str | None) -> Gallery:
    """Return the gallery of slides with predictions and layers of their site; without a site, of all visible sites."""
    predictions = _read_predictions(study, run_name, folder)
    run = RunFolder(study.find_run(run_name or str(predictions[0].score["run"])))
    study = restore_study(study, run)
    pipeline = load_run_pipeline(run.path / "config.toml")
    sites = [study.load_site(name) for name in _choose_sites(study, run, predictions, site)]
    site_slides = {prediction.name: _SiteSlides(study, prediction, pipeline) for prediction in sites}
    owners = _slide_owners(study)
    slides: dict[tuple[str, str], list[Prediction]] = {}
    for site_file in predictions:
        if site_file.site in site_slides:
            key = str(site_slides[site_file.site].find_file(site_file) or site_file.site), site_file.slide
            slides.setdefault(key, []).append(site_file)
    for site_file in predictions:
        key = str(_find_file(study, site_file)), site_file.slide
        if site_file.site not in site_slides and key in slides:
            has_left = site_file.score["model"] in ("proxy", "shared")
            if has_left or study.load_site(site_file.site).allows("private_model"):
                slides[key].append(site_file)
    names = study.site_names() if site is None else []
    visible = {*site_slides, *(name for name in names if study.load_site(name).allows("patches"))}
    exhibits = [_build_exhibit(site_slides[group[0].site], group, owners, visible) for group in slides.values()]
    patients = {
        *site_slides,
        *(name for exhibit in exhibits if exhibit.path for name in owners.get(resolve_slide_path(exhibit.path), ())),
    }
    real = _real_names(study.load_site(name) for name in sorted(patients, key=natural_key))
    return Gallery(f"{run.name} · {', '.join(site_slides)}", _sort_exhibits(exhibits), real)


class _SiteSlides:
    """The slides of a site with their records and layers."""

    def __init__(self, study: Study, site: SiteFile, pipeline: Pipeline) -> None:
        self._study, self.site = study, site
        self.layers = SiteLayers(study, site.name, pipeline)
        records = list_table_slides(study, site)  # predictions have the paths of their slides, too
        self._by_file = {record.path.resolve(): record for record in records}
        self._by_name = {record.slide: record.path.resolve() for record in records}

    def find_file(self, prediction: Prediction) -> Path | None:
        """Return the slide's path in the prediction, else of the site's slide of this name; None if missing."""
        return _find_file(self._study, prediction) or self._by_name.get(prediction.slide)

    def find_record(self, path: Path, name: str) -> SlideRecord:
        """Return the record of a slide in the site's table, by default as in `predict`."""
        site = self.site
        new = SlideRecord(path, name, "", site.name, "negative", False, mpp_override=site.mpp_override)
        return self._by_file.get(path, new)


def _build_exhibit(
    site_slides: _SiteSlides, predictions: Sequence[Prediction], owners: Mapping[Path, set[str]], visible: set[str]
) -> Exhibit:
    """Return a slide with its predictions; not shown where it belongs to another site that is not visible."""
    first = predictions[0]
    path = site_slides.find_file(first)
    if path is None:
        return Exhibit(first.slide, None, "the slide is not here", first.value)
    owner_names = owners.get(resolve_slide_path(path), set())
    if site_slides.site.name not in owner_names and (hidden := owner_names - visible):
        reason = f"a slide of {', '.join(sorted(hidden, key=natural_key))}, which is not shown here"
        return Exhibit(first.slide, None, reason, first.value)
    record = site_slides.find_record(path, first.slide)
    record = replace(record, mpp_override=first.mpp_l0 or record.mpp_override)
    models = [layer for prediction in predictions for layer in prediction.list_overlays()]
    note = " · ".join(part for part in (first.summary, site_slides.layers.summarize_slide(record.slide)) if part)
    overlays = [*models, *site_slides.layers.list_overlays(record)]
    return Exhibit(first.slide, path, note, first.value, record.mpp_override, overlays)


def _read_predictions(study: Study, run_name: str | None, folder: Path | None) -> list[Prediction]:
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; --predictions takes the folder that `wsi-fl predict` wrote")
        paths, place = [*folder.glob("score.json"), *folder.glob("*/score.json")], str(folder)
    else:
        assert run_name is not None
        run = study.find_run(run_name)
        paths, place = [*run.glob("predictions/*/*/score.json")], run.name
    predictions = [read_prediction(path.parent) for path in sorted(paths)]
    if not predictions:
        raise UsageError(
            f"{place}: no prediction yet; make one with `wsi-fl predict {run_name or 'RUN'} --site S --slide X.svs`"
        )
    return predictions


def _choose_sites(study: Study, run: RunFolder, predictions: Sequence[Prediction], site: str | None) -> list[str]:
    names = sorted({prediction.site for prediction in predictions}, key=natural_key)
    if site is not None:
        if site not in names:
            raise UsageError(
                f"{run.name}: no prediction of site {site}; there are some of {', '.join(names)}. Make one with "
                f"`wsi-fl predict {run.name} --site {site} --slide X.svs`"
            )
        return [site]
    visible = names if len(names) == 1 else [name for name in names if study.load_site(name).allows("patches")]
    if not visible:
        raise UsageError(f"{run.name}: predictions of several real sites lie here; name one with --site")
    if omitted := ", ".join(name for name in names if name not in visible):
        print_message(f"  predictions of {omitted} are left out: real sites, each shown only with --site", "yellow")
    return visible


def _find_file(study: Study, prediction: Prediction) -> Path | None:
    """Return the path of the slide in its prediction, if it still exists."""
    path = study.root / str(prediction.score.get("path") or "?")
    return path.resolve() if path.exists() else None


def _slide_owners(study: Study) -> dict[Path, set[str]]:
    """Return the sites of a study by the slides that their files list."""
    owners: dict[Path, set[str]] = {}
    for site in map(study.load_site, study.site_names()):
        for path in list_slides(study, site) if site.slides is not None else ():
            owners.setdefault(resolve_slide_path(path), set()).add(site.name)
    return owners


def _sort_exhibits(exhibits: Iterable[Exhibit]) -> list[Exhibit]:
    return sorted(exhibits, key=lambda exhibit: natural_key(exhibit.name))


def _real_names(sites: Iterable[SiteFile]) -> list[str]:
    return [site.name for site in sites if site.real]
