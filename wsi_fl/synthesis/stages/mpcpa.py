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

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.privacy_units import row_units
from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Digest, RoundNumber
from wsi_fl.federation.message import HEADER_BYTES, Outgoing
from wsi_fl.federation.methods import Disclosure
from wsi_fl.federation.site_state import Site, release_once
from wsi_fl.models import schema_digest
from wsi_fl.privacy.ledger_file import Release, digest_values
from wsi_fl.stages.runtime.console import Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import load_patches
from wsi_fl.stages.site.study_hooks import StudyHooks
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.ddpm import DdpmShape, UNet, build_denoiser, flatten_parameters
from wsi_fl.synthesis.keys import Ddpm, Mpcpa
from wsi_fl.synthesis.stages.ddpm import KIND as DDPM
from wsi_fl.synthesis.stages.ddpm import ensure_images, is_current_check, load_denoiser
from wsi_fl.synthesis.stages.generator_check import check_generator
from wsi_fl.synthesis.stages.generator_training import train_generator
from wsi_fl.synthesis.stages.generator_types import check_state
from wsi_fl.system.files import atomic_path
from wsi_fl.types import Images, NoCommonPlan, Shape, WsiFlError

_SERVER = "server"
_Vector = NDArray[np.float32]
_ROUND = 0
_HOPS = {"denoiser": 0, "package": 1, "model": 2}
"""Hops of denoisers and their packages before the first round, and of classifiers after the last."""


class SizeNotice(TypedDict):
    """The number of values of a site's next release to the server, for its memory."""

    values: Annotated[int, Field(ge=1, le=1 << 30)]


class ImagesNotice(TypedDict):
    """Whether a site has its generated training images."""

    images: bool


class DenoiserNotice(TypedDict):
    """The schema of a site's denoiser."""

    schema: Digest


class ClassifierNotice(TypedDict):
    """The schema of a site's classifier, and the last round of its training."""

    schema: Digest
    rounds: RoundNumber


def _prepare_denoiser(study: Study, pipeline: Pipeline, site: str, watcher: Watcher) -> str:
    """Train and check a site's denoiser unless done; return the digest of the checked one."""
    train_generator(study, pipeline, DDPM, site, watcher=watcher)
    folder, _ = DDPM.require_trained(study, site)
    state, reasons = check_state(folder, folder.compute_digest("denoiser"))
    if state == "not run" or not is_current_check(folder.read_check(), pipeline):
        document = check_generator(study, pipeline, DDPM, site, watcher=watcher)
        state, reasons = ("passed" if document["passed"] else "failed"), document["reasons"]
    if state != "passed":
        explanation = f"the check was not passed: {'; '.join(reasons)}"
        if not pipeline.find_section(Mpcpa).unchecked or study.load_site(site).real:
            raise WsiFlError(f"site {site}: its denoiser is not released, {explanation}")
        watcher.print_message(f"  {site}: its denoiser is released by mpcpa.unchecked although {explanation}")
    return folder.compute_digest("denoiser")


def _has_all_images(study: Study, package: Mapping[str, Any] | None) -> bool:
    return bool(package and all(study.synthetic_path(key).exists() for key in package["images"].values()))


def _exchange_denoisers(
    context: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher, *, digests: Mapping[str, str]
) -> None:
    """Exchange denoisers by the server, draw their images and record each site's images in the run."""
    study, names = context.study, context.names
    for name, checked_digest in digests.items():
        if DDPM.require_trained(study, name)[0].compute_digest("denoiser") != checked_digest:
            raise WsiFlError(f"site {name}: its denoiser was trained anew since it was checked; start again")
    denoisers = {site.index: load_denoiser(DDPM.find_folder(study, site.name)) for site in sites}
    local_notices: list[DenoiserNotice] = [{"schema": denoisers[site.index].shape.schema} for site in sites]
    schemas = [notice["schema"] for notice in comm.gather(local_notices, DenoiserNotice, patient=True)]
    differing_sites = (k for k, schema in zip(comm.running, schemas, strict=True) if schema != schemas[0])
    if (differing_site := next(differing_sites, None)) is not None:
        raise NoCommonPlan(
            f"site {names[differing_site]}: its denoiser has another shape than that of {names[comm.running[0]]}; "
            "the sites need the same [ddpm], classes and channels"
        )
    exchange = _ServerExchange(sites, comm, names, _ROUND)
    releases = {
        site.index: release_once(
            site.ledger, _ROUND, flatten_parameters(denoisers[site.index]), schemas[0], "generator"
        )
        for site in sites
    }
    uploads = exchange.gather("denoiser", releases, dict.fromkeys(comm.running, schemas[0]))
    packages = exchange.broadcast(uploads, next(iter(releases.values())).vector.size, schemas[0])
    for site in sites:
        store, vectors = context.open_data(site.name).store, packages[site.index]
        assert isinstance(store, PatchStore)  # the plan refuses other data
        if context.method.learns_from == "generated":
            vectors = {**vectors, site.index: np.asarray(releases[site.index].vector, np.float32)}
        shape, image_keys = denoisers[site.index].shape, {}
        for origin in sorted(vectors, key=lambda k: (k - site.index) % len(names)):
            denoiser = build_denoiser(vectors[origin], shape).to(select_device())
            image_keys[names[origin]], _ = ensure_images(
                study, context.pipeline, store, denoiser, site=names[origin], watcher=watcher, progress_name=site.name
            )
        site.folder.write_document(
            "package", {"images": {name: image_keys[name] for name in names if name in image_keys}}
        )


def _set_training_examples(context: RunContext, site: Site) -> None:
    """Set a site's training set: its local examples, unless all are generated, and the images."""
    package = site.folder.read_document("package")
    assert package is not None
    parts = [] if context.method.learns_from == "generated" else [site.train]
    shape, per_class = context.open_data(site.name).shape, context.pipeline.find_section(Mpcpa).per_class
    assert isinstance(shape, Images)
    parts += [_load_generated(context.study, key, shape.size_px, per_class) for key in package["images"].values()]
    site.train = concatenate_examples(parts)
    site.units = row_units(len(site.train))


def _load_generated(study: Study, key: str, size_px: int, per_class: int | None) -> Cohort:
    """Return the images of one denoiser, or the first of each class, as classes alternate."""
    store = PatchStore(study.synthetic_path(key))
    examples = load_patches(store, "train", size_px)
    n = len(examples) if per_class is None else min(len(examples), per_class * len(store.meta.classes))
    return examples[np.arange(n)]


class _GeneratorHooks(StudyHooks):
    """Denoisers before the rounds, and classifiers after them, where the method sends any."""

    def prepare_rounds(self, context: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher) -> None:
        """Provide the sites with generated training images; finished steps are not repeated.

        Raises:
            WsiFlError: for a denoiser without a passed check, which is not released.
            NoCommonPlan: for denoisers of different shapes.
        """
        study = context.study
        digests = {site.name: _prepare_denoiser(study, context.pipeline, site.name, watcher) for site in sites}
        local_notices: list[ImagesNotice] = [
            {"images": _has_all_images(study, site.folder.read_document("package"))} for site in sites
        ]
        if not all(notice["images"] for notice in comm.gather(local_notices, ImagesNotice, patient=True)):
            _exchange_denoisers(context, sites, comm, watcher, digests=digests)
        for site in sites:
            _set_training_examples(context, site)

    def finish_rounds(self, context: RunContext, sites: Sequence[Site], comm: Comm) -> None:
        """Send every classifier to the server's folder `aggregate/`, for aggregated predictions.

        Files have the study's site names: text of a peer is never part of a path.
        """
        if not any(disclosure.timing == "after" for disclosure in context.method.disclosures):
            return
        learners = {site.index: site.learners["private"] for site in sites}
        local_notices: list[ClassifierNotice] = []
        for site in sites:
            finished = max((line["round"] for line in site.folder.read_metrics()), default=0)
            local_notices.append({"schema": schema_digest(learners[site.index].model), "rounds": finished})
        notices = comm.gather(local_notices, ClassifierNotice, patient=True)
        schemas = {k: notice["schema"] for k, notice in zip(comm.running, notices, strict=True)}
        last_round = max(notice["rounds"] for notice in notices) + 1
        releases = {
            site.index: release_once(
                site.ledger, last_round, learners[site.index].parameter_vector(), schemas[site.index], "model"
            )
            for site in sites
        }
        start_time = time.perf_counter()
        uploads = _ServerExchange(sites, comm, context.names, last_round).gather("model", releases, schemas)
        for index, vector in uploads.items():
            path = context.run.path / "aggregate" / f"{context.names[index]}.safetensors"
            with atomic_path(path) as temporary:
                save_file({"parameters": from_numpy(vector.copy())}, temporary, {"schema": schemas[index]})
        for site in sites:
            site.folder.log(f"sent its model to the server, {time.perf_counter() - start_time:.2f} s")

    def count_bytes(self, pipeline: Pipeline, disclosure: Disclosure, shape: Shape, n_classes: int) -> int | None:
        """Return the bytes of a denoiser; None for models without images."""
        if not isinstance(shape, Images):
            return None
        ddpm = pipeline.find_section(Ddpm)
        denoiser = UNet(DdpmShape(ddpm.resolution, shape.channels, n_classes, ddpm.channels))
        return 4 * int(denoiser.num_parameters())

    def distinguishing_settings(self, pipeline: Pipeline) -> tuple[object, ...]:
        """Return the point of the curve over generated images."""
        return (pipeline.find_section(Mpcpa).per_class,)

    def voting_rule(self, pipeline: Pipeline) -> str:
        return pipeline.find_section(Mpcpa).aggregate


HOOKS = _GeneratorHooks()


# ---- the star


@dataclass(frozen=True)
class _ServerExchange:
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

    def gather(self, label: str, releases: Mapping[int, Release], schemas: Mapping[int, str]) -> dict[int, _Vector]:
        """Send every site's release float32[d] to the server; return them there by site, elsewhere {}.

        Args:
            label: the name of a release in `transfers.jsonl`.
            releases: of the sites of this process.
            schemas: the schema of each site's release; WsiFlError for another one.
        """
        local_sizes: list[SizeNotice] = [{"values": releases[site.index].vector.size} for site in self.sites]
        sizes = zip(self.comm.running, self.comm.gather(local_sizes, SizeNotice), strict=True)
        vectors = {
            k: self._transfer_payload(label, (k, self.hub), releases.get(k), notice["values"], schemas[k])
            for k, notice in sizes
        }
        return {k: vector for k, vector in vectors.items() if vector is not None}

    def broadcast(self, uploads: Mapping[int, _Vector], size: int, schema: str) -> dict[int, dict[int, _Vector]]:
        """Send each site the others' releases in one package; return them for the sites of this process.

        Args:
            uploads: the releases at the server, of `gather`.
            size: number of values of one release, the same for all, as `schema` is.
        """
        packages: dict[int, dict[int, _Vector]] = {}
        package_schema = hashlib.sha256(f"package of {schema}".encode()).hexdigest()
        for receiver in self.comm.running:
            others = [k for k in self.comm.running if k != receiver]
            parts: list[_Vector] = []
            if others:
                payload: Release | _Vector | None = np.concatenate([uploads[k] for k in others]) if uploads else None
                if isinstance(payload, np.ndarray) and receiver != self.hub:
                    hub_digest, ledger = digest_values(uploads[self.hub]), self._find_site(self.hub).ledger
                    payload = ledger.relay_mixture(
                        self.round, payload, own_sha256=hub_digest, schema=package_schema, weight=1.0
                    )
                pair, total = (self.hub, receiver), size * len(others)
                received = self._transfer_payload("package", pair, payload, total, package_schema)
                parts = [] if received is None else np.split(received, len(others))
            if receiver in self.comm.sites:
                packages[receiver] = dict(zip(others, (part.copy() for part in parts), strict=True))
        return packages

    def _transfer_payload(
        self, label: str, pair: tuple[int, int], payload: Release | _Vector | None, size: int, expected_schema: str
    ) -> _Vector | None:
        """Send a payload of this process from one site to another and record it; return it at the receiver."""
        start_time, (sender, receiver) = time.perf_counter(), pair
        values = payload.vector if isinstance(payload, Release) else payload
        vector = None if values is None else np.asarray(values, np.float32)
        received = vector if sender == receiver else None
        if sender != receiver:
            outgoing = [Outgoing(sender, receiver, 1.0, payload)] if isinstance(payload, Release) else []
            expected = [pair] if receiver in self.comm.sites else []
            hop = _HOPS[label]
            for message in self.comm.exchange(outgoing, expected, round_=self.round, hop=hop, size=size):
                received = np.array(message.vector, np.float32)
                mismatch = "" if message.schema == expected_schema else "it has another architecture"
                problem = message.refused or mismatch
                if problem or not np.isfinite(received).all():
                    subject = f"the {label} from site {self.names[sender]}"
                    raise WsiFlError(f"{subject} is no use: {problem or 'it is not finite'}")
        if vector is not None:
            endpoints = (_SERVER, self.names[receiver]) if label == "package" else (self.names[sender], _SERVER)
            record = {"what": label, "from": endpoints[0], "to": endpoints[1], "bytes": HEADER_BYTES + vector.nbytes}
            seconds = round(time.perf_counter() - start_time, 6)
            self._find_site(sender).folder.record_transfer(record | {"seconds": seconds})
        return received

    def _find_site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
