"""`export` of a trained model: a file that other programs run, and the card that says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from wsi_fl import __version__
from wsi_fl.models.exporting import Encoded, Reduced, fit_to_leave, input_of, write_onnx, write_torchscript
from wsi_fl.report import worth
from wsi_fl.report.fill import fill
from wsi_fl.report.words import SCORES, SHORT, detected_of, number
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.report import baselines
from wsi_fl.stages.answers.trained import answering, offered, with_dp
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.site.targets import question
from wsi_fl.stages.training.workshop import architecture
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import sha256_of, write_json, write_text
from wsi_fl.types import Bags, GridSpec, Images, Shape, UsageError, Vectors, WsiFlError, encoder_differences

_CARD = ("MODEL_CARD.md", "model_card.json")


@dataclass(frozen=True)
class Leaving:
    """The model that is asked for.

    Attributes:
        called: "private", "proxy" or "shared", as people ask for it.
        role: as the run keeps it.
        facts: what the run noted of the store it learned from.
    """

    party: RunContext
    site: SiteFile
    called: str
    role: str
    facts: Mapping[str, Any]

    @cached_property
    def made_by(self) -> list[str]:
        """The sites whose patients it knows."""
        return [one.name for one in ([self.site] if self.called == "private" else self.party.members)]

    @cached_property
    def accounts(self) -> dict[str, dict[str, Any]]:
        """What the run's ledgers said at its end of all whose patients it knows and whose part of the run lies here."""
        folders = {name: self.party.run.site(name) for name in self.made_by}
        return {name: one.account() for name, one in folders.items() if one.account_path.exists()}

    @property
    def covered(self) -> bool:
        """Whether the ε of the run's ledgers is this model's."""
        promised = [account["guarantee"] != "none" for account in self.accounts.values()]
        return with_dp(self.party, self.role) and bool(promised) and all(promised)

    @property
    def architecture(self) -> str:
        common = self.party.method.travels == "private"
        return architecture(self.site, self.party.pipeline, self.role, common=common)

    @property
    def name(self) -> str:
        return f"{self.party.run.name}-{self.site.name}-{self.called}"

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


class Made(NamedTuple):
    """The files that were written, the largest difference of their probabilities from the model's, what the file takes
    in words, and the whole architecture."""

    files: Sequence[str]
    difference: float
    input: str
    architecture: str


def export_model(
    study: Study,
    run_name: str,
    *,
    called: str,
    form: str,
    site: str | None = None,
    private: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Write a model of a run for another program, with MODEL_CARD.md and model_card.json; return the document.

    Args:
        called: a name that `offered` gives.
        form: "wsinfer" or "onnx".
        site: whose; by default the first that finished and is here, for models that travelled.
        private: whether a private model may leave.

    Raises:
        UsageError: when the run has no such model, it cannot be had in this format, or the site does not let it go.
        WsiFlError: when the run has not finished.
    """
    if form not in _FORMATS:
        raise UsageError(f"--format {form!r}: for a model use {' or '.join(_FORMATS)}")
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    run.finished()
    with RunContext.of_run(study, run) as party:
        leaving = asked_for(party, called, site)
        _require_allowed(leaving, private=private)
        folder = out or run.path / "exports" / form / f"{leaving.site.name}-{called}"
        what = (leaving.facts["classes"], leaving.shape, torch.device("cpu"))
        models = answering(run, party.pipeline, leaving.site, *what, every=True).models
        network = fit_to_leave(models[leaving.role]).eval().requires_grad_(False)
        for old in _CARD:  # never beside a model that is not its own
            (folder / old).unlink(missing_ok=True)
        made = _FORMATS[form](leaving, network, folder)
        card = card_of(leaving, made, folder)
    write_json(folder / "model_card.json", card)
    write_text(folder / "MODEL_CARD.md", _rendered(card))
    run.site(leaving.site.name).log(f"export: the {called} model as {form}, {', '.join(card['files'])}")
    return {
        "run": study.relative(run.path),
        "site": leaving.site.name,
        "model": called,
        "format": form,
        "out": study.relative(folder),
        "files": sorted((*card["files"], *_CARD)),
        "difference": made.difference,
        "warning": _warning_of(card),
    }


def export_model_lines(document: dict[str, Any]) -> Lines:
    """Say where the files are, and first of all what they may tell of patients."""
    private = document["model"] == "private" or "without differential privacy" in document["warning"]
    yield Line(document["warning"], "bold yellow" if private else "")
    yield Line(f"{document['out']}: {', '.join(document['files'])}")
    yield Line("  read MODEL_CARD.md and write a licence into it before you share this")


def asked_for(party: RunContext, called: str, site_name: str | None) -> Leaving:
    """Return the model of this name, of a site or of the first that has it here.

    Raises:
        UsageError: when the run has no such model, or it is not here.
        WsiFlError: when nobody noted what it learned from.
    """
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
    return Leaving(party, party.site(wanted[0]), called, role, run.site(wanted[0]).store_facts())


def _require_allowed(leaving: Leaving, *, private: bool) -> None:
    """Refuse what the site has not let go by name, and a private model that nobody said may leave."""
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


def _write_onnx(leaving: Leaving, network: nn.Module, folder: Path) -> Made:
    """One file; of a head on features the head alone."""
    shape, encoder = leaving.shape, leaving.facts.get("encoder") or "its encoder"
    if isinstance(shape, Images):
        network, shape, says = _of_patches(network, shape, leaving.spec.size_px)
    elif isinstance(shape, Bags):
        filled = "the last column 1 for a patch and 0 for padding"
        says = f"float32[batch, patches, {shape.n_features} + 1], {filled}; features of {encoder}"
    else:
        says = f"float32[batch, {shape.n_features}], features of {encoder}"
    said = f"`{input_of(shape)}` {says}"
    facts = {"input": said, "class_names": json.dumps(list(leaving.facts["classes"]))}
    facts |= {"patch_size_pixels": str(leaving.spec.size_px), "spacing_um_px": str(leaving.spec.mpp)}
    difference = write_onnx(folder / "model.onnx", network, shape, facts)
    return Made(["model.onnx"], difference, said, leaving.architecture)


def _of_patches(network: nn.Module, shape: Images, size_px: int) -> tuple[nn.Module, Images, str]:
    """A model of patches as they are cut, which reduces them itself as training did: its input, and what that is."""
    says = f"float32[batch, {shape.channels}, {size_px}, {size_px}], pixels / 127.5 − 1"
    if shape.size_px == size_px:
        return network, shape, says
    inside = f"; reduced inside to {shape.size_px} px by area, as in training"
    return Reduced(network, shape.size_px).eval(), Images(shape.channels, size_px), says + inside


def _write_wsinfer(leaving: Leaving, network: nn.Module, folder: Path) -> Made:
    """`torchscript_model.pt`, and `config.json` as wsinfer-zoo's model-config.schema.json has it; it takes the softmax
    itself."""
    shape, spec = leaving.shape, leaving.spec
    if isinstance(shape, Bags):
        raise UsageError("--format wsinfer: WSInfer runs models of patches, and this one sees bags; use onnx")
    if spec.mpp <= 0 or leaving.facts.get("channels", 3) != 3:
        raise UsageError("--format wsinfer: this model learned from images without a scale; use onnx")
    architecture = leaving.architecture
    taken = Images(3, spec.size_px)
    if isinstance(shape, Vectors):
        encoder = _encoder(leaving)
        network, architecture = Encoded(encoder.network, network), f"{encoder.name}+{architecture}"
        shape = taken
    network, taken, says = _of_patches(network, shape, spec.size_px)
    difference = write_torchscript(folder / "torchscript_model.pt", network.eval(), taken)
    half, classes = [0.5, 0.5, 0.5], list(leaving.facts["classes"])
    config = {
        "spec_version": "1.0",
        "name": leaving.name,
        "architecture": architecture,
        "num_classes": len(classes),
        "class_names": classes,
        "patch_size_pixels": spec.size_px,
        "spacing_um_px": spec.mpp,
        "transform": [
            {"name": "Resize", "arguments": {"size": spec.size_px}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": {"mean": half, "std": half}},
        ],
    }
    write_json(folder / "config.json", config)
    return Made(["torchscript_model.pt", "config.json"], difference, says, architecture)


_FORMATS = {"wsinfer": _write_wsinfer, "onnx": _write_onnx}


def _encoder(leaving: Leaving) -> Any:
    """The encoder of the features that a head learned from, if its weights are here and still the same."""
    party, wanted, cpu = leaving.party, leaving.facts["encoder"], torch.device("cpu")
    alone = "use --format onnx, which needs the head alone"
    if any(encoder_differences([party.pipeline.encoding.encoder, wanted])):
        raise UsageError(
            f"--format wsinfer: the model learned from features of {wanted}, and no encoder of the study makes those; "
            f"{alone}"
        )
    try:
        encoder = encoder_of(party.study, party.pipeline, "features", 1, device=cpu)
    except WsiFlError as error:
        raise UsageError(f"{error}; {alone}") from None
    if any(encoder_differences([encoder.label, wanted])):
        raise UsageError(
            f"the model learned from features of {wanted}, the encoder here is {encoder.label}; {alone}"
        )
    return encoder


def card_of(leaving: Leaving, made: Made, folder: Path) -> dict[str, Any]:
    """Return the card of a model whose files lie in a folder, as a document."""
    party = leaving.party
    return {
        "name": leaving.name,
        "role": leaving.called,
        "run": party.run.name,
        "method": party.name,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {file: sha256_of(folder / file) for file in made.files},
        "model": {
            "architecture": made.architecture,
            "input": made.input,
            "task": party.task.kind,
            "target": question(party.pipeline.target),
            "classes": list(leaving.facts["classes"]),
            "difference": made.difference,
        },
        "sites": leaving.made_by,
        "examples": party.examples,
        "inputs": asdict(leaving.spec) | {"encoder": leaving.facts.get("encoder")},
        **_told(leaving),
        "privacy": {"covered": leaving.covered, "sites": _privacy(leaving)},
        "license": None,
    }


def _told(leaving: Leaving) -> dict[str, object]:
    """Scores of the model on test patients (`metrics`), and what joining brought over all sites as comparisons say it
    (`benefit`); each None where nobody measured it, or sites keep it to themselves.

    A head that is made of sums answers with the site's own exact part, and leaves without it: `as_released`. Its scores
    are those of the head that leaves. `missing` says why there are none.
    """
    party, evaluation = leaving.party, leaving.party.run.evaluation()
    alone = leaving.called == "shared" and party.method.once
    told: dict[str, Any] = {
        "metrics": None,
        "benefit": None,
        "as_released": alone,
        "missing": "the run was not evaluated",
    }
    if evaluation is None:
        return told
    shut = 'the hospital does not allow its scores to leave (`allow = ["scores"]`)'
    told["missing"] = "the run has no scores of it" if leaving.site.allows("scores") else shut
    merged = evaluation["merged"] is not None and all(site.allows("scores") for site in party.members)
    if evaluation["merged"] and merged:
        rows = baselines(party, Run.of(party.run.path))
        told["benefit"] = next((row["gain"] for row in rows if row.get("gain")), None)
    if alone:
        those = [
            one for one in evaluation.get("global_head") or [] if party.site(one["site"]).allows("scores")
        ]
        parts = [{"on": f"the test part of {one['site']}", "intervals": None} | one for one in those]
        told["metrics"] = {"scores": list(evaluation["scores"]), "parts": parts} if parts else None
        return told
    row = next((row for row in evaluation["sites"] if row["site"] == leaving.site.name), None)
    if row and leaving.site.allows("scores") and not alone and (model := row["models"].get(leaving.role)):
        answers, scores = row["model"] == leaving.role, evaluation["scores"]
        found = {"the test parts of all sites": (model, row)} if merged else {}
        found["the test part of its own site"] = (model["own"], row["own"])
        parts = []
        for on, (said, whole) in found.items():
            beside = {name: whole.get(name) if answers else None for name in ("n", "intervals")}
            own = {name: said.get(name) for name in scores} | (
                {} if said.get("n") is None else {"n": said["n"]}
            )
            parts.append({"on": on} | beside | own)
        told["metrics"] = {"scores": list(scores), "parts": parts}
    return told


def _privacy(leaving: Leaving) -> list[dict[str, object]]:
    """What every site's account says, of all whose part of the run lies here."""
    ledgers = {name: leaving.party.study.ledger(name) for name in leaving.accounts}
    return [
        {
            "site": name,
            **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
            "max_tpr_at_fpr_1pct": account.get("max_tpr_at_fpr_1pct"),
            "epsilon_lower": _audited(leaving, name),
            "ledger": sha256_of(ledgers[name]) if ledgers[name].exists() else None,
        }
        for name, account in leaving.accounts.items()
    ]


def _audited(leaving: Leaving, site: str) -> float | None:
    """The lower bound on ε that an audit found of what this site released, where that may be told."""
    audited = leaving.party.run.audit() if leaving.party.site(site).allows("scores") else None
    if audited is None:
        return None
    bounds = [
        model["canaries"]["epsilon_lower"]
        for row in audited["sites"]
        for model in row["models"]
        if row["site"] == site
        and model["canaries"]
        and (model["model"] == "private") == (leaving.called == "private")
    ]
    return max(bounds, default=None)


def _warning_of(card: Mapping[str, Any]) -> str:
    """What stands first: what somebody who has this file might learn of patients."""
    private = card["role"] == "private"
    if card["privacy"]["covered"]:
        home = "This is a private model, which was to stay at home. " if private else ""
        return f"{home}Trained with differential privacy; what that is worth stands under Privacy."
    what = "a private model: it was" if private else "a model that was"
    return (
        f"This is {what} trained without differential privacy and may have memorised patients. "
        "Treat it as you treat the data it learned from."
    )


def _rendered(card: Mapping[str, Any]) -> str:
    gain, scores = card["benefit"], (card["metrics"] or {}).get("scores", ())
    joining = None
    if gain:
        who = ", each hospital with its own sums and models mixed in," if card["as_released"] else ""
        reached = (
            f"In the run joining{who} reached {number(gain['federated']['mean'], 2)} in {gain['measure']}"
        )
        joining = worth.finding(gain, reached, "a hospital alone without differential privacy").text
    context = {
        "card": card,
        "warning": _warning_of(card),
        "measures": {name: SHORT.get(name, SCORES[name].lower()) for name in scores},
        "detected": detected_of(card["privacy"]["sites"]),
        "joining": joining,
    }
    return fill("model_card", context, form="md") + "\n"
