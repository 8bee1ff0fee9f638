"""The page that sets methods side by side: the document of ``compare --json`` in, sentences and HTML out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.learning.verdict import Estimate, of_repetitions, verdict
from wsi_fl.report import words, worth
from wsi_fl.report.comparison_figures import N_COLORS, Series, charts, color_name
from wsi_fl.report.fill import fill
from wsi_fl.report.words import Finding, known, number

Json = Mapping[str, Any]
"""A JSON object as ``compare --json`` prints it."""

ALONE = "a hospital alone without DP"
WHERE = {
    "merged": "on the merged test set",
    "own": "on each site's own test part",
    "left_out": "on the site that was left out",
}


def repeated(rows: Sequence[Json]) -> str:
    """Return what values are spread over, in words.

    Example:
        >>> repeated([{"seeds": [0], "folds": [1, 2]}])
        'sites, seeds and folds'
    """
    if any(row.get("left_out") for row in rows):
        return "sites left out and seeds"
    return "sites, seeds and folds" if any(row.get("folds") for row in rows) else "sites and seeds"


def findings(
    rows: Sequence[Json],
    tests: Sequence[Json],
    baseline: str,
    examples: str = "patches",
    metric: str = "accuracy",
    gains: Mapping[str, Json] | None = None,
) -> list[Finding]:
    """What the numbers say about federation: the baseline first, then a sentence per method.

    Args:
        rows: one per method, as in the document.
        tests: paired differences, of which those against the row ``baseline`` are looked at.
        examples: what the models are asked about, patches or slides.
        metric: the score that is compared, "macro_accuracy" where tests are skewed.
        gains: what joining brings over all sites, by the label of a row. Where it is known it alone says whether
            joining pays, so that a page has one verdict.
    """
    alone = next(row for row in rows if row["label"] == baseline)
    if not known(alone[metric]["mean"]):
        return [
            Finding(
                "unclear",
                f"There is no run of {ALONE} on these {examples}, so nothing here says whether federation pays.",
            )
        ]
    n, seeds = alone["n_sites"], len(alone["seeds"])
    folds = f", {len(alone['folds'])} folds" if alone.get("folds") else ""
    measured = f"({n} site{'' if n == 1 else 's'}, {seeds} seed{'' if seeds == 1 else 's'}{folds})"
    reached = f"{_capital(ALONE)} reaches {number(alone[metric]['mean'], 2)} {measured}."
    against = {(test["a"], test["metric"]): test for test in tests if test["b"] == baseline}
    room = next((gain["room"] for gain in (gains or {}).values() if gain["room"]), None)
    pooled = next((row["label"] for row in rows if words.is_pooled(row["method"]) and not row["dp"]), None)
    return [Finding("unclear", reached)] + [
        worth.finding(gain, f"{_spoken(row)} reaches {number(row[metric]['mean'], 2)}{_price(row)}", ALONE)
        if (gain := (gains or {}).get(row["label"]))
        else _against(row, test, room if row["label"] == pooled else None)
        for row in rows
        if (test := against.get((row["label"], metric)))
    ]


def _against(row: Json, test: Json, room: Json | None) -> Finding:
    """One method against the hospital alone, where nothing tells what joining brings each patient.

    Repetitions with other seeds then do, by the same rule; pairs of sites or folds of the same run do not.

    Args:
        room: what this method gains over it, patient by patient, where it is known.
    """
    reached = f"{_spoken(row)} reaches {number(row[test['metric']]['mean'], 2)}{_price(row)}"
    if not words.is_federated(row["method"]):
        side = f"{_side(test['difference'])} {ALONE} ({_evidence(test)})"
        side = f"{worth.gain_words({'gain': room})} over {ALONE}" if room else side
        return Finding("unclear", f"{reached}, {side}{_meaning(row)}.")
    d = test["difference"]
    gain = of_repetitions(d, test["sd"], test["n"]) if test["unit"] == "seed" else Estimate(d, None, None)
    return worth.finding({"gain": gain.document(), "verdict": verdict(gain, None)}, reached, ALONE)


def _side(difference: float) -> str:
    if round(abs(difference), 2) == 0:
        return "as much as"
    return f"{abs(difference):.2f} {'above' if difference > 0 else 'below'}"


def _evidence(test: Json) -> str:
    return f"{p_value(test['p_holm'])} over {test['n']} {test['unit']}{'' if test['n'] == 1 else 's'}"


def _spoken(row: Json) -> str:
    """A row as the subject of a sentence."""
    if words.is_federated(row["method"]):
        return str(row["label"])
    name = "A model of all data pooled" if words.is_pooled(row["method"]) else "A hospital alone"
    with_dp = f"{name} {'with' if row['dp'] else 'without'} DP"
    return ", ".join(filter(None, (with_dp, settings_words(row["settings"]))))


def _price(row: Json) -> str:
    return f" (ε {row['guarantee']} {number(row['epsilon'], 1)})" if known(row["epsilon"]) else ""


def _meaning(row: Json) -> str:
    if words.is_pooled(row["method"]):
        return "; nobody may pool the data like that"
    return "; this is what its noise costs" if row["dp"] else ""


def p_value(p: float | None) -> str:
    """A p-value in words.

    >>> p_value(0.0312), p_value(2e-6), p_value(None)
    ('p = 0.031', 'p < 0.001', 'no p-value')
    """
    if p is None:
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def cautions(rows: Sequence[Json], tests: Sequence[Json], *, classes: bool = True) -> list[str]:
    """What a reader has to know before believing the sentences.

    Args:
        classes: whether classes were asked for.
    """
    balance = " and the weights of its classes" if classes else ""
    found = [
        f"A hospital alone chose its regularisation{balance} by cross-validation on its own patients. Give the same "
        "care to every method before you believe in a loss, and to the pooled model."
    ]
    if any(test["unit"] == "fold" for test in tests):
        found.append(
            "Where a test pairs folds, its p-value is too small: any two folds train on mostly the same patients. "
            "Tests by patient do not know how much chance there is in training; repeat with other seeds (--seeds 3)."
        )
    if any(test["unit"] == "site" for test in tests):
        found.append(
            "Where fewer than three seeds are common to both, a test pairs the sites. Sites of one run learned from "
            "each other and share a test set, so such a p-value is too small; repeat with other seeds "
            "(train --seeds 5) before believing it."
        )
    if any(words.is_federated(row["method"]) and len(row["seeds"]) == 1 for row in rows):
        found.append(
            "Intervals of a single run know of its test patients, and of the privacy noise where a head was "
            "made of letters; of other training patients, and of the noise in training, they know nothing. Repeat it "
            "(train --seeds 5) before a hospital decides."
        )
    private = [row for row in rows if known(row["epsilon"])]
    if len({number(row["epsilon"], 1) for row in private}) > 1:
        spent = words.span([row["epsilon"] for row in private], 1)
        found.append(f"The methods did not spend the same ε ({spent}), so they did not pay the same price.")
    if any(row["guarantee"] == "nominal" for row in private):
        found.append(
            "An ε called nominal is no guarantee: the proxy learned from a private model trained without noise."
        )
    if any(row["guarantee"] == "shared" for row in private):
        found.append(
            "An ε called shared is guaranteed to all who see the sum of all sites, and against as many colluding sites "
            "as privacy.colluding says; a site that adds less noise than it says weakens it for all."
        )
    if len({tuple(row["seeds"]) for row in rows if row["seeds"]}) > 1:
        found.append(
            "Not every method was run with the same seeds; differences use the seeds that both have."
        )
    return found


def render(document: Json, series: Sequence[Series], *, created: str, sites: Sequence[str]) -> str:
    """One HTML document that needs nothing beside it.

    Args:
        document: of ``compare --json``.
        series: what the charts show, one per row and in the order of the rows.
        created: when, as text.
        sites: their names, in order.
    """
    scores = words.scores_of(document)
    metrics = {name: words.SCORES[name] for name in scores}
    context = {
        "document": document,
        "title": f"{len(document['rows'])} methods on the same {document.get('examples', 'patches')}",
        "where": WHERE[document["on"]],
        "over": repeated(document["rows"]),
        "one": words.singular(document.get("examples", "patches")),
        "measure": (document.get("worth") or {}).get("measure", words.SCORES[scores[0]].lower()),
        "own": f"own_{scores[0]}",
        "rows": [_shown(row) for row in document["rows"]],
        "legend": [_legend(k, series) for k in range(len(series))],
        "more_than_colors": sum(not one.baseline for one in series) > N_COLORS,
        "charts": charts(series, words.SCORES[scores[0]]),
        "worth": worth.chart(document["worth"]) if document.get("worth") else None,
        "gains": worth.rows_of(document["worth"]) if document.get("worth") else [],
        "gain_words": worth.gain_words,
        "verdict_words": worth.verdict_words,
        "sources_words": worth.sources_words,
        "price": worth.price,
        "p_value": p_value,
        "metrics": metrics,
        "tested": metrics | ({f"own_{scores[0]}": "Own part"} if document["on"] == "merged" else {}),
        "differences": _differences(document["paired"]),
        "by_site": any(test["unit"] == "site" for test in document["paired"]),
        "sites": sites,
        "first": words.SCORES[scores[0]],
        "span": _extremes(document["rows"]),
        "created": created,
    }
    return fill("comparison", context)


def _shown(row: Json) -> dict[str, Any]:
    named = {"name": words.method_name(row["method"]), "does": words.method_does(row["method"])}
    return {**row, **named, "set": settings_words(row["settings"])}


def settings_words(settings: Mapping[str, Any]) -> str:
    """Settings as one writes them after ``--set``.

    >>> settings_words({"train.alpha": 0.3, "train.input_px": None, "model.proxy": "mlp"})
    'train.alpha=0.3, train.input_px=default, model.proxy=mlp'
    """
    plain = {None: "default", True: "true", False: "false"}
    return ", ".join(
        f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
        for key, value in settings.items()
    )


def _legend(position: int, series: Sequence[Series]) -> tuple[str, str]:
    one = series[position]
    return color_name(position, series), ", ".join(filter(None, (one.label, one.settings)))


def _differences(tests: Sequence[Json]) -> list[dict[str, Any]]:
    """One line per pair with the tests of all metrics."""
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for test in tests:
        line = pairs.setdefault(
            (test["a"], test["b"]), {"a": test["a"], "b": test["b"], "tests": {}, "units": {}}
        )
        line["tests"][test["metric"]] = test
        line["units"][f"{test['n']} {test['unit']}{'' if test['n'] == 1 else 's'}"] = None
        line["n"] = ", ".join(line["units"])
    return list(pairs.values())


def _extremes(rows: Sequence[Json]) -> tuple[float, float] | None:
    values = [v for row in rows for v in row["sites"].values() if known(v)]
    return (min(values), max(values)) if values else None


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
