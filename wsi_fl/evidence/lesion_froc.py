"""Free-response ROC of detected lesions, as the Camelyon16 challenge scored them.

A detection inside a lesion finds it, and the most probable one counts; a detection elsewhere is a false positive. The
score is the mean sensitivity at 1/4, 1/2, 1, 2, 4 and 8 false positives per slide.

Two rules of counting are in use, and differ. The challenge's page and its program `Evaluation_FROC.py` count the false
positives of all slides. The paper (Ehteshami Bejnordi et al., "Diagnostic assessment of deep learning algorithms for
detection of lymph node metastases in women with breast cancer", JAMA 318, 2017) counts those of slides without tumour.
`compute_sensitivities` takes either.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.outline_files import list_polygons

_Floats = NDArray[np.float64]

FALSE_POSITIVE_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False positives per slide at which the score takes the sensitivity."""
_MAX_GAP_UM = 75.0
"""Outlines less far apart are one lesion; about five tumour cells."""
_MIN_LESION_UM = 275.0
"""Major axis below which a lesion is isolated tumour cells: 200 µm, and the gap by which it has grown."""


class Lesions(NamedTuple):
    """The k lesions of a slide.

    Attributes:
        areas: shapely Polygons [k] in level-0 pixels, disjoint.
        isolated: bool[k], whether they are isolated tumour cells, which count neither as found nor as missed.
    """

    areas: NDArray[Any]
    isolated: NDArray[np.bool_]


class SlideDetections(NamedTuple):
    """The detections of a slide, by what they hit.

    Attributes:
        lesions: float64[k], highest probability in each lesion that counts; 0 where it was missed.
        false_positives: float64[m], probabilities of the detections outside all lesions.
    """

    lesions: _Floats
    false_positives: _Floats


def find_lesions(tumor: Any, mpp: float) -> Lesions:
    """Return the lesions of a slide: its outlines grown by 37.5 µm, united where they meet, and without holes.

    Args:
        tumor: a shapely (Multi)Polygon in level-0 pixels; empty for a slide without tumour.
        mpp: µm per level-0 pixel.
    """
    grown = shapely.buffer(tumor, _MAX_GAP_UM / 2 / mpp)
    filled = shapely.union_all([shapely.Polygon(part.exterior) for part in list_polygons(grown)])
    areas = list_polygons(filled)
    isolated = [_measure_major_axis(area) * mpp < _MIN_LESION_UM for area in areas]
    return Lesions(np.array(areas, object), np.array(isolated, bool))


def _measure_major_axis(area: Any) -> float:
    """Return the major axis of the ellipse with the second moments of a polygon without holes, in its unit.

    The moments are sums over the edges by Green's theorem; `regionprops` of scikit-image takes them over pixels.
    """
    x, y = (shapely.get_coordinates(area.exterior) - shapely.get_coordinates(area.centroid)).T
    cross = x[:-1] * y[1:] - x[1:] * y[:-1]

    def compute_moment(a: _Floats, b: _Floats) -> float:
        products = 2 * a[:-1] * b[:-1] + a[:-1] * b[1:] + a[1:] * b[:-1] + 2 * a[1:] * b[1:]
        return float((cross * products).sum() / (12 * cross.sum()))

    covariance = [[compute_moment(x, x), compute_moment(x, y)], [compute_moment(x, y), compute_moment(y, y)]]
    return 4 * sqrt(np.linalg.eigvalsh(covariance)[-1])


def select_detections(centers_l0: _Floats, probability: _Floats, radius_l0: float) -> NDArray[np.int64]:
    """Return the rows of the patches that are detections, by non-maximum suppression, most probable first.

    The most probable patch is a detection, and patches whose centres [n, 2] are no farther from its centre than
    `radius_l0` are none; then the most probable one of the others, and so on. Patches of probability 0 are none.
    """
    from scipy.spatial import cKDTree

    tree, is_open, rows = cKDTree(centers_l0), probability > 0, []
    for row in np.argsort(-probability, kind="stable"):
        if is_open[row]:
            rows.append(row)
            is_open[tree.query_ball_point(centers_l0[row], radius_l0)] = False
    return np.array(rows, np.int64)


def match_detections(points_l0: _Floats, probability: _Floats, lesions: Lesions) -> SlideDetections:
    """Assign detections at points [n, 2] with probabilities [n] to the lesions that they hit."""
    point, lesion = shapely.STRtree(lesions.areas).query(shapely.points(points_l0), predicate="intersects").tolist()
    highest, is_outside = np.zeros(len(lesions.areas)), np.ones(len(probability), bool)
    np.maximum.at(highest, lesion, probability[point])
    is_outside[point] = False
    return SlideDetections(highest[~lesions.isolated], probability[is_outside])


def compute_sensitivities(lesions: _Floats, false_positives: _Floats, n_slides: int) -> _Floats:
    """Return the sensitivities float64[6] at FALSE_POSITIVE_RATES; their mean is the score of the challenge.

    Between thresholds the curve is interpolated; beyond the last one it is flat.

    Args:
        lesions: highest probability in each lesion of all slides, at least one; 0 where it was missed.
        false_positives: probabilities of the false positives of `n_slides` slides.

    Example:
        >>> compute_sensitivities(np.array([0.9, 0.6]), np.array([0.7]), n_slides=1).tolist()
        [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    """
    thresholds = np.unique(np.concatenate([lesions, false_positives]))[::-1]
    thresholds = thresholds[thresholds > 0]
    n_found, n_false = (
        len(values) - np.searchsorted(np.sort(values), thresholds) for values in (lesions, false_positives)
    )
    rates, sensitivity = np.append(0, n_false) / n_slides, np.append(0, n_found) / len(lesions)
    return np.interp(FALSE_POSITIVE_RATES, rates, sensitivity)
