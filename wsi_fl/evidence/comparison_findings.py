"""The findings and cautions of a comparison in words, from the document of ``compare --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.evidence.benefit import describe_benefit
from wsi_fl.evidence.benefit_figure import gain_words
from wsi_fl.evidence.verdict import Estimate, decide_verdict, estimate_from_repetitions
from wsi_fl.report import formatting
from wsi_fl.report.formatting import Finding, Json, format_number, is_number

LOCAL_BASELINE = "a local model without DP"
TEST_SET_WORDS = {
    "merged": "on the merged test set",
    "own": "on each site's local test part",
    "left_out": "on the left-out site",
}


def repetition_words(rows: Sequence[Json]) -> str:
    """Return the repetitions over which values are averaged, in words.

    Example:
        >>> repetition_words([{"seeds": [0], "folds": [1, 2]}])
        'sites, seeds and folds'
    """
    if any(row.get("left_out") for row in rows):
        return "left-out sites and seeds"
    return "sites, seeds and folds" if any(row.get("folds") for row in rows) else "sites and seeds"


def list_comparison_findings(
    rows: Sequence[Json],
    tests: Sequence[Json],
    baseline: str,
    examples: str = "patches",
    metric: str = "accuracy",
    gains: Mapping[str, Json] | None = None,
) -> list[Finding]:
    """Return a sentence on the baseline, then one per method.

    Args:
        rows, tests: as in the document; only tests against the row ``baseline`` are used.
        metric: the compared score, "macro_accuracy" where tests are skewed.
        gains: benefit over all sites by the label of a row. Where known, the verdict and the scores are its (means over
            patients, not over sites or folds), so that a page has one verdict.
    """
    local_row = next(row for row in rows if row["label"] == baseline)
    if not is_number(local_row[metric]["mean"]):
        text = f"There is no run of {LOCAL_BASELINE} on these {examples}, so the benefit of federation is unknown."
        return [Finding("unclear", text)]
    n, seeds = local_row["n_sites"], len(local_row["seeds"])
    folds = f", {len(local_row['folds'])} folds" if local_row.get("folds") else ""
    measured = f"({n} site{'' if n == 1 else 's'}, {seeds} seed{'' if seeds == 1 else 's'}{folds})"
    baseline_gain = next((gain for gain in (gains or {}).values() if gain.get("local")), {"local": local_row[metric]})
    measure_text = f" in {baseline_gain['measure']} over all test {examples}" if "measure" in baseline_gain else ""
    reached = f"reaches {format_number(baseline_gain['local']['mean'], 2)}{measure_text} {measured}"
    mean_text = f" as a mean over {repetition_words(rows)}" if measure_text else ""
    tests_by_row = {(test["a"], test["metric"]): test for test in tests if test["b"] == baseline}
    known_gain = next((gain for gain in (gains or {}).values() if gain["pooled_gain"]), None)
    pooled = next((row["label"] for row in rows if formatting.is_pooled(row["method"]) and not row["dp"]), None)
    return [Finding("unclear", f"A{LOCAL_BASELINE[1:]} {reached}.")] + [
        describe_benefit(gain, _score_text(row, gain.get("federated") or row[metric]), LOCAL_BASELINE)
        if (gain := (gains or {}).get(row["label"])) and gain["gain"]
        else _local_comparison(row, test, known_gain if row["label"] == pooled else None, mean_text)
        for row in rows
        if (test := tests_by_row.get((row["label"], metric)))
    ]


def _local_comparison(row: Json, test: Json, pooled_gain: Json | None, mean_text: str) -> Finding:
    """Return a method's difference from the local baseline, where the benefit by patient is unknown.

    The verdict then needs repetitions with other seeds; pairs of sites or folds of one run do not suffice. Where the
    method pools all data, `pooled_gain` holds its score and gain.
    """
    d = test["difference"]
    score_text = f"{_score_text(row, row[test['metric']])}{mean_text}"
    if not formatting.is_federated(row["method"]):
        distance = f"{abs(d):.2f} {'above' if d > 0 else 'below'}" if round(abs(d), 2) else "as much as"
        gain_text = (
            f"{distance} {LOCAL_BASELINE} ({formatting.format_p_value(test['p_holm'])} over {count_pairs(test)})"
        )
        if pooled_gain:
            score_text = _score_text(row, pooled_gain["pooled"])
            gain_text = f"{gain_words({'gain': pooled_gain['pooled_gain']})} over {LOCAL_BASELINE}"
        meaning = "; this is what its noise costs" if row["dp"] else ""
        meaning = "; privacy forbids pooling the data" if formatting.is_pooled(row["method"]) else meaning
        return Finding("unclear", f"{score_text}, {gain_text}{meaning}.")
    gain = estimate_from_repetitions(d, test["sd"], test["n"]) if test["unit"] == "seed" else Estimate(d, None, None)
    row_gain = {"gain": gain.build_document(), "verdict": decide_verdict(gain, None)}
    return describe_benefit(row_gain, score_text, LOCAL_BASELINE)


def count_pairs(test: Json) -> str:
    return f"{test['n']} {test['unit']}{'' if test['n'] == 1 else 's'}"


def _score_text(row: Json, value: Json) -> str:
    """Return a row and its score as the beginning of a sentence."""
    subject = row["label"]
    if not formatting.is_federated(row["method"]):
        name = "A model of pooled data" if formatting.is_pooled(row["method"]) else "A local model"
        with_dp = f"{name} {'with' if row['dp'] else 'without'} DP"
        subject = ", ".join(filter(None, (with_dp, settings_words(row["settings"]))))
    text = f"{subject} reaches {format_number(value['mean'], 2)}"
    return f"{text} (ε {row['guarantee']} {format_number(row['epsilon'], 1)})" if is_number(row["epsilon"]) else text


def list_cautions(rows: Sequence[Json], tests: Sequence[Json], *, classes: bool = True) -> list[str]:
    """Return the limits of the findings, in sentences.

    Args:
        classes: whether the task is one of classes.
    """
    balance = " and the weights of classes" if classes else ""
    sentences = [
        f"Local models chose their regularisation{balance} by cross-validation on each site's patients. Tune every "
        "method and the pooled model as carefully before you believe in a loss."
    ]
    if any(test["unit"] == "fold" for test in tests):
        sentences.append(
            "Where a test pairs folds, its p-value is too small: any two folds train on mostly the same patients. "
            "Tests by patient ignore the variance of training; repeat with other seeds (--seeds 3)."
        )
    if any(test["unit"] == "site" for test in tests):
        sentences.append(
            "With fewer than three common seeds a test pairs the sites. Sites of one run train together and share a "
            "test set, so the p-value is too small; repeat with other seeds (train --seeds 5) before believing it."
        )
    if any(formatting.is_federated(row["method"]) and len(row["seeds"]) == 1 for row in rows):
        sentences.append(
            "Intervals of a single run cover its test patients, and the privacy noise of a one-shot global head; they "
            "do not cover other training patients or noise in training. Repeat the run (train --seeds 5) before a "
            "hospital decides."
        )
    private_rows = [row for row in rows if is_number(row["epsilon"])]
    if len({format_number(row["epsilon"], 1) for row in private_rows}) > 1:
        span_text = formatting.format_span([row["epsilon"] for row in private_rows], 1)
        sentences.append(f"The methods spent different ε ({span_text}), so their privacy cost differs.")
    if any(row["guarantee"] == "nominal" for row in private_rows):
        sentences.append("A nominal ε is no guarantee: the proxy learned from a private model trained without noise.")
    if any(row["guarantee"] == "shared" for row in private_rows):
        sentences.append(
            "A shared ε is guaranteed against all who see the sum over sites, and against up to privacy.colluding "
            "colluding sites; a site that adds less noise than agreed weakens it for all."
        )
    if len({tuple(row["seeds"]) for row in rows if row["seeds"]}) > 1:
        sentences.append("Not every method was run with the same seeds; differences use the common seeds.")
    return sentences


def settings_words(settings: Mapping[str, Any]) -> str:
    """Return settings as written after ``--set``.

    >>> settings_words({"train.alpha": 0.3, "train.input_px": None, "model.proxy": "mlp"})
    'train.alpha=0.3, train.input_px=default, model.proxy=mlp'
    """
    plain = {None: "default", True: "true", False: "false"}
    return ", ".join(
        f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
        for key, value in settings.items()
    )
