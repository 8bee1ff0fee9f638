"""The model of a run that is asked for, whether its site lets it go, and the card that goes with it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl import __version__
from wsi_fl.federation.methods import Method
from wsi_fl.report.words import scores_of
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.report import baselines
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.targets import question
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import read_json
from wsi_fl.types import GridSpec, Images, Shape, UsageError


@dataclass(frozen=True)
class Leaving:
    """The model that is asked for.

    Attributes:
        called: "private", "proxy" or "shared", as people ask for it.
        role: as the run keeps it.
        covered: whether the ε of the run's ledgers is this model's.
        architecture: its name.
        facts: what the run noted of the store it learned from.
    """

    party: RunContext
    site: SiteFile
    called: str
    role: str
    covered: bool
    architecture: str
    facts: Mapping[str, Any]

    @property
    def spec(self) -> GridSpec:
        return GridSpec(**self.facts["spec"])

    @property
    def shape(self) -> Shape:
        """What it takes of an example."""
        if self.party.kind.of_images:
            size = self.party.pipeline.train.input_px or self.spec.size_px
            return Images(int(self.facts.get("channels", 3)), size)
        return self.party.kind.shape(int(self.facts["n_features"]))


def offered(method: Method) -> dict[str, str]:
    """Return the models that sites of a method have by the name they are asked for: name → role in the run.

    A model is `private` where it stays at home. One that travels, or that all sites have alike, is `proxy` or `shared`.
    """
    if method.once:
        return {"private": "private", "shared": "proxy"}
    if "proxy" in method.learners:
        return {"private": "private", "proxy": "proxy"}
    return {
        "shared" if method.learns_from == "everybody" or method.travels == "private" else "private": "private"
    }


def asked_for(party: RunContext, called: str, site_name: str | None) -> Leaving:
    """Return the model of this name, of a site or of the first that has it here.

    Raises:
        UsageError: when the run has no such model, or it is not here.
        WsiFlError: when nobody noted what it learned from.
    """
    from wsi_fl.stages.training.workshop import architecture

    run, models = party.run, offered(party.method)
    if called not in models:
        raise UsageError(f"--model {called!r}: {party.name} has {' and '.join(models)}")
    role = models[called]
    if site_name is None and called == "private":
        raise UsageError("--model private: every site has its own; add --site NAME")
    there = [name for name in party.names if (run.site(name).path / f"{role}.safetensors").exists()]
    wanted = [name for name in there if name not in party.lost and site_name in (None, name)]
    if not wanted:
        raise UsageError(
            f"{run.name}: no {called} model of {site_name or 'any site'} here; found: {', '.join(there) or 'none'}"
        )
    folder = run.site(wanted[0])
    site = party.site(wanted[0])
    with_dp = party.pipeline.privacy.enabled and (role == "proxy" or "proxy" not in party.method.learners)
    return Leaving(
        party,
        site,
        called,
        role,
        covered=with_dp and _all_promised(_accounts(party, called, site)),
        architecture=architecture(site, party.pipeline, role, common=party.method.travels == "private"),
        facts=folder.store_facts(),
    )


def require_allowed(leaving: Leaving, *, private: bool) -> None:
    """Refuse what the site has not let go by name.

    Args:
        private: whether whoever asks says that a private model may leave.

    Raises:
        UsageError: which says what to write where.
    """
    site = leaving.site
    if leaving.called == "private":
        if not private:
            raise UsageError(
                "--model private: it may have memorised patients and is meant to stay; add --private if it may leave"
            )
        if not site.allows("private_model"):
            raise UsageError(
                f"sites/{site.name}.toml: a real hospital's private model may leave only if this file allowed it when "
                'the run began; add allow = ["private_model"] and train a new run'
            )
        return
    shut = [one.name for one in leaving.party.members if not one.allows("model")]
    if shut and not leaving.covered:
        raise UsageError(
            f"sites/{shut[0]}.toml: this model was trained without differential privacy; "
            'it leaves only with allow = ["model"]'
        )


def _all_promised(accounts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(accounts) and all(account["guarantee"] != "none" for account in accounts)


def _accounts(party: RunContext, called: str, site: SiteFile) -> list[dict[str, Any]]:
    """The accounts that a model's ε rests on: the site's own, and of a shared one all that lie here."""
    names = _made_by(party, called, site)
    return [
        _account_of(party.run, name) for name in names if (party.run.site(name).path / "ledger.json").exists()
    ]


def _made_by(party: RunContext, called: str, site: SiteFile) -> list[str]:
    """The sites whose patients a model knows."""
    return [one.name for one in ([site] if called == "private" else party.members)]


def _account_of(run: RunFolder, site: str) -> dict[str, Any]:
    """Return what a run's ledger said of a site when it ended."""
    return dict(read_json(run.site(site).path / "ledger.json"))


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
        "sites": _made_by(party, leaving.called, leaving.site),
        "examples": party.examples,
        "inputs": asdict(spec) | {"encoder": leaving.facts.get("encoder")},
        "metrics": _metrics(leaving),
        "worth": _worth(leaving),
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
    told = all(site.allows("scores") for site in leaving.party.members)
    if evaluation and evaluation["merged"] is not None and told:
        parts.insert(0, _part("the test parts of all sites", model, row if answers else None, scores))
    return {"scores": list(scores), "parts": parts}


def _worth(leaving: Leaving) -> dict[str, Any] | None:
    """What joining brought over all sites, as comparisons say it; None where that is not known, or may not leave."""
    party = leaving.party
    evaluation = party.run.evaluation() or {}
    if not evaluation.get("merged") or not all(site.allows("scores") for site in party.members):
        return None
    rows = baselines(party, Run.of(party.run.path))
    return next((row["gain"] for row in rows if row.get("gain")), None)


def _part(
    on: str, said: Mapping[str, Any], whole: Mapping[str, Any] | None, scores: Sequence[str]
) -> dict[str, Any]:
    n = said.get("n") if said.get("n") is not None or whole is None else whole["n"]
    found = {name: said.get(name) for name in scores}
    return {"on": on, "n": n, **found, "intervals": (whole or {}).get("intervals")}


def _privacy(leaving: Leaving) -> list[dict[str, Any]]:
    """What every site's account says, of all whose part of the run lies here."""
    party, found = leaving.party, []
    for name in _made_by(party, leaving.called, leaving.site):
        if not (party.run.site(name).path / "ledger.json").exists():
            continue
        account, ledger = _account_of(party.run, name), party.study.ledger(name)
        found.append(
            {
                "site": name,
                **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
                "detection": account.get("detection"),
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
