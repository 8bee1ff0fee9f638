"""What came of one attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One attempt.

    Attributes:
        kind: kill, flip or malformed.
        seed: repeats it, with `--only KIND:SEED`.
        what: was done.
        end: how it ended, one of few words.
        told: of a failure: what was seen.
        kills: how many processes' trees were killed.
        seconds, n_bytes: the longest, and the most memory, of its commands.
    """

    kind: str
    seed: int
    what: str
    end: str
    told: str = ""
    kills: int = 0
    seconds: float = 0.0
    n_bytes: int = 0
