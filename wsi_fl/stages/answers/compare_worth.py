"""What joining brings each hospital: alone, joined and pooled on the same test examples, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.tasks import CLASSES, Task
from wsi_fl.learning.verdict import Estimate, estimate, ratio, shows_room, verdict
from wsi_fl.report import words
from wsi_fl.stages.answers.compare_rows import ComparedRow, is_alone
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.predictions import Answers, Key, Weighed, measured_by, read_answers, weighed
from wsi_fl.stages.site.targets import task_of


@dataclass(frozen=True)
class Said:
    """What the runs of one seed say of the test examples.

    Attributes:
        answers: test example → what it adds to the mean, and its weight.
        score: the name of the score that the weighted mean is.
        noise: standard deviation of that score by the noise of what was released; None where nobody knows it.
    """

    answers: Weighed = field(default_factory=dict)
    score: str = "accuracy"
    noise: float | None = None


BySeed = Mapping[int, Said]
BALANCED = "balanced accuracy"
"""What the measure is called where classes are so unlike in number that all are made to count alike."""


def worth(
    rows: Sequence[ComparedRow], first: Run, on: str, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Every site's own accuracy with each of three models; None where no federated method is compared, or a whole site
    is left out.

    *Alone* is the baseline without DP, *joined* the first federated row given, *pooled* a model of all data, without DP
    where there is one. Values are means over the seeds of each; the gain is over the seeds that both have, its interval
    that of drawing seeds and patients anew. The headroom is the part of what pooling would bring that joining brings;
    `verdict` says in a word what follows for the hospital.

    Args:
        found: what `verdicts` returns.
    """
    chosen = _chosen(rows, first)
    if chosen is None or on == "left_out":
        return None
    names = [site["site"] for site in chosen["joined"].runs[0].summary["sites"]]
    answers = {kind: _by_site(row.runs, names, on) for kind, row in chosen.items()}
    sites = [
        {
            "site": name,
            **_compared({kind: found[name] for kind, found in answers.items()}),
            **_spent(chosen["joined"], name),
        }
        for name in names
    ]
    return {
        **{kind: row.label for kind, row in chosen.items()},
        "pooled": chosen["pooled"].label if "pooled" in chosen else None,
        "on": on,
        "measure": _measure(answers["joined"][names[0]]),
        "sites": sites,
        "all": found[chosen["joined"].label],
    }


def verdicts(rows: Sequence[ComparedRow], first: Run, on: str) -> dict[str, dict[str, Any]]:
    """What joining by each federated row brings over all sites, by its label; {} where `worth` is None."""
    chosen = _chosen(rows, first)
    if chosen is None or on == "left_out":
        return {}
    known = {kind: row.runs for kind, row in chosen.items() if kind != "joined"}
    federated = [row for row in rows if row.runs and words.is_federated(row.method)]
    return {row.label: of_all(known | {"joined": row.runs}, on) for row in federated}


def of_all(runs: Mapping[str, Sequence[Run]], on: str) -> dict[str, Any]:
    """What joining brings over all sites, as `worth` says it of one.

    Args:
        runs: "alone", "joined", and perhaps "pooled" → the runs of each.
        on: which test examples are asked, those "merged" or each site's "own".
    """
    names = [site["site"] for site in runs["joined"][0].summary["sites"]]
    answers = {kind: _over_sites(_by_site(those, names, on).values()) for kind, those in runs.items()}
    return {"measure": _measure(answers["joined"]), **_compared(answers)}


def _chosen(rows: Sequence[ComparedRow], first: Run) -> dict[str, ComparedRow] | None:
    alone = [row for row in rows if row.runs and is_alone(row, first)]
    federated = [row for row in rows if row.runs and words.is_federated(row.method)]
    joined = sorted(federated, key=lambda row: first not in row.runs)
    pooled = sorted((row for row in rows if row.runs and words.is_pooled(row.method)), key=lambda row: row.dp)
    if not alone or not joined:
        return None
    return {"alone": alone[0], "joined": joined[0]} | ({"pooled": pooled[0]} if pooled else {})


def _by_site(runs: Iterable[Run], names: Iterable[str], on: str) -> dict[str, dict[int, Said]]:
    """Site → seed → what it says; all folds together, which have no patient in common."""
    answers: dict[str, dict[int, Answers]] = {name: {} for name in names}
    noises: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    task: Task = CLASSES
    for run in runs:
        task = task_of(run.pipeline.target)
        rows = {row["site"]: row for row in (run.folder.evaluation() or {"sites": []})["sites"]}
        for name, by_seed in answers.items():
            if (found := read_answers(run.folder.site(name), on, task)) is not None:
                by_seed.setdefault(run.seed, {}).update(found)
                row = rows.get(name, {})
                moved = (row.get("own", {}) if on == "own" else row).get("noise")
                noises.setdefault((name, run.seed), []).append(moved or {})
    return {
        name: {seed: _said(found, task, noises[name, seed]) for seed, found in by_seed.items()}
        for name, by_seed in answers.items()
    }


def _said(answers: Answers, task: Task, noises: Sequence[Mapping[str, float]]) -> Said:
    """Of the folds of one seed, each of which had its own noise."""
    found = weighed(answers)
    score = measured_by(found, task)
    known = [noise[score] for noise in noises if score in noise]
    whole = len(known) == len(noises) > 0
    return Said(found, score, hypot(*known) / len(known) if whole else None)


def _over_sites(parts: Iterable[BySeed]) -> dict[int, Said]:
    """All sites' models as one: the examples of each apart, patients not.

    Their heads rest on the same noisy letters, so that their noise is taken to move them alike.
    """
    seen: dict[int, list[Said]] = {}
    for runs in parts:
        for seed, said in runs.items():
            seen.setdefault(seed, []).append(said)
    return {seed: _together(those) for seed, those in seen.items()}


def _together(those: Sequence[Said]) -> Said:
    answers = {(*key, str(k)): value for k, said in enumerate(those) for key, value in said.answers.items()}
    known = [said.noise for said in those if said.noise is not None]
    return Said(answers, those[0].score, sum(known) / len(those) if known else None)


def _measure(said: BySeed) -> str:
    """What is compared, in words."""
    score = next((one.score for one in said.values()), "accuracy")
    return BALANCED if score == "macro_accuracy" else words.measured_in(score)


def _compared(answers: Mapping[str, BySeed]) -> dict[str, Any]:
    """{"alone": value, "joined": value, "pooled": value or None, "gain": value, "headroom": value or None, "verdict"},
    each value as `Estimate.document` has it.
    """
    found: dict[str, Estimate | None] = {"pooled": None}
    found |= {kind: _value(runs) for kind, runs in answers.items()}
    gains = _differences(answers["joined"], answers["alone"])
    rooms = _differences(answers.get("pooled", {}), {seed: answers["alone"][seed] for seed in gains})
    gain, room = _value(gains), _value(rooms)
    share = _share(gains, rooms, room) if room and shows_room(room) else None
    found |= {"gain": gain, "room": room, "headroom": share}
    told = {name: one and one.document() for name, one in found.items()}
    return told | {"verdict": verdict(gain, room)}


def _share(gains: BySeed, rooms: BySeed, room: Estimate) -> Estimate:
    """The part of the room that the gains fill, over the seeds that have both."""
    gains = {seed: gains[seed] for seed in rooms}
    keys = _shared([*gains.values(), *rooms.values()])
    part, whole = (np.prod(_pairs(runs, keys), axis=2) for runs in (gains, rooms))
    noise = _noise(gains)
    weights = _pairs(gains, keys)[0, :, 1]
    return ratio(part, whole, _patients(keys), None if noise is None else noise / room.mean, weights)


def _shared(those: Iterable[Said]) -> list[Key]:
    """The examples that all say something of."""
    known = [said.answers.keys() for said in those]
    return sorted(set.intersection(*map(set, known))) if known else []


def _pairs(runs: BySeed, keys: Sequence[Key]) -> NDArray[np.float64]:
    """Values and weights, float64[seeds, examples, 2]."""
    return np.array([[runs[seed].answers[key] for key in keys] for seed in sorted(runs)])


def _noise(runs: BySeed) -> NDArray[np.float64] | None:
    """Of each run, 0 where none is known; None where it is known of none."""
    known = [runs[seed].noise for seed in sorted(runs)]
    return None if all(one is None for one in known) else np.array([one or 0.0 for one in known])


def _patients(keys: Sequence[Key]) -> NDArray[np.str_]:
    """Whose each example is."""
    return np.array(["\n".join(key[:2]) for key in keys])


def _differences(ours: BySeed, theirs: BySeed) -> dict[int, Said]:
    """Ours less theirs on the examples of both, by seed."""
    return {seed: _difference(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}


def _difference(ours: Said, theirs: Said) -> Said:
    a, b = ours.answers, theirs.answers
    known = [one.noise for one in (ours, theirs) if one.noise is not None]
    answers = {key: (a[key][0] - b[key][0], a[key][1]) for key in a if key in b}
    return Said(answers, ours.score, hypot(*known) if known else None)


def _value(runs: BySeed) -> Estimate | None:
    """Mean and interval over runs on the same examples; None without any."""
    if not (keys := _shared(runs.values())):
        return None
    values, weights = np.moveaxis(_pairs(runs, keys), 2, 0)
    return estimate(values, weights, _patients(keys), _noise(runs))


def _spent(row: ComparedRow, name: str) -> dict[str, Any]:
    """The largest ε of a site over the runs, and what it is worth."""
    mine = [site for run in row.runs for site in run.summary["sites"] if site["site"] == name]
    spent = [site["epsilon"] for site in mine if site["epsilon"] is not None]
    return {"epsilon": max(spent, default=None), "guarantee": mine[0]["guarantee"] if mine else "none"}
