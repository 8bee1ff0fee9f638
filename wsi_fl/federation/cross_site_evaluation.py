"""Scores between hospitals: every hospital tests the models that travelled on its own patients and sends counts only.

After the last round every site sends its last release to all others, unless all of them hold the same model by then.
A hospital that allows it counts the answers of these models on its own test part. The counts leave once, through its
ledger. Nothing of a training patient is used but releases (post-processing), so ε stays what it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import BYTES, HEADER_BYTES, SCORING, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum, Vector
from wsi_fl.federation.scoring import (
    Counted,
    CrossSiteEvaluation,
    Present,
    agree_on_models,
    as_released,
    counted,
    problem_of,
)
from wsi_fl.federation.site import Site, release_once
from wsi_fl.learning.counts import Counts, Scores, nothing, packed, unpacked
from wsi_fl.models import schema
from wsi_fl.privacy.ledger_file import SCORES, Release, digest

Models = Mapping[int | None, Vector]
"""Parameters float32[d] by the index of the site that released them; of a model that all hold, by None."""


@dataclass(frozen=True)
class CrossSiteScoring:
    """Scores what travelled, once the last round is over.

    Attributes:
        sites: those of this process.
        names: of all sites of the study, by index.
        classes: names of the classes.
        rounds: number of rounds of the run.
        masked: whether a release by itself is a part of a sum under masks, and no model.
        apart: whether this process may not read the others' test parts.
        reporting_sites: the sites that let counts of their test part leave, as far as they live in this process.
        alive: called with every batch, so that nobody thinks that this hangs.
    """

    sites: Sequence[Site]
    method: Method
    comm: Comm
    names: Sequence[str]
    classes: tuple[str, ...]
    rounds: int
    masked: bool
    apart: bool
    reporting_sites: Sequence[int]
    alive: Callable[[Site], None]

    def run(self) -> None:
        """Score what travelled at every hospital; each site keeps what all have told as `scores.json`.

        Nothing happens where nothing travels, where some site may read all test parts, or where no site lets counts
        leave. Counts leave a site once in a run. Where the models are no longer those that were scored before a
        restart, as after a site has come back, nothing is scored again.

        Raises:
            WsiFlError: when other counts have left a site in this run.
        """
        if self.method.travels is None or len(self.comm.running) < 2:
            return
        last = {site.index: self._last_release(site) for site in self.sites}
        mine = [self._present(site, last[site.index]) for site in self.sites]
        told = dict(zip(self.comm.running, self.comm.gather(mine, Present, patient=True), strict=True))
        exam = agree_on_models(told, self.classes, self.rounds)
        if exam is None:
            return
        if any(one["scored"] not in ("", exam.schema) for one in told.values()):
            for site in self.sites:
                site.folder.log("models are others than those that were scored before; none is scored again")
            return
        models = self._held(exam) if None in exam.models else self._pass_models(exam, last)
        self._pass_counts(
            exam,
            {
                site.index: self._release(site, exam, models[site.index])
                for site in self.sites
                if site.index in exam.reporting_sites
            },
        )

    def _present(self, site: Site, last: PushSum | None) -> Present:
        """Return what a site tells; without digests where it may read others' test parts: nothing is scored then."""
        kept = site.folder.kept("counts") or {}
        part = self.apart and site.active
        return {
            "apart": self.apart,
            "counts": site.index in self.reporting_sites,
            "number": self._number(site),
            "held": digest(site.traveller(self.method).vector()) if part else "",
            "sent": digest(last.x) if last is not None and self._may_pass(site) else "",
            "scored": str(kept.get("schema", "")),
        }

    def _may_pass(self, site: Site) -> bool:
        """Return whether a site's last release may go to all; without noise only where its counts may leave too."""
        return (site.plan is not None and site.plan.sigma > 0) or site.index in self.reporting_sites

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

    def _held(self, exam: CrossSiteEvaluation) -> dict[int, Models]:
        """Return the common model for each site of this process, where the site holds it."""
        vectors = {site.index: site.traveller(self.method).vector() for site in self.sites}
        return {k: {None: own} if digest(own) == exam.models[None] else {} for k, own in vectors.items()}

    def _pass_models(
        self, exam: CrossSiteEvaluation, last: Mapping[int, PushSum | None]
    ) -> dict[int, Models]:
        """Bring every site the others' last releases; return all of them for each site of this process.

        A model that is not what was announced is left out, and the site's log says why.
        """
        agreed = schema(self.sites[0].traveller(self.method).model)
        held: dict[int, dict[int | None, Vector]] = {site.index: {} for site in self.sites}
        releases = {}
        for site in self.sites:
            if (sent := last[site.index]) is not None and site.index in exam.models:
                held[site.index][site.index] = sent.z
                again = site.ledger.reissue(exam.rounds, sent.x, schema=agreed, weight=sent.w)
                releases[site.index] = again
        size = self.sites[0].traveller(self.method).vector().size
        known = {k: one for k, one in exam.models.items() if k is not None}
        began, outgoing = time.perf_counter(), self._to_all(releases)
        arrived = self.comm.exchange(
            outgoing, self._from(list(known)), round_=exam.rounds, hop=SCORING, size=size
        )
        self._note("model to be scored", outgoing, time.perf_counter() - began)
        for message in arrived:
            if problem := problem_of(message, agreed, known[message.sender]):
                what = f"the model from site {self.names[message.sender]} is not scored"
                self._site(message.receiver).folder.log(f"{what}: {problem}")
            else:
                vector = np.asarray(message.vector, np.float32)
                held[message.receiver][message.sender] = PushSum(vector, message.weight).z
        return {k: dict(models) for k, models in held.items()}

    def _release(self, site: Site, exam: CrossSiteEvaluation, models: Models) -> Release:
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

    def _count(self, site: Site, index: int | None, models: Models) -> Counts:
        """Return the counts of one model on a site's own test part."""
        examples = site.tests.get("own")
        if examples is None or index not in models:
            return nothing(len(self.classes))
        model = as_released(site.traveller(self.method).model, models[index], alone=index is not None)
        return counted(model, examples, site.device, alive=lambda: self.alive(site))

    def _pass_counts(self, exam: CrossSiteEvaluation, releases: Mapping[int, Release]) -> None:
        """Bring every site the counts of all, and keep them at the sites of this process."""
        mine = [Counted(told=releases[k.index].digest if k.index in releases else "") for k in self.sites]
        told = dict(zip(self.comm.running, self.comm.gather(mine, Counted, patient=True), strict=True))
        began, outgoing = time.perf_counter(), self._to_all(releases)
        arrived = self.comm.exchange(
            outgoing,
            self._from(exam.reporting_sites),
            round_=exam.number,
            hop=SCORING,
            size=exam.n_bytes,
            kind=BYTES,
        )
        self._note(SCORES, outgoing, time.perf_counter() - began)
        found: dict[int, dict[int, list[Counts]]] = {site.index: {} for site in self.sites}
        for index, own in releases.items():
            found[index][index] = unpacked(np.asarray(own.vector, np.uint8), *exam.shape)
        for message in arrived:
            problem = problem_of(message, exam.schema, told[message.sender]["told"])
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

    def _document(self, exam: CrossSiteEvaluation, parts: Mapping[int, Sequence[Counts]]) -> Scores:
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

    def _to_all(self, releases: Mapping[int, Release]) -> list[Outgoing]:
        return [
            Outgoing(index, to, 1.0, release)
            for index, release in releases.items()
            for to in self.comm.running
            if to != index
        ]

    def _from(self, senders: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pairs (sender, receiver) whose receiver is in this process."""
        return [(k, site.index) for site in self.sites for k in senders if k != site.index]

    def _note(self, what: str, outgoing: Sequence[Outgoing], seconds: float) -> None:
        """Record what the sites of this process sent outside the rounds."""
        for item in outgoing:
            line = {
                "what": what,
                "from": self.names[item.sender],
                "to": self.names[item.receiver],
                "bytes": HEADER_BYTES + item.release.vector.nbytes,
                "seconds": round(seconds / len(outgoing), 6),
            }
            self._site(item.sender).folder.note_transfer(line)

    def _site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
