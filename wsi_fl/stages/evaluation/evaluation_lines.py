"""What `evaluate` prints: a row per site, mean ± sd, and remarks."""

from __future__ import annotations

from wsi_fl.data.cross_site_counts import CrossSiteScores
from wsi_fl.learning.ensemble import LOCAL
from wsi_fl.report.formatting import (
    SCORES,
    SHORT_SCORES,
    Json,
    describe_part_classes,
    describe_receivers,
    describe_unscored,
    format_auroc,
    format_number,
    format_spread,
    is_number,
    score_in_sentence,
)
from wsi_fl.stages.evaluation.evaluate import NOISE_REDRAWS, Evaluation
from wsi_fl.stages.runtime.console import MAX_SITE_COLUMNS, Lines, TextLine, TextTable


def render_evaluation_lines(document: Evaluation) -> Lines:
    """Yield a row per site, then mean ± sd."""
    scores = document["scores"]
    first = scores[0]
    if document["sites"]:
        yield _render_table(document)
        class_note = describe_part_classes(document["sites"])
        # only this table has the macro-accuracy of parts
        if class_note and (document["merged"] is None or document["shared"]):
            yield TextLine(f"  {class_note}")
    if unscored := describe_unscored(document["unscored"]):
        yield TextLine(f"  {unscored}", "yellow")
    for sentence in describe_receivers(document):
        yield TextLine(f"  {sentence}")
    if aggregated := document["aggregated"]:
        scores_of_rule = aggregated["rules"][aggregated["rule"]]
        yield TextLine(
            f"aggregated predictions ({aggregated['rule'].replace('_', ' ')}): "
            f"{format_number(scores_of_rule['accuracy'])} accuracy"
        )
    if document["parts"] and not document["shared"]:
        part_scores = {name: part[first] for name, part in document["parts"].items()}
        unknown_text = "not known (too few events or classes there)"
        sentence = ", ".join(
            f"{name} {format_spread(spread_values) if is_number(spread_values['mean']) else unknown_text}"
            for name, spread_values in part_scores.items()
        )
        yield TextLine(f"  {score_in_sentence(first)} on each site's part over all models: {sentence}")
    if document["sites"] and all(row["model"] == LOCAL for row in document["sites"]):
        yield TextLine(
            "each site predicts with its local model: no held-out rows show a gain of federation; "
            "networks need validation rows for that (train.val_fraction)"
        )
    noise_sds = [(row.get("noise") or {}).get(first) for row in document["sites"]]
    if known_sds := [value for value in noise_sds if is_number(value)]:
        yield TextLine(
            f"  the noise of class statistics changes {score_in_sentence(first)} by ±{max(known_sds):.3f} (standard "
            f"deviation over {NOISE_REDRAWS} redraws)"
        )
    if document["cross_site"]:
        yield from render_cross_site_lines(document["cross_site"])
    yield TextLine(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")


def _render_table(document: Evaluation) -> TextTable:
    """Return the table of each site's scores and mean ± sd; of a shared model the scores on each part and on all."""
    scores, examples, sites = document["scores"], document["examples"], document["sites"]
    first = scores[0]
    headings = ["site", "n", *(SHORT_SCORES.get(name, SCORES[name].lower()) for name in scores)]

    def format_cells(name: str, values: Json) -> list[str]:
        return [name, str(values["n"]), *(format_number(values[score]) for score in scores)]

    if document["shared"]:
        rows = [*(format_cells(row["site"], row["own"]) for row in sites), None, format_cells("all", sites[0])]
        return TextTable(f"the shared model on each site's part and the merged test set ({examples})", headings, rows)
    test_set = "merged test set" if document["merged"] is not None else "local test set"
    several = any(row["model"] != "private" for row in sites)
    rows = [
        [
            *format_cells(row["site"], row),
            format_number(row["own"][first]),
            format_number((row["external"] or {}).get(first)),
            *[row["model"]] * several,
        ]
        for row in sites
    ]
    if document["merged"] is not None:
        spreads = [document["merged"][name] for name in scores]
        groups = (document["internal"], document["external"])
        spreads += [(group or {}).get(first) or {} for group in groups]
        rows += [None, ["mean ± sd", "", *map(format_spread, spreads)]]
    model_words = "models" if several else "private models"
    headings += ["own test set", "other sites", *["model"] * several]
    return TextTable(f"{model_words} on the {test_set} ({examples})", headings, rows)


def render_cross_site_lines(cross_site: CrossSiteScores) -> Lines:
    """Yield a table of each model's accuracy on each hospital's test part, and of its scores on all parts."""
    hospitals = cross_site["hospitals"]
    hospitals = hospitals if len(hospitals) <= MAX_SITE_COLUMNS else []  # the report has room for them
    headings = ["model", *hospitals, "all", "macro-acc.", "AUROC", "n"]
    rows: list[list[str] | None] = []
    for name, model in cross_site["models"].items():
        merged = model["merged"]
        parts = [*(model["hospitals"][hospital] for hospital in hospitals), merged]
        areas = [format_number(merged["macro_accuracy"]), format_auroc(merged), str(merged["n"])]
        rows.append([name, *(format_number(part["accuracy"]) for part in parts), *areas])
    yield TextTable("cross-site accuracy of released models", headings, rows)
