"""Numbers and findings as a reader sees them; every sentence is composed from the run's data alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from wsi_fl.federation.methods import METHODS

Json = Mapping[str, Any]
"""A JSON object as the run's files hold it."""
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
"""What scores are called."""
SHORT = {
    "macro_accuracy": "macro-acc.",
    "auroc": "AUROC",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "integrated_brier": "int. Brier",
}
"""What the long ones are called in narrow tables."""


def known(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number one can print (not None, not NaN).

    >>> known(0.5), known(None), known(float("nan"))
    (True, False, False)
    """
    return isinstance(value, int | float) and not math.isnan(value)


def number(value: Any, digits: int = 3) -> str:
    """A number with fixed decimals, a dash when there is none.

    >>> number(0.70649), number(None), number(2.3567, 2), number(-0.0001)
    ('0.706', '–', '2.36', '0.000')
    """
    if not known(value):
        return DASH
    text = "∞" if value == math.inf else f"{value:,.{digits}f}"
    return (text if text.strip("-0.,") else text.lstrip("-")).replace("-", "−")


def count(value: Any) -> str:
    """A whole number with thousands separated.

    >>> count(2984), count(None)
    ('2,984', '–')
    """
    return number(value, 0)


def area_words(scores: Mapping[str, Any]) -> str:
    """Return the AUROC that follows from counts in bins, and how far the exact one may lie from it at most."""
    within = scores.get("auroc_within")
    around = f" ± {number(within)}" if known(within) and within >= 0.0005 else ""
    return number(scores.get("auroc")) + around


def over_classes(present: Mapping[str, int], n_classes: int) -> str:
    """Return in a sentence over how many classes the macro-accuracy of each part is a mean; "" where over all.

    Args:
        present: by name of a test part, how many of the classes have examples in it; 0 of parts without examples.

    >>> over_classes({"C1": 3, "C2": 2}, 3), over_classes({"C1": 3}, 3)
    ('Macro-accuracy is the mean over the classes that occur, at C2 over 2 of 3.', '')
    """
    fewer = [f"{name} over {n} of {n_classes}" for name, n in present.items() if 0 < n < n_classes]
    if not fewer:
        return ""
    return f"Macro-accuracy is the mean over the classes that occur, at {', at '.join(fewer)}."


def classes_of_parts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `over_classes` of the sites' own test parts, by their rows of an evaluation; "" where none has classes."""
    tables = {row["site"]: (row.get("own") or {}).get("confusion") or [] for row in rows}
    present = {name: sum(any(counts) for counts in table) for name, table in tables.items()}
    return over_classes(present, max(map(len, tables.values()), default=0))


def letters(digests: Mapping[str, str]) -> str:
    """Return the letters that heads were made of, by site and the beginning of their digests.

    >>> letters({"C1": "0f3a9c2e", "C2": "77d01b4a"})
    'C1 0f3a9c2e, C2 77d01b4a'
    """
    return ", ".join(f"{site} {digest}" for site, digest in digests.items())


def received(evaluation: Mapping[str, Any]) -> list[str]:
    """Return in sentences who only receives, and how right its predictions are to be expected."""
    found = evaluation.get("inference_sites")
    if not found:
        return []
    score, examples = evaluation["scores"][0], evaluation["examples"]
    said = [
        f"{one['site']} receives: {one['n']} {examples} are predicted, and nobody knows what is true."
        for one in found["sites"]
    ]
    expect = "What to expect of receivers is what a site with labels tells; none is here."
    if told := found["expected"].get(score):
        reached = f"{number(told['mean'])} ({number(told['low'])} to {number(told['high'])})"
        expect = (
            f"To expect of receivers: {SCORES[score].lower()} {reached}, which their head has on the test parts of "
            f"{', '.join(found['reference_sites'])}; a hospital unlike these may see less."
        )
    return [*said, expect]


def measured_in(score: str) -> str:
    """What a score is called within a sentence.

    >>> measured_in("accuracy"), measured_in("auroc"), measured_in("r2")
    ('accuracy', 'AUROC', 'R²')
    """
    name = SCORES[score]
    return name if name[:2].isupper() or name == "R²" else name.lower()


def signed(value: Any, digits: int = 2) -> str:
    """A difference, its sign always written.

    >>> signed(0.071), signed(-0.05), signed(-0.001)
    ('+0.07', '−0.05', '±0.00')
    """
    if not known(value):
        return DASH
    rounded = round(value, digits)
    sign = "±" if rounded == 0 else "+" if rounded > 0 else "−"
    return f"{sign}{abs(rounded):.{digits}f}"


def percent(share: Any, digits: int = 0) -> str:
    """A share of one in percent.

    >>> percent(0.6649), percent(None)
    ('66 %', '–')
    """
    return f"{number(100 * share, digits)} %" if known(share) else DASH


def stated_percent(share: float) -> str:
    """Return a share that somebody has stated in percent, with all its digits: half a per cent is not 0 %.

    >>> stated_percent(0.004), stated_percent(0.07), stated_percent(0.9995)
    ('0.4 %', '7 %', '99.95 %')
    """
    return f"{100 * share:.12g} %"


def singular(examples: str) -> str:
    """Return one of several examples, or models.

    >>> singular("patches"), singular("patients"), singular("shared models")
    ('patch', 'patient', 'shared model')
    """
    return "patch" if examples == "patches" else examples.removesuffix("s")


def spread(metric: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Mean ± standard deviation of ``{"mean", "sd"}``; the mean alone where nothing varies.

    >>> spread({"mean": 0.7123, "sd": 0.0211}), spread({"mean": 0.5, "sd": None}), spread(None)
    ('0.712 ± 0.021', '0.500', '–')
    """
    if not metric or not known(metric.get("mean")):
        return DASH
    mean = number(metric["mean"], digits)
    return f"{mean} ± {number(metric['sd'], digits)}" if known(metric.get("sd")) and metric["sd"] else mean


def interval(bounds: Sequence[float | None] | None) -> str:
    """An interval in brackets, empty when there is none.

    >>> interval([0.6712, 0.75]), interval(None), interval([None, None])
    ('[0.671, 0.750]', '', '')
    """
    if not bounds or not all(known(b) for b in bounds):
        return ""
    return f"[{number(bounds[0])}, {number(bounds[1])}]"


def span(values: Sequence[Any], digits: int = 2) -> str:
    """Smallest to largest known value, one number when they print alike.

    >>> span([2.81, None, 2.36]), span([1.5]), span([])
    ('2.36–2.81', '1.50', '–')
    """
    shown = [number(v, digits) for v in sorted(v for v in values if known(v))]
    if not shown:
        return DASH
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]}–{shown[-1]}"


def size(n_bytes: Any) -> str:
    """Bytes in decimal units.

    >>> size(512), size(48_300_000), size(999_960)
    ('512 B', '48.3 MB', '1.0 MB')
    """
    if not known(n_bytes):
        return DASH
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.95 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def absences(sites: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each site that took no part in some rounds and came back.

    Args:
        sites: rows of a run's summary.

    >>> rounds = {"C1": [[1, 9]], "C2": [[1, 2], [6, 9]]}
    >>> list(absences([{"site": name, "rounds_completed": held} for name, held in rounds.items()]))
    ['C2 was away for a while; it took part in rounds 1 to 2 and 6 to 9.']
    """
    began = min((row["rounds_completed"][0][0] for row in sites if row.get("rounds_completed")), default=1)
    for row in sites:
        held = row.get("rounds_completed") or ()
        if len(held) > 1 or (held and held[0][0] > began):
            parts = " and ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in held)
            yield f"{row['site']} was away for a while; it took part in rounds {parts}."


def duration(seconds: Any) -> str:
    """A time span to the precision a reader needs.

    >>> duration(0.0123), duration(3.21), duration(252), duration(7260), duration(None)
    ('12 ms', '3.2 s', '4 min 12 s', '2 h 1 min', '–')
    """
    if not known(seconds):
        return DASH
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def scientific(value: Any) -> str:
    """A small number such as δ as a power of ten.

    >>> scientific(1e-5), scientific(2.5e-6), scientific(None)
    ('10⁻⁵', '2.5 × 10⁻⁶', '–')
    """
    if not known(value) or value <= 0:
        return DASH
    mantissa, exponent = f"{value:.1e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = mantissa.removesuffix(".0")
    return power if mantissa == "1" else f"{mantissa} × {power}"


def detected(rate: float, unit: str) -> str:
    """What ε means for those it protects, by the test that finds most of them.

    Args:
        rate: the largest true positive rate of a test whose false positive rate is 0.01.
        unit: what ε protects.

    >>> detected(0.0198, "patient").split(", ")[1]
    'somebody who sees all that leaves and knows all other data recognises at most 2.0'
    """
    return (
        f"of 100 {unit}s in it, somebody who sees all that leaves and knows all other data recognises at most "
        f"{100 * rate:.1f}, and wrongly 1 of 100 that are not in it"
    )


def detected_of(sites: Sequence[Mapping[str, Any]]) -> str:
    """What ε means at the site where it means least; "" where some site promises nothing.

    Args:
        sites: rows of a summary or a plan, with `max_tpr_at_fpr_1pct` and `unit`.
    """
    found: list[Any] = [site.get("max_tpr_at_fpr_1pct") for site in sites]
    if not found or not all(known(rate) for rate in found):
        return ""
    where = ", at the site where this is most" if len({round(rate, 3) for rate in found}) > 1 else ""
    return f"{detected(max(found), sites[0]['unit'])}{where}"


def method_name(method: str) -> str:
    """Return the name of a method as its paper writes it; an unknown one as it is."""
    return METHODS[method].name if method in METHODS else method


def method_does(method: str) -> str:
    """Return what a method does, in a few words; "" for an unknown one."""
    return METHODS[method].does if method in METHODS else ""


def is_pooled(method: str) -> bool:
    """Return whether a method learns from all sites' data in one place."""
    return method in METHODS and METHODS[method].learns_from == "everybody"


def is_alone(method: str) -> bool:
    """Return whether each site learns from its own data alone."""
    return method in METHODS and not METHODS[method].shares and not is_pooled(method)


def is_federated(method: str) -> bool:
    """Return whether sites learn with one another by a method."""
    return not (is_pooled(method) or is_alone(method))


class Finding(NamedTuple):
    """A sentence and its tone: ``good``, ``unclear`` or ``bad``."""

    tone: str
    text: str
