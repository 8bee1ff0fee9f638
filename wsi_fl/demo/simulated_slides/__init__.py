"""A simulated archive: H&E slides of lymph nodes, outlines of their metastases, labels.

Its layout is that of Camelyon17, and it needs no download. The slides are drawings: good for trying the software,
never for claims about medicine.
"""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from skimage.measure import find_contours

from wsi_fl.demo.simulated_slides.tiff_writer import write_pyramid as write_pyramid
from wsi_fl.demo.simulated_slides.tissue_drawing import (
    COARSE_PX,
    MPP,
    Anatomy,
    draw_anatomy,
    draw_picture,
    scanner_profile,
    texture_bank,
)
from wsi_fl.demo.simulated_slides.tissue_drawing import tumor_mask as tumor_mask
from wsi_fl.system.files import write_text
from wsi_fl.system.machine import n_cores
from wsi_fl.types import UsageError

_PATIENTS_PER_CENTER = 20
"""Camelyon17's rule: centre = patient number // 20."""
_MIN_PX = 512
_MAX_WORKERS = 4  # about 300 MB each at the default size

_Outline = tuple[str, NDArray[np.float64]]


@dataclass(frozen=True)
class _SimulatedSlide:
    """The parameters of one simulated slide."""

    site: int
    patient: int
    """Number over all sites: 20 · site + number within the site."""
    node: int
    """0 is healthy; 1 holds metastases where the patient has any."""
    size_px: int
    seed: int
    has_metastases: bool = True
    """Whether the patient has metastases."""

    @property
    def name(self) -> str:
        """File name without suffix, as in Camelyon17."""
        return f"patient_{self.patient:03d}_node_{self.node}"

    @property
    def is_positive(self) -> bool:
        """Whether the slide holds tumour."""
        return self.node == 1 and self.has_metastases

    def make_generator(self, purpose: int) -> Generator:
        """Return the generator of this slide for a purpose: 0 anatomy, 1 pixels."""
        return np.random.default_rng([self.seed, self.patient, self.node, purpose])

    def build_anatomy(self) -> Anatomy:
        """Return the places of its tissues."""
        return draw_anatomy(self.make_generator(0), self.size_px, self.is_positive)


def plan_slides(
    n_sites: int, patients_per_site: int, size_px: int, seed: int, metastasis_shares: Sequence[float] = ()
) -> list[_SimulatedSlide]:
    """Return every slide of an archive, two per patient.

    Args:
        metastasis_shares: share of each site's patients with metastases, the first ones; all by default.

    Raises:
        UsageError: a number out of range.

    Example:
        >>> [s.name for s in plan_slides(2, 1, 1024, seed=0)][1:3]
        ['patient_000_node_1', 'patient_020_node_0']
    """
    if n_sites < 1:
        raise UsageError(f"n_sites is {n_sites}: an archive needs at least one site")
    if not 1 <= patients_per_site <= _PATIENTS_PER_CENTER:
        raise UsageError(f"patients_per_site is {patients_per_site}: choose 1 to {_PATIENTS_PER_CENTER}")
    if size_px < _MIN_PX or size_px % COARSE_PX:
        raise UsageError(f"size_px is {size_px}: choose a multiple of {COARSE_PX}, at least {_MIN_PX}")
    return [
        _SimulatedSlide(
            site,
            _PATIENTS_PER_CENTER * site + p,
            node,
            size_px,
            seed,
            not metastasis_shares or p < round(metastasis_shares[site] * patients_per_site),
        )
        for site in range(n_sites)
        for p in range(patients_per_site)
        for node in (0, 1)
    ]


def simulate_slide(slide: _SimulatedSlide) -> NDArray[np.uint8]:
    """Return the level-0 pixels [size_px, size_px, 3] of a slide, before JPEG."""
    return draw_picture(slide.make_generator(1), slide.build_anatomy(), scanner_profile(slide.site))


def trace_outlines(anatomy: Anatomy) -> list[_Outline]:
    """Return the tumour's edge as (group, [n, 2] level-0 (x, y)): islands in `metastases`, holes (last) in `normal`."""
    if anatomy.tumor is None:
        return []
    rings = []
    for contour in find_contours(anatomy.tumor, 0.0):
        # A node lies at the middle of its square, hence the half.
        xy = (contour[:-1, ::-1] + 0.5) * COARSE_PX
        x, y = xy.T
        area = 0.5 * float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y))
        # find_contours goes around the tumour one way and around its holes the other.
        rings.append(("metastases" if area > 0 else "normal", xy))
    return sorted(rings, key=lambda outline: outline[0])


def _format_asap_xml(rings: list[_Outline]) -> str:
    """Return outlines in the XML of ASAP, the annotation tool of the Camelyon challenges."""
    root = ET.Element("ASAP_Annotations")
    annotations, groups = (ET.SubElement(root, name) for name in ("Annotations", "AnnotationGroups"))
    for i, (group, xy) in enumerate(rings):
        ring = {"Name": f"Annotation {i}", "Type": "Polygon", "PartOfGroup": group, "Color": "#F4FA58"}
        coordinates = ET.SubElement(ET.SubElement(annotations, "Annotation", ring), "Coordinates")
        for k, (x, y) in enumerate(xy):
            ET.SubElement(coordinates, "Coordinate", {"Order": str(k), "X": f"{x:.3f}", "Y": f"{y:.3f}"})
    for group, color in (("metastases", "#ff0000"), ("normal", "#00ff00")):
        element = ET.SubElement(groups, "Group", {"Name": group, "PartOfGroup": "None", "Color": color})
        ET.SubElement(element, "Attributes")
    ET.indent(root, "\t")
    return f'<?xml version="1.0"?>\n{ET.tostring(root, "unicode")}\n'


def _write_slide(out: Path, slide: _SimulatedSlide) -> None:
    """Write one slide; the outlines of a tumour first, so that no positive slide lacks them."""
    anatomy = slide.build_anatomy()
    outline_path = out / "annotations" / f"{slide.name}.xml"
    if slide.is_positive:
        write_text(outline_path, _format_asap_xml(trace_outlines(anatomy)))
    else:
        outline_path.unlink(missing_ok=True)
    picture = draw_picture(slide.make_generator(1), anatomy, scanner_profile(slide.site))
    write_pyramid(out / "training" / f"center_{slide.site}" / f"{slide.name}.tif", picture, MPP)


def _format_stages_csv(slides: list[_SimulatedSlide]) -> str:
    """Return Camelyon17's table: a row per patient, then one per slide."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("patient", "stage"))
    for slide in slides:
        if slide.node == 0:
            rows.writerow((f"patient_{slide.patient:03d}.zip", "pN1" if slide.has_metastases else "pN0"))
        rows.writerow((f"{slide.name}.tif", "macro" if slide.is_positive else "negative"))
    return text.getvalue()


def simulate_archive(
    out: str | Path,
    *,
    n_sites: int = 4,
    patients_per_site: int = 5,
    size_px: int = 4096,
    seed: int = 0,
    metastasis_shares: Sequence[float] = (),
    only_site: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Write a simulated archive in the layout of Camelyon17 into `out`; return `out`.

    Writes `training/center_K/patient_PPP_node_N.tif`, `annotations/patient_PPP_node_N.xml` (positive slides) and, last,
    `stages.csv`. The same arguments give the same bytes.

    Args:
        size_px: side of a slide in level-0 pixels of 0.5 µm.
        metastasis_shares: share of each site's patients with metastases; all by default.
        only_site: write only the slides of this site, the same as among `n_sites`.
        progress: called after each slide, from the calling thread, with the numbers of finished and of all slides and
            a line of text.

    Raises:
        UsageError: a number out of range.
    """
    out = Path(out)
    slides = [
        slide
        for slide in plan_slides(n_sites, patients_per_site, size_px, seed, metastasis_shares)
        if only_site in (None, slide.site)
    ]
    (out / "annotations").mkdir(parents=True, exist_ok=True)
    for site in {slide.site for slide in slides}:
        (out / "training" / f"center_{site}").mkdir(parents=True, exist_ok=True)
    texture_bank()
    # Threads suffice: numpy, scipy and the JPEG library work outside the interpreter lock.
    with ThreadPoolExecutor(min(_MAX_WORKERS, n_cores())) as pool:
        jobs = pool.map(lambda slide: _write_slide(out, slide), slides)
        for i, (slide, _) in enumerate(zip(slides, jobs, strict=True), 1):
            if progress:
                progress(i, len(slides), f"{slide.name}.tif ({i} of {len(slides)})")
    write_text(out / "stages.csv", _format_stages_csv(slides))
    return out
