"""Formats of numbers, and sentences on a run, for pages and the console."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from wsi_fl.federation.methods import METHODS
from wsi_fl.privacy.guarantee import describe_detection

Json = Mapping[str, Any]
"""A JSON object of a run's file."""
DASH = "–"
SCORES = {
    "accuracy": "Accuracy",
    "macro_accuracy": "Macro-accuracy",
    "auroc": "AUROC",
    "mae": "Mean absolute error",
    "rmse": "Root mean squared error",
    "r2": "R²",
    "concordance": "Concordance",
    "integrated_brier": "Integrated Brier score",
}
"""Names of scores."""
SHORT_SCORES = {
    "macro_accuracy": "macro-acc.",
    "auroc": "AUROC",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "integrated_brier": "int. Brier",
}
"""Short names of scores for narrow tables."""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number other than NaN.

    >>> is_number(0.5), is_number(None), is_number(float("nan"))
    (True, False, False)
    """
    return isinstance(value, int | float) and not math.isnan(value)


def format_number(value: Any, digits: int = 3) -> str:
    """Return a number with fixed decimals, a dash for None and NaN.

    >>> format_number(0.70649), format_number(None), format_number(2.3567, 2), format_number(-0.0001)
    ('0.706', '–', '2.36', '0.000')
    """
    if not is_number(value):
        return DASH
    text = "∞" if value == math.inf else f"{value:,.{digits}f}"
    return (text if text.strip("-0.,") else text.lstrip("-")).replace("-", "−")


def format_count(value: Any) -> str:
    """Return a whole number with thousands separators.

    >>> format_count(2984), format_count(None)
    ('2,984', '–')
    """
    return format_number(value, 0)


def format_auroc(scores: Mapping[str, Any]) -> str:
    """Return the AUROC from counts in bins, ± the bound of its error."""
    within = scores.get("auroc_within")
    around = f" ± {format_number(within)}" if is_number(within) and within >= 0.0005 else ""
    return format_number(scores.get("auroc")) + around


def describe_class_coverage(present: Mapping[str, int], n_classes: int) -> str:
    """Return a sentence on the classes in the macro-accuracy of test parts that lack some; "" without such a part.

    Args:
        present: test part → number of classes with examples; 0 for parts without examples.

    >>> describe_class_coverage({"C1": 3, "C2": 2}, 3), describe_class_coverage({"C1": 3}, 3)
    ('Macro-accuracy is the mean over the classes that occur, at C2 over 2 of 3.', '')
    """
    fewer = [f"{name} over {n} of {n_classes}" for name, n in present.items() if 0 < n < n_classes]
    if not fewer:
        return ""
    return f"Macro-accuracy is the mean over the classes that occur, at {', at '.join(fewer)}."


def describe_part_classes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `describe_class_coverage` of the local test parts, from the rows of an evaluation; "" without classes."""
    tables = {row["site"]: (row.get("own") or {}).get("confusion") or [] for row in rows}
    present = {name: sum(any(counts) for counts in table) for name, table in tables.items()}
    return describe_class_coverage(present, max(map(len, tables.values()), default=0))


def format_statistics(digests: Mapping[str, str]) -> str:
    """Return the class statistics of a head as text: site and beginning of the digest.

    >>> format_statistics({"C1": "0f3a9c2e", "C2": "77d01b4a"})
    'C1 0f3a9c2e, C2 77d01b4a'
    """
    return ", ".join(f"{site} {digest}" for site, digest in digests.items())


def describe_receivers(evaluation: Mapping[str, Any]) -> list[str]:
    """Return sentences on the inference-only sites, and the expected score of their predictions."""
    receivers = evaluation.get("inference_sites")
    if not receivers:
        return []
    score, examples = evaluation["scores"][0], evaluation["examples"]
    sentences = [
        f"{site['site']} is a site without labels: {site['n']} {examples} are predicted, the true labels are unknown."
        for site in receivers["sites"]
    ]
    expect = "The score to expect at sites without labels needs a site with labels; none is here."
    if expected := receivers["expected"].get(score):
        low, high = format_number(expected["low"]), format_number(expected["high"])
        reached = f"{format_number(expected['mean'])} ({low} to {high})"
        expect = (
            f"Expected at sites without labels: {score_in_sentence(score)} {reached}, as their head has on the test "
            f"parts of {', '.join(receivers['reference_sites'])}; a hospital unlike these may have less."
        )
    return [*sentences, expect]


def describe_unscored(unscored: Mapping[str, int]) -> str:
    """Return a sentence on test slides whose tumour type has one diagnosis, by tumour type; "" without any.

    >>> describe_unscored({"breast": 7, "mesenchymal": 2})
    'Not scored: 9 slides of breast, mesenchymal, which have one diagnosis in this study, so nothing is to choose.'
    """
    if not unscored:
        return ""
    slides = "1 slide" if (n := sum(unscored.values())) == 1 else f"{n} slides"
    have = "have" if len(unscored) > 1 else "has"
    names = ", ".join(unscored)
    return f"Not scored: {slides} of {names}, which {have} one diagnosis in this study, so nothing is to choose."


def score_in_sentence(score: str) -> str:
    """Return the name of a score within a sentence.

    >>> score_in_sentence("accuracy"), score_in_sentence("auroc"), score_in_sentence("r2")
    ('accuracy', 'AUROC', 'R²')
    """
    name = SCORES[score]
    return name if name[:2].isupper() or name == "R²" else name.lower()


def format_signed(value: Any, digits: int = 2) -> str:
    """Return a difference with its sign.

    >>> format_signed(0.071), format_signed(-0.05), format_signed(-0.001)
    ('+0.07', '−0.05', '±0.00')
    """
    if not is_number(value):
        return DASH
    rounded = round(value, digits)
    sign = "±" if rounded == 0 else "+" if rounded > 0 else "−"
    return f"{sign}{abs(rounded):.{digits}f}"


def format_p_value(p: float | None) -> str:
    """Return a p-value in words.

    >>> format_p_value(0.0312), format_p_value(2e-6), format_p_value(None)
    ('p = 0.031', 'p < 0.001', 'no p-value')
    """
    if p is None:
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def format_percent(share: Any, digits: int = 0) -> str:
    """Return a share in percent.

    >>> format_percent(0.6649), format_percent(None)
    ('66 %', '–')
    """
    return f"{format_number(100 * share, digits)} %" if is_number(share) else DASH


def format_stated_percent(share: float) -> str:
    """Return a given share in percent with all its digits.

    >>> format_stated_percent(0.004), format_stated_percent(0.07), format_stated_percent(0.9995)
    ('0.4 %', '7 %', '99.95 %')
    """
    return f"{100 * share:.12g} %"


def singular(examples: str) -> str:
    """Return the singular of a plural noun.

    >>> singular("patches"), singular("patients"), singular("shared models")
    ('patch', 'patient', 'shared model')
    """
    return "patch" if examples == "patches" else examples.removesuffix("s")


def format_spread(metric: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Return mean ± standard deviation of ``{"mean", "sd"}``; the mean without a deviation.

    >>> format_spread({"mean": 0.7123, "sd": 0.0211}), format_spread({"mean": 0.5, "sd": None}), format_spread(None)
    ('0.712 ± 0.021', '0.500', '–')
    """
    if not metric or not is_number(metric.get("mean")):
        return DASH
    mean = format_number(metric["mean"], digits)
    return f"{mean} ± {format_number(metric['sd'], digits)}" if is_number(metric.get("sd")) and metric["sd"] else mean


def format_interval(bounds: Sequence[float | None] | None) -> str:
    """Return an interval in brackets, "" for None.

    >>> format_interval([0.6712, 0.75]), format_interval(None), format_interval([None, None])
    ('[0.671, 0.750]', '', '')
    """
    if not bounds or not all(is_number(b) for b in bounds):
        return ""
    return f"[{format_number(bounds[0])}, {format_number(bounds[1])}]"


def format_span(values: Sequence[Any], digits: int = 2) -> str:
    """Return smallest–largest known value, one number where both print alike.

    >>> format_span([2.81, None, 2.36]), format_span([1.5]), format_span([])
    ('2.36–2.81', '1.50', '–')
    """
    numbers = [format_number(v, digits) for v in sorted(v for v in values if is_number(v))]
    if not numbers:
        return DASH
    return numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]}–{numbers[-1]}"


def format_size(n_bytes: Any) -> str:
    """Return bytes in decimal units.

    >>> format_size(512), format_size(48_300_000), format_size(999_960)
    ('512 B', '48.3 MB', '1.0 MB')
    """
    if not is_number(n_bytes):
        return DASH
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.95 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def describe_absences(sites: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each site that dropped out of some rounds and came back.

    Args:
        sites: rows of a run's summary.

    >>> rounds = {"C1": [[1, 9]], "C2": [[1, 2], [6, 9]]}
    >>> list(describe_absences([{"site": name, "rounds_completed": held} for name, held in rounds.items()]))
    ['C2 dropped out for a while; it took part in rounds 1 to 2 and 6 to 9.']
    """
    first_round = min((row["rounds_completed"][0][0] for row in sites if row.get("rounds_completed")), default=1)
    for row in sites:
        intervals = row.get("rounds_completed") or ()
        if len(intervals) > 1 or (intervals and intervals[0][0] > first_round):
            parts = " and ".join(f"{start} to {end}" if end > start else f"{start}" for start, end in intervals)
            yield f"{row['site']} dropped out for a while; it took part in rounds {parts}."


def format_duration(seconds: Any) -> str:
    """Return a time span in two units at most.

    >>> format_duration(0.0123), format_duration(3.21), format_duration(252), format_duration(7260)
    ('12 ms', '3.2 s', '4 min 12 s', '2 h 1 min')
    """
    if not is_number(seconds):
        return DASH
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60} min"


def format_scientific(value: Any) -> str:
    """Return a small number such as δ as a power of ten.

    >>> format_scientific(1e-5), format_scientific(2.5e-6), format_scientific(None)
    ('10⁻⁵', '2.5 × 10⁻⁶', '–')
    """
    if not is_number(value) or value <= 0:
        return DASH
    mantissa, exponent = f"{value:.1e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = mantissa.removesuffix(".0")
    return power if mantissa == "1" else f"{mantissa} × {power}"


def find_departures(summary: Json) -> list[Json]:
    """Return the losses of sites that dropped out after a round in which they took part; their ε is in no row."""
    return [loss for loss in summary.get("losses", ()) if loss["round"] > 1]


def describe_worst_detection(sites: Sequence[Mapping[str, Any]]) -> str:
    """Return the meaning of ε at the site with the weakest guarantee; "" where a site has none.

    Args:
        sites: rows of a summary or a plan, with `max_tpr_at_fpr_1pct` and `unit`.
    """
    rates: list[Any] = [site.get("max_tpr_at_fpr_1pct") for site in sites]
    if not rates or not all(is_number(rate) for rate in rates):
        return ""
    location = ", at the site where this is most" if len({round(rate, 3) for rate in rates}) > 1 else ""
    return f"{describe_detection(max(rates), sites[0]['unit'])}{location}"


def method_name(method: str) -> str:
    """Return the name of a method in its paper; an unknown name unchanged."""
    return METHODS[method].name if method in METHODS else method


def method_does(method: str) -> str:
    """Return the summary of a method; "" for an unknown one."""
    return METHODS[method].summary if method in METHODS else ""


def is_pooled(method: str) -> bool:
    """Return whether a method trains on the pooled data of all sites."""
    return method in METHODS and METHODS[method].learns_from == "everybody"


def is_local(method: str) -> bool:
    """Return whether a method trains local models only."""
    return method in METHODS and not METHODS[method].disclosures and not is_pooled(method)


def is_federated(method: str) -> bool:
    """Return whether a method is federated."""
    return not (is_pooled(method) or is_local(method))


class Finding(NamedTuple):
    """A sentence and its tone: ``good``, ``unclear`` or ``bad``."""

    tone: str
    text: str
