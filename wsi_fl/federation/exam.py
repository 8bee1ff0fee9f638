"""What is scored between hospitals, and by whom: it follows from what each tells all, so that nobody waits in vain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Round
from wsi_fl.federation.message import Message
from wsi_fl.learning.counts import N_BINS, n_bytes
from wsi_fl.privacy.ledger_file import SCORES, digest

_MOST_BEYOND = 1 << 16
"""Rounds of a ledger after the last one of training, at most: each attempt at a shared sum takes one."""
_Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
"""SHA-256, or nothing."""


class Present(TypedDict):
    """What a site tells before models are scored.

    Attributes:
        apart: whether it may not read the others' test parts.
        counts: whether counts of its own test part may leave it.
        number: the round of its ledger in which they would leave, or have left.
        held: SHA-256 of the model that it holds after the last exchange; "" where it took no part.
        sent: SHA-256 of its last release; "" where nothing was released, or only a sum of all can be read.
        scored: what the counts are of that left it before a restart; "" for none.
    """

    apart: bool
    counts: bool
    number: Round
    held: _Digest
    sent: _Digest
    scored: _Digest


class Counted(TypedDict):
    """SHA-256 of the counts that a site is about to send; "" for none."""

    told: _Digest


@dataclass(frozen=True)
class Exam:
    """What all sites agree on before they score.

    Attributes:
        classes: their names.
        rounds: the last round of training.
        number: the round of the ledgers in which counts leave.
        models: SHA-256 of each model by the index of its site, in order; of one that all hold, by None.
        tellers: the sites that let counts leave.
    """

    classes: tuple[str, ...]
    rounds: int
    number: int
    models: Mapping[int | None, str]
    tellers: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many models and how many classes there are."""
        return len(self.models), len(self.classes)

    @property
    def n_bytes(self) -> int:
        """Return the length of a hospital's counts."""
        return n_bytes(*self.shape)

    @property
    def schema(self) -> str:
        """Return the SHA-256 of what the counts are of, and in which order."""
        models = [[index, known] for index, known in self.models.items()]
        said = [SCORES, self.classes, N_BINS, self.number, models]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def agree(told: Mapping[int, Present], classes: tuple[str, ...], rounds: int) -> Exam | None:
    """Return what is scored; None where nothing is.

    Where all who took part to the end hold the same model, that one is scored, by those who hold it. Elsewhere it is
    the last release of every site, by all.

    Args:
        told: what each site told, by its index.
        classes: names of the classes.
        rounds: number of rounds of the run.
    """
    if not all(one["apart"] for one in told.values()):
        return None
    tellers = [index for index, one in told.items() if one["counts"]]
    models: dict[int | None, str] = {k: one["sent"] for k, one in told.items() if one["sent"]}
    holders = [index for index, one in told.items() if one["held"]]
    if len(held := {told[index]["held"] for index in holders}) == 1 and len(holders) > 1:
        models = {None: held.pop()}
        tellers = [index for index in tellers if index in holders]
    if not tellers or not models:
        return None
    number = max(one["number"] for one in told.values())
    if number > rounds + _MOST_BEYOND:  # it would be final in every honest ledger
        return None
    return Exam(classes, rounds, number, models, tuple(tellers))


def problem_of(message: Message, agreed: str, known: str) -> str:
    """Return why a message is not what its sender said it would send; empty when it is.

    Args:
        agreed: its schema.
        known: SHA-256 of its values.
    """
    if message.refused:
        return message.refused
    if message.schema != agreed:
        return "it is of another kind"
    if digest(message.vector) != known:
        return "it is not what was announced"
    return "" if message.weight > 0 else f"its weight is {message.weight:g}"
