"""Method mpcpa: diffusion models are sent once, classifiers train on local and other sites' generated images.

The steps before the loop (denoiser, check, release, package, images) and after it (classifiers to the server). The
loop trains the classifiers, as of any method.
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
"""Hops of denoisers and their packages before the first round, and of classifiers after the last."""


class Size(TypedDict):
    """The number of values of a site's next release to the server, for its memory."""

    values: Annotated[int, Field(ge=1, le=1 << 30)]


class Ready(TypedDict):
    """Whether a site has its generated training images."""

    images: bool


class Denoiser(TypedDict):
    """The schema of a site's denoiser."""

    schema: Digest


class Classifier(TypedDict):
    """The schema of a site's classifier, and the last round of its training."""

    schema: Digest
    rounds: RoundNumber


def bring_generated(party: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher) -> None:
    """Provide the sites with generated training images; finished steps are not repeated.

    Raises:
        WsiFlError: for a denoiser without a passed check, which is not released.
        NoCommonPlan: for denoisers of different shapes.
    """
    checked = {site.name: _ready(party.study, party.pipeline, site.name, watcher) for site in sites}
    mine: list[Ready] = [{"images": _all_there(party.study, site.folder.read_document("package"))} for site in sites]
    if not all(one["images"] for one in comm.gather(mine, Ready, patient=True)):
        _exchange(party, sites, comm, watcher, checked=checked)
    for site in sites:
        _learn_from(party, site)


def _ready(study: Study, pipeline: Pipeline, site: str, watcher: Watcher) -> str:
    """Train and check a site's denoiser unless done; return the digest of the checked one."""
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
        watcher.print_message(f"  {site}: its denoiser is released by mpcpa.unchecked although {why}")
    return folder.compute_digest("denoiser")


def _all_there(study: Study, package: Mapping[str, Any] | None) -> bool:
    return bool(package and all(study.synthetic_path(key).exists() for key in package["images"].values()))


def _exchange(
    party: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher, *, checked: Mapping[str, str]
) -> None:
    """Exchange denoisers by the server, draw their images and record each site's images in the run."""
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
            f"site {names[odd]}: its denoiser has another shape than that of {names[comm.running[0]]}; "
            "the sites need the same [ddpm], classes and channels"
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
    """Return the patches of a site; the plan refuses other data."""
    data = party.open_data(site)
    assert isinstance(data, PatchData)
    return data


def _learn_from(party: RunContext, site: Site) -> None:
    """Set a site's training set: its local examples, unless all are generated, and the images."""
    package = site.folder.read_document("package")
    assert package is not None
    parts = [] if party.method.learns_from == "generated" else [site.train]
    size, per_class = _patches(party, site.name).shape.size_px, party.pipeline.find_section(Mpcpa).per_class
    parts += [_generated(party.study, key, size, per_class) for key in package["images"].values()]
    site.train = concatenate_examples(parts)
    site.units = row_units(len(site.train))


def _generated(study: Study, key: str, size_px: int, per_class: int | None) -> Examples:
    """Return the images of one denoiser, or the first of each class, as classes alternate."""
    store = PatchStore(study.synthetic_path(key))
    every = load_patches(store, "train", size_px)
    n = len(every) if per_class is None else min(len(every), per_class * len(store.meta.classes))
    return select_examples(every, np.arange(n))


def hand_over_models(party: RunContext, sites: Sequence[Site], comm: Comm) -> None:
    """Send every classifier to the server's folder `aggregate/`, for aggregated predictions.

    Files have the study's site names: text of a peer is never part of a path.
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
    """Return the bytes of a denoiser; None for models without images."""
    if not isinstance(shape, Images):
        return None
    ddpm = pipeline.find_section(Ddpm)
    wanted = DdpmShape(ddpm.resolution, shape.channels, n_classes, ddpm.channels, ddpm.layers)
    return 4 * UNet(wanted).n_values


# ---- the star


@dataclass(frozen=True)
class _Star:
    """One exchange of releases between the sites and a server: uploads, packages back (MPCPA, section 3.3).

    The first running site's process hosts the server. Transfers between this site and the server are recorded too, as
    the paper counts them.

    Attributes:
        sites: of this process.
        names: of all sites of the study, by index.
        round: of all transfers.
    """

    sites: Sequence[Site]
    comm: Comm
    names: Sequence[str]
    round: int

    @property
    def hub(self) -> int:
        """The index of the server's host site."""
        return self.comm.running[0]

    def gather(self, what: str, releases: Mapping[int, Release], agreed: Mapping[int, str]) -> dict[int, _Vector]:
        """Send every site's release float32[d] to the server; return them there by site, elsewhere {}.

        Args:
            what: the name of a release in `transfers.jsonl`.
            releases: of the sites of this process.
            agreed: the schema of each site's release; WsiFlError for another one.
        """
        mine: list[Size] = [{"values": releases[site.index].vector.size} for site in self.sites]
        sizes = zip(self.comm.running, self.comm.gather(mine, Size), strict=True)
        found = {k: self._carry(what, (k, self.hub), releases.get(k), one["values"], agreed[k]) for k, one in sizes}
        return {k: vector for k, vector in found.items() if vector is not None}

    def broadcast(self, held: Mapping[int, _Vector], size: int, schema: str) -> dict[int, dict[int, _Vector]]:
        """Send each site the others' releases in one package; return them for the sites of this process.

        Args:
            held: the releases at the server, of `gather`.
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
        """Send a payload of this process from one site to another and record it; return it at the receiver."""
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
