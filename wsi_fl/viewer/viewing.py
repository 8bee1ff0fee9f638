"""What `view` shows: the slides of a site, or those that were predicted, with what lies over each.

Whoever names a site sees that site's slides and nobody else's. Without a site, a run shows its predictions as its
report shows patches: of the only site that has some here, else of the sites that allow `patches`; their slides may then
be those of any site that allows it. What another site's model says of a slide is shown where that model left its
hospital, or may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.layouts import list_site
from wsi_fl.slides.reading.formats.dicom import place_of
from wsi_fl.stages.prepare.sources import sources_of
from wsi_fl.stages.site.data import slides_of
from wsi_fl.stages.site.party import as_begun
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SlideRecord, UsageError, natural
from wsi_fl.viewer.gallery import Exhibit, Gallery
from wsi_fl.viewer.site_layers import Prediction, SiteLayers, of_folder


def gallery(
    study: Study,
    *,
    site: str | None = None,
    run: str | None = None,
    predictions: Path | None = None,
    pipeline: str | None = None,
) -> Gallery:
    """Return what a viewer shows: a site's slides, or those that were predicted in a run or into a folder.

    Args:
        pipeline: how the site's slides are cut, where it has no store.

    Raises:
        UsageError, WsiFlError: when there is nothing to show, or it may not be shown.
    """
    if run is None and predictions is None:
        if site is None:
            raise UsageError("view needs --site NAME for a site's slides, or --run RUN for predictions")
        return _gallery_of_site(study, site, pipeline)
    if pipeline is not None:
        raise UsageError("--pipeline is for the slides of a site; a run keeps its own")
    return _gallery_of_predictions(study, run, predictions, site)


def _gallery_of_site(study: Study, name: str, pipeline_name: str | None) -> Gallery:
    site, pipeline = study.site(name), study.pipeline(study.pipeline_name(pipeline_name))
    records, aside = list_site(site.layout, sources_of(study, site))
    layers = SiteLayers(study, name, pipeline)
    if layers.store is None and layers.mosaic is None:
        said = f"has no store yet (`wsi-fl tile --site {name}`); its slides are shown as they are"
        say(f"  site {name} {said}", "yellow")
    exhibits = [
        Exhibit(one.slide, one.path, layers.note(one.slide), None, one.mpp_override, layers.over(one))
        for one in records
    ]
    exhibits += [Exhibit(one.slide, None, one.reason) for one in aside]
    return Gallery(f"slides of {name}", _ordered(exhibits), _real([site]))


def _gallery_of_predictions(
    study: Study, run_name: str | None, folder: Path | None, site: str | None
) -> Gallery:
    """The slides that were predicted, with what models said of them and what their site kept of them.

    Without a site, predictions that may be shown together.
    """
    found = _predictions(study, run_name, folder)
    run = RunFolder(study.run(run_name or str(found[0].score["run"])))
    study = as_begun(study, run)
    pipeline = load_pipeline(run.path / "config.toml")
    sites = [study.site(name) for name in _shown_sites(study, run, found, site)]
    rooms = {one.name: _Room(study, one, pipeline) for one in sites}
    owners = _owners(study)
    slides: dict[tuple[str, str], list[Prediction]] = {}
    for one in found:
        if one.site in rooms:
            key = str(rooms[one.site].file(one) or one.site), one.slide
            slides.setdefault(key, []).append(one)
    for one in found:
        key = str(_stated(study, one)), one.slide
        if one.site not in rooms and key in slides and _may_be_seen(study, one):
            slides[key].append(one)
    names = study.site_names() if site is None else []
    whose = {*rooms, *(name for name in names if study.site(name).allows("patches"))}
    exhibits = [_exhibit(rooms[some[0].site], some, owners, whose) for some in slides.values()]
    patients = {
        *rooms,
        *(name for one in exhibits if one.path for name in owners.get(place_of(one.path), ())),
    }
    real = _real(study.site(name) for name in sorted(patients, key=natural))
    return Gallery(f"{run.name} · {', '.join(rooms)}", _ordered(exhibits), real)


class _Room:
    """A site's slides, and what is known of them."""

    def __init__(self, study: Study, site: SiteFile, pipeline: Pipeline) -> None:
        self._study, self.site = study, site
        self.layers = SiteLayers(study, site.name, pipeline)
        try:
            records = list_site(site.layout, sources_of(study, site))[0]
        except UsageError:  # the archive is elsewhere by now; predictions say where their slides were
            records = []
        self._by_file = {record.path.resolve(): record for record in records}
        self._by_name = {record.slide: record.path.resolve() for record in records}

    def file(self, prediction: Prediction) -> Path | None:
        """Where the slide is: where it was predicted, else the site's slide of that name; None for nowhere."""
        return _stated(self._study, prediction) or self._by_name.get(prediction.slide)

    def record(self, path: Path, name: str) -> SlideRecord:
        """What the site's table says of a slide; of others what `predict` assumes."""
        site = self.site
        new = SlideRecord(path, name, "", site.name, "negative", False, mpp_override=site.mpp_override)
        return self._by_file.get(path, new)


def _exhibit(
    room: _Room, predictions: Sequence[Prediction], owners: Mapping[Path, set[str]], whose: set[str]
) -> Exhibit:
    """One slide with all that is said of it; not shown where it is no slide of the room's site and one of a site
    that is not among `whose`."""
    first = predictions[0]
    path = room.file(first)
    if path is None:
        return Exhibit(first.slide, None, "the slide is not here", first.value)
    theirs = owners.get(place_of(path), set())
    if room.site.name not in theirs and (hidden := theirs - whose):
        said = f"a slide of {', '.join(sorted(hidden, key=natural))}, which is not shown here"
        return Exhibit(first.slide, None, said, first.value)
    record = room.record(path, first.slide)
    models = [layer for one in predictions for layer in one.overlays()]
    note = " · ".join(part for part in (first.words, room.layers.note(record.slide)) if part)
    overlays = [*models, *room.layers.over(record)]
    return Exhibit(first.slide, path, note, first.value, record.mpp_override, overlays)


def _predictions(study: Study, run_name: str | None, folder: Path | None) -> list[Prediction]:
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; --predictions takes the folder that `wsi-fl predict` wrote"
            )
        paths, where = [*folder.glob("score.json"), *folder.glob("*/score.json")], str(folder)
    else:
        assert run_name is not None
        run = study.run(run_name)
        paths, where = [*run.glob("predictions/*/*/score.json")], run.name
    found = [of_folder(path.parent) for path in sorted(paths)]
    if not found:
        raise UsageError(
            f"{where}: no prediction yet; make one with `wsi-fl predict {run_name or 'RUN'} --site S --slide X.svs`"
        )
    return found


def _shown_sites(study: Study, run: RunFolder, found: Sequence[Prediction], site: str | None) -> list[str]:
    names = sorted({one.site for one in found}, key=natural)
    if site is not None:
        if site not in names:
            raise UsageError(
                f"{run.name}: no prediction of site {site}; there are some of {', '.join(names)}. Make one with "
                f"`wsi-fl predict {run.name} --site {site} --slide X.svs`"
            )
        return [site]
    shown = names if len(names) == 1 else [name for name in names if study.site(name).allows("patches")]
    if not shown:
        raise UsageError(f"{run.name}: predictions of several real sites lie here; name one with --site")
    if left := ", ".join(name for name in names if name not in shown):
        say(f"  predictions of {left} are left out: real sites, to be shown alone with --site", "yellow")
    return shown


def _may_be_seen(study: Study, prediction: Prediction) -> bool:
    return prediction.score["model"] in ("proxy", "shared") or study.site(prediction.site).allows(
        "private_model"
    )


def _stated(study: Study, prediction: Prediction) -> Path | None:
    """The slide's file as its prediction names it, where it still is there."""
    path = study.root / str(prediction.score.get("path") or "?")
    return path.resolve() if path.exists() else None


def _owners(study: Study) -> dict[Path, set[str]]:
    """Place of a slide → the sites whose files name it, of all sites of a study."""
    owners: dict[Path, set[str]] = {}
    for site in map(study.site, study.site_names()):
        for path in slides_of(study, site) if site.slides is not None else ():
            owners.setdefault(place_of(path), set()).add(site.name)
    return owners


def _ordered(exhibits: Iterable[Exhibit]) -> list[Exhibit]:
    return sorted(exhibits, key=lambda one: natural(one.name))


def _real(sites: Iterable[SiteFile]) -> list[str]:
    return [site.name for site in sites if site.real]
