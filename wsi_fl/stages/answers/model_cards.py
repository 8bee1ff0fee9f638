"""What is said of a model that leaves, gathered from what its run left behind."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl import __version__
from wsi_fl.report.words import scores_of
from wsi_fl.stages.answers.leaving import Leaving, account_of
from wsi_fl.stages.site.targets import question
from wsi_fl.system.files import read_json


@dataclass(frozen=True)
class Made:
    """What was written.

    Attributes:
        files: their names.
        difference: largest difference of probabilities from the model's.
        input: what the file takes, in words.
        architecture: the whole of it.
    """

    files: Sequence[str]
    difference: float
    input: str
    architecture: str


def card_of(leaving: Leaving, name: str, made: Made, folder: Path) -> dict[str, Any]:
    """Return the card of a model whose files lie in a folder, as a document."""
    party, spec = leaving.party, leaving.spec
    return {
        "name": name,
        "role": leaving.called,
        "run": party.run.name,
        "method": party.name,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in made.files},
        "model": {
            "architecture": made.architecture,
            "input": made.input,
            "task": party.task.kind,
            "answers": question(party.pipeline.target),
            "classes": list(leaving.facts["classes"]),
            "difference": made.difference,
        },
        "sites": [leaving.site.name] if leaving.called == "private" else party.names,
        "examples": party.examples,
        "inputs": asdict(spec) | {"encoder": leaving.facts.get("encoder")},
        "metrics": _metrics(leaving),
        "privacy": {"covered": leaving.covered, "sites": _privacy(leaving)},
        "license": None,
    }


def _metrics(leaving: Leaving) -> dict[str, Any] | None:
    """Scores of the model on test patients; None where nobody measured, or the site keeps them to itself.

    A head that is made of sums is evaluated with the site's own exact part, and leaves without it.
    """
    evaluation = leaving.party.run.evaluation()
    rows = [row for row in (evaluation or {}).get("sites", ()) if row["site"] == leaving.site.name]
    if (
        not rows
        or not leaving.site.allows("scores")
        or (leaving.called == "shared" and leaving.party.method.once)
    ):
        return None
    row, model = rows[0], rows[0]["models"].get(leaving.role)
    if model is None:
        return None
    answers = row["with"] == leaving.role
    scores = scores_of(evaluation or {})
    parts = [_part("the test part of its own site", model["own"], row["own"] if answers else None, scores)]
    told = all(site.allows("scores") for site in leaving.party.sites)
    if evaluation and evaluation["merged"] is not None and told:
        parts.insert(0, _part("the test parts of all sites", model, row if answers else None, scores))
    return {"scores": list(scores), "parts": parts}


def _part(
    on: str, said: Mapping[str, Any], whole: Mapping[str, Any] | None, scores: Sequence[str]
) -> dict[str, Any]:
    n = said.get("n") if said.get("n") is not None or whole is None else whole["n"]
    found = {name: said.get(name) for name in scores}
    return {"on": on, "n": n, **found, "intervals": (whole or {}).get("intervals")}


def _privacy(leaving: Leaving) -> list[dict[str, Any]]:
    """What every site's account says, of all whose part of the run lies here."""
    party, found = leaving.party, []
    for name in [leaving.site.name] if leaving.called == "private" else party.names:
        if not (party.run.site(name).path / "ledger.json").exists():
            continue
        account, ledger = account_of(party.run, name), party.study.ledger(name)
        found.append(
            {
                "site": name,
                **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
                "epsilon_lower": _audited(leaving, name),
                "ledger": hashlib.sha256(ledger.read_bytes()).hexdigest() if ledger.exists() else None,
            }
        )
    return found


def _audited(leaving: Leaving, site: str) -> float | None:
    """The lower bound on ε that an audit found of what this site released, where that may be told."""
    path = leaving.party.run.path / "audit" / "audit.json"
    if not path.exists() or not leaving.party.site(site).allows("scores"):
        return None
    models = [row["models"] for row in read_json(path)["sites"] if row["site"] == site]
    bounds = [
        model["canaries"]["epsilon_lower"]
        for model in (models[0] if models else ())
        if model["canaries"] and (model["model"] == "private") == (leaving.called == "private")
    ]
    return max(bounds, default=None)
