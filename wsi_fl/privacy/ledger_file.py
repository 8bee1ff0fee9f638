"""The file of a ledger: JSON lines, each with the hash of all before it, and heads with its length.

Every line holds `prev`, the SHA-256 of all bytes before it, which detects changed, missing and inserted lines. A file
that ends too early, because it was emptied, cut or taken from an older backup, is detected by its *heads*: small files
elsewhere with the number of lines and the SHA-256 of the file when it was last written. They are read again, under a
separate lock, before each line that is written: so of two copies only one spends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from wsi_fl.privacy.accounting import Mechanism
from wsi_fl.system.files import append_line, file_lock, read_json, refuse_unavailable, require_regular_file, write_json
from wsi_fl.types import UsageError, WsiFlError

Guarantee = Literal["guaranteed", "shared", "nominal", "none"]
"""Guarantee level of an ε.

``guaranteed``  the per-example gradient depends on nothing fitted on other records
``shared``      the same, as long as at most privacy.colluding sites collude, and the others add their stated noise
``nominal``     the arithmetic of Algorithm 1, whose gradient contains a teacher trained without DP
``none``        no differential privacy, or noise from a seed that others may know
"""


SCORES = "scores"
"""Content computed from test patients and earlier releases alone: the scores of releases."""


VERSION = 1
"""Version of the lines that are written; the format is docs/reference/ledger.md."""


class _LedgerLine(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class _AppliedMechanism(_LedgerLine):
    sigma: float = Field(ge=0, le=1e9)
    clip: float = Field(gt=0)
    sample_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=0, le=10**12)

    @field_validator("sigma")
    @classmethod
    def _refuse_tiny(cls, sigma: float) -> float:
        if 0 < sigma < 1e-9:  # its square may be 0
            raise ValueError("is 0 or at least 1e-9")
        return sigma

    @property
    def gaussian_mechanism(self) -> Mechanism:
        """The mechanism for the accountant."""
        return Mechanism(self.sigma, self.clip, self.sample_rate, self.steps)


class _RecordedPlan(_LedgerLine):
    """Further fields of the privacy plan of an entry."""

    n: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    mode: Literal["strict", "paper"]


class LedgerEntry(_LedgerLine):
    """One line of a ledger."""

    version: int = Field(1, ge=VERSION, le=VERSION)
    time: str = ""
    run: str = Field(min_length=1, max_length=300)  # the run's id, after its folder's name where it has one
    site: str
    round: int = Field(ge=0)
    released: str | None = None  # kind and SHA-256 of the content that may leave by this line; None for none
    mechanism: _AppliedMechanism | None = None  # None without differential privacy
    plan: _RecordedPlan | None = None  # further fields of the privacy plan; None without one
    delta: float | None = Field(None, gt=0, lt=1)
    unit: Literal["row", "patient", "site"] | None = None
    guarantee: Guarantee = "none"
    insecure: bool = False
    # whether the round is final: its release is about to leave, for the first time or `again`
    sending: bool = False
    relayed: str | None = None  # SHA-256 of a relayed mixture of releases, the round's among them
    real: bool = False  # whether the site was a real hospital when it wrote the line
    promise: str = ""  # SHA-256 of the site file that the run keeps
    agreement: str = ""  # SHA-256 of the plan signed by the hospital; "" without one
    approved: str = ""  # time of the signature
    task: str = ""  # id of the task of another framework whose result is released; "" for none
    prev: str = Field(pattern="^[0-9a-f]{64}$")  # SHA-256 of the file before this line

    @property
    def run_id(self) -> str:
        """The run's id without the folder's name."""
        return run_id(self.run)

    @property
    def is_unprotected(self) -> bool:
        """Whether data of training patients may leave by this entry without differential privacy.

        Counts of test patients (`SCORES`) disclose no more of training patients than the scored releases.
        """
        return bool(self.released and self.mechanism is None and self.released.split()[0] != SCORES)


class _LedgerHead(_LedgerLine):
    """State of a ledger when it was last written: number of lines, SHA-256 of all its bytes, and its path."""

    lines: int = Field(ge=1)
    sha256: str
    ledger: str = ""

    def describe_move(self, path: Path) -> str:
        """Return the text on the ledger's earlier place; "" where that is `path`."""
        if self.ledger in ("", str(path.resolve())):
            return ""
        return (
            f" and was at {self.ledger}: name that file as `ledger` in the site's file, or give the site another name "
            "if its patients are others"
        )


def run_id(run: str) -> str:
    """Return the id of a run without the folder's name before it."""
    return run.rpartition(" ")[2]


class LedgerFile:
    """Read and write the lines of a ledger's file; a missing file is an empty ledger.

    The next line written creates missing heads.

    Raises:
        WsiFlError: when a line is damaged or is no entry, the chain is broken, or a head records a longer file.
    """

    def __init__(self, path: Path, heads: Sequence[Path] = ()) -> None:
        self.path = path
        self.entries: list[LedgerEntry] = []
        self._heads = tuple(head.resolve() for head in heads)  # the target of a link, shared by all copies
        self._known_heads: set[Path] = set()
        self._n_bytes_read = 0
        self._chain_hash = hashlib.sha256()
        self._digests: list[str] = []
        self._check_heads()

    def _check_heads(self) -> None:
        if missing := [head for head in self._known_heads if not head.exists()]:
            raise WsiFlError(
                f"{missing[0]} is missing; put it back: it keeps copies of the ledger from spending the budget too"
            )
        records = {head: _read_head(head) for head in self._heads if head.exists()}  # before the file, which may grow
        self._known_heads |= records.keys()
        self.catch_up()
        for head, record in records.items():
            if [record.sha256] != self._digests[record.lines - 1 : record.lines]:
                raise WsiFlError(
                    f"{self.path}: this is not the ledger that {head} records, which had {record.lines} lines or more"
                    f"{record.describe_move(self.path)}; put the newest backup of the ledger back: it is the site's "
                    "budget, even where its studies were deleted"
                )

    def catch_up(self) -> None:
        """Read new lines of this process and others.

        Raises:
            WsiFlError: when a line is damaged, or does not follow the lines before it.
        """
        for line in self._read_new_lines():
            number = len(self._digests) + 1
            entry = _parse_entry(line, f"{self.path}: line {number}")
            if entry.prev != self._chain_hash.hexdigest():
                raise WsiFlError(
                    f"{self.path}: line {number} does not fit the lines before it, so they were changed; put the "
                    "newest backup of the ledger back: it is the site's budget"
                )
            self._chain_hash.update(line + b"\n")
            self._digests.append(self._chain_hash.hexdigest())
            self.entries.append(entry)

    def append(self, entry: Mapping[str, object]) -> None:
        """Append a line, then write the heads. The caller holds the lock and has caught up."""
        append_line(self.path, {"version": VERSION, **entry, "prev": self._chain_hash.hexdigest()})
        self.catch_up()
        self.write_heads()

    def write_heads(self) -> None:
        """Write the state of the ledger into the heads. The caller holds the lock and has caught up."""
        for head in self._writable_heads():
            record = _LedgerHead(lines=len(self._digests), sha256=self._digests[-1], ledger=str(self.path.resolve()))
            write_json(head, record.model_dump())
            self._known_heads.add(head)

    def _writable_heads(self) -> list[Path]:
        return [head for head in self._heads if os.access(head.parent, os.W_OK)]

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the ledger against other jobs, and catch up: no other process may read or spend the budget meanwhile.

        Heads are locked and read too: copies of a study have separate ledgers, but share a head in the user's folder. A
        ledger is refused when a copy of it was written since.
        """
        with ExitStack() as locks:
            for path in (self.path, *(head.with_suffix(".lock") for head in self._writable_heads())):
                locks.enter_context(file_lock(path))
            self._check_heads()
            yield

    def _read_new_lines(self) -> list[bytes]:
        # return the lines that were not read yet, without one cut short by a crash: no release has followed it
        if not self.path.exists():
            return []
        if self.path.stat().st_size + 1 < self._n_bytes_read:  # the newline of the last line may be missing
            raise WsiFlError(f"{self.path}: the ledger has become shorter; put its newest backup back")
        with require_regular_file(self.path).open("rb") as handle:
            handle.seek(self._n_bytes_read)
            *lines, last = handle.read().split(b"\n")
        if last and _is_whole(last):
            lines.append(last)
        self._n_bytes_read += sum(len(line) + 1 for line in lines)
        return lines


def _is_whole(line: bytes) -> bool:
    """Return whether only the newline of a last line is missing."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_entry(line: bytes, place: str) -> LedgerEntry:
    try:
        document = json.loads(line, object_pairs_hook=_require_single_keys)
    except (ValueError, RecursionError):
        raise WsiFlError(f"{place} is damaged") from None
    try:
        entry = LedgerEntry.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        raise WsiFlError(f"{place} is no entry of a ledger: {field}: {first['msg']}") from None
    if entry.mechanism and (entry.unit is None or entry.delta is None):
        raise WsiFlError(f"{place} is no entry of a ledger: it has a mechanism, but no delta or unit")
    if entry.mechanism and (entry.sending or entry.relayed):
        raise WsiFlError(f"{place} is no entry of a ledger: it has a mechanism, which no round would be charged with")
    return entry


def _require_single_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON.

    Raises:
        ValueError: for a key that stands twice, of which readers might take either.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice")
    return values


def _read_head(path: Path) -> _LedgerHead:
    try:
        return _LedgerHead.model_validate(read_json(path))
    except (ValidationError, OSError) as error:
        refuse_unavailable(error, path)
        raise WsiFlError(f"{path}: damaged; put its backup back, or the site's budget cannot be trusted") from None


def user_head_path(site: str) -> Path:
    """Return this user's head of a real site's ledger.

    Raises:
        UsageError: when it cannot be written.
    """
    try:
        state_home = Path(os.environ.get("XDG_STATE_HOME", ""))  # XDG ignores relative paths
        state = (state_home if state_home.is_absolute() else Path.home() / ".local" / "state") / "wsi-fl" / "ledgers"
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(state, os.W_OK)
    except (OSError, RuntimeError):  # no such folder, or no home
        writable = False
    if not writable:
        raise UsageError(
            f"the budget of real site {site} is remembered in ~/.local/state, which cannot be written; set "
            "XDG_STATE_HOME to a writable folder of yours"
        )
    return state / f"{site}.head.json"


ReleaseValues = NDArray[np.float32] | NDArray[np.uint8]
"""Parameters of a model, or the bytes of a buffer of images."""

SEAL = object()
"""The object that authorises a release, for the ledger alone."""


@dataclass(frozen=True, eq=False)
class Release:
    """A recorded release of a site: numbers float32[d] with their PushSum weight, or bytes uint8[d].

    Attributes:
        site, round: the site, and the round of the release.
        schema: of the model with these parameters.
        vector: read-only.
        digest: SHA-256 of the transmitted bytes, as in the ledger.
    """

    site: str
    round: int
    schema: str
    vector: ReleaseValues
    weight: float
    digest: str
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("only PrivacyLedger.release makes a Release")
        frozen = np.array(self.vector, np.uint8 if self.vector.dtype == np.uint8 else np.float32)
        frozen.flags.writeable = False
        object.__setattr__(self, "vector", frozen)


def digest_values(vector: ReleaseValues) -> str:
    """Return the SHA-256 of the transmitted bytes."""
    kind = "u1" if vector.dtype == np.uint8 else "<f4"
    return hashlib.sha256(np.ascontiguousarray(vector, kind).ravel().data).hexdigest()
