"""`synthesize check`: whether a site's generator copies its training images. A verdict, histograms of distances
(Fig. 3), projected images (Fig. 4) and one page."""

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
from wsi_fl.report.formatting import format_number
from wsi_fl.report.inline_pictures import encode_patch, enlarge_patch, render_grid
from wsi_fl.report.templates import fill_template
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.site_data import is_source_store, open_store
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.copying_evidence import (
    COPY_THRESHOLD,
    CRITERIA,
    MIN_HELD_OUT,
    frechet_distance,
    kernel_distance,
    list_doubts,
)
from wsi_fl.synthesis.folder import Document
from wsi_fl.synthesis.stages.generator_types import (
    HELD_OUT,
    CheckCase,
    CheckEvidence,
    GeneratorType,
    load_images,
    select_shared_phase,
)
from wsi_fl.synthesis.stages.synthetic_stores import transpose_images
from wsi_fl.system.files import write_bytes, write_sealed, write_text
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import UsageError, WsiFlError

_PAGE_IMAGES = 9
_ENCODER_BATCH = 64
_HISTOGRAM_BINS = 24
_SET_NAMES = {
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
    start_time = time.perf_counter()
    folder, document = kind.require_trained(study, site)
    watcher, resolution = watcher or SilentProgress(), document["settings"]["shape"]["resolution"]
    with site_lock(folder.path, site) as work:
        with open_store(study, site) as store:
            if not is_source_store(store, document["store"]):
                raise UsageError(f"site {site}: its store was made anew since the generator was trained; train --again")
            training, held_out = (load_images(store, resolution, *splits) for splits in (("train",), HELD_OUT))
        if (n_held_out := len(held_out)) < MIN_HELD_OUT:
            watcher.print_message(
                f"  site {site} holds out {n_held_out} images; {MIN_HELD_OUT} are the least for a verdict"
            )
        case = CheckCase(study, pipeline, site, folder, document, training, held_out, watcher)
        evidence = kind.collect_evidence(case)
        result = _build_document(case, evidence)
        result["seconds"] = time.perf_counter() - start_time
        work.require_presence()
        _write_page(case, evidence, result)
    return result


def _build_document(case: CheckCase, evidence: CheckEvidence) -> Document:
    """Return the document: measurements of each network, and the verdict on the shareable one."""
    phase, comparisons, lpips = select_shared_phase(case.document), evidence.comparisons, evidence.lpips
    findings = list_doubts(comparisons.get(phase, {}), evidence.n_fresh)
    reasons = list(dict.fromkeys([*evidence.reasons, *findings]))
    sets = {**evidence.samples, "training": evidence.training.images}
    quality, note = compute_quality(case.study, case.pipeline, evidence.held_out.images, sets)
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
        "copy_below": COPY_THRESHOLD if comparisons else None,
        "copying": {
            name: {distance_name: asdict(comparison) for distance_name, comparison in by_distance.items()}
            for name, by_distance in comparisons.items()
        },
        **evidence.document,
        "quality": quality,
        "notes": [*([note] if note else []), *notes, *evidence.notes],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def compute_quality(
    study: Study, pipeline: Pipeline, held_out: Tensor, sets: Mapping[str, Tensor]
) -> tuple[dict[str, object], str | None]:
    """Return ({"encoder", "n", name: {"fid", "kid"}}, None), or ({}, the reason) without FID and KID.

    Args:
        held_out: uint8[n, c, h, h]; at most n images of each set are used.
    """
    if len(held_out) < MIN_HELD_OUT:
        return {}, "FID and KID need held-out images"
    try:
        encoder = load_encoder(study, pipeline, "features", torch.get_num_threads())
    except WsiFlError as error:
        return {}, f"FID and KID were not computed: {error}"

    def embed_images(images: Tensor) -> NDArray[np.float32]:
        pixels = _rgb_pixels(images)
        return encode_batches((pixels[k : k + _ENCODER_BATCH] for k in range(0, len(pixels), _ENCODER_BATCH)), encoder)

    target = embed_images(held_out)
    scores: dict[str, object] = {"encoder": encoder.label, "n": len(held_out)}
    for name, images in sets.items():
        embeddings = embed_images(images[: len(held_out)])
        scores[name] = {"fid": frechet_distance(embeddings, target), "kid": kernel_distance(embeddings, target)}
    return scores, None


def _write_page(case: CheckCase, evidence: CheckEvidence, result: Document) -> None:
    """Write pictures and page first, the verdict last, so a verdict always has its page."""
    folder, (key, picture) = case.folder.path / "check", evidence.picture
    names = {"page": "index.html", "histograms": "histograms.png", key: picture}
    result["files"] = {name: case.study.relative_path(folder / file) for name, file in names.items()}
    rows = [(_SET_NAMES[name], _rgb_pixels(images)) for name, images in evidence.image_rows]
    samples = [(_SET_NAMES[name], _rgb_pixels(images[:_PAGE_IMAGES])) for name, images in evidence.samples.items()]
    write_bytes(folder / names["histograms"], _render_histogram_png(evidence))
    write_bytes(folder / picture, render_grid([images for _, images in rows]))
    context = {
        "document": result,
        "names": _SET_NAMES,
        "chart": _render_histogram(evidence),
        "rows": [(name, [encode_patch(enlarge_patch(patch)) for patch in patches]) for name, patches in rows],
        "samples": [(name, [encode_patch(enlarge_patch(patch)) for patch in patches]) for name, patches in samples],
    }
    write_text(folder / names["page"], fill_template("check", context, Path(__file__).parent))
    write_sealed(case.folder.check_path, result)


def _render_histogram(evidence: CheckEvidence) -> Chart:
    """Return Fig. 3 as SVG in the page's colours."""
    distances, axis = evidence.distances, evidence.axis
    medians = [
        f"{_SET_NAMES[name]} median {format_number(float(np.median(values)), 3)}" for name, values in distances.items()
    ]
    with figures.open_figure(width_in=6.4, height_in=2.9) as (figure, axes):
        _draw_histogram(axes, evidence, figures.TOKENS)
        return Chart(figures.render_svg(figure, axis), f"Histograms: {axis}; {'; '.join(medians)}.")


def _render_histogram_png(evidence: CheckEvidence) -> bytes:
    """Return Fig. 3 as PNG for slides and papers."""
    with mpl.rc_context(build_png_style()):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        _draw_histogram(figure.add_subplot(), evidence, load_palette())
        return figures.render_png(figure)


def _draw_histogram(axes: Axes, evidence: CheckEvidence, colors: Mapping[str, str]) -> None:
    all_distances = np.concatenate(list(evidence.distances.values()))
    edges = np.linspace(0.0, float(all_distances.max()) * 1.05 + 1e-6, _HISTOGRAM_BINS + 1).tolist()
    for k, (name, values) in enumerate(evidence.distances.items()):
        color, weights = colors[f"s{k}"], np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, color=color, alpha=0.55, label=_SET_NAMES[name])
        axes.axvline(float(np.median(values)), color=color, lw=1.4, ls="--")
    axes.set_xlabel(f"{evidence.axis} (dashed: median)")
    axes.set_ylabel("share of images")
    axes.legend(frameon=False, fontsize=8.5)


def _rgb_pixels(images: Tensor) -> NDArray[np.uint8]:
    """Return uint8[n, c, h, w] as uint8[n, h, w, 3]."""
    (pixels,) = transpose_images([images.expand(-1, 3, -1, -1)])
    return pixels


def render_verdict_lines(document: Document) -> Lines:
    """Yield the verdict, its reasons and the path of the page."""
    passed = document["passed"]
    yield TextLine(
        f"site {document['site']}: the check is {'passed' if passed else 'NOT passed'}", "green" if passed else "red"
    )
    for reason in document["reasons"]:
        yield TextLine(f"  {reason}", "red")
    for name in ("before", "after", "denoiser"):
        if entry := (document["projection"] or {}).get(name):
            yield TextLine(
                f"  projections {name}: median LPIPS {entry['median']:.4f}, "
                f"5 % quantile {entry['q05']:.4f} (n = {entry['n']})"
            )
        if entry := document["quality"].get(name):
            yield TextLine(
                f"  quality {name}: FID {format_number(entry['fid'], 1)}, KID {format_number(entry['kid'], 4)}"
            )
    if memorization := document.get("memorization"):
        yield TextLine(
            f"  nearest training image: least {memorization['least']:.4f}, median {memorization['median']:.4f} "
            f"(held-out images {memorization['held_out_least']:.4f}, {memorization['held_out_median']:.4f}); "
            f"below 0.1: {memorization['below_paper']} of {memorization['n_generated']}"
        )
    for note in document["notes"]:
        yield TextLine(f"  {note}", "yellow")
    yield TextLine(f"  {document['files']['page']}")
