"""Where sites stand and who takes part in a round, as it follows from what each of them tells all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Round

State = Literal["staying", "leaving", "returning", "away"]


class Standing(TypedDict):
    """What a site tells before the first round.

    Attributes:
        kept: the rounds that it has a checkpoint of, in ascending order.
        returning: whether it was lost and comes back.
    """

    kept: Annotated[list[Round], Field(max_length=1000)]
    returning: bool


class Answer(TypedDict):
    """What a site answers to the roll call of a round.

    Attributes:
        ahead: whether it has a checkpoint of this round or a later one that it did not go on from.
    """

    state: State
    ahead: bool


class Arrival(TypedDict):
    """Whether a site takes part, once those who return were given their shares."""

    active: bool


@dataclass(frozen=True)
class Roster:
    """Who takes part in a round, as all sites see it."""

    staying: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(sorted((*self.staying, *self.returning)))


def first_round(told: Sequence[Standing]) -> int:
    """Return the last round from which every site can go on; 1 where none has begun.

    A site that comes back does not take the others further back than they stand.

    Example:
        >>> first_round([{"kept": [3, 4], "returning": False}, {"kept": [2, 3], "returning": False}])
        3
        >>> first_round([{"kept": [3, 4], "returning": False}, {"kept": [1], "returning": True}])
        4
    """
    latest = [max(one["kept"], default=1) for one in told]
    first = min(latest)
    if all(stands(one["kept"], first) for one in told):
        return first
    waiting = [r for r, one in zip(latest, told, strict=True) if not one["returning"]]
    return min(waiting, default=max(latest))


def stands(kept: Sequence[int], round_: int) -> bool:
    """Return whether a site with checkpoints of the rounds `kept` can go on from a round."""
    return round_ in kept or (round_ == 1 and not kept)


def roster_of(sites: Sequence[int], told: Sequence[Answer]) -> Roster:
    """Return who takes part, given the answers of these sites, in the same order.

    Who returns waits until no site has its next state on disk already, where the share it would give is whole.

    Example:
        >>> roster_of([0, 2], [{"state": "staying", "ahead": False}, {"state": "returning", "ahead": False}])
        Roster(staying=(0,), leaving=(), returning=(2,))
    """
    staying, leaving, returning = (
        tuple(site for site, one in zip(sites, told, strict=True) if one["state"] == state)
        for state in ("staying", "leaving", "returning")
    )
    ahead = any(one["ahead"] for one in told if one["state"] == "staying")
    return Roster(staying, leaving, () if ahead else returning)
