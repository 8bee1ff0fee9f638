"""Cross-site evaluation: each hospital tests the exchanged models on its local test set and releases counts only.

After the last round each site sends its last release to all others, unless all hold the same model by then. A hospital
that allows it counts the predictions of these models on its test set. The counts leave the site once, through its
ledger. Of training patients only releases are used (post-processing), so ε does not grow.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.data.cross_site_counts import (
    MIN_EXAMPLES,
    N_BINS,
    CrossSiteCounts,
    PredictionCounts,
    count_predictions,
    empty_counts,
    pack_counts,
    size_in_bytes,
    unpack_counts,
)
from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import RoundNumber
from wsi_fl.federation.message import BYTES, HEADER_BYTES, NUMBERS, SCORING, Message, Outgoing, PayloadType
from wsi_fl.federation.methods import Method
from wsi_fl.federation.push_sum import PushSum, Vector
from wsi_fl.federation.site_state import Site, release_once
from wsi_fl.learning.local_training import predict_examples, replace_nonfinite
from wsi_fl.models import schema_digest
from wsi_fl.privacy.ledger_file import SCORES, Release, digest_values

_MAX_EXTRA_ROUNDS = 1 << 16
"""Most rounds of a ledger after the last training round: each attempt at secure aggregation takes one."""
_Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # SHA-256, or nothing


class _ScoringOffer(TypedDict):
    """The document that a site sends before models are scored."""

    apart: bool  # whether it may not read the others' test sets
    counts: bool  # whether counts of its test set may leave it
    number: RoundNumber  # the round of its ledger in which the counts leave, or have left
    held: _Digest  # SHA-256 of its model after the last exchange; "" where it did not participate
    sent: _Digest  # SHA-256 of its last release; "" for none, or where only the sum of all is readable
    scored: _Digest  # schema of the counts that left it before a restart; "" for none


class _CountsDigest(TypedDict):
    """SHA-256 of the counts that a site will send; "" for none."""

    told: _Digest


@dataclass(frozen=True)
class _ScoringPlan:
    """The agreement of all sites on the models to score."""

    classes: tuple[str, ...]
    number: int  # the round of the ledgers in which counts leave the sites
    # SHA-256 of each model by the index of its site, in order; key None for a model that all hold
    models: Mapping[int | None, str]
    reporting_sites: tuple[int, ...]  # the sites that let counts leave

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.models), len(self.classes)

    @property
    def n_bytes(self) -> int:
        return size_in_bytes(*self.shape)

    @property
    def schema(self) -> str:
        """Return the SHA-256 over the models and classes of the counts, in order."""
        models = [[index, model_digest] for index, model_digest in self.models.items()]
        schema_parts = [SCORES, self.classes, N_BINS, MIN_EXAMPLES, self.number, models]
        return hashlib.sha256(json.dumps(schema_parts).encode()).hexdigest()


def _agree_models(offers: Mapping[int, _ScoringOffer], classes: tuple[str, ...], rounds: int) -> _ScoringPlan | None:
    """Return the models to score and the reporting sites, given each site's document by index; None for no scoring.

    Where all sites that participated to the end hold the same model, those sites score it. Otherwise all sites score
    the last release of each site.
    """
    if not all(offer["apart"] for offer in offers.values()):
        return None
    reporting_sites = [index for index, offer in offers.items() if offer["counts"]]
    models: dict[int | None, str] = {k: offer["sent"] for k, offer in offers.items() if offer["sent"]}
    holders = [index for index, offer in offers.items() if offer["held"]]
    if len(held_digests := {offers[index]["held"] for index in holders}) == 1 and len(holders) > 1:
        models = {None: held_digests.pop()}
        reporting_sites = [index for index in reporting_sites if index in holders]
    if not reporting_sites or not models:
        return None
    number = max(offer["number"] for offer in offers.values())
    if number > rounds + _MAX_EXTRA_ROUNDS:  # no honest ledger reaches it
        return None
    return _ScoringPlan(classes, number, models, tuple(reporting_sites))


def _find_problem(message: Message, agreed_schema: str, announced_digest: str) -> str:
    """Return why a message differs from its announced schema or SHA-256; "" where it does not."""
    if message.refused:
        return message.refused
    if message.schema != agreed_schema:
        return "it is of another kind"
    if digest_values(message.vector) != announced_digest:
        return "it is not what was announced"
    return "" if message.weight > 0 else f"its weight is {message.weight:g}"


_Models = Mapping[int | None, Vector]
"""Parameters float32[d] by the index of the releasing site; key None for a model that all hold."""


@dataclass(frozen=True)
class CrossSiteScoring:
    """Scoring of the exchanged models after the last round."""

    sites: Sequence[Site]  # sites of this process
    method: Method
    comm: Comm
    names: Sequence[str]  # of all sites of the study, by index
    classes: tuple[str, ...]  # names of the classes
    rounds: int  # number of rounds of the run
    masked: bool  # whether releases are masked parts of a sum and no models
    is_isolated: bool  # whether this process may not read the others' test sets
    # sites of this process that release counts of their test sets
    reporting_sites: Sequence[int]
    report_alive: Callable[[Site], None]  # called with each batch, as a sign of life

    def run(self) -> None:
        """Score the exchanged models at each hospital; each site keeps the counts of all as `scores.json`.

        Nothing is scored where no model is exchanged, a site may read all test sets, or no site releases counts. Counts
        leave a site once in a run; it fails where different counts have left before. Nothing is scored again where
        the models differ from those scored before a restart, as after a site returned.
        """
        if self.method.mixing_role is None or len(self.comm.running) < 2:
            return
        last_releases = {site.index: self._load_last_release(site) for site in self.sites}
        local_offers = [self._make_offer(site, last_releases[site.index]) for site in self.sites]
        offers = dict(zip(self.comm.running, self.comm.gather(local_offers, _ScoringOffer, patient=True), strict=True))
        plan = _agree_models(offers, self.classes, self.rounds)
        if plan is None:
            return
        if any(offer["scored"] not in ("", plan.schema) for offer in offers.values()):
            for site in self.sites:
                site.folder.log("the models differ from those that were scored before; none is scored again")
            return
        models: dict[int, _Models] = {}
        if None in plan.models:  # where a site holds the common model
            for site in self.sites:
                vector = site.mixing_learner(self.method).parameter_vector()
                models[site.index] = {None: vector} if digest_values(vector) == plan.models[None] else {}
        else:
            models = self._pass_models(plan, last_releases)
        self._pass_counts(
            plan,
            {
                site.index: self._release_counts(site, plan, models[site.index])
                for site in self.sites
                if site.index in plan.reporting_sites
            },
        )

    def _make_offer(self, site: Site, last_release: PushSum | None) -> _ScoringOffer:
        """Return a site's document; without digests where it may read others' test sets: nothing is scored then."""
        stored_counts = site.folder.read_document("counts") or {}
        takes_part = self.is_isolated and site.active
        # without noise a last release is sent to all only where the site's counts may leave too
        may_pass = (site.plan is not None and site.plan.sigma > 0) or site.index in self.reporting_sites
        return {
            "apart": self.is_isolated,
            "counts": site.index in self.reporting_sites,
            "number": self._find_counts_round(site),
            "held": digest_values(site.mixing_learner(self.method).parameter_vector()) if takes_part else "",
            "sent": digest_values(last_release.x) if last_release is not None and may_pass else "",
            "scored": str(stored_counts.get("schema", "")),
        }

    def _load_last_release(self, site: Site) -> PushSum | None:
        """Return a site's release of the last round, from its checkpoint; None where it may not be passed on."""
        if self.masked or not self.is_isolated or not site.folder.has_checkpoint(self.rounds):
            return None
        tensors, document = site.folder.load_checkpoint(self.rounds)
        if not document["active"] or "push/x" not in tensors:
            return None
        return PushSum(tensors["push/x"].numpy(), float(document["weight"]))

    def _find_counts_round(self, site: Site) -> int:
        """Return the ledger's round in which a site's counts left, or the next round."""
        release_rounds = [
            ledger_round.number for ledger_round in site.ledger.list_rounds() if SCORES in ledger_round.releases
        ]
        return release_rounds[-1] if release_rounds else max(site.ledger.last_round(), self.rounds) + 1

    def _pass_models(self, plan: _ScoringPlan, last_releases: Mapping[int, PushSum | None]) -> dict[int, _Models]:
        """Send each site the others' last releases; return all of them for each site of this process.

        A model that differs from its announcement is left out, and the reason logged.
        """
        agreed_schema = schema_digest(self.sites[0].mixing_learner(self.method).model)
        received_models: dict[int, dict[int | None, Vector]] = {site.index: {} for site in self.sites}
        releases = {}
        for site in self.sites:
            if (sent := last_releases[site.index]) is not None and site.index in plan.models:
                received_models[site.index][site.index] = sent.z
                reissued = site.ledger.release_again(self.rounds, sent.x, schema=agreed_schema, weight=sent.w)
                releases[site.index] = reissued
        size = self.sites[0].mixing_learner(self.method).parameter_vector().size
        digests = {k: model_digest for k, model_digest in plan.models.items() if k is not None}
        for message in self._exchange_releases(
            "model to be scored", releases, [*digests], round_=self.rounds, size=size
        ):
            if problem := _find_problem(message, agreed_schema, digests[message.sender]):
                subject = f"the model from site {self.names[message.sender]} is not scored"
                self._find_site(message.receiver).folder.log(f"{subject}: {problem}")
            else:
                vector = np.asarray(message.vector, np.float32)
                received_models[message.receiver][message.sender] = PushSum(vector, message.weight).z
        return {k: dict(models) for k, models in received_models.items()}

    def _release_counts(self, site: Site, plan: _ScoringPlan, models: _Models) -> Release:
        """Return the counts of all models on a site's local test set, recorded in its ledger.

        They are stored first, so that after a restart the same bytes leave.
        """
        stored_counts = site.folder.read_document("counts")
        if stored_counts is None:
            stored_counts = {"schema": plan.schema, "counts": [self._count_model(site, k, models) for k in plan.models]}
            site.folder.write_document("counts", stored_counts)
        released = release_once(site.ledger, plan.number, pack_counts(stored_counts["counts"]), plan.schema, SCORES)
        site.folder.log(f"counts of {len(plan.models)} models on its local test set leave (allow: scores)")
        return released

    def _count_model(self, site: Site, index: int | None, models: _Models) -> PredictionCounts:
        """Return the counts of a model on a site's local test set."""
        examples = site.tests.get("own")
        if examples is None or index not in models:
            return empty_counts(len(self.classes))
        travelling_model = site.mixing_learner(self.method).model
        model = self.method.payload.build_released_model(travelling_model, models[index], is_single=index is not None)
        with torch.no_grad():
            predictions = predict_examples(model, examples, site.device, alive=lambda: self.report_alive(site))
        return count_predictions(replace_nonfinite(predictions, examples), examples.label, examples.patient)

    def _pass_counts(self, plan: _ScoringPlan, releases: Mapping[int, Release]) -> None:
        """Send each site the counts of all, and store them at the sites of this process."""
        local_digests = [
            _CountsDigest(told=releases[k.index].digest if k.index in releases else "") for k in self.sites
        ]
        digests = dict(
            zip(self.comm.running, self.comm.gather(local_digests, _CountsDigest, patient=True), strict=True)
        )
        arrived = self._exchange_releases(
            SCORES, releases, plan.reporting_sites, round_=plan.number, size=plan.n_bytes, kind=BYTES
        )
        received_counts: dict[int, dict[int, list[PredictionCounts]]] = {site.index: {} for site in self.sites}
        for index, release in releases.items():
            received_counts[index][index] = unpack_counts(np.asarray(release.vector, np.uint8), *plan.shape)
        for message in arrived:
            problem = _find_problem(message, plan.schema, digests[message.sender]["told"])
            if not problem:
                try:
                    values = np.asarray(message.vector, np.uint8)
                    received_counts[message.receiver][message.sender] = unpack_counts(values, *plan.shape)
                except ValueError as error:
                    problem = str(error)
            if problem:
                subject = f"the counts of site {self.names[message.sender]} are left out"
                self._find_site(message.receiver).folder.log(f"{subject}: {problem}")
        for site in self.sites:
            if parts := dict(sorted(received_counts[site.index].items())):
                site.folder.write_document("scores", self._build_scores(plan, parts))

    def _build_scores(self, plan: _ScoringPlan, parts: Mapping[int, Sequence[PredictionCounts]]) -> CrossSiteCounts:
        """Return the counts of all hospitals, under the site names of this study."""
        common_name = "shared" if self.method.payload.is_single_release else "central"
        models = [common_name if k is None else self.names[k] for k in plan.models]
        return {
            "classes": list(plan.classes),
            "round": plan.number,
            "models": dict(zip(models, plan.models.values(), strict=True)),
            "hospitals": [self.names[k] for k in parts],
            "counts": {
                model: {self.names[k]: counts[row] for k, counts in parts.items()} for row, model in enumerate(models)
            },
        }

    def _exchange_releases(
        self,
        content: str,
        releases: Mapping[int, Release],
        senders: Sequence[int],
        *,
        round_: int,
        size: int,
        kind: PayloadType = NUMBERS,
    ) -> list[Message]:
        """Send each site the releases of this process, log them, and return the messages to its sites."""
        outgoing = [
            Outgoing(k, to, 1.0, release) for k, release in releases.items() for to in self.comm.running if to != k
        ]
        expected = [(k, site.index) for site in self.sites for k in senders if k != site.index]
        start = time.perf_counter()
        arrived = self.comm.exchange(outgoing, expected, round_=round_, hop=SCORING, size=size, kind=kind)
        seconds = time.perf_counter() - start
        for item in outgoing:
            line = {
                "what": content,
                "from": self.names[item.sender],
                "to": self.names[item.receiver],
                "bytes": HEADER_BYTES + item.release.vector.nbytes,
                "seconds": round(seconds / len(outgoing), 6),
            }
            self._find_site(item.sender).folder.record_transfer(line)
        return arrived

    def _find_site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
