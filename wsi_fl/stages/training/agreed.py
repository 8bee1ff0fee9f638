"""What all sites of a run have in common: its method, its graph, who runs, and the versions of what they run."""

from __future__ import annotations

from wsi_fl.federation.graph import from_file
from wsi_fl.federation.methods import METHODS, Method, replay
from wsi_fl.federation.topology import TOPOLOGIES, Topology, named
from wsi_fl.runs import RunFolder
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import UsageError


def method_named(name: str) -> Method:
    """A row of METHODS."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]


def method_for(name: str, pipeline: Pipeline) -> Method:
    """A row of METHODS as a pipeline has it: `replay` comes in variants, and orders sites by the seed."""
    if name == "replay":
        return replay(pipeline.replay.variant, pipeline.train.seed)
    return method_named(name)


def graph_of(study: Study, pipeline: Pipeline) -> Topology | None:
    """The graph a pipeline names or points to; None for the method's own."""
    graph = pipeline.topology.graph
    if graph is None:
        return None
    if not graph.endswith(".json"):
        if graph not in TOPOLOGIES:
            raise UsageError(f"unknown graph {graph!r}; known: {', '.join(TOPOLOGIES)}, FILE.json")
        return named(graph, pipeline.train.seed)
    names = [site.name for site in study.sites(pipeline)]
    return from_file(study.resolve(graph), names, pipeline.topology.self_weight)


def running_sites(study: Study, pipeline: Pipeline, run: RunFolder) -> tuple[int, ...]:
    """Indices of the sites that were not lost."""
    lost = {loss["site"] for loss in run.losses()}
    return tuple(k for k, site in enumerate(study.sites(pipeline)) if site.name not in lost)


def versions() -> dict[str, str]:
    """What must be the same everywhere for numbers to agree."""
    from importlib.metadata import version

    import wsi_fl

    names = ("torch", "torchvision", "opacus", "monai", "numpy")
    return {"wsi_fl": wsi_fl.__version__} | {name: version(name) for name in names}
