"""What letters tell of each patient behind them, and what each site's letter changes in the head of all."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.local import probabilities
from wsi_fl.learning.units import Units
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.letters import without
from wsi_fl.privacy.sums import NoisySums
from wsi_fl.privacy.tails import distances, found, tail_of
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.site.ledgers import units_of
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.learners import build_model
from wsi_fl.stages.training.workshop import learned_from
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.system.files import write_text

EXPOSURE = "exposure.csv"
"""Of a site: how far each unit moves its letter. It names patients, and stays at home."""


def exposure_of(party: RunContext, name: str) -> dict[str, Any]:
    """Attack every unit of a site's letter, keep what each is exposed to in its folder, and return what groups are.

    Where patients have more rows than a letter takes of each, rows are drawn anew.
    """
    train, _ = learned_from(party, name)
    units, head, folder = units_of(party.pipeline, train, name), _head(party, name), party.run.site(name)
    sigma = (
        party.releases[name].facts.sigma if party.by_files else (folder.kept("plan") or {}).get("sigma", 0.0)
    )
    mechanism, stream = NoisySums(sigma, 1.0, units.n, units.kind), CipherStream.fresh()
    rows = units.rows(np.arange(units.n), stream)
    parts = _parts(head, mechanism, train, units, rows)
    groups, row_of = _groups(party, train, units)
    empty = torch.zeros(parts.shape[1], dtype=torch.float64)
    told = tail_of(parts, sigma, groups, lambda: mechanism.noisy(empty, stream).numpy())
    _keep(folder, parts, sigma, train, units, row_of)
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
    z, y, of = head.embedded(x).cpu(), y.cpu(), units.of_row[rows]
    whose, head = torch.from_numpy(of), head.cpu()
    order = np.argsort(of, kind="stable")
    each = np.split(order, np.searchsorted(of[order], np.arange(1, units.n)))
    return np.stack(
        [mechanism.clipped(head, z[k], y[k], whose[k]).numpy() for k in map(torch.from_numpy, each)]
    )


def _groups(
    party: RunContext, train: Examples, units: Units
) -> tuple[dict[str, NDArray[np.bool_]], NDArray[np.int64]]:
    """Return which units are of each class and have how many slides, where that differs, and a row of each."""
    _, row_of = np.unique(units.of_row, return_index=True)
    label, classes = train.label[row_of], party.data(party.names[0]).classes
    groups = {f"class {name}": label == k for k, name in enumerate(classes)}
    pairs = np.unique(np.stack([units.of_row, np.unique(train.slide, return_inverse=True)[1]]), axis=1)
    slides = np.bincount(pairs[0], minlength=units.n).clip(max=3)
    names = {1: "1 slide", 2: "2 slides", 3: "3 slides or more"}
    groups |= {name: slides == k for k, name in names.items() if (slides > 1).any()}
    return {name: of for name, of in groups.items() if of.any()}, row_of


def _keep(
    folder: SiteFolder,
    parts: NDArray[np.float64],
    sigma: float,
    train: Examples,
    units: Units,
    row_of: NDArray[np.int64],
) -> None:
    """Write the file of all units, the most exposed first."""
    known, unknown = (distances(parts, sigma, others_known=others) for others in (True, False))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("patient", "slide", "rows", "mu", "found_at_0.01", "mu_population"))
    n_rows = np.bincount(units.of_row, minlength=units.n)
    for k in np.lexsort((-unknown, -known)):
        slide = train.slide[row_of[k]] if units.kind == "row" else ""
        numbers = (f"{value:.6g}" for value in (known[k], float(found(known[k], 0.01)), unknown[k]))
        table.writerow((train.patient[row_of[k]], slide, n_rows[k], *numbers))
    write_text(folder.path / EXPOSURE, text.getvalue())


def influence_of(party: RunContext, here: list[str]) -> list[dict[str, Any]]:
    """Return what each letter that is here adds to the head of all, and what the head would be without it.

    A letter is a sum of n units, each at most 1 long, and noise; so n is the most that a site moves the sum by.

    Args:
        here: sites whose stores are here; on their own test parts answers are compared.
    """
    head = _head(party, here[0])
    if int(head.n_sites) < 2:
        return []
    heads = {name: _head(party, name) for name in here}
    letters: Mapping[str, Tensor] = {name: one.released for name, one in heads.items()}
    n_units = {row["site"]: row["n_units"] for row in (party.run.summary() or {})["sites"]}
    if party.by_files:
        n_units = {name: one.facts.n for name, one in party.releases.items()}
        letters = {name: torch.from_numpy(one.vector).double() for name, one in party.releases.items()}
    head.forget()
    tests = [one for name in here if len(one := party.data(name).held_out)]
    weights, answers = head.head()[0], _answers(head, tests)
    rows = []
    for name, letter in letters.items():
        left = without(head, letter)
        moved = (left.head()[0] - weights).norm() / weights.norm()
        changed = float((_answers(left, tests) != answers).mean()) if len(answers) else None
        length = float(letter[: -head.shape[0]].norm())
        told = {"site": name, "n": n_units[name], "length": length, "moved": float(moved)}
        rows.append(told | {"answers_changed": changed})
    return rows


def _answers(head: SharedHead, tests: list[Examples]) -> NDArray[np.int64]:
    """Return the class that a head names for every example."""
    said = [probabilities(head.as_released(), one, device_of_rank()).argmax(1) for one in tests]
    return np.concatenate(said) if said else np.zeros(0, np.int64)
