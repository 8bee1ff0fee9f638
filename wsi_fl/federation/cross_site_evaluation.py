"""Scores between hospitals: every hospital tests the models that travelled on its own patients and sends counts only.

After the last round every site sends its last release to all others, unless all of them hold the same model by then.
A hospital that allows it counts the answers of these models on its own test part. The counts leave once, through its
ledger. Nothing of a training patient is used but releases (post-processing), so ε stays what it was.
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
    """Return a model of the same kind with released parameters float32[d], without anything that only its site knows.

    They are one site's release `alone`, or the mean of all; a head that is made of sums must know.
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
"""Rounds of a ledger after the last one of training, at most: each attempt at a shared sum takes one."""
_Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # SHA-256, or nothing


class _Present(TypedDict):
    """What a site tells before models are scored."""

    apart: bool  # whether it may not read the others' test parts
    counts: bool  # whether counts of its own test part may leave it
    number: Round  # the round of its ledger in which they would leave, or have left
    held: _Digest  # SHA-256 of the model that it holds after the last exchange; "" where it took no part
    sent: _Digest  # SHA-256 of its last release; "" where nothing was released, or only a sum of all can be read
    scored: _Digest  # what the counts are of that left it before a restart; "" for none


class _Counted(TypedDict):
    """SHA-256 of the counts that a site is about to send; "" for none."""

    told: _Digest


@dataclass(frozen=True)
class _Agreed:
    """What all sites agree on before they score."""

    classes: tuple[str, ...]
    number: int  # the round of the ledgers in which counts leave
    # SHA-256 of each model by the index of its site, in order; of one that all hold, by None
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
        """Return the SHA-256 of which models and classes the counts are of, in order."""
        models = [[index, known] for index, known in self.models.items()]
        said = [SCORES, self.classes, N_BINS, FEWEST, self.number, models]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _agreed_models(told: Mapping[int, _Present], classes: tuple[str, ...], rounds: int) -> _Agreed | None:
    """Return which models are scored and where, given what each site told by its index; None where nothing is scored.

    Where all who took part to the end hold the same model, that one is scored, by those who hold it. Elsewhere it is
    the last release of every site, by all.
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
    if number > rounds + _MOST_BEYOND:  # it would be final in every honest ledger
        return None
    return _Agreed(classes, number, models, tuple(reporting_sites))


def _problem_of(message: Message, agreed: str, known: str) -> str:
    """Return why a message is not what its sender announced, its schema and SHA-256; "" where it is."""
    if message.refused:
        return message.refused
    if message.schema != agreed:
        return "it is of another kind"
    if digest(message.vector) != known:
        return "it is not what was announced"
    return "" if message.weight > 0 else f"its weight is {message.weight:g}"


_Models = Mapping[int | None, Vector]
"""Parameters float32[d] by the index of the site that released them; of a model that all hold, by None."""


@dataclass(frozen=True)
class CrossSiteScoring:
    """Scores what travelled, once the last round is over."""

    sites: Sequence[Site]  # those of this process
    method: Method
    comm: Comm
    names: Sequence[str]  # of all sites of the study, by index
    classes: tuple[str, ...]  # names of the classes
    rounds: int  # number of rounds of the run
    masked: bool  # whether a release by itself is a part of a sum under masks, and no model
    apart: bool  # whether this process may not read the others' test parts
    # the sites that let counts of their test part leave, as far as they live in this process
    reporting_sites: Sequence[int]
    alive: Callable[[Site], None]  # called with every batch, so that nobody thinks that this hangs

    def run(self) -> None:
        """Score what travelled at every hospital; each site keeps what all have told as `scores.json`.

        Nothing happens where nothing travels, where some site may read all test parts, or where no site lets counts
        leave. Counts leave a site once in a run; where others have left before, it fails. Where the models are no
        longer those that were scored before a restart, as after a site has come back, nothing is scored again.
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
                site.folder.log("models are others than those that were scored before; none is scored again")
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
        """Return what a site tells; without digests where it may read others' test parts: nothing is scored then."""
        kept = site.folder.kept("counts") or {}
        part = self.apart and site.active
        # without noise a last release goes to all only where the site's counts may leave too
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
        """Return what a site released in the last round, from its checkpoint; None where nothing may be passed on."""
        if self.masked or not self.apart or self.rounds not in site.folder.checkpoints():
            return None
        tensors, document = site.folder.load_checkpoint(self.rounds)
        if not document["active"] or "push/x" not in tensors:
            return None
        return PushSum(tensors["push/x"].numpy(), float(document["weight"]))

    def _number(self, site: Site) -> int:
        """Return the ledger's round in which a site's counts left; where they have not, the next one."""
        found = [one.number for one in site.ledger.rounds() if SCORES in one.releases]
        return found[-1] if found else max(site.ledger.last_round(), self.rounds) + 1

    def _pass_models(self, exam: _Agreed, last: Mapping[int, PushSum | None]) -> dict[int, _Models]:
        """Bring every site the others' last releases; return all of them for each site of this process.

        A model that is not what was announced is left out, and the site's log says why.
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
        """Return the counts of all models on a site's own test part, on record and about to leave.

        They are kept first: after a restart the same bytes leave.
        """
        kept = site.folder.kept("counts")
        if kept is None:
            kept = {"schema": exam.schema, "counts": [self._count(site, k, models) for k in exam.models]}
            site.folder.keep("counts", kept)
        released = release_once(site.ledger, exam.number, packed(kept["counts"]), exam.schema, SCORES)
        site.folder.log(f"counts of {len(exam.models)} models on its own test part leave (allow: scores)")
        return released

    def _count(self, site: Site, index: int | None, models: _Models) -> Counts:
        """Return the counts of one model on a site's own test part."""
        examples = site.tests.get("own")
        if examples is None or index not in models:
            return nothing(len(self.classes))
        model = _as_released(site.traveller(self.method).model, models[index], alone=index is not None)
        with torch.no_grad():
            said = probabilities(model, examples, site.device, alive=lambda: self.alive(site))
        return count(undecided_where_broken(said, examples), examples.label, examples.patient)

    def _pass_counts(self, exam: _Agreed, releases: Mapping[int, Release]) -> None:
        """Bring every site the counts of all, and keep them at the sites of this process."""
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
        """Return the counts of all hospitals, under the names that this study has for them."""
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
        """Send every site the releases of this process, and return what senders sent its sites, on record."""
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
