"""`synthesize check`: does a site's generator copy its training images? A verdict, histograms of distances (Fig. 3),
projected images (Fig. 4) and one page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.models.encoder import encode_batches
from wsi_fl.report import figures
from wsi_fl.report.figures import Chart, build_png_style, load_palette
from wsi_fl.report.fill import fill_template
from wsi_fl.report.pictures import encode_patch, enlarge_patch, render_grid
from wsi_fl.report.words import format_number
from wsi_fl.stages.site.data import is_source_store, open_store
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.work.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import (
    COPY_THRESHOLD,
    CRITERIA,
    MIN_HELD_OUT,
    frechet_distance,
    kernel_distance,
    list_doubts,
)
from wsi_fl.synthesis.stages.kinds import HELD_OUT, Case, Document, Evidence, GeneratorType, pictures_of, shared_phase
from wsi_fl.synthesis.stages.sample import as_pixels
from wsi_fl.system.files import site_lock, write_bytes, write_sealed, write_text
from wsi_fl.types import UsageError, WsiFlError

_SHOWN = 9
_ENCODED = 64
_BINS = 24
_NAMES = {
    "before": "without the privacy loss",
    "after": "with the privacy loss",
    "real": "real images",
    "denoiser": "diffusion model",
    "held_out": "held-out real images",
}


def check_generator(
    study: Study, pipeline: Pipeline, kind: GeneratorType, site: str, *, watcher: Watcher | None = None
) -> Document:
    """Write `check.json` and `check/` beside a site's generator; return the verdict, the `--json` document."""
    began = time.perf_counter()
    folder, document = kind.trained(study, site)
    watcher, resolution = watcher or SilentProgress(), document["settings"]["shape"]["resolution"]
    with site_lock(folder.path, site):
        with open_store(study, site) as store:
            if not is_source_store(store, document["store"]):
                raise UsageError(f"site {site}: its store was made anew since the generator was trained; train --again")
            training, held_out = (pictures_of(store, resolution, *splits) for splits in (("train",), HELD_OUT))
        if (n := len(held_out)) < MIN_HELD_OUT:
            watcher.print_message(f"  site {site} holds out {n} images; {MIN_HELD_OUT} are the least for a verdict")
        case = Case(study, pipeline, site, folder, document, training, held_out, watcher)
        evidence = kind.evidence(case)
        result = _result(case, evidence)
        result["seconds"] = time.perf_counter() - began
        _write(case, evidence, result)
    return result


def _result(case: Case, evidence: Evidence) -> Document:
    """The document: what is known of each generator, and the verdict on the one that may be shared."""
    phase, compared, lpips = shared_phase(case.document), evidence.comparisons, evidence.lpips
    found = list_doubts(compared.get(phase, {}), evidence.n_fresh)
    reasons = list(dict.fromkeys([*evidence.reasons, *found]))
    sets = {**evidence.samples, "training": evidence.training.images}
    quality, note = quality_of(case.study, case.pipeline, evidence.held_out.images, sets)
    notes = ["A passed check is evidence against copying, not differential privacy: it bounds nothing."]
    if lpips is not None and not lpips.trained:
        notes.append(f"LPIPS ran on an {lpips.label}; its distances are not the paper's.")
    return {
        "site": case.site,
        "passed": not reasons,
        "reasons": reasons,
        "criteria": CRITERIA,
        "generator": {"phase": phase, "sha256": case.folder.compute_digest(phase)},
        "lpips": lpips.label if lpips else None,
        "n_training": len(evidence.training),
        "n_held_out": len(evidence.held_out),
        "n_samples": len(evidence.samples[phase]),
        "copy_below": COPY_THRESHOLD if compared else None,
        "copying": {name: {what: asdict(one) for what, one in both.items()} for name, both in compared.items()},
        **evidence.document,
        "quality": quality,
        "notes": [*([note] if note else []), *notes, *evidence.notes],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def quality_of(
    study: Study, pipeline: Pipeline, held_out: Tensor, sets: Mapping[str, Tensor]
) -> tuple[dict[str, object], str | None]:
    """({"encoder", "n", name: {"fid", "kid"}}, None), or ({}, why they could not be computed).

    Args:
        held_out: uint8[n, c, h, h]; of each set, of the same kind, as many are taken at most.
    """
    if len(held_out) < MIN_HELD_OUT:
        return {}, "FID and KID need held-out images"
    try:
        encoder = load_encoder(study, pipeline, "features", torch.get_num_threads())
    except WsiFlError as error:
        return {}, f"FID and KID were not computed: {error}"

    def features(images: Tensor) -> NDArray[np.float32]:
        pixels = _pixels(images)
        return encode_batches((pixels[k : k + _ENCODED] for k in range(0, len(pixels), _ENCODED)), encoder)

    target = features(held_out)
    rows: dict[str, object] = {"encoder": encoder.label, "n": len(held_out)}
    for name, images in sets.items():
        mine = features(images[: len(held_out)])
        rows[name] = {"fid": frechet_distance(mine, target), "kid": kernel_distance(mine, target)}
    return rows, None


def _write(case: Case, evidence: Evidence, result: Document) -> None:
    """Pictures first, the verdict last: whoever finds it finds them too."""
    place, (key, picture) = case.folder.path / "check", evidence.picture
    names = {"page": "index.html", "histograms": "histograms.png", key: picture}
    result["files"] = {name: case.study.relative_path(place / file) for name, file in names.items()}
    rows = [(_NAMES[name], _pixels(images)) for name, images in evidence.rows]
    samples = [(_NAMES[name], _pixels(images[:_SHOWN])) for name, images in evidence.samples.items()]
    write_bytes(place / names["histograms"], _histogram_png(evidence))
    write_bytes(place / picture, render_grid([images for _, images in rows]))
    context = {
        "document": result,
        "names": _NAMES,
        "chart": _histogram(evidence),
        "rows": [(name, [encode_patch(enlarge_patch(one)) for one in patches]) for name, patches in rows],
        "samples": [(name, [encode_patch(enlarge_patch(one)) for one in patches]) for name, patches in samples],
    }
    write_text(place / names["page"], fill_template("check", context, Path(__file__).parent))
    write_sealed(case.folder.check_path, result)


def _histogram(evidence: Evidence) -> Chart:
    """Fig. 3 as SVG in the page's colours."""
    distances, axis = evidence.distances, evidence.axis
    said = [f"{_NAMES[name]} median {format_number(float(np.median(d)), 3)}" for name, d in distances.items()]
    with figures.open_figure(width_in=6.4, height_in=2.9) as (figure, axes):
        _draw(axes, evidence, figures.TOKENS)
        return Chart(figures.render_svg(figure, axis), f"Histograms: {axis}; {'; '.join(said)}.")


def _histogram_png(evidence: Evidence) -> bytes:
    """Fig. 3 for slides and papers."""
    with mpl.rc_context(build_png_style()):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        _draw(figure.add_subplot(), evidence, load_palette())
        return figures.render_png(figure)


def _draw(axes: Axes, evidence: Evidence, colors: Mapping[str, str]) -> None:
    everything = np.concatenate(list(evidence.distances.values()))
    edges = np.linspace(0.0, float(everything.max()) * 1.05 + 1e-6, _BINS + 1).tolist()
    for k, (name, values) in enumerate(evidence.distances.items()):
        color, weights = colors[f"s{k}"], np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, color=color, alpha=0.55, label=_NAMES[name])
        axes.axvline(float(np.median(values)), color=color, lw=1.4, ls="--")
    axes.set_xlabel(f"{evidence.axis} (dashed: median)")
    axes.set_ylabel("share of images")
    axes.legend(frameon=False, fontsize=8.5)


def _pixels(images: Tensor) -> NDArray[np.uint8]:
    """uint8[n, c, h, w] → uint8[n, h, w, 3]."""
    (pixels,) = as_pixels([images.expand(-1, 3, -1, -1)])
    return pixels


def check_lines(document: Document) -> Lines:
    """Yield the verdict, its reasons, and where the pictures are."""
    passed = document["passed"]
    yield TextLine(
        f"site {document['site']}: the check is {'passed' if passed else 'NOT passed'}", "green" if passed else "red"
    )
    for reason in document["reasons"]:
        yield TextLine(f"  {reason}", "red")
    for name in ("before", "after", "denoiser"):
        if one := (document["projection"] or {}).get(name):
            yield TextLine(
                f"  projections {name}: median LPIPS {one['median']:.4f}, "
                f"5 % quantile {one['q05']:.4f} (n = {one['n']})"
            )
        if one := document["quality"].get(name):
            yield TextLine(f"  quality {name}: FID {format_number(one['fid'], 1)}, KID {format_number(one['kid'], 4)}")
    if z := document.get("memorization"):
        yield TextLine(
            f"  nearest training image: least {z['least']:.4f}, median {z['median']:.4f} (held-out images "
            f"{z['held_out_least']:.4f}, {z['held_out_median']:.4f}); "
            f"below 0.1: {z['below_paper']} of {z['n_generated']}"
        )
    for note in document["notes"]:
        yield TextLine(f"  {note}", "yellow")
    yield TextLine(f"  {document['files']['page']}")
