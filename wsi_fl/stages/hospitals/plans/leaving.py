"""Every kind of thing that leaves a hospital under a plan, and what never does."""

from __future__ import annotations

from typing_extensions import TypedDict

from wsi_fl.federation.buffers import BufferShape
from wsi_fl.privacy.terms import MOST_ATTEMPTS
from wsi_fl.stages.site.account import guarantee_of, spends
from wsi_fl.stages.site.party import Party
from wsi_fl.study.generating import Ddpm, Replay
from wsi_fl.types import Images, Shape

FLOAT_BYTES = 4
_SUM_BYTES = 8
"""Of a number in a sum that is masked."""


class Leaving(TypedDict):
    """One kind of thing that leaves a hospital.

    Attributes:
        what, to, often, protected_by: in words.
        times: how often at most in a run, to each receiver of one hop; None where it is not fixed.
        bytes: size of each; None where it is not known yet, or small and not fixed.
        large: whether it bounds the longest letter.
        of_records: whether it is computed of records, be it that they are counted.
    """

    what: str
    to: str
    often: str
    times: int | None
    bytes: int | None
    large: bool
    of_records: bool
    protected_by: str


def leaving(party: Party, shape: Shape | None, n_classes: int | None) -> list[Leaving]:
    """Return a row for every kind of thing that leaves a hospital.

    Args:
        shape, n_classes: of what the models see and answer; None where only the hospitals' stores know.
    """
    method = party.method
    rows: list[Leaving] = []
    if method.travels is not None:
        rows.append(_sums(party, shape, n_classes) if method.once else _model(party, shape, n_classes))
    if method.carries is not None:
        rows.append(_buffer(party, shape, n_classes))
    if method.generated:
        rows += _generators(party, shape, n_classes)
    if method.generated == "others":
        rows.append(_classifier(party, shape, n_classes))
    if any(party.tells_scores(name) for name in party.names):
        rows += [*([_passed(party, shape, n_classes)] if method.travels is not None else ()), _SCORES]
    return [*rows, *_documents(party.pipeline.train.rounds)]


def staying(party: Party) -> list[str]:
    """Return what never leaves a hospital under a plan."""
    lets_go = any("private_model" in site.allow for site in party.sites)
    kept = "" if party.method.travels == "private" or lets_go else ", the private model"
    return [
        "slides, patches, features, masks and outlines",
        "labels, and the names of slides and patients",
        f"stores, checkpoints, the state of optimisers{kept}",
        "accuracies, losses, predictions and heatmaps of single slides or patients",
        "how long a real hospital's training took, and why something failed there",
        "the private key of the hospital's kit",
    ]


def _model(party: Party, shape: Shape | None, n_classes: int | None) -> Leaving:
    pipeline, role = party.pipeline, party.method.travels
    name = pipeline.model.proxy if role == "proxy" else pipeline.model.private
    n_bytes = _model_bytes(name, shape, n_classes)
    return {
        "what": f"{'proxy model' if role == 'proxy' else 'central model'} ({name})",
        "to": _receivers(party),
        "often": f"once or more in each of {pipeline.train.rounds} rounds, as the graph says",
        "times": pipeline.train.rounds,
        "bytes": n_bytes,
        "large": True,
        "of_records": True,
        "protected_by": _protected(party, "model"),
    }


_TRIED = (
    f"once; where a site spoils the sum, at most {MOST_ATTEMPTS} times under one approval, at its ε each time"
)


def _sums(party: Party, shape: Shape | None, n_classes: int | None) -> Leaving:
    name = party.pipeline.model.proxy
    shared = party.pipeline.privacy.noise == "shared"
    n_bytes = _model_bytes(name, shape, n_classes)
    if shared and n_bytes is not None:
        n_bytes = n_bytes // FLOAT_BYTES * _SUM_BYTES
    noisy = (
        "masked sums, of which only the total over all sites can be read" if shared else "sums of features"
    )
    return {
        "what": f"{noisy} ({name})",
        "to": "all sites" if shared else _receivers(party),
        "often": _TRIED if shared else "once",
        "times": MOST_ATTEMPTS if shared else 1,
        "bytes": n_bytes,
        "large": True,
        "of_records": True,
        "protected_by": _protected(party, "model"),
    }


def _buffer(party: Party, shape: Shape | None, n_classes: int | None) -> Leaving:
    n, rounds = party.pipeline.section(Replay).buffer, party.pipeline.train.rounds
    central = party.pipeline.section(Replay).variant == "central"
    n_bytes = None
    if isinstance(shape, Images) and n_classes is not None:
        n_bytes = BufferShape(n, shape.size_px, shape.channels, n_classes).n_bytes
    return {
        "what": f"buffer of {n} synthetic samples",
        "to": "all sites" if central else "the next site in an order drawn anew in each round",
        "often": "once" if central else f"in each of {rounds} rounds",
        "times": 1 if central else rounds,
        "bytes": n_bytes,
        "large": True,
        "of_records": True,
        "protected_by": 'no differential privacy; the site allows it by name (allow = ["buffer"])',
    }


def _generators(party: Party, shape: Shape | None, n_classes: int | None) -> list[Leaving]:
    """A hospital's own diffusion model, and the package of others' that the first site hands on."""
    n_bytes, others = _denoiser_bytes(party, shape, n_classes), len(party.names) - 1
    own: Leaving = {
        "what": "diffusion model of the hospital's patches",
        "to": "the first site",
        "often": "once, before the first round",
        "times": 1,
        "bytes": n_bytes,
        "large": True,
        "of_records": True,
        "protected_by": (
            'no differential privacy; the site allows it by name (allow = ["generator"]), and the model is checked '
            "for copies of training patches before it leaves"
        ),
    }
    package: Leaving = {
        "what": f"package of the {others} other sites' diffusion models, from the first site alone",
        "to": "each site",
        "often": "once, before the first round",
        "times": 1,
        "bytes": None if n_bytes is None else n_bytes * others,
        "large": True,
        "of_records": True,
        "protected_by": "no differential privacy; each model in it has left its own site before",
    }
    return [own, package]


def _classifier(party: Party, shape: Shape | None, n_classes: int | None) -> Leaving:
    name = party.pipeline.model.private
    return {
        "what": f"classifier ({name})",
        "to": "the first site",
        "often": "once, after the last round",
        "times": 1,
        "bytes": _model_bytes(name, shape, n_classes),
        "large": True,
        "of_records": True,
        "protected_by": 'no differential privacy; the site allows it by name (allow = ["model"])',
    }


def _passed(party: Party, shape: Shape | None, n_classes: int | None) -> Leaving:
    travelling = _model(party, shape, n_classes)
    protected = travelling["protected_by"]
    if not spends(party.pipeline):
        protected += '; only a site with allow = ["scores"] passes its own on'
    return travelling | {
        "what": "a site's last release once more, to be scored",
        "to": "all sites",
        "often": "once, after the last round, unless all sites hold the same model then",
        "times": 1,
        "protected_by": protected,
    }


_SCORES: Leaving = {
    "what": "counts of test examples by score and class",
    "to": "all sites and the coordinator",
    "often": "when a run is evaluated over all sites",
    "times": None,
    "bytes": None,
    "large": False,
    "of_records": True,
    "protected_by": 'no differential privacy; only a site that allows it by name sends them (allow = ["scores"])',
}


def _documents(rounds: int) -> list[Leaving]:
    """What all sites tell each other about the run itself."""
    common: Leaving = {
        "what": "",
        "to": "all sites",
        "often": "",
        "times": 1,
        "bytes": None,
        "large": False,
        "of_records": False,
        "protected_by": "settings and shapes, the ledger's totals, and the number of records, which is public",
    }
    return [
        common
        | {
            "what": "documents: version, settings, shapes, classes, the run's number, rounds the budget is enough for",
            "often": "a few, before the first round",
            "times": None,
        },
        common
        | {
            "what": "tallies: which round a site has done, and whether it goes on",
            "often": f"in each of {rounds} rounds",
            "times": rounds,
        },
        common
        | {
            "what": "final row: ε, δ, what it is worth, rounds, number of records, messages and bytes",
            "of_records": True,
            "to": "all sites and the coordinator",
            "often": "once, at the end",
        },
    ]


def _receivers(party: Party) -> str:
    """Who gets what travels, in words."""
    graph = party.pipeline.topology.graph
    if graph is not None and graph.endswith(".json"):
        return f"the sites that the graph of {graph} names"
    name = str(graph or getattr(party.method.exchange, "__name__", ""))
    return {
        "none": "nobody",
        "star": "the first site, which sends the mean of all back to all",
        "ring": "the next site in order",
        "exponential": "one other site, another one in each round",
        "complete_once": "all sites, in the first round",
    }.get(name, "the next site in an order drawn anew in each round")


def _protected(party: Party, allowed: str) -> str:
    """What protects something that costs ε, or does not."""
    if not spends(party.pipeline):
        return f'no differential privacy; the site allows it by name (allow = ["{allowed}"])'
    worth = guarantee_of(party.method, party.pipeline)
    unit = party.pipeline.privacy.unit
    return f"differential privacy per {unit}, {worth}; each release is a line of the site's ledger"


def _model_bytes(name: str, shape: Shape | None, n_classes: int | None) -> int | None:
    """Bytes of the trained parameters of a model; None where its shape is not known."""
    if shape is None or n_classes is None:
        return None
    from wsi_fl.models import build  # and with it PyTorch

    model = build(name, n_classes=n_classes, shape=shape, seed=0)
    return FLOAT_BYTES * sum(p.numel() for p in model.parameters() if p.requires_grad)


def _denoiser_bytes(party: Party, shape: Shape | None, n_classes: int | None) -> int | None:
    """Bytes of the diffusion model that `mpcpa` shares; None where its shape is not known."""
    if not isinstance(shape, Images) or n_classes is None:
        return None
    from wsi_fl.synthesis.ddpm import DdpmShape, build_denoiser  # diffusers takes seconds to import

    settings = party.pipeline.section(Ddpm)
    network = build_denoiser(
        DdpmShape(settings.resolution, shape.channels, n_classes, tuple(settings.channels), settings.layers)
    )
    return FLOAT_BYTES * sum(p.numel() for p in network.parameters())
