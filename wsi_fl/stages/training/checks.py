"""Checks of a run before it starts, without PyTorch: graph, sites, settings, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from wsi_fl import __version__
from wsi_fl.data.augmentation import check_augmentation
from wsi_fl.data.cohort import Cohort
from wsi_fl.federation.methods import FILES, LOCAL_METHOD, Method, list_names
from wsi_fl.federation.topology import TOPOLOGIES, Topology, find_topology, list_hops, read_graph, star
from wsi_fl.plugins import PAYLOAD_MODELS
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.privacy_account import costs_epsilon, describe_batch_size, find_batch_size, require_budget
from wsi_fl.stages.site.public_sources import require_published
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import open_data
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import find_clash
from wsi_fl.types import NoCommonPlan, UsageError


def build_graph(study: Study, pipeline: Pipeline, names: Sequence[str]) -> Topology | None:
    """Return the graph of a pipeline, by name or file; None for the method's graph."""
    graph = pipeline.topology.graph
    if graph is None:
        return None
    if not graph.endswith(".json"):
        if graph not in TOPOLOGIES:
            raise UsageError(f"unknown graph {graph!r}; known: {', '.join(TOPOLOGIES)}, FILE.json")
        return find_topology(graph, pipeline.train.seed)
    return read_graph(study.resolve(graph), names, pipeline.topology.self_weight)


def collect_versions() -> dict[str, str]:
    """Return the versions of packages that must agree at all sites."""
    names = ("torch", "torchvision", "opacus", "numpy")
    return {"wsi_fl": __version__} | {name: version(name) for name in names}


def check_run(
    context: RunContext, backend: str, *, stores: bool = True, is_reported: bool = False, is_preview: bool = False
) -> None:
    """Refuse errors that are detectable before the start, with `stores` also of stores and statistics here.

    Doubts are reported, unless `is_reported` already. A preview charges nothing, so a real site may ask for one alone.
    """
    row, pipeline, sites = context.method, context.pipeline, context.sites
    graph = build_graph(context.study, pipeline, context.names) or row.build_graph(pipeline.train.seed)
    if backend not in {"mpi", "local"}:
        raise UsageError(f"unknown backend {backend!r}; known: mpi, local")
    if refusal := find_clash(pipeline, list_traits(row)):
        raise UsageError(refusal)
    if not is_preview:
        _require_partner(context)
    if context.kind.is_images:
        check_augmentation(pipeline.train.augment)
    min_sites = pipeline.train.min_sites
    n, is_local = (len(context.members if context.uses_files else sites), stores and pipeline.train.from_released)
    if min_sites is not None and not is_local and not 2 <= min_sites <= n:
        raise UsageError(f"train.min_sites = {min_sites}: sites learn together from 2 on; there are {n}")
    if pipeline.topology.weights == "rows" and row.mixing_role and (graph is not star or not row.needs_initial_weights):
        raise UsageError(
            f"topology.weights = 'rows': {context.name} takes no mean of models at a hub; set topology.weights=equal, "
            "or for trained models topology.graph=star"
        )
    # a graph of more hops than a round has room for is refused
    list_hops(graph, len(sites), range(len(sites)), 0, pipeline.topology.self_weight)
    _check_disclosures(context)
    for refusal in _find_errors(context):
        raise UsageError(refusal)
    for hooks in filter(None, (context.hooks, context.starter)):
        hooks.check(context, is_synced=not stores)
    _check_stores_stay_apart(context, backend)
    # a rank of a hospital looks at its own file alone
    for site in context.members if stores and costs_epsilon(pipeline) and not context.uses_files else ():
        require_budget(site)
    if stores:
        _check_stores(context, is_reported=is_reported)


def _check_stores(context: RunContext, *, is_reported: bool) -> None:
    """Refuse stores here that cannot be opened, and report doubts unless `is_reported`."""
    scans: list[Scan] = []
    for site in context.sites:
        if site.name in context.local_names and (site.allows("patches") or not context.has_store(site.name)):
            with open_data(context.study, site.name, context.pipeline) as data:
                doubts = filter(None, (data.remark, _find_doubt(context, site, data.cohort)))
                for doubt in () if is_reported else doubts:
                    print_message(f"  {doubt}", "yellow")
                if not is_reported:
                    scans += (site_scans := context.list_scans(data))
                    for line in describe_copies(site_scans):
                        print_message(f"  {site.name}: {line}", "bold yellow")
    for line in describe_shared(scans):
        print_message(f"  {line}", "bold yellow")


def list_traits(method: Method) -> set[str]:
    """Return the traits of a method that configuration keys require or exclude."""
    traits = {
        "a method of sums": method.payload.has_secure_sum,
        "a method of synthetic patches": method.find_disclosure("generator", "buffer") is not None,
        "a method without differential privacy": bool(method.bare_disclosures),
        "a method that orders sites anew": any(share.is_in_rounds for share in method.bare_disclosures),
    }
    return {trait for trait, has in traits.items() if has}


def _find_doubt(context: RunContext, site: SiteFile, cohort: Cohort) -> str:
    """Describe settings that make little sense for a site with few rows; they are refused for a real hospital."""
    privacy = context.pipeline.privacy
    if not costs_epsilon(context.pipeline):
        return ""
    patients = cohort.obs["patient"][cohort.obs["split"] == "train"]
    n = patients.nunique() if privacy.unit == "patient" else len(patients)
    batch_size = find_batch_size(site, context.pipeline)
    if privacy.target_epsilon is None and batch_size > n > 0 and not context.method.payload.is_single_release:
        return (
            f"site {site.name}: {describe_batch_size(site, context.pipeline)} is more than its {n} {privacy.unit}s, "
            f"and divides sums over {n}"
        )
    if (delta := site.delta or privacy.delta) * n >= 1:
        return f"site {site.name}: δ = {delta:g} is not below 1/{n}, so one of its {privacy.unit}s might be published"
    return ""


def _require_partner(context: RunContext) -> None:
    """Refuse an exchange of a real site with nobody, which would spend its budget for nothing."""
    if len(context.sites) > 1 or not context.method.has_exchange or not all(site.real for site in context.sites):
        return
    (site,) = context.sites
    raise UsageError(
        f"{context.name} would spend the budget of {site.name}, which takes part alone, and send nothing; release "
        f"class statistics (wsi-fl statistics --site {site.name}), train its own model, which never leaves (--method "
        f"{LOCAL_METHOD} --set privacy.enabled=false), or approve a plan of several hospitals (wsi-fl federation "
        "approve PLAN --kit KIT)"
    )


def _check_disclosures(context: RunContext) -> None:
    """Require confirmation and each site's permission for disclosures without differential privacy."""
    pipeline, row, name = context.pipeline, context.method, context.name
    if row.bare_disclosures and pipeline.privacy.enabled:
        things = " and ".join(f"{disclosure.kind}s" for disclosure in row.bare_disclosures)
        raise UsageError(
            f"{name} lets {things} leave without differential privacy; confirm that by --set privacy.enabled=false"
        )
    bare = [
        disclosure
        for disclosure in row.disclosures
        if disclosure.route != FILES and disclosure.is_unprotected(costs_epsilon(pipeline))
    ]
    for site in context.members:
        if forbidden := [disclosure for disclosure in bare if not site.allows(disclosure.content)]:
            contents = ", ".join(f'"{content}"' for content in dict.fromkeys(disclosure.content for disclosure in bare))
            raise UsageError(
                f"sites/{site.name}.toml: a {forbidden[0].content} without differential privacy may not leave this "
                f"site; add allow = [{contents}] "
                f"there{', or switch privacy on' if forbidden[0].protection == 'dp' else ''}"
            )
    if row.find_disclosure("buffer") is not None and len(context.sites) < 2:
        raise UsageError(f"{name} needs two sites or more, which exchange buffers")


def _find_errors(context: RunContext) -> Iterator[str]:
    """Yield errors of participating sites, their models and their permissions."""
    train, model = context.pipeline.train, context.pipeline.model
    if model.weights not in {"", "hub"} and context.pipeline.privacy.enabled:
        require_published(context.study.resolve(model.weights), "model.weights")
    if train.left_out is not None and not context.study.load_site(train.left_out).allows("patches"):
        yield (
            f"sites/{train.left_out}.toml: models are tested on all patients of a site that is left out; add "
            'allow = ["patches"] if they may be, or leave out another site by train.left_out'
        )
    if not context.members and train.left_out is not None:
        yield f"train.left_out = {train.left_out!r} leaves no site to train"
    if not context.members:
        yield f"{context.name} needs a site with labels, and all of them are receivers"
    for family in {name.split(":")[0] for name in (model.private, model.proxy)} & {*PAYLOAD_MODELS}:
        if not context.method.payload.is_single_release:
            names = list_names(lambda row: row.payload.is_single_release)
            yield f"model {family!r} is computed, not trained: it needs --method {names}"
    if model.weights not in {"", "hub"} and not context.study.resolve(model.weights).exists():
        yield f"model.weights = {model.weights!r}: no such file or folder; copy it here, or set model.weights = 'hub'"
    closed_sites = [site.name for site in context.sites if not site.allows("patches")]
    if closed_sites and context.method.learns_from == "everybody":
        reason = f"{context.name} needs every site's patches"
        yield f'sites/{closed_sites[0]}.toml: {reason}; add allow = ["patches"] if it may'


def _check_stores_stay_apart(context: RunContext, backend: str) -> None:
    closed_sites = [site.name for site in context.sites if not site.allows("patches")]
    if closed_sites and backend == "local" and len(context.local_names) > 1:
        raise UsageError(
            f"sites/{closed_sites[0]}.toml is a real hospital, whose store no other site's process may open; "
            "use --backend mpi"
        )


def report_doubts(context: RunContext, *, stores: bool = True) -> None:
    """Report doubts that are no errors: random directions, missing statistics, unusual `stores`."""
    if stores:
        _report_other_patches(context)
    for doubt in context.hooks.find_doubts(context):
        print_message(f"  {doubt}", style="yellow")
    keys, model_choice = context.pipeline.train, context.pipeline.predict.model
    can_validate = context.task.kind == "classes" or not context.method.has_local_baseline or keys.val_fraction
    if not can_validate and keys.local_baseline and model_choice == "auto":
        print_message(
            "  without validation rows, of train.val_fraction or of the stores, the local model predicts numbers and "
            "survival, and ε brings no gain",
            style="yellow",
        )
    if context.receivers:
        print_message(f"  without labels, receives the head and spends nothing: {', '.join(context.receivers)}")


def _report_other_patches(context: RunContext) -> None:
    """Report stores without a site file, or with other patches than the pipeline's."""
    study, first = context.study, context.local_names[0]
    file = context.kind.store_path(study, first).name
    known_sites = {*context.names, context.pipeline.train.left_out}
    unknown_sites = sorted(
        p.parent.name for p in study.root.glob(f"stores/*/{file}") if p.parent.name not in known_sites
    )
    if unknown_sites and context.pipeline.sites is None:
        print_message(f"  stores/{unknown_sites[0]} has no site file, so this site takes no part", style="yellow")
    if not context.find_site(first).allows("patches"):
        return
    with open_data(study, first, context.pipeline) as data:
        meta = data.store.meta
    if getattr(meta, "made_by", "") == "import":  # made without tiling
        return
    spec = meta.spec
    settings = getattr(context.pipeline, context.kind.tiling_command)
    if spec.mpp and (spec.size_px, spec.mpp) != (settings.size_px, settings.mpp):
        print_message(
            f"  the stores hold patches of {spec.size_px} px at {spec.mpp:g} µm, this pipeline would cut "
            f"{settings.size_px} px at {settings.mpp:g} µm (another --pipeline?); training uses what is in the stores",
            style="yellow",
        )


def check_budgets(documents: Sequence[Mapping[str, Any]], limits: Mapping[str, float | None], rounds: int) -> str:
    """Return a warning about sites whose budget ends before the plan, with the limits known here; "" for none.

    NoCommonPlan where no site can afford a round; it names no limit that other processes do not know.
    """
    short_budgets = {
        document["site"]: document["affordable"] for document in documents if document["affordable"] < rounds
    }
    warnings = [_describe_budget(name, limits.get(name), n, rounds) for name, n in short_budgets.items()]
    if len(short_budgets) == len(documents) and not any(short_budgets.values()):
        first, n = next(iter(short_budgets.items()))
        limit = limits.get(first) if len(limits) == len(documents) else None
        raise NoCommonPlan(
            f"{_describe_budget(first, limit, n, rounds)}; lower train.rounds, raise privacy.sigma, or agree on a "
            "larger budget"
        )
    return "; ".join(warnings) + ("; then it leaves and the others go on" if warnings else "")


def _describe_budget(site: str, limit: float | None, n: int, rounds: int) -> str:
    """Describe the number of rounds within a budget, with the limit where known."""
    value = f" = {limit:g}" if limit else ""
    return f"sites/{site}.toml: max_epsilon{value} is enough for {n} of {rounds} rounds"
