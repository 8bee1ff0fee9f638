"""Method mpcpa: diffusion models travel once, classifiers learn from own and others' generated images.

What comes before the loop (denoiser, check, release, package, images) and after it (the classifiers' way to the
server); the training of the classifiers is the loop's, like that of any method.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import save_file
from torch import from_numpy
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Digest, RoundNumber
from wsi_fl.federation.message import HEADER_BYTES, Outgoing
from wsi_fl.federation.site import Site, release_once
from wsi_fl.learning.examples import Examples, concatenate_examples, select_examples
from wsi_fl.learning.units import row_units
from wsi_fl.models import schema_digest
from wsi_fl.privacy.ledger_file import Release, digest_values
from wsi_fl.stages.site.data import PatchData, load_patches
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.job import select_device
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.ddpm import DdpmShape, UNet, build_denoiser, flatten_parameters
from wsi_fl.synthesis.keys import Ddpm, Mpcpa
from wsi_fl.synthesis.stages.check import check_generator
from wsi_fl.synthesis.stages.ddpm import KIND as DDPM
from wsi_fl.synthesis.stages.ddpm import checked_as, images_of, load_denoiser
from wsi_fl.synthesis.stages.kinds import check_state
from wsi_fl.synthesis.stages.train import train_generator
from wsi_fl.system.files import atomic_path
from wsi_fl.types import Images, NoCommonPlan, Shape, WsiFlError

_SERVER = "server"
_Vector = NDArray[np.float32]
_ROUND = 0
_HOPS = {"denoiser": 0, "package": 1, "model": 2}
"""Of what travels: denoisers and packages of them before the first round, classifiers after the last."""


class Size(TypedDict):
    """The number of values of what a site is about to send to the server, which takes memory for them."""

    values: Annotated[int, Field(ge=1, le=1 << 30)]


class Ready(TypedDict):
    """Whether a site has the images that it learns from."""

    images: bool


class Denoiser(TypedDict):
    """The schema of the denoiser that a site sends."""

    schema: Digest


class Classifier(TypedDict):
    """The schema of the classifier that a site sends, and the last round of its training."""

    schema: Digest
    rounds: RoundNumber


def bring_generated(party: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher) -> None:
    """Give the sites the generated images that they learn from; whatever was done before is not done again.

    Raises:
        WsiFlError: when a site's denoiser looks as if it copied: it is not released.
        NoCommonPlan: when the sites' denoisers do not fit together.
    """
    checked = {site.name: _ready(party.study, party.pipeline, site.name, watcher) for site in sites}
    mine: list[Ready] = [{"images": _all_there(party.study, site.folder.read_document("package"))} for site in sites]
    if not all(one["images"] for one in comm.gather(mine, Ready, patient=True)):
        _exchange(party, sites, comm, watcher, checked=checked)
    for site in sites:
        _learn_from(party, site)


def _ready(study: Study, pipeline: Pipeline, site: str, watcher: Watcher) -> str:
    """Trains and checks a site's denoiser where that was not done; returns the digest of what was checked."""
    train_generator(study, pipeline, DDPM, site, watcher=watcher)
    folder, _ = DDPM.trained(study, site)
    state, reasons = check_state(folder, folder.compute_digest("denoiser"))
    if state == "not run" or not checked_as(folder.read_check(), pipeline):
        document = check_generator(study, pipeline, DDPM, site, watcher=watcher)
        state, reasons = ("passed" if document["passed"] else "failed"), document["reasons"]
    if state != "passed":
        why = f"the check was not passed: {'; '.join(reasons)}"
        if not pipeline.find_section(Mpcpa).unchecked or study.load_site(site).real:
            raise WsiFlError(f"site {site}: its denoiser is not released, {why}")
        watcher.print_message(f"  {site}: its denoiser leaves by mpcpa.unchecked although {why}")
    return folder.compute_digest("denoiser")


def _all_there(study: Study, package: Mapping[str, Any] | None) -> bool:
    return bool(package and all(study.synthetic_path(key).exists() for key in package["images"].values()))


def _exchange(
    party: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher, *, checked: Mapping[str, str]
) -> None:
    """Denoisers up, packages down, images drawn; notes in the run what each site learns from."""
    study, names = party.study, party.names
    for name, known in checked.items():
        if DDPM.trained(study, name)[0].compute_digest("denoiser") != known:
            raise WsiFlError(f"site {name}: its denoiser was trained anew since it was checked; start again")
    denoisers = {site.index: load_denoiser(DDPM.folder(study, site.name)) for site in sites}
    mine: list[Denoiser] = [{"schema": denoisers[site.index].shape.schema} for site in sites]
    agreed = [one["schema"] for one in comm.gather(mine, Denoiser, patient=True)]
    if len(set(agreed)) > 1:
        odd = next(k for k, one in zip(comm.running, agreed, strict=True) if one != agreed[0])
        raise NoCommonPlan(
            f"site {names[odd]}: its denoiser has another shape than that of {names[comm.running[0]]}; the sites need "
            "the same [ddpm], classes and channels"
        )
    star = _Star(sites, comm, names, _ROUND)
    releases = {
        site.index: release_once(site.ledger, _ROUND, flatten_parameters(denoisers[site.index]), agreed[0], "generator")
        for site in sites
    }
    held = star.gather("denoiser", releases, dict.fromkeys(comm.running, agreed[0]))
    packages = star.broadcast(held, next(iter(releases.values())).vector.size, agreed[0])
    for site in sites:
        vectors = packages[site.index]
        if party.method.learns_from == "generated":
            vectors = {**vectors, site.index: np.asarray(releases[site.index].vector, np.float32)}
        shape, drawn = denoisers[site.index].shape, {}
        for other in sorted(vectors, key=lambda k: (k - site.index) % len(names)):
            denoiser = build_denoiser(vectors[other], shape).to(select_device())
            drawn[names[other]], _ = images_of(
                study,
                party.pipeline,
                _patches(party, site.name).store,
                denoiser,
                site=names[other],
                watcher=watcher,
                part=site.name,
            )
        site.folder.write_document("package", {"images": {name: drawn[name] for name in names if name in drawn}})


def _patches(party: RunContext, site: str) -> PatchData:
    """The patches of a site: the plan refuses other data."""
    data = party.open_data(site)
    assert isinstance(data, PatchData)
    return data


def _learn_from(party: RunContext, site: Site) -> None:
    """What the site's classifier sees: its own training rows, unless all is generated, and the images."""
    package = site.folder.read_document("package")
    assert package is not None
    parts = [] if party.method.learns_from == "generated" else [site.train]
    size, per_class = _patches(party, site.name).shape.size_px, party.pipeline.find_section(Mpcpa).per_class
    parts += [_generated(party.study, key, size, per_class) for key in package["images"].values()]
    site.train = concatenate_examples(parts)
    site.units = row_units(len(site.train))


def _generated(study: Study, key: str, size_px: int, per_class: int | None) -> Examples:
    """The images drawn from one denoiser, or the first of each class: they were drawn in turn."""
    store = PatchStore(study.synthetic_path(key))
    every = load_patches(store, "train", size_px)
    n = len(every) if per_class is None else min(len(every), per_class * len(store.meta.classes))
    return select_examples(every, np.arange(n))


def hand_over_models(party: RunContext, sites: Sequence[Site], comm: Comm) -> None:
    """Send every classifier to the server, which keeps it in `aggregate/`: with it predictions can be aggregated.

    What sites are called there, is as the study has it: a peer's word becomes no part of a path.
    """
    learners = {site.index: site.learners["private"] for site in sites}
    mine: list[Classifier] = []
    for site in sites:
        finished = max((line["round"] for line in site.folder.read_metrics()), default=0)
        mine.append({"schema": schema_digest(learners[site.index].model), "rounds": finished})
    told = comm.gather(mine, Classifier, patient=True)
    agreed = {k: one["schema"] for k, one in zip(comm.running, told, strict=True)}
    last = max(one["rounds"] for one in told) + 1
    releases = {
        site.index: release_once(
            site.ledger, last, learners[site.index].parameter_vector(), agreed[site.index], "model"
        )
        for site in sites
    }
    began = time.perf_counter()
    held = _Star(sites, comm, party.names, last).gather("model", releases, agreed)
    for index, vector in held.items():
        path = party.run.path / "aggregate" / f"{party.names[index]}.safetensors"
        with atomic_path(path) as temporary:
            save_file({"parameters": from_numpy(vector.copy())}, temporary, {"schema": agreed[index]})
    for site in sites:
        site.folder.log(f"sent its model to the server, {time.perf_counter() - began:.2f} s")


def n_bytes(pipeline: Pipeline, shape: Shape, n_classes: int) -> int | None:
    """Return the bytes of a denoiser; None where models see no images."""
    if not isinstance(shape, Images):
        return None
    ddpm = pipeline.find_section(Ddpm)
    wanted = DdpmShape(ddpm.resolution, shape.channels, n_classes, ddpm.channels, ddpm.layers)
    return 4 * UNet(wanted).n_values


# ---- the star


@dataclass(frozen=True)
class _Star:
    """Carries releases between the sites and a server, once: uploads, packages back (MPCPA, section 3.3).

    The server has no process of its own: it lives beside the first running site. What that site hands to the server,
    and what the server hands to it, is a transfer all the same, as the paper counts them, and so each is written down.

    Attributes:
        sites: those of this process.
        names: of all sites of the study, by index.
        round: in which all of it travels.
    """

    sites: Sequence[Site]
    comm: Comm
    names: Sequence[str]
    round: int

    @property
    def hub(self) -> int:
        """The site beside which the server lives."""
        return self.comm.running[0]

    def gather(self, what: str, releases: Mapping[int, Release], agreed: Mapping[int, str]) -> dict[int, _Vector]:
        """Bring every site's release float32[d] to the server; return them there by site, elsewhere nothing.

        Args:
            what: what `transfers.jsonl` calls a release.
            releases: of the sites of this process.
            agreed: the schema of each site's release; WsiFlError tells of one that is not what was agreed on.
        """
        mine: list[Size] = [{"values": releases[site.index].vector.size} for site in self.sites]
        sizes = zip(self.comm.running, self.comm.gather(mine, Size), strict=True)
        found = {k: self._carry(what, (k, self.hub), releases.get(k), one["values"], agreed[k]) for k, one in sizes}
        return {k: vector for k, vector in found.items() if vector is not None}

    def broadcast(self, held: Mapping[int, _Vector], size: int, schema: str) -> dict[int, dict[int, _Vector]]:
        """Bring each site the others' releases in one package, and return these for the sites of this process.

        Args:
            held: what `gather` found.
            size: number of values of one release, the same for all, as `schema` is.
        """
        found: dict[int, dict[int, _Vector]] = {}
        bundled = hashlib.sha256(f"package of {schema}".encode()).hexdigest()
        for receiver in self.comm.running:
            others = [k for k in self.comm.running if k != receiver]
            parts: list[_Vector] = []
            if others:
                load: Release | _Vector | None = np.concatenate([held[k] for k in others]) if held else None
                if isinstance(load, np.ndarray) and receiver != self.hub:
                    own, ledger = digest_values(held[self.hub]), self._site(self.hub).ledger
                    load = ledger.relay_mixture(self.round, load, own_sha256=own, schema=bundled, weight=1.0)
                pair, total = (self.hub, receiver), size * len(others)
                arrived = self._carry("package", pair, load, total, bundled)
                parts = [] if arrived is None else np.split(arrived, len(others))
            if receiver in self.comm.sites:
                found[receiver] = dict(zip(others, (part.copy() for part in parts), strict=True))
        return found

    def _carry(
        self, what: str, pair: tuple[int, int], load: Release | _Vector | None, size: int, agreed: str
    ) -> _Vector | None:
        """Carry a load, where it lies here, from one site to another; return it where it arrives, and write it down."""
        began, (sender, receiver) = time.perf_counter(), pair
        values = load.vector if isinstance(load, Release) else load
        vector = None if values is None else np.asarray(values, np.float32)
        arrived = vector if sender == receiver else None
        if sender != receiver:
            outgoing = [Outgoing(sender, receiver, 1.0, load)] if isinstance(load, Release) else []
            expected = [pair] if receiver in self.comm.sites else []
            hop = _HOPS[what]
            for message in self.comm.exchange(outgoing, expected, round_=self.round, hop=hop, size=size):
                arrived = np.array(message.vector, np.float32)
                other = "" if message.schema == agreed else "it has another architecture"
                problem = message.refused or other
                if problem or not np.isfinite(arrived).all():
                    whose = f"the {what} from site {self.names[sender]}"
                    raise WsiFlError(f"{whose} is no use: {problem or 'it is not finite'}")
        if vector is not None:
            ends = (_SERVER, self.names[receiver]) if what == "package" else (self.names[sender], _SERVER)
            line = {"what": what, "from": ends[0], "to": ends[1], "bytes": HEADER_BYTES + vector.nbytes}
            seconds = round(time.perf_counter() - began, 6)
            self._site(sender).folder.record_transfer(line | {"seconds": seconds})
        return arrived

    def _site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
