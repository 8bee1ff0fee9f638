"""What the lines of a ledger amount to: rounds, each of which is charged once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wsi_fl.privacy.accounting import Mechanism
from wsi_fl.privacy.book import Entry


@dataclass
class Round:
    """One round of a site in a run, as it stands on the ledger.

    Attributes:
        site, run: whose it is; `run` is the run's id.
        number: from 1 on, or 0 for what is released before the first round.
        mechanism: what was applied; None where there was no differential privacy.
        releases: what may leave, by kind: {"model": SHA-256}. Of each kind the newest alone.
        final: whether something of it may have left the site, so that it is never trained anew.
    """

    site: str
    run: str
    number: int
    mechanism: Mechanism | None = None
    releases: dict[str, str] = field(default_factory=dict)
    final: bool = False

    @property
    def released(self) -> list[str]:
        """Return what may leave as the ledger's lines say it, "model 5f2c…"."""
        return [f"{kind} {digest}" for kind, digest in self.releases.items()]


def rounds_of(entries: Iterable[Entry]) -> list[Round]:
    """Return the rounds that lines of a ledger amount to, in the order in which they were begun.

    A round that is recorded anew at once, before anything of it left, takes the place of what it was: it is charged
    once, and what it had made before may leave no more. Recorded after that it is charged once more. Rounds of two
    sites that share a ledger are charged apart, also in one run.
    """
    found: list[Round] = []
    latest: dict[tuple[str, str], Round] = {}
    for entry in entries:
        key = entry.site, entry.run_id
        here = latest.get(key)
        if entry.sending or entry.relayed:
            if here is not None and here.number == entry.round:
                here.final = True
            continue
        if here is None or here.number != entry.round or (here.final and entry.mechanism):
            here = latest[key] = Round(*key, entry.round)
            found.append(here)
        if entry.mechanism is not None:
            here.mechanism = entry.mechanism.mechanism
        if entry.released:
            kind, _, digest = entry.released.partition(" ")
            here.releases[kind] = digest
    return found


def applied(entries: Iterable[Entry]) -> list[Mechanism]:
    """Return the mechanisms of all rounds that lines of a ledger amount to."""
    return [one.mechanism for one in rounds_of(entries) if one.mechanism is not None]


def of_hospital(entries: Iterable[Entry], unit: str) -> list[Entry]:
    """Return the lines that count for a real hospital that counts ε per `unit`.

    What it did as a simulated site counts like all else, but does not bind it to the unit of that time: such lines of
    another unit are left out.
    """
    return [e for e in entries if e.real or e.unit in (None, unit)]


def attempts_of(entries: Iterable[Entry], site: str, approved: str) -> int:
    """Return in how many rounds, of whatever run, a model could leave a site under one approval; "" for none."""
    under = [e for e in entries if (e.site, e.approved) == (site, approved) and e.released]
    return len({(e.run_id, e.round) for e in under if str(e.released).startswith("model ")})


def units_of(entries: Iterable[Entry]) -> set[str]:
    """Return whose records all that was spent protects: "row", "patient", or both where they were mixed."""
    return {str(e.unit) for e in entries if e.mechanism}
