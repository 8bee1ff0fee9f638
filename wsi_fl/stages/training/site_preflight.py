"""What a site announces before the first round, and what it decides for the whole run."""

from __future__ import annotations

from dataclasses import asdict, astuple

from wsi_fl.federation.methods import Method
from wsi_fl.federation.preflight import PreflightDocument, Setting
from wsi_fl.federation.site_state import Site
from wsi_fl.models import parameters_digest, schema_digest, start_digest
from wsi_fl.privacy.ledger_file import run_id
from wsi_fl.stages.site.privacy_account import count_affordable
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import collect_versions
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.toml import Section, read_setting
from wsi_fl.system.files import file_sha256
from wsi_fl.types import NoCommonPlan

_COMPARED_SECTIONS = ("privacy", "train", "target", "audit", "topology")
"""The sections with settings that must agree at all sites."""
_SITE_KEYS = ("topology.graph", "train.input_px")
"""Settings that may differ between sites, or are compared by effect."""


def build_preflight(site: Site, context: RunContext) -> PreflightDocument:
    """Return a site's preflight document: plans and shapes only."""
    data, pipeline, travels = context.open_data(site.name), context.pipeline, context.method.mixing_role
    meta, buffer, graph = data.store.meta, site.buffer, pipeline.topology.graph
    return {
        "site": site.name,
        "run": run_id(site.ledger.run),
        "method": context.name,
        "settings": _list_settings(pipeline),
        "classes": list(data.classes),
        "size_px": meta.spec.size_px,
        "mpp": meta.spec.mpp,
        **data.describe_inputs(),
        "weights": start_digest(site.learners[travels].model) if travels else "",
        "schema": schema_digest(site.learners[travels].model) if travels else "",
        "sites": context.names,
        "inference_sites": context.receivers,
        "graph": file_sha256(context.study.resolve(graph)) if graph and graph.endswith(".json") else graph,
        "projection": context.hooks.projection_digest(data),
        "buffer": [read_setting(pipeline, "replay.variant"), *astuple(buffer.shape)] if buffer else None,
        "noise": site.plan.sigma if site.plan and pipeline.privacy.noise == "shared" else None,
        "statistics": {name: released.digest for name, released in context.statistics.items()},
        "versions": collect_versions(),
        "affordable": count_affordable(site, pipeline.train.rounds),
        "units": site.units.n,
        "sigma": site.plan.sigma if site.plan else 0.0,
    }


def _list_settings(pipeline: Pipeline) -> dict[str, Setting]:
    """Return "section.key" → value, of all settings that must agree at all sites."""
    values = pipeline.model_dump(by_alias=True)
    extra_sections = [name for name, section in pipeline if isinstance(section, Section) and section.compared]
    settings = {
        f"{name}.{key}": value for name in (*_COMPARED_SECTIONS, *extra_sections) for key, value in values[name].items()
    }
    return {key: value for key, value in settings.items() if key not in _SITE_KEYS}


def require_signed_model(site: Site, context: RunContext) -> None:
    """Refuse to train where the exchanged model is not the signed one, by its `parameters_digest`."""
    signed, travels = context.run.parameters, context.method.mixing_role
    if signed and travels and parameters_digest(site.learners[travels].model) != signed:
        raise NoCommonPlan(
            f"site {site.name} has another model than the plan's (names and shapes of its parameters differ); "
            "nothing was trained, so compare the versions of timm, torchvision and MONAI, or agree on a new plan"
        )


def store_decisions(site: Site) -> None:
    """Store a site's decisions in the run before training, so that a restart uses the same.

    These are the plan (the account changes during the run), the canaries, the tuned settings, and the buffer, of which
    each round sends the same bytes.
    """
    folder, site_canaries = site.folder, site.canaries
    if site.plan is not None and folder.read_document("plan") is None:
        folder.write_document("plan", asdict(site.plan))
    if site_canaries is not None and not folder.read_document("canaries"):
        coins = "".join("1" if coin else "0" for coin in site_canaries.included)
        folder.write_document("canaries", {"n": len(coins), "seed": str(site_canaries.seed), "coins": coins})
    if site.tuned_settings is not None:
        folder.write_document("tuning", site.tuned_settings)
    if site.buffer is not None and folder.read_buffer() is None:
        folder.record_buffer(site.buffer.values, site.buffer.provenance)


_THINGS = {"model": "its model", "buffer": "a buffer of synthetic samples", "generator": "its generator"}


def describe_disclosures(site: Site, method: Method) -> str:
    """Describe disclosures without differential privacy by design; "" for none."""
    if not method.bare_disclosures:
        return ""
    things = " and ".join(_THINGS[disclosure.content] for disclosure in method.bare_disclosures)
    text = f"{site.name} releases {things}, without differential privacy"
    if site.buffer is not None and site.buffer.provenance["check"] != "passed":
        text += f"; the check of its generator: {'; '.join(site.buffer.provenance['reasons'])}"
    return text
