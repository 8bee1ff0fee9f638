"""What joining brings each hospital: alone, joined and pooled on the same test examples, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.significance import clustered_ratio
from wsi_fl.report import words
from wsi_fl.stages.answers.compare_rows import ComparedRow, is_alone
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.predictions import Right, ScoredExamples, measure_of, read_answers, weighed


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
        "measure": measure_of(next(iter(answers["joined"][names[0]].values()), {})),
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
    measure = measure_of(next(iter(answers["joined"].values()), {}))
    return {"measure": measure, **_compared(answers)}


def _chosen(rows: Sequence[ComparedRow], first: Run) -> dict[str, ComparedRow] | None:
    alone = [row for row in rows if row.runs and is_alone(row, first)]
    federated = [row for row in rows if row.runs and words.is_federated(row.method)]
    joined = sorted(federated, key=lambda row: first not in row.runs)
    pooled = sorted((row for row in rows if row.runs and words.is_pooled(row.method)), key=lambda row: row.dp)
    if not alone or not joined:
        return None
    return {"alone": alone[0], "joined": joined[0]} | ({"pooled": pooled[0]} if pooled else {})


def _by_site(runs: Iterable[Run], names: Iterable[str], on: str) -> dict[str, dict[int, Right]]:
    """Site → seed → its predictions; those of all folds together, which have no patient in common."""
    found: dict[str, dict[int, ScoredExamples]] = {name: {} for name in names}
    for run in runs:
        for name, by_seed in found.items():
            if (answers := read_answers(run.folder.site(name), on)) is not None:
                by_seed.setdefault(run.seed, {}).update(answers)
    return {
        name: {seed: weighed(answers) for seed, answers in by_seed.items()} for name, by_seed in found.items()
    }


def _over_sites(parts: Iterable[Mapping[int, Right]]) -> dict[int, Right]:
    """All sites' models as one: the examples of each apart, patients not."""
    seen: dict[int, Right] = {}
    for k, runs in enumerate(parts):
        for seed, right in runs.items():
            seen.setdefault(seed, {}).update({(*key, str(k)): value for key, value in right.items()})
    return seen


def _compared(answers: Mapping[str, Mapping[int, Right]]) -> dict[str, Any]:
    """{"alone": value, "joined": value, "pooled": value or None, "gain": value, "headroom": value or None, "verdict"},
    each value {"mean", "low", "high"}.
    """
    found: dict[str, Any] = {"pooled": None}
    found |= {kind: _value(runs, list(runs)) for kind, runs in answers.items()}
    alone, joined = answers["alone"], answers["joined"]
    common = sorted(alone.keys() & joined.keys())
    gains = {seed: _difference(joined[seed], alone[seed]) for seed in common}
    found["gain"] = _value(gains, common)
    rooms = {
        seed: _difference(right, alone[seed])
        for seed, right in answers.get("pooled", {}).items()
        if seed in gains
    }
    found["room"] = _value(rooms, sorted(rooms))
    shown = found["room"] is not None and (found["room"]["low"] or 0) > 0
    found["headroom"] = _share(gains, rooms) if shown else None
    return found | {"verdict": verdict(found["gain"], found["room"])}


_EQUIVALENT = 0.03
"""Where the interval of what pooling brings ends below it, there is nothing to gain."""


def verdict(gain: Mapping[str, Any] | None, room: Mapping[str, Any] | None) -> str:
    """What follows for a hospital: "join", "stay", "nothing to gain", or "not shown".

    Args:
        gain: of joining over the hospital alone, {"mean", "low", "high"}.
        room: what a model of all data gains over it; None where nobody trained one.

    Example:
        >>> verdict({"mean": 0.1, "low": 0.06, "high": 0.14}, None)
        'join'
        >>> verdict({"mean": 0.0, "low": -0.01, "high": 0.01}, {"mean": 0.002, "low": -0.01, "high": 0.012})
        'nothing to gain'
    """
    if gain is None or gain["low"] is None:
        return "not shown"
    if gain["low"] > 0 and gain["mean"] >= words.SMALLEST_DIFFERENCE:
        return "join"
    if gain["high"] < 0 and gain["mean"] <= -words.SMALLEST_DIFFERENCE:
        return "stay"
    little = room is not None and room["mean"] < words.SMALLEST_DIFFERENCE
    if room is not None and little and room["high"] is not None and room["high"] < _EQUIVALENT:
        return "nothing to gain"
    return "not shown"


def _share(gains: Mapping[int, Right], rooms: Mapping[int, Right]) -> dict[str, float | None]:
    """The part of the room that the gains fill, with its interval, over the seeds that have both."""
    seeds = sorted(rooms)
    keys = sorted(set.intersection(*({*gains[seed]} & {*rooms[seed]} for seed in seeds)))
    part, whole = (_weighted(runs, seeds, keys)[0] for runs in (gains, rooms))
    low, high = clustered_ratio(part, whole, _patients(keys)) or (None, None)
    return {"mean": float(part.sum() / whole.sum()), "low": low, "high": high}


Key = tuple[str, ...]


def _weighted(
    runs: Mapping[int, Right], seeds: Sequence[int], keys: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weighted values and weights, float64[seeds, examples] each."""
    pairs = np.array([[runs[seed][key] for key in keys] for seed in seeds])
    return pairs[..., 0] * pairs[..., 1], pairs[..., 1]


def _patients(keys: Sequence[Key]) -> NDArray[np.str_]:
    """Whose each example is."""
    return np.array(["\n".join(key[:2]) for key in keys])


def _difference(a: Right, b: Right) -> Right:
    return {key: (a[key][0] - b[key][0], a[key][1]) for key in a if key in b}


def _value(runs: Mapping[int, Right], seeds: Sequence[int]) -> dict[str, float | None] | None:
    """Mean and interval over runs on the same examples; None without any."""
    shared = set.intersection(*(set(runs[seed]) for seed in seeds)) if seeds else set()
    if not shared:
        return None
    keys = sorted(shared)
    values, weights = _weighted(runs, seeds, keys)
    low, high = clustered_ratio(values, weights, _patients(keys)) or (None, None)
    return {"mean": float(values.sum() / weights.sum()), "low": low, "high": high}


def _spent(row: ComparedRow, name: str) -> dict[str, Any]:
    """The largest ε of a site over the runs, and what it is worth."""
    mine = [site for run in row.runs for site in run.summary["sites"] if site["site"] == name]
    spent = [site["epsilon"] for site in mine if site["epsilon"] is not None]
    return {"epsilon": max(spent, default=None), "guarantee": mine[0]["guarantee"] if mine else "none"}
