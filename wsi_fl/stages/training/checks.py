"""What can be known of a run before anything is started, without PyTorch: its graph, its sites, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from wsi_fl import __version__
from wsi_fl.federation.graph import from_file
from wsi_fl.federation.methods import SHARED
from wsi_fl.federation.topology import TOPOLOGIES, Topology, named, over
from wsi_fl.stages.site.account import require_budget, spends
from wsi_fl.stages.site.kinds import open_data
from wsi_fl.stages.site.party import LINEAR, Party
from wsi_fl.stages.site.sums import RUN, missing_release
from wsi_fl.stages.work.console import say
from wsi_fl.study.site import Allowed, SiteFile
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError


def graph_of(party: Party) -> Topology | None:
    """Return the graph a pipeline names or points to; None for the method's own."""
    pipeline = party.pipeline
    graph = pipeline.topology.graph
    if graph is None:
        return None
    if not graph.endswith(".json"):
        if graph not in TOPOLOGIES:
            raise UsageError(f"unknown graph {graph!r}; known: {', '.join(TOPOLOGIES)}, FILE.json")
        return named(graph, pipeline.train.seed)
    return from_file(party.study.resolve(graph), party.names, pipeline.topology.self_weight)


def running_sites(party: Party) -> tuple[int, ...]:
    """Return the indices of the sites that were not lost."""
    lost = party.lost
    return tuple(k for k, name in enumerate(party.names) if name not in lost)


def sites_here(party: Party) -> tuple[int, ...]:
    """Return the indices of the sites whose models are made on this machine, and which were not lost."""
    return tuple(k for k in running_sites(party) if party.names[k] in party.here)


def versions() -> dict[str, str]:
    """Return the versions of what must be the same everywhere for numbers to agree."""
    names = ("torch", "torchvision", "opacus", "monai", "numpy")
    return {"wsi_fl": __version__} | {name: version(name) for name in names}


def check(party: Party, backend: str, *, stores: bool = True, told: bool = False) -> None:
    """Refuse everything that can be known to be wrong before anything is started.

    Args:
        stores: whether the stores of all sites are on this machine; a rank of a hospital has its own alone.
        told: whether what is doubtful, and not wrong, will be said by another check.
    """
    row, pipeline, sites, method = party.method, party.pipeline, party.sites, party.name
    graph = graph_of(party) or row.exchange
    if backend not in {"mpi", "local"}:
        raise UsageError(f"unknown backend {backend!r}; known: mpi, local")
    # a graph of more hops than a round has room for is refused
    over(graph, len(sites), range(len(sites)), 0, pipeline.topology.self_weight)
    if row.bare:
        _check_bare(party)
    _check_division(party)
    _check_heads(party)
    _check_target(party)
    _check_shared_noise(party)
    if pipeline.audit.canaries and (row.bare or row.generated):
        raise UsageError(
            f"audit.canaries tests what differential privacy promises, and {method} promises none; leave it out"
        )
    if stores and spends(pipeline) and not party.by_files:  # a rank of a hospital looks at its own file alone
        for site in sites:
            require_budget(site)
    if row.travels is not None and not spends(pipeline):
        _check_models_may_leave(sites)
    if row.generated:
        _check_generated(party)
    _check_stores_stay_apart(party, backend)
    _check_releases(party)
    for site in sites if stores else ():
        if site.name in party.here and (site.allows("patches") or not party.has_store(site.name)):
            with open_data(party.study, site.name, pipeline) as data:
                doubts = filter(None, (data.without_answer, _doubtful(party, site, data.table)))
                for said in () if told else doubts:
                    say(f"  {said}", "yellow")


def _doubtful(party: Party, site: SiteFile, table: Any) -> str:
    """Say what of a plan makes little sense for as few rows as a site has; a real hospital is refused it."""
    train, privacy = party.pipeline.train, party.pipeline.privacy
    if not spends(party.pipeline):
        return ""
    patients = table.patient[table.split == "train"]
    n = len(set(patients.tolist())) if privacy.unit == "patient" else len(patients)
    if privacy.target_epsilon is None and train.batch_size > n > 0 and not party.method.once:
        return (
            f"site {site.name}: train.batch_size = {train.batch_size} is more than its {n} {privacy.unit}s, and "
            f"divides what {n} add up to"
        )
    if (delta := site.delta or privacy.delta) * n >= 1:
        return f"site {site.name}: δ = {delta:g} is not below 1/{n}: it would let one of its {privacy.unit}s be public"
    return ""


def _check_division(party: Party) -> None:
    """Refuse folds without one that is tested, or beside what was made of the store's own split, and a site to leave
    out whose patches are not here for testing.
    """
    train, row = party.pipeline.train, party.method
    if train.fold is not None and not train.folds:
        raise UsageError(
            f"train.fold = {train.fold} belongs to train.folds, which says how many folds there are"
        )
    if train.folds and train.fold is None:
        raise UsageError(
            f"train.folds = {train.folds} is a series of runs: `wsi-fl train --folds {train.folds}`, or one of them "
            "with train.fold=1"
        )
    if train.folds and train.fold is not None and train.fold > train.folds:
        raise UsageError(f"train.fold = {train.fold}: there are train.folds = {train.folds} folds")
    if train.folds and train.stratify and party.pipeline.privacy.noisy:
        raise UsageError(
            "train.stratify: whom a patient is in a fold with would depend on all others, which ε does not cover; set "
            "train.stratify=false, or privacy.enabled=false"
        )
    made = {
        "train.releases": party.by_files,
        "train.start = 'oneshot'": row.starts and train.start == RUN,
        f"--method {party.name}": row.generated or row.carries is not None,
    }
    if train.folds and (used := [what for what, uses in made.items() if uses]):
        raise UsageError(
            f"train.folds: {used[0]} rests on the training part of the stores' own split, and a fold tests some of "
            "these patients; leave out one of the two"
        )
    if train.left_out is None:
        return
    if not party.study.site(train.left_out).allows("patches"):
        raise UsageError(
            f"sites/{train.left_out}.toml: models are tested on all patients of a site that is left out; "
            'allow = ["patches"] lets them, or name the sites to leave out that do with train.left_out'
        )
    if not party.sites:
        raise UsageError(f"train.left_out = {train.left_out!r} leaves no site to train")


def _check_releases(party: Party) -> None:
    """Refuse a run that rests on released sums where they are missing, or nothing can be made of them."""
    pipeline, row = party.pipeline, party.method
    if party.by_files:
        if pipeline.audit.canaries:
            raise UsageError(
                "audit.canaries are planted in training, and train.releases takes sums of before"
            )
        if not party.releases:
            raise WsiFlError(missing_release(party.study, party.names[0]))
        if not party.here:
            raise WsiFlError(f"no site of this run has its store here; {party.names[0]} could be the first")
    if pipeline.train.start == RUN and row.starts:
        role = "proxy" if row.travels == "proxy" else "private"
        linear = LINEAR.get(pipeline.train.data)
        if linear is None or getattr(pipeline.model, role) != linear:
            wanted = " or ".join(f"{name!r} (train.data = {data!r})" for data, name in LINEAR.items())
            raise UsageError(f"train.start = 'oneshot' is for linear heads: set model.{role} = {wanted}")
        if missing := [name for name in party.names if name not in party.releases]:
            raise WsiFlError(missing_release(party.study, missing[0]))


def _check_target(party: Party) -> None:
    """What is asked must be a question, and what works with classes alone is not for others."""
    task, pipeline = party.task, party.pipeline
    if task.kind == "classes":
        return
    settings = {
        "train.balance": pipeline.train.balance,
        "audit.canaries": pipeline.audit.canaries,
        "predict.with = 'stack'": pipeline.predict.with_ == "stack",
        "train.start = 'oneshot'": pipeline.train.start == RUN,
    }
    if strange := [name for name, on in settings.items() if on]:
        raise UsageError(
            f"{strange[0]} works with classes alone, and [target] asks for a {task.kind}; leave it out"
        )
    if party.method.once:
        raise UsageError(f"{party.name} works with classes alone, and [target] asks for a {task.kind}")


def _check_heads(party: Party) -> None:
    """One method makes its own heads, and no other can make them."""
    model, name = party.pipeline.model, party.name
    if not party.method.once and any(one.startswith(SHARED) for one in (model.private, model.proxy)):
        raise UsageError(f"model {SHARED!r} is made by `train --method oneshot` alone")
    if party.method.once and (own := [site.name for site in party.sites if site.private_model]):
        raise UsageError(
            f"sites/{own[0]}.toml: {name} solves linear heads; leave private_model out, or train proxyfl"
        )


def _check_shared_noise(party: Party) -> None:
    """Noise that sites add together protects one method, and asks each real site whether it trusts the others."""
    privacy = party.pipeline.privacy
    if privacy.noise == "own":
        return
    if not party.method.once:
        raise UsageError("privacy.noise = 'shared' is for sums that are released once; use --method oneshot")
    if len(party.sites) < privacy.colluding + 2:
        raise UsageError(
            f"privacy.noise = 'shared' with privacy.colluding = {privacy.colluding} needs {privacy.colluding + 2} "
            "sites or more, since a sum of fewer hides nothing"
        )
    for site in party.sites:
        if not site.allows("shared"):
            raise UsageError(
                f"sites/{site.name}.toml: with privacy.noise = 'shared' this site's ε rests on noise that other sites "
                'add; add allow = ["shared"] there, or set privacy.noise = "own"'
            )


def _check_stores_stay_apart(party: Party, backend: str) -> None:
    """The store of a real hospital is opened by its own process alone, unless its file allows more."""
    shut = [site.name for site in party.sites if not site.allows("patches")]
    if shut and party.method.pooled:
        raise UsageError(
            f'sites/{shut[0]}.toml: {party.name} needs every site\'s patches; allow = ["patches"] would let them'
        )
    if shut and backend == "local" and len(party.here) > 1:
        raise UsageError(
            f"sites/{shut[0]}.toml is a real hospital, whose store no other site's process may open; use --backend mpi"
        )


def _check_models_may_leave(sites: Sequence[SiteFile]) -> None:
    """Models that leave without differential privacy are allowed by name."""
    for site in sites:
        if not site.allows("model"):
            raise UsageError(
                f"sites/{site.name}.toml: a model without differential privacy may not leave this site; "
                'add allow = ["model"] there, or switch privacy on'
            )


def _check_generated(party: Party) -> None:
    """Generators and the models that learned from their images leave without differential privacy, if at all."""
    method = party.name
    if not party.kind.of_images:
        raise UsageError(f"{method} generates images; set train.data = 'patches'")
    if party.pipeline.privacy.enabled:
        raise UsageError(f"{method} has no differential privacy and claims none; set privacy.enabled=false")
    needed: tuple[Allowed, ...] = ("generator", "model")
    for what in needed:
        if shut := [site.name for site in party.sites if not site.allows(what)]:
            raise UsageError(
                f"sites/{shut[0]}.toml: {method} lets a {what} leave this site without differential privacy; "
                'allow = ["generator", "model"] would let it'
            )


def _check_bare(party: Party) -> None:
    """What a method must be told in so many words that shares models or buffers without differential privacy."""
    pipeline, name, method, sites = party.pipeline, party.name, party.method, party.sites
    if pipeline.privacy.enabled:
        raise UsageError(
            f"{name} lets models and synthetic samples leave without differential privacy; say that you know, by "
            "--set privacy.enabled=false"
        )
    for site in sites:
        if shut := [content for content in method.leaves if content not in site.allowed]:
            wanted = ", ".join(f'"{content}"' for content in method.leaves)
            raise UsageError(
                f"sites/{site.name}.toml: a {shut[0]} without differential privacy may not leave this site; "
                f"replay.variant = {pipeline.replay.variant!r} needs allow = [{wanted}] there"
            )
    if pipeline.topology.graph is not None or pipeline.topology.self_weight:
        raise UsageError(f"{name} orders the sites anew in every round; leave [topology] out")
    if method.carries is None:
        return
    if len(sites) < 2:
        raise UsageError(f"{name} needs two sites or more: one alone has nobody to get a buffer from")
    if not party.kind.of_images:
        raise UsageError("a buffer holds patches; use train.data = 'patches'")


def tell_who_is_left_out(party: Party) -> None:
    """Say which sites have released no sums, where heads are made of those that are there."""
    if party.by_files and (left := [name for name in party.names if name not in party.releases]):
        say(f"  not in the sum, for there is no file in releases/: {', '.join(left)}", style="yellow")


def warn_of_other_patches(party: Party) -> None:
    """Say when stores belong to no site, or were made otherwise than the pipeline would."""
    study, first = party.study, party.here[0]
    file = party.kind.path(study, first).name
    known = {*party.names, party.pipeline.train.left_out}
    left = sorted(p.parent.name for p in study.root.glob(f"stores/*/{file}") if p.parent.name not in known)
    if left and party.pipeline.sites is None:
        say(f"  stores/{left[0]} has no site file, so this site takes no part", style="yellow")
    if not party.site(first).allows("patches"):
        return
    with open_data(study, first, party.pipeline) as data:
        spec = data.store.meta.spec
    would = getattr(party.pipeline, party.kind.cut_by)
    if spec.mpp and (spec.size_px, spec.mpp) != (would.size_px, would.mpp):
        say(
            f"  the stores hold patches of {spec.size_px} px at {spec.mpp:g} µm, this pipeline would cut "
            f"{would.size_px} px at {would.mpp:g} µm (another --pipeline?); training uses what is in the stores",
            style="yellow",
        )


def check_budgets(
    brought: Sequence[Mapping[str, Any]], limits: Mapping[str, float | None], rounds: int
) -> str:
    """What to say of the sites whose budget ends before the plan does; empty when none does.

    Args:
        brought: the preflight documents of all sites, with "site" and "affordable" rounds.
        limits: max_epsilon of each site, as far as it is known here.

    Raises:
        NoCommonPlan: when no site can afford a single round. It names no limit that other processes do not know.
    """
    short = {one["site"]: one["affordable"] for one in brought if one["affordable"] < rounds}
    said = [_enough(name, limits.get(name), n, rounds) for name, n in short.items()]
    if len(short) == len(brought) and not any(short.values()):
        first, n = next(iter(short.items()))
        limit = limits.get(first) if len(limits) == len(brought) else None
        raise NoCommonPlan(
            f"{_enough(first, limit, n, rounds)}; lower train.rounds, raise privacy.sigma, or agree on a larger budget"
        )
    return "; ".join(said) + ("; then it leaves and the others go on" if said else "")


def _enough(site: str, limit: float | None, n: int, rounds: int) -> str:
    """For how many rounds a budget is enough; a limit that is not known is not named."""
    value = f" = {limit:g}" if limit else ""
    return f"sites/{site}.toml: max_epsilon{value} is enough for {n} of {rounds} rounds"
