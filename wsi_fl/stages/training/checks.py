"""What can be known of a run before anything is started, without PyTorch: its graph, its sites, what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

from wsi_fl import __version__
from wsi_fl.federation.methods import FILES, SHARED, Method, names_of
from wsi_fl.federation.topology import TOPOLOGIES, Topology, from_file, named, over
from wsi_fl.privacy.masks import require_enough
from wsi_fl.slides.patching.copies import Scan, describe_copies, describe_shared
from wsi_fl.stages.site.account import require_budget, spends
from wsi_fl.stages.site.data import open_data, scans_in
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.public import require_published
from wsi_fl.stages.site.sums import RUN, missing_release
from wsi_fl.stages.work.console import say
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import clash
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError


def graph_of(party: RunContext) -> Topology | None:
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


def versions() -> dict[str, str]:
    """Return the versions of what must be the same everywhere for numbers to agree."""
    names = ("torch", "torchvision", "opacus", "numpy")
    return {"wsi_fl": __version__} | {name: version(name) for name in names}


def check(party: RunContext, backend: str, *, stores: bool = True, told: bool = False) -> None:
    """Refuse what can be known to be wrong before anything is started, of `stores` and letters if all are here.

    What is doubtful, and not wrong, is said unless it was `told` already.
    """
    row, pipeline, sites = party.method, party.pipeline, party.sites
    graph = graph_of(party) or row.graph(pipeline.train.seed)
    if backend not in {"mpi", "local"}:
        raise UsageError(f"unknown backend {backend!r}; known: mpi, local")
    if refusal := clash(pipeline, traits_of(row)):
        raise UsageError(refusal)
    least = pipeline.train.min_sites
    n, alone = len(party.members if party.by_files else sites), stores and pipeline.train.from_released
    if least is not None and not alone and not 2 <= least <= n:
        raise UsageError(f"train.min_sites = {least}: sites learn together from 2 on; there are {n}")
    # a graph of more hops than a round has room for is refused
    over(graph, len(sites), range(len(sites)), 0, pipeline.topology.self_weight)
    _check_leave(party)
    _check_start(party)
    for refusal in _wrong(party):
        raise UsageError(refusal)
    _check_stores_stay_apart(party, backend)
    if stores and spends(pipeline) and not party.by_files:  # a rank of a hospital looks at its own file alone
        for site in party.members:
            require_budget(site)
    _check_releases(party, carried=not stores)
    scans: list[Scan] = []
    for site in sites if stores else ():
        if site.name in party.here and (site.allows("patches") or not party.has_store(site.name)):
            with open_data(party.study, site.name, pipeline) as data:
                doubts = filter(None, (data.remark, _doubtful(party, site, data.table)))
                for said in () if told else doubts:
                    say(f"  {said}", "yellow")
                if not told:
                    scans += (site_scans := scans_in(data.store))
                    for line in describe_copies(site_scans):
                        say(f"  {site.name}: {line}", "bold yellow")
    for line in describe_shared(scans):
        say(f"  {line}", "bold yellow")


def traits_of(method: Method) -> set[str]:
    """Return what a method is, as keys of the configuration say what they need and exclude."""
    traits = {
        "a method of sums": method.once,
        "a method of synthetic patches": method.share("generator", "buffer") is not None,
        "a method without differential privacy": bool(method.without_dp),
        "a method that orders sites anew": any(share.in_rounds for share in method.without_dp),
    }
    return {trait for trait, has in traits.items() if has}


def _doubtful(party: RunContext, site: SiteFile, table: Any) -> str:
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
        return f"site {site.name}: δ = {delta:g} is not below 1/{n}, so one of its {privacy.unit}s might be published"
    return ""


def _check_start(party: RunContext) -> None:
    """Refuse to start, under differential privacy, from what the patients of a real site made without it."""
    weights = party.pipeline.model.weights
    if weights not in {"", "hub"} and party.pipeline.privacy.enabled:
        require_published(party.study.resolve(weights), "model.weights")


def _check_leave(party: RunContext) -> None:
    """What leaves without differential privacy is known to whoever starts a run, and each site allows it by name."""
    pipeline, row, name = party.pipeline, party.method, party.name
    if row.without_dp and pipeline.privacy.enabled:
        things = " and ".join(f"{share.what}s" for share in row.without_dp)
        raise UsageError(
            f"{name} lets {things} leave without differential privacy; confirm that by --set privacy.enabled=false"
        )
    bare = [share for share in row.shares if share.by != FILES and share.is_bare(spends(pipeline))]
    for site in party.members:
        if shut := [share for share in bare if not site.allows(share.content)]:
            wanted = ", ".join(f'"{content}"' for content in dict.fromkeys(share.content for share in bare))
            raise UsageError(
                f"sites/{site.name}.toml: a {shut[0].content} without differential privacy may not leave this site; "
                f"add allow = [{wanted}] there{', or switch privacy on' if shut[0].protected == 'dp' else ''}"
            )
    if row.share("buffer") is not None and len(party.sites) < 2:
        raise UsageError(f"{name} needs two sites or more: one alone has nobody to get a buffer from")


def _wrong(party: RunContext) -> Iterator[str]:
    """Say what is wrong with the sites that take part, the models that they train and what their files allow."""
    train, model, privacy = party.pipeline.train, party.pipeline.model, party.pipeline.privacy
    if train.left_out is not None and not party.study.site(train.left_out).allows("patches"):
        yield (
            f"sites/{train.left_out}.toml: models are tested on all patients of a site that is left out; add "
            'allow = ["patches"] if they may be, or leave out another site by train.left_out'
        )
    if not party.members and train.left_out is not None:
        yield f"train.left_out = {train.left_out!r} leaves no site to train"
    if not party.method.once and any(one.startswith(SHARED) for one in (model.private, model.proxy)):
        yield f"model {SHARED!r} needs --method {names_of(lambda row: row.once)}"
    if model.weights not in {"", "hub"} and not party.study.resolve(model.weights).exists():
        yield f"model.weights = {model.weights!r}: no such file or folder; copy it here, or set model.weights = 'hub'"
    if privacy.noise == "shared":  # it asks each real site whether it trusts the others
        require_enough(len(party.sites), privacy.colluding, privacy.dropouts)
        for site in party.sites:
            if not site.allows("shared"):
                yield (
                    f"sites/{site.name}.toml: with privacy.noise = 'shared' this site's ε rests on noise that other "
                    'sites add; add allow = ["shared"] there, or set privacy.noise = "own"'
                )
    shut = [site.name for site in party.sites if not site.allows("patches")]
    if shut and party.method.learns_from == "everybody":
        yield f'sites/{shut[0]}.toml: {party.name} needs every site\'s patches; add allow = ["patches"] if it may'


def _check_stores_stay_apart(party: RunContext, backend: str) -> None:
    shut = [site.name for site in party.sites if not site.allows("patches")]
    if shut and backend == "local" and len(party.here) > 1:
        raise UsageError(
            f"sites/{shut[0]}.toml is a real hospital, whose store no other site's process may open; use --backend mpi"
        )


def _check_releases(party: RunContext, *, carried: bool) -> None:
    """Refuse a run that rests on released sums where nothing can be made of them, or, unless sites bring each other
    their own, where they are missing.
    """
    pipeline, row = party.pipeline, party.method
    if party.receivers and pipeline.privacy.noise == "shared":
        raise UsageError(
            f"sites/{party.receivers[0]}.toml: a receiver has no part in noise that sites share; set privacy.noise = "
            "'own'"
        )
    if not party.members:
        raise UsageError(f"{party.name} needs a site with labels, and all of them are receivers")
    if party.by_files and carried and pipeline.privacy.noise == "shared":
        raise UsageError("letters that lie there have noise of their own; set privacy.noise = 'own'")
    if party.by_files and not carried:
        check_letters(party)
        if not party.here:
            raise WsiFlError(f"no site of this run has its store here; {party.names[0]}'s would do")
    if pipeline.train.init_from == RUN and row.starts:
        role = "proxy" if row.travels == "proxy" else "private"
        linear = party.kind.linear
        if linear is None or getattr(pipeline.model, role) != linear:
            wanted = repr(linear) if linear else "'linear_head', and train.data = 'features'"
            raise UsageError(f"train.init_from = 'oneshot' is for linear heads: set model.{role} = {wanted}")
        if missing := [name for name in party.names if name not in party.releases]:
            raise WsiFlError(missing_release(party.study, missing[0]))


def check_letters(party: RunContext) -> None:
    """Refuse to make heads before as many letters are there as was agreed on; say whose are missing."""
    train, there = party.pipeline.train, len(party.releases)
    missing = [site.name for site in party.members if site.name not in party.releases]
    n, late = there + len(missing), bool(train.deadline and date.today().isoformat() > train.deadline)
    needed = train.min_sites or (1 if late else max(1, n))
    if needed > n:
        raise UsageError(f"{needed} letters are needed (train.min_sites), but only {n} sites write one")
    if there < needed:
        waited = f" (awaited until {train.deadline})" if train.deadline and not late else ""
        first = missing_release(party.study, missing[0])
        raise WsiFlError(
            f"{there} of {n} letters are there, and {needed} are needed; missing{waited}: {', '.join(missing)}; {first}"
            + (f", or set train.min_sites = {there}" if there else "")
        )


def tell_doubts(party: RunContext, *, stores: bool = True) -> None:
    """Say what is not wrong, and costs something: random directions, letters that miss, unusual `stores`."""
    if stores:
        _tell_of_other_patches(party)
    if party.method.once and isinstance(party.pipeline.model.projection, int):
        say(
            "  features are summed along random directions, which costs a good part of the gain; "
            "wsi-fl projection finds better ones in public tissue",
            style="yellow",
        )
    keys, asked = party.pipeline.train, party.pipeline.predict.model
    judged = party.task.kind == "classes" or not party.method.keeps_lone or keys.val_fraction
    if not judged and keys.local_baseline and asked == "auto":
        say(
            "  without validation rows, of train.val_fraction or of the stores, numbers and survival are answered by "
            "the lone model, and ε buys nothing",
            style="yellow",
        )
    if party.by_files and (left := [one.name for one in party.members if one.name not in party.releases]):
        say(f"  not in the sum, for there is no file in statistics/: {', '.join(left)}", style="yellow")
    if party.receivers:
        say(f"  receives the head, releases nothing and pays nothing: {', '.join(party.receivers)}")


def _tell_of_other_patches(party: RunContext) -> None:
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
        meta = data.store.meta
    if getattr(meta, "made_by", "") == "import":  # this pipeline cuts nothing
        return
    spec = meta.spec
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
    """What to say of the sites whose budget ends before the plan does, of those limits that are known here.

    NoCommonPlan where no site can afford a single round; it names no limit that other processes do not know.
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
