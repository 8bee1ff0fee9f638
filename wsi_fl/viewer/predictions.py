"""What `predict` wrote of a slide, as `view` shows it: a score, and layers of what models said of each patch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system.files import read_json
from wsi_fl.types import WsiFlError
from wsi_fl.viewer.gallery import Overlay
from wsi_fl.viewer.layers import Layer, finite, values

ATTENTION = "attention"


@dataclass(frozen=True)
class Prediction:
    """What `predict` wrote of one slide.

    Attributes:
        folder: with its files.
        score: the document `score.json`.
    """

    folder: Path
    score: Mapping[str, Any]

    @property
    def slide(self) -> str:
        """The slide's name."""
        return str(self.score["slide"])

    @property
    def site(self) -> str:
        """The site whose models answered."""
        return str(self.score["site"])

    @property
    def value(self) -> float | None:
        """The number by which slides are ranked; None where there is none.

        Raises:
            WsiFlError: when the document says it otherwise than `predict` does.
        """
        score = self.score
        try:
            if "score" in score:
                return finite(float(score["score"]["top_k_mean"]))
            found = next((score[key] for key in ("probability", "risk", "value") if key in score), None)
            return None if found is None else finite(float(found))
        except (KeyError, TypeError, ValueError):
            raise _foreign(self.folder) from None

    @property
    def words(self) -> str:
        """What was said of the slide."""
        said = self.score.get("class") or self.score.get("target") or "risk"
        return f"{said} {self.value:.2f}" if self.value is not None else str(said)

    def overlays(self) -> list[Overlay]:
        """Return its layers: what is said of each patch, and the attention of models of whole slides.

        Raises:
            WsiFlError: when its table is missing.
        """
        columns, placed = _heading(self.folder / "patches.csv")
        layers = []
        if placed and any(name != ATTENTION for name in columns):
            said = partial(self._draw, [name for name in columns if name != ATTENTION])
            layers.append(Overlay(f"model of {self.site}", "values", said))
        if placed and ATTENTION in columns:
            layers.append(Overlay(f"{ATTENTION} of {self.site}", "values", partial(self._draw, [ATTENTION])))
        return layers

    def _draw(self, columns: Sequence[str], slide: Slide) -> Layer:
        """A layer of some columns of the table; attention as a share of the highest, as in the heatmap."""
        if self.score.get("quickhash", slide.quickhash) != slide.quickhash:
            raise WsiFlError(
                f"{slide.path.name}: not the slide that was predicted; run `wsi-fl predict` again"
            )
        xy_l0, side_l0, table = _read(self.folder / "patches.csv", columns)
        if ATTENTION in table:
            share = table[ATTENTION]
            share /= np.max(share, initial=np.finfo(np.float64).tiny, where=np.isfinite(share))
        named = {name.removeprefix("p_"): column for name, column in table.items()}
        asked = str(self.score.get("class"))
        return values(xy_l0, side_l0, named, asked if asked in named else list(named)[-1])


def of_folder(folder: Path) -> Prediction:
    """Return what `predict` wrote in a folder.

    Raises:
        WsiFlError: when it did not write that.
    """
    score = read_json(folder / "score.json")
    if not isinstance(score, dict) or not score.keys() >= {"run", "site", "slide", "with"}:
        raise _foreign(folder)
    return Prediction(folder, score)


def _foreign(folder: Path) -> WsiFlError:
    return WsiFlError(f"{folder}/score.json: not what `wsi-fl predict` writes; predict the slide again")


def _heading(path: Path) -> tuple[list[str], bool]:
    """(columns of a patches.csv that are shares, whether patches have places)."""
    with _opened(path) as file:
        rows = csv.DictReader(file)
        first = next(rows, None)
        names = rows.fieldnames or []
    shares = ("p_", "without_event_", ATTENTION)
    return [name for name in names if name.startswith(shares)], bool(first and first["size_l0"])


def _read(
    path: Path, columns: Sequence[str]
) -> tuple[NDArray[np.int64], float, dict[str, NDArray[np.float64]]]:
    """(corners [n, 2], side, column → [n]) of a patches.csv."""
    try:
        with _opened(path) as file:
            rows = list(csv.DictReader(file))
        xy_l0 = np.array([(int(row["x_l0"]), int(row["y_l0"])) for row in rows], np.int64)
        table = {name: np.array([float(row[name]) for row in rows]) for name in columns}
        return xy_l0, float(rows[0]["size_l0"]), table
    except (KeyError, TypeError, ValueError, IndexError):
        raise WsiFlError(f"{path}: no table of patches that `wsi-fl predict` wrote; predict again") from None


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; predict the slide again")
    return path.open(newline="", encoding="utf-8")
