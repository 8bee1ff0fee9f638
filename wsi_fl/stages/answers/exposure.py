"""What letters tell of each patient behind them, and what each site's letter changes in the head of all."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.local import probabilities
from wsi_fl.learning.units import Units
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.audit import distances, found, tail_of
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.sums import NoisySums, impossible, without
from wsi_fl.stages.site.ledgers import units_of
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.learners import build_model
from wsi_fl.stages.training.workshop import learned_from
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.system.files import write_text

EXPOSURE = "exposure.csv"
"""Of a site: how far each unit moves its letter. It names patients, and stays at home."""


def exposure_of(party: RunContext, name: str) -> dict[str, Any]:
    """Attack every unit of a site's letter, keep what each is exposed to in its folder, and return what groups are.

    Where patients have more rows than a letter takes of each, rows are drawn anew.
    """
    train, _ = learned_from(party, name)
    units, folder, stream = units_of(party.pipeline, train, name), party.run.site(name), CipherStream.fresh()
    sigma = (folder.kept("plan") or {}).get("sigma", 0.0)
    if party.by_files:
        sigma = party.releases[name].facts.sigma
    mechanism = NoisySums(sigma, 1.0, units.n, units.kind)
    parts = _parts(_head(party, name), mechanism, train, units, units.rows(np.arange(units.n), stream))
    empty, groups = (
        torch.zeros(parts.shape[1], dtype=torch.float64),
        _groups(party.data(name).classes, train, units),
    )
    told = tail_of(parts, sigma, groups, lambda: mechanism.noisy(empty, stream).numpy())
    known, unknown = (distances(parts, sigma, others_known=others) for others in (True, False))
    _keep(folder.path / EXPOSURE, known, unknown, train, units)
    return {"unit": units.kind, "n": units.n, **told}


def _head(party: RunContext, name: str) -> SharedHead:
    """Return a site's head as its run left it."""
    index, folder = party.names.index(name), party.run.site(name)
    state = folder.load_model("proxy")
    head = build_model(party.sites[index], party.pipeline, party.data(name), "proxy", index, state=state)
    assert isinstance(head, SharedHead)
    return head.to(device_of_rank()).eval()


def _parts(
    head: SharedHead, mechanism: NoisySums, train: Examples, units: Units, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return float64[units, k], the letter of each unit alone: letters add up."""
    ((x, y),) = batches(train, iter([rows]), augment=None, device=device_of_rank())
    z, y, of = head.embedded(x).cpu(), train.task.columns(y.cpu()), units.of_row[rows]
    whose, head = torch.from_numpy(of), head.cpu()
    order = np.argsort(of, kind="stable")
    each = np.split(order, np.searchsorted(of[order], np.arange(1, units.n)))
    return np.stack(
        [mechanism.clipped(head, z[k], y[k], whose[k]).numpy() for k in map(torch.from_numpy, each)]
    )


def _groups(classes: Sequence[str], train: Examples, units: Units) -> dict[str, NDArray[np.bool_]]:
    """Return which units are of each class, and have how many slides where some have several."""
    label = train.label[np.unique(units.of_row, return_index=True)[1]]
    slide_of = np.unique(train.slide, return_inverse=True)[1]
    slides = np.bincount(np.unique([units.of_row, slide_of], axis=1)[0], minlength=units.n).clip(max=3)
    of_classes = enumerate(classes) if train.task.kind == "classes" else ()
    groups = {f"class {name}": label == k for k, name in of_classes}
    names = ("1 slide", "2 slides", "3 slides or more") if slides.max() > 1 else ()
    groups |= {name: slides == k for k, name in enumerate(names, 1)}
    return {name: of for name, of in groups.items() if of.any()}


def _keep(
    path: Path, known: NDArray[np.float64], unknown: NDArray[np.float64], train: Examples, units: Units
) -> None:
    """Write μ of all units, the most exposed first, to one who knows all others and to one who knows none."""
    _, row, n_rows = np.unique(units.of_row, return_index=True, return_counts=True)
    slide = train.slide[row] if units.kind == "row" else [""] * units.n
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("patient", "slide", "rows", "mu", "found_at_0.01", "mu_population"))
    for k in np.lexsort((-unknown, -known)):
        numbers = (f"{value:.6g}" for value in (known[k], found(known[k], 0.01), unknown[k]))
        table.writerow((train.patient[row[k]], slide[k], n_rows[k], *numbers))
    write_text(path, text.getvalue())


def influence_of(party: RunContext, here: list[str]) -> list[dict[str, Any]]:
    """Return what each letter that is here adds to the head of all, and what the head would be without it.

    A letter is a sum of n units, each at most 1 long, and noise; so n is the most that a site moves the sum by.

    Args:
        here: sites whose stores are here; on their own test parts answers are compared.
    """
    heads = {name: _head(party, name) for name in here}
    head = heads[here[0]]
    if int(head.n_sites) < 2:
        return []
    letters: Mapping[str, Tensor] = {name: one.released.clone() for name, one in heads.items()}
    n_units = {row["site"]: row["n_units"] for row in (party.run.summary() or {})["sites"]}
    if party.by_files:
        n_units = {name: one.facts.n for name, one in party.releases.items()}
        letters = {name: torch.from_numpy(one.vector).double() for name, one in party.releases.items()}
    head.forget()
    tests = [one for name in here if len(one := party.data(name).held_out)]
    weights, answers = head.head()[0], _answers(head, tests)

    rows = party.pipeline.privacy.unit == "row" and not party.pipeline.audit.canaries

    def row_of(name: str, letter: Tensor) -> dict[str, Any]:
        refused = impossible(head, letter, n_units[name], rows=rows)  # as where it arrived
        left = head if refused else without(head, letter)
        moved = float((left.head()[0] - weights).norm() / weights.norm())
        named = len(answers) and head.kind == "classes"
        changed = float((_answers(left, tests) != answers).mean()) if named else None
        told = {"site": name, "n": n_units[name], "length": float(letter[: -head.shape[0]].norm())}
        return told | {"refused": refused, "moved": moved, "answers_changed": changed}

    return [row_of(name, letter) for name, letter in letters.items()]


def _answers(head: SharedHead, tests: list[Examples]) -> NDArray[np.int64]:
    """Return the class that a head names for every example."""
    said = [probabilities(head.as_released(), one, device_of_rank()).argmax(1) for one in tests]
    return np.concatenate(said) if said else np.zeros(0, np.int64)
