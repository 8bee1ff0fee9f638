"""Letters that lie at their sites, see `statistics`, carried by the network in the place of people.

Every site tells which letters lie there. Who lacks another's gets it from that site alone, checks it as a file that
people have carried, and keeps it as such. The run then rests on the files, as in a study where all of them lie.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Digest, Name, NotAgreed
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import digest
from wsi_fl.stages.site.account import check_own, guarantee_of, open_ledger, terms_of
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import (
    RUN,
    ReleasedSums,
    as_file,
    read_sums,
    refuse_another_site,
    refuse_others,
    wanted_of,
)
from wsi_fl.stages.training.checks import check_letters
from wsi_fl.system.files import atomic
from wsi_fl.types import KnownToAll, UsageError, WsiFlError

_MOST = 8 << 20
"""The longest letter as base64: 1000 classes along 1536 directions. All letters of a job are in memory at once."""
_Names = Annotated[list[Name], Field(max_length=10_000)]


class Lies(TypedDict):
    """Which letters lie at a site, by the SHA-256 of their files.

    Attributes:
        own: its own; "" for none.
        held: of the sites of the plan, its own among them.
        began: whose letters its run began with, where it goes on with one of a signed plan.
    """

    own: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    held: Annotated[dict[Name, Digest], Field(max_length=10_000)]
    began: _Names | None


class Carried(TypedDict):
    """The file of a site's own letter in base64; "" where all have it."""

    letter: Annotated[str, Field(max_length=_MOST)]


def carry(party: RunContext, comm: Comm) -> RunContext:
    """Bring every site the letters that it lacks of those who are there; return the party that rests on common ones.

    A letter of a site that is away is used where all have the same. Nothing is told where heads rest on no files.

    Raises:
        KnownToAll: when fewer letters are there than was agreed on.
        WsiFlError: when the own letter may not leave, or another's is none that people could have carried here.
    """
    if not party.by_files:
        return party
    names, here = [party.names[k] for k in comm.running], [party.names[k] for k in comm.sites]
    marks = {name: sha256(as_file(one)).hexdigest() for name, one in party.releases.items()}
    kept = party.run.site(here[0]).released() if party.run.agreement else None
    began = None if kept is None else sorted(kept)
    mine = [Lies(own=marks.get(name, ""), held=marks, began=began) for name in here]
    told = dict(zip(names, comm.gather(mine, Lies), strict=True))
    lacking = [name for name in names if told[name]["own"] and _lack(told, name)]
    if lacking:
        leaving = [Carried(letter=_letter(party, name) if name in lacking else "") for name in here]
        came = dict(zip(names, comm.gather(leaving, Carried), strict=True))
        for name in lacking:
            if name not in here:
                _keep(party, here[0], name, came[name]["letter"])
    party = replace(party, letters=frozenset(_common(told, party.names)))
    try:
        check_letters(party)
    except WsiFlError as error:
        raise KnownToAll(str(error)) from None
    return party


def _lack(told: Mapping[str, Lies], name: str) -> bool:
    """Return whether a site lacks the letter of another as it lies there."""
    return any(one["held"].get(name) != told[name]["own"] for one in told.values())


def _common(told: Mapping[str, Lies], names: Sequence[str]) -> list[str]:
    """Return whose letters all sites have once letters were carried, and had as the run began."""
    away = {name: {one["held"].get(name, "") for one in told.values()} for name in names if name not in told}
    there = [name for name in names if (told[name]["own"] if name in told else away[name] - {""})]
    begun = [one["began"] for one in told.values() if one["began"] is not None]
    return [name for name in there if len(away.get(name, "1")) == 1 and all(name in one for one in begun)]


def own_letter(party: RunContext, name: str) -> tuple[ReleasedSums, PrivacyLedger, int]:
    """Return a site's own letter as it may leave, its ledger, and the round in which it was released.

    Raises:
        UsageError: when there is none, or it has no differential privacy and the site allows that no longer.
        WsiFlError: when it was edited, or the ledger does not know that it may leave.
    """
    study, site = party.study, party.site(name)
    label = study.relative(study.release(name))
    if (sums := party.releases.get(name)) is None:
        raise UsageError(
            f"site {name} has released no letter yet, and this plan sends it; there: `wsi-fl statistics --site {name}`"
        )
    terms = terms_of(site, party.pipeline, guarantee_of(party.method, party.pipeline))
    ledger = open_ledger(study, site, RUN, terms)
    round_ = check_own(ledger, RUN, digest(sums.vector), label)
    if not round_.final:
        raise WsiFlError(
            f"{label}: the ledger does not say that it may leave; run `wsi-fl statistics --site {name}`, which spends "
            "nothing then"
        )
    if ledger.epsilon() is None and not site.allows("model"):
        raise UsageError(
            f"sites/{name}.toml: a letter without differential privacy may not leave this site; add allow = "
            '["model"] there'
        )
    return sums, ledger, round_.number


def _letter(party: RunContext, name: str) -> str:
    """Return a site's own letter as it leaves, which is on its ledger by now; nothing is spent."""
    sums, ledger, round_ = own_letter(party, name)
    text = b64encode(as_file(sums)).decode()
    if len(text) > _MOST:
        raise WsiFlError(
            f"the letter of site {name} is too long for a network; copy it to the others' statistics/"
        )
    ledger.reissue(round_, sums.vector, schema="sums", agreement=party.run.agreement)
    return text


def _keep(party: RunContext, me: str, name: str, letter: str) -> None:
    """Keep another site's letter, once it is known to be one that is of use here."""
    study, label = party.study, f"the letter of site {name}"
    try:
        content = b64decode(letter, validate=True)
    except ValueError:
        raise NotAgreed(f"site {name} told what was not agreed on: no letter") from None
    with atomic(study.release(name)) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        sums = read_sums(temporary, label)
        refuse_another_site(sums.facts, name, label)
        refuse_others(sums.facts, wanted_of(party.data(me)), label)
