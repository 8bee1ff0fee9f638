"""Cross-site evaluation: each hospital tests the exchanged models on its local test set and releases counts only.

After the last round each site sends its last release to all others, unless all hold the same model by then. A hospital
that allows it counts the predictions of these models on its test set. The counts leave the site once, through its
ledger. Of training patients only releases are used (post-processing), so ε does not grow.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import nn
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Round
from wsi_fl.federation.message import BYTES, HEADER_BYTES, NUMBERS, SCORING, Message, Outgoing, PayloadType
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum, Vector
from wsi_fl.federation.site import Site, release_once
from wsi_fl.learning.counts import FEWEST, N_BINS, Counts, Scores, count, n_bytes, nothing, packed, unpacked
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.models import schema
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.ledger_file import SCORES, Release, digest


def _as_released(model: nn.Module, vector: Vector, *, alone: bool) -> nn.Module:
    """Return a copy of a model with released parameters float32[d] and without the private state of its site.

    They are a single site's release (`is_single`) or the mean of all, which a one-shot global head distinguishes.
    """
    found = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    if isinstance(found, SharedHead):
        found.forget()
        if alone:
            found.n_sites.fill_(1)
    parameters = [p for p in found.parameters() if p.requires_grad]
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(np.array(vector)), [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
    return found.eval()


_MOST_BEYOND = 1 << 16
"""Most rounds of a ledger after the last training round: each attempt at secure aggregation takes one."""
_Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # SHA-256, or nothing


class _Present(TypedDict):
    """The document that a site sends before models are scored."""

    apart: bool  # whether it may not read the others' test sets
    counts: bool  # whether counts of its test set may leave it
    number: Round  # the round of its ledger in which the counts leave, or have left
    held: _Digest  # SHA-256 of its model after the last exchange; "" where it did not participate
    sent: _Digest  # SHA-256 of its last release; "" for none, or where only the sum of all is readable
    scored: _Digest  # schema of the counts that left it before a restart; "" for none


class _Counted(TypedDict):
    """SHA-256 of the counts that a site will send; "" for none."""

    told: _Digest


@dataclass(frozen=True)
class _Agreed:
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
        return n_bytes(*self.shape)

    @property
    def schema(self) -> str:
        """Return the SHA-256 over the models and classes of the counts, in order."""
        models = [[index, known] for index, known in self.models.items()]
        said = [SCORES, self.classes, N_BINS, FEWEST, self.number, models]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _agreed_models(told: Mapping[int, _Present], classes: tuple[str, ...], rounds: int) -> _Agreed | None:
    """Return the models to score and the reporting sites, given each site's document by index; None for no scoring.

    Where all sites that participated to the end hold the same model, those sites score it. Otherwise all sites score
    the last release of each site.
    """
    if not all(one["apart"] for one in told.values()):
        return None
    reporting_sites = [index for index, one in told.items() if one["counts"]]
    models: dict[int | None, str] = {k: one["sent"] for k, one in told.items() if one["sent"]}
    holders = [index for index, one in told.items() if one["held"]]
    if len(held := {told[index]["held"] for index in holders}) == 1 and len(holders) > 1:
        models = {None: held.pop()}
        reporting_sites = [index for index in reporting_sites if index in holders]
    if not reporting_sites or not models:
        return None
    number = max(one["number"] for one in told.values())
    if number > rounds + _MOST_BEYOND:  # no honest ledger reaches it
        return None
    return _Agreed(classes, number, models, tuple(reporting_sites))


def _problem_of(message: Message, agreed: str, known: str) -> str:
    """Return why a message differs from its announced schema or SHA-256; "" where it does not."""
    if message.refused:
        return message.refused
    if message.schema != agreed:
        return "it is of another kind"
    if digest(message.vector) != known:
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
    apart: bool  # whether this process may not read the others' test sets
    # sites of this process that release counts of their test sets
    reporting_sites: Sequence[int]
    alive: Callable[[Site], None]  # called with each batch, as a sign of life

    def run(self) -> None:
        """Score the exchanged models at each hospital; each site keeps the counts of all as `scores.json`.

        Nothing is scored where no model is exchanged, a site may read all test sets, or no site releases counts. Counts
        leave a site once in a run; it fails where different counts have left before. Nothing is scored again where
        the models differ from those scored before a restart, as after a site returned.
        """
        if self.method.travels is None or len(self.comm.running) < 2:
            return
        last = {site.index: self._last_release(site) for site in self.sites}
        mine = [self._present(site, last[site.index]) for site in self.sites]
        told = dict(zip(self.comm.running, self.comm.gather(mine, _Present, patient=True), strict=True))
        exam = _agreed_models(told, self.classes, self.rounds)
        if exam is None:
            return
        if any(one["scored"] not in ("", exam.schema) for one in told.values()):
            for site in self.sites:
                site.folder.log("the models differ from those that were scored before; none is scored again")
            return
        models: dict[int, _Models] = {}
        if None in exam.models:  # where a site holds the common model
            for site in self.sites:
                own = site.traveller(self.method).vector()
                models[site.index] = {None: own} if digest(own) == exam.models[None] else {}
        else:
            models = self._pass_models(exam, last)
        self._pass_counts(
            exam,
            {
                site.index: self._release(site, exam, models[site.index])
                for site in self.sites
                if site.index in exam.reporting_sites
            },
        )

    def _present(self, site: Site, last: PushSum | None) -> _Present:
        """Return a site's document; without digests where it may read others' test sets: nothing is scored then."""
        kept = site.folder.kept("counts") or {}
        part = self.apart and site.active
        # without noise a last release is sent to all only where the site's counts may leave too
        may_pass = (site.plan is not None and site.plan.sigma > 0) or site.index in self.reporting_sites
        return {
            "apart": self.apart,
            "counts": site.index in self.reporting_sites,
            "number": self._number(site),
            "held": digest(site.traveller(self.method).vector()) if part else "",
            "sent": digest(last.x) if last is not None and may_pass else "",
            "scored": str(kept.get("schema", "")),
        }

    def _last_release(self, site: Site) -> PushSum | None:
        """Return a site's release of the last round, from its checkpoint; None where it may not be passed on."""
        if self.masked or not self.apart or self.rounds not in site.folder.checkpoints():
            return None
        tensors, document = site.folder.load_checkpoint(self.rounds)
        if not document["active"] or "push/x" not in tensors:
            return None
        return PushSum(tensors["push/x"].numpy(), float(document["weight"]))

    def _number(self, site: Site) -> int:
        """Return the ledger's round in which a site's counts left, or the next round."""
        found = [one.number for one in site.ledger.rounds() if SCORES in one.releases]
        return found[-1] if found else max(site.ledger.last_round(), self.rounds) + 1

    def _pass_models(self, exam: _Agreed, last: Mapping[int, PushSum | None]) -> dict[int, _Models]:
        """Send each site the others' last releases; return all of them for each site of this process.

        A model that differs from its announcement is left out, and the reason logged.
        """
        agreed = schema(self.sites[0].traveller(self.method).model)
        held: dict[int, dict[int | None, Vector]] = {site.index: {} for site in self.sites}
        releases = {}
        for site in self.sites:
            if (sent := last[site.index]) is not None and site.index in exam.models:
                held[site.index][site.index] = sent.z
                again = site.ledger.reissue(self.rounds, sent.x, schema=agreed, weight=sent.w)
                releases[site.index] = again
        size = self.sites[0].traveller(self.method).vector().size
        known = {k: one for k, one in exam.models.items() if k is not None}
        for message in self._passed("model to be scored", releases, [*known], round_=self.rounds, size=size):
            if problem := _problem_of(message, agreed, known[message.sender]):
                what = f"the model from site {self.names[message.sender]} is not scored"
                self._site(message.receiver).folder.log(f"{what}: {problem}")
            else:
                vector = np.asarray(message.vector, np.float32)
                held[message.receiver][message.sender] = PushSum(vector, message.weight).z
        return {k: dict(models) for k, models in held.items()}

    def _release(self, site: Site, exam: _Agreed, models: _Models) -> Release:
        """Return the counts of all models on a site's local test set, recorded in its ledger.

        They are stored first, so that after a restart the same bytes leave.
        """
        kept = site.folder.kept("counts")
        if kept is None:
            kept = {"schema": exam.schema, "counts": [self._count(site, k, models) for k in exam.models]}
            site.folder.keep("counts", kept)
        released = release_once(site.ledger, exam.number, packed(kept["counts"]), exam.schema, SCORES)
        site.folder.log(f"counts of {len(exam.models)} models on its local test set leave (allow: scores)")
        return released

    def _count(self, site: Site, index: int | None, models: _Models) -> Counts:
        """Return the counts of a model on a site's local test set."""
        examples = site.tests.get("own")
        if examples is None or index not in models:
            return nothing(len(self.classes))
        model = _as_released(site.traveller(self.method).model, models[index], alone=index is not None)
        with torch.no_grad():
            said = probabilities(model, examples, site.device, alive=lambda: self.alive(site))
        return count(undecided_where_broken(said, examples), examples.label, examples.patient)

    def _pass_counts(self, exam: _Agreed, releases: Mapping[int, Release]) -> None:
        """Send each site the counts of all, and store them at the sites of this process."""
        mine = [_Counted(told=releases[k.index].digest if k.index in releases else "") for k in self.sites]
        told = dict(zip(self.comm.running, self.comm.gather(mine, _Counted, patient=True), strict=True))
        arrived = self._passed(
            SCORES, releases, exam.reporting_sites, round_=exam.number, size=exam.n_bytes, kind=BYTES
        )
        found: dict[int, dict[int, list[Counts]]] = {site.index: {} for site in self.sites}
        for index, own in releases.items():
            found[index][index] = unpacked(np.asarray(own.vector, np.uint8), *exam.shape)
        for message in arrived:
            problem = _problem_of(message, exam.schema, told[message.sender]["told"])
            if not problem:
                try:
                    values = np.asarray(message.vector, np.uint8)
                    found[message.receiver][message.sender] = unpacked(values, *exam.shape)
                except ValueError as error:
                    problem = str(error)
            if problem:
                what = f"the counts of site {self.names[message.sender]} are left out"
                self._site(message.receiver).folder.log(f"{what}: {problem}")
        for site in self.sites:
            if parts := dict(sorted(found[site.index].items())):
                site.folder.keep("scores", self._document(exam, parts))

    def _document(self, exam: _Agreed, parts: Mapping[int, Sequence[Counts]]) -> Scores:
        """Return the counts of all hospitals, under the site names of this study."""
        whole = "shared" if self.method.once else "central"
        models = [whole if k is None else self.names[k] for k in exam.models]
        return {
            "classes": list(exam.classes),
            "round": exam.number,
            "models": dict(zip(models, exam.models.values(), strict=True)),
            "hospitals": [self.names[k] for k in parts],
            "counts": {
                model: {self.names[k]: told[row] for k, told in parts.items()}
                for row, model in enumerate(models)
            },
        }

    def _passed(
        self,
        what: str,
        releases: Mapping[int, Release],
        senders: Sequence[int],
        *,
        round_: int,
        size: int,
        kind: PayloadType = NUMBERS,
    ) -> list[Message]:
        """Send each site the releases of this process, log them, and return the messages to its sites."""
        outgoing = [
            Outgoing(k, to, 1.0, one) for k, one in releases.items() for to in self.comm.running if to != k
        ]
        expected = [(k, site.index) for site in self.sites for k in senders if k != site.index]
        began = time.perf_counter()
        arrived = self.comm.exchange(outgoing, expected, round_=round_, hop=SCORING, size=size, kind=kind)
        seconds = time.perf_counter() - began
        for item in outgoing:
            line = {
                "what": what,
                "from": self.names[item.sender],
                "to": self.names[item.receiver],
                "bytes": HEADER_BYTES + item.release.vector.nbytes,
                "seconds": round(seconds / len(outgoing), 6),
            }
            self._site(item.sender).folder.note_transfer(line)
        return arrived

    def _site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
