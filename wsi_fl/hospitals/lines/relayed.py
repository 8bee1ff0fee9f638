"""A `Comm` over an untrusted transport: an engine or a shared folder that carries bytes between hospitals.

Each process introduces itself with a handshake. All handshakes together make the session; later messages are sealed,
signed and bound to it. A transport may be slow, lose, repeat, reorder, alter or invent: messages that do not verify are
refused, lost ones are sent again until the deadline, and repeated ones are taken once.

If the others may go on without a site that timed out, every process keeps, per site, the newest handshake it knows, and
the handshake of a process that is believed to have dropped out. A handshake states its sender's beliefs, which are
merged by the later time, so that all processes in contact agree. Only a newer handshake of the site itself ends such a
belief. As a session binds the handshakes of all its members, sites that disagree exchange nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Literal, Protocol, TypeVar, cast

import numpy as np

from wsi_fl.federation.comm import PeerLate, Traffic, count
from wsi_fl.federation.documents import NotAgreed, decoded, encoded
from wsi_fl.federation.message import HEADER_BYTES, NUMBERS, Message, Outgoing, PayloadType, pack, received
from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, fingerprint
from wsi_fl.hospitals.trust.letters import EVERYBODY, HELLO, Buffer, Hello, Letter, Writer, session_of
from wsi_fl.types import Interrupted, KnownToAll

_T = TypeVar("_T")

Answer = Literal["taken", "later", "refused"]
"""A receiver's answer to a message: taken, not yet decidable, or refused for good."""
_ENDS = {"end": "ended the run; its own log says why", "withdrawn": "withdrew its approval of this plan"}
"""Sequence ids of a site's last message, and their meaning."""
MOST_BYTES = 1 << 30
"""The longest message that is taken unless the signed plan sets a limit."""
_PAUSES_S = (0.05, 2.0)
_WAKE_S = 0.5
_SKEW_S = 900.0
_END_S = 5.0
_MOST_HELD = 64
"""Messages of one peer that wait to be read: a site is never more than a few sequence ids ahead."""


def _ahead_s() -> float:
    """Return the offset of the clock from one that nobody sets; both go on while a machine sleeps."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SiteReturned(Interrupted):
    """A peer's process began again, so all resume from their checkpoints."""


class SitesGone(Interrupted):
    """Peers timed out or ended, or they went on without this site; all others resume.

    Attributes:
        sites: those that dropped out.
    """

    def __init__(self, message: str, sites: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.sites = tuple(sites)


@dataclass
class Attendance:
    """The presence of all sites as one process knows it; it outlives the process's sessions.

    Args:
        identity: of this site.
        names: of all sites of the plan, this one included.
        min_sites: sites required for a session, if the others go on without a site that timed out; more than half are
            required in any case, so that two groups out of contact cannot both go on. By default all are required, and
            no site drops out.
    """

    identity: Identity
    names: Sequence[str]
    at_least: int | None = None
    gone: dict[str, float] = field(default_factory=dict)
    """Site → time of the handshake of its newest process that dropped out; 0 for a site that never sent one."""
    why: dict[str, str] = field(default_factory=dict)
    """Site → why this process believes it dropped out; beliefs of others carry no reason."""

    def __post_init__(self) -> None:
        self.writer, self._ahead_s = Writer(self.identity, time.time()), _ahead_s()

    def clock_was_set(self) -> bool:
        """Return whether this machine's clock was set, so that its handshake's time is no longer comparable."""
        return abs(_ahead_s() - self._ahead_s) > _SKEW_S

    def is_gone(self, name: str) -> bool:
        """Return whether the newest process of a site dropped out."""
        return name in self.gone and self.writer.heard.get(name, 0.0) <= self.gone[name]

    def lacking(self) -> list[str]:
        """Return the sites that dropped out, if too few are left; none if enough are."""
        gone = [name for name in self.names if name != self.identity.name and self.is_gone(name)]
        enough = len(self.names) - len(gone) >= max(self.at_least or 0, len(self.names) // 2 + 1)
        return [] if enough else gone

    def note_gone(self, names: Sequence[str], why: str) -> None:
        """Mark the newest process of each of some sites as dropped out, with a reason, and renew the handshake."""
        self.gone |= {name: self.writer.heard.get(name, 0.0) for name in names}
        self.why |= dict.fromkeys(names, why)
        since = 0.0 if self.clock_was_set() else self.writer.since
        self.writer = self.writer.anew(max(since, self.gone.get(self.identity.name, 0.0)))
        self._ahead_s = _ahead_s()

    def learn(self, told: Mapping[str, float]) -> bool:
        """Merge the beliefs in a peer's handshake, of later processes alone; return whether this site is left out."""
        if self.at_least is None:
            return False
        for name, time_ in told.items():
            if name in self.names:
                self.gone[name] = max(time_, self.gone.get(name, 0.0))
        return self.gone.get(self.identity.name, -1.0) >= self.writer.since


class Line(Protocol):
    """Carries messages without knowledge of their content.

    Attributes:
        lag_s: the greatest age of a message at its arrival: seconds for an engine, days for a folder.
    """

    lag_s: float

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        """Hand over all arrivals from now on, from any thread."""

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        """Carry a message to a site; return "" once it has arrived, or why not, and it may be retried.

        Args:
            sequence_id: of the message among those of the sender and the receiver in this session.
        """
        ...

    def broken(self) -> str:
        """Return why the transport has failed for good; "" if it has not."""
        ...

    def silent_s(self, site: str) -> float:
        """Return the seconds since the last sign of life of a site's process; infinite if there was none."""
        ...

    def close(self) -> None:
        """Stop listening."""


@dataclass
class RelayedComm:
    """One process per site, over a transport.

    Args:
        identity: of this site.
        names: of all sites of the study, by index.
        running: indices of the participants, the same everywhere.
        transport: the transport, listened to from now on.
        timeout_s: how long to wait for a peer.
        version, code: of wsi-fl, and the SHA-256 of the installed package; the same at all sites.
        plan: SHA-256 of the signed plan; "" without one.
        most_bytes: of a message.
        keys: the fingerprint of each site's key, if the plan pins them: no other key speaks for the site.
        on_wait: called now and then while this process waits.
        presence: the presence known to this process; the same one when it resumes, so that its peers need not. If the
            others may go on without a site, `running` becomes the participants of the session, and a site that times
            out or ends makes every call raise `SitesDroppedOut`. By default all of `running` are required.
        find_stop_reason: called before each sending; returns why this site no longer takes part, "" if it does.
        load_revoked: called before each sending and while this process waits; returns when the certificates of each key
            were revoked, by its fingerprint: no session goes on with such a site.

    Raises:
        PeerLate: when a site did not introduce itself in time.
        SitesGone: the same, if the others may go on without it.
        KnownToAll: when one has another plan, version, code or time.
    """

    identity: Identity
    names: Sequence[str]
    running: tuple[int, ...]
    line: Line
    timeout_s: float
    version: str = ""
    code: str = "0" * 64
    plan: str = ""
    most_bytes: int = MOST_BYTES
    keys: Mapping[str, str] = field(default_factory=dict)
    waiting: Callable[[], None] = lambda: None
    attendance: Attendance | None = None
    standing: Callable[[], str] = lambda: ""
    withdrawn: Callable[[], Mapping[str, datetime]] = dict
    line_bytes: int = 0
    """All that was sent: messages with headers and signatures, documents too."""
    refused: list[str] = field(default_factory=list)
    """Reasons of the last refusals."""

    def __post_init__(self) -> None:
        me = list(self.names).index(self.identity.name)
        if me not in self.running:
            raise KnownToAll(f"site {self.identity.name} takes no part in this run")
        self.n_sites, self.sites = len(self.names), cast("tuple[int, ...]", (me,))
        self.traffic: dict[int, Traffic] = {me: Traffic()}
        self._others = {self.names[k]: k for k in self.running if k != me}
        self._invited = set(self._others)
        self._attendance = self.attendance or Attendance(self.identity, self.names)
        self._writer, self._few = self._attendance.writer, self._attendance.at_least is not None
        self._gathered, self._session = 0, ""
        self._met_s, self._steps = time.monotonic(), 0
        self._peers: dict[str, tuple[Hello, Holder]] = {}
        self._held: dict[tuple[str, str], Letter] = {}
        self._read: set[tuple[str, str]] = set()
        self._over: KnownToAll | None = None
        self._left: KnownToAll | None = None
        """A peer's end of the run; ignored while sites may drop out."""
        self._lossy, self._last = False, "end"
        self._changed = threading.Condition()
        self.line.listen(self._take)
        self._introduce()

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: PayloadType = NUMBERS,
        lossy: bool = False,
    ) -> list[Message]:
        """Send releases and receive the expected ones; see `Comm`."""
        began, mine = time.perf_counter(), self.sites[0]
        contents: dict[str, Sequence[Buffer]] = {}
        for item in outgoing:
            head, vector = pack(item, round_, hop)
            contents[self.names[item.receiver]] = (head, np.ascontiguousarray(vector).data.cast("B"))
        senders = [sender for sender, receiver in expected if receiver == mine]
        arrived = self._swap(f"x{round_}.{hop}", contents, senders, lossy=lossy)
        count(self.traffic, outgoing, time.perf_counter() - began)
        messages = []
        for sender, content in arrived.items():
            body = content[HEADER_BYTES:]
            vector = np.frombuffer(body[: len(body) - len(body) % kind.itemsize], kind)
            head = bytes(content[:HEADER_BYTES])
            messages.append(received(head, vector, sender, mine, round_, size, kind=kind))
        return messages

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return one document of every site; see `Comm`."""
        (document,) = documents
        mine = encoded(document, kind, self.identity.name)
        contents, senders = dict.fromkeys(self._others, (mine,)), list(self._others.values())
        texts = self._swap(self._place(), contents, senders, patient=patient)
        texts[self.sites[0]] = memoryview(mine)
        self._met_s, self._steps = time.monotonic(), 0
        return [decoded(bytes(texts[k]), kind, self.names[k]) for k in self.running]

    def hand(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Give documents to single sites; see `Comm`."""
        mine = self.sites[0]
        contents = {
            self.names[to]: (encoded(document, kind, self.identity.name),)
            for (_, to), document in documents.items()
        }
        senders = [sender for sender, receiver in expected if receiver == mine]
        texts = self._swap(self._place(), contents, senders, lossy=True)
        return {(k, mine): decoded(bytes(text), kind, self.names[k]) for k, text in texts.items()}

    def _place(self) -> str:
        """Return the sequence id of the next documents, the same at every site."""
        self._gathered += 1
        return f"g{self._gathered - 1}"

    def abort(self, code: int = 1) -> None:
        """End this site's part for all others, so that none waits for it; the process itself goes on."""
        del code
        if self._session and self._over is self._left is None:
            with suppress(Exception):  # the transport itself may have failed
                self._send(self._last, dict.fromkeys(self._others, (b"",)), _END_S)
        self.close()

    def close(self) -> None:
        """Stop listening; every further call fails."""
        with self._changed:
            self._over = self._over or KnownToAll(f"site {self.identity.name} has left the run")
            self._changed.notify_all()
        self.line.close()

    # handshakes

    def _introduce(self) -> None:
        """Send this site's handshake to all, and collect theirs."""
        said = Hello(
            certificate=self.identity.certificate,
            public=self._writer.public,
            time=self._writer.since,
            version=self.version,
            code=self.code,
            gone=dict(self._attendance.gone),
        )
        letter = self._writer.hello(said, self.plan)
        self._deliver(HELLO, dict.fromkeys(self._others, letter), self.timeout_s)
        with self._changed:
            self._wait_for(HELLO, self._attendance.lacking, inf)
            self._wait_for(
                HELLO, lambda: [name for name in self._expected() if name not in self._peers], self.timeout_s
            )
            self._others = {name: self._others[name] for name in self._expected()}
            self._peers = {name: self._peers[name] for name in self._others}
            self.running = tuple(sorted((*self.sites, *self._others.values())))
            hellos = [(name, hello["public"]) for name, (hello, _) in self._peers.items()]
            self._session = session_of([*hellos, (self.identity.name, self._writer.public)], self.plan)

    def _expected(self) -> list[str]:
        """Return the peers of the session that begins."""
        return [name for name in self._others if not self._attendance.is_gone(name)]

    def _meet(self, letter: Letter) -> Answer:
        """Take a handshake: the first one, or that of a process that began again."""
        said, holder = letter.hello(self.identity.root)
        name, met = holder.name, holder.name in self._peers
        heard = self._writer.heard.get(name, 0.0)
        if said["time"] < heard:
            return "refused"  # of a process that ended
        if met and said["time"] == heard:
            return "taken"
        if why := self._stranger(said, name, letter):
            return self._refuse(why)
        if problem := self._unlike(said, name):
            if self._few:  # the others go on without it
                return self._refuse(problem)
            self._left = KnownToAll(f"{problem}; nothing was trained")
        else:
            if self._session:
                self._left = SiteReturned(f"site {name} began again")
            else:
                self._peers[name] = (said, holder)
            self._writer.heard[name] = said["time"]
            if self._attendance.learn(said["gone"]):
                self._left = SitesGone(f"the others went on without {self.identity.name}, which was silent")
        self._changed.notify_all()
        return "taken"

    def _stranger(self, said: Hello, name: str, letter: Letter) -> str:
        """Return why a handshake is none of this run's; "" if it is one.

        One for another plan may be an old one that somebody copied here again, so nobody is blamed.
        """
        print_, behind_s = fingerprint(said["certificate"]), time.time() - said["time"]
        if name not in self._invited:
            return f"{name} sent a handshake, and takes no part in this run"
        if self.keys.get(name, print_) != print_:
            return f"somebody sent a handshake as {name} with another key than the plan's"
        if behind_s > _SKEW_S + self.line.lag_s + self.timeout_s:  # an old one, or a clock that is behind
            return f"{name} sent a handshake {behind_s / 3600:.1f} h ago by this clock"
        if letter.head["session"] != self.plan:
            return f"a handshake as {name} for another plan ({str(letter.head['session'])[:8]}) was ignored"
        return ""

    def _unlike(self, said: Hello, name: str) -> str:
        """Return how a peer differs from this site; "" if it does not."""
        me, ahead_s = self.identity.name, max([said["time"], *said["gone"].values()]) - time.time()
        if ahead_s > _SKEW_S:
            return f"the clock of {name} is {ahead_s / 3600:.1f} h ahead"
        if (said["version"], said["code"]) != (self.version, self.code):
            theirs, ours = f"{said['version']} ({said['code'][:8]})", f"{self.version} ({self.code[:8]})"
            return f"{name} has wsi-fl {theirs}, {me} has {ours}"
        return ""

    # arrivals

    def _take(self, data: Buffer) -> Answer:
        """Judge an arrival, in the transport's thread."""
        if len(data) > self.most_bytes:
            return self._refuse(
                f"a message of {len(data)} bytes arrived, at most {self.most_bytes} are agreed on"
            )
        try:
            letter = Letter.read(data)
            with self._changed:
                return self._judge(letter)
        except (NotAgreed, NotTrusted) as error:
            return self._refuse(str(error))

    def _judge(self, letter: Letter) -> Answer:
        head = letter.head
        if head["place"] == HELLO and head["to"] == EVERYBODY:
            return self._meet(letter)
        if head["sender"] not in self._others:
            return self._refuse(f"a message of {head['sender']} came, who takes no part in this run")
        peer = self._peers.get(head["sender"])
        if peer is None or not self._session or self._is_full(letter):
            return "later"
        letter.check(peer[1])
        if head["to"] != self.identity.name or head["session"] != self._session:
            return self._refuse(
                f"a message of {head['sender']} is of another session or for another receiver"
            )
        key = (head["sender"], head["place"])
        if key in self._held or key in self._read:
            return "taken"
        if head["place"] in _ENDS:
            why = f"site {head['sender']} {_ENDS[head['place']]}"
            self._left = SitesGone(why, [head["sender"]]) if self._few else KnownToAll(why)
        self._held[key] = letter
        self._changed.notify_all()
        return "taken"

    def _is_full(self, letter: Letter) -> bool:
        """Return whether a peer's unread messages leave no room for a further one."""
        waiting = [
            len(one.body) for (sender, _), one in self._held.items() if sender == letter.head["sender"]
        ]
        return len(waiting) >= _MOST_HELD or sum(waiting) + len(letter.body) > 2 * self.most_bytes

    def _refuse(self, why: str) -> Answer:
        self.refused = [*self.refused[-9:], why]
        return "refused"

    def _swap(
        self,
        place: str,
        contents: Mapping[str, Sequence[Buffer]],
        senders: Sequence[int],
        *,
        patient: bool = False,
        lossy: bool = False,
    ) -> dict[int, memoryview]:
        """Send messages, then wait for those of some sites with the same sequence id, and open them.

        If lossy, late ones are left out: the k-th time since all met, k timeouts after that.
        """
        self._lossy, self._steps = lossy, self._steps + lossy
        ends_s = self._met_s + self._steps * self.timeout_s

        def left_s() -> float:
            return ends_s - time.monotonic() if lossy else inf if patient else self.timeout_s

        keys = {k: (self.names[k], place) for k in senders}
        late_is_lost = suppress(PeerLate) if lossy else nullcontext()
        with late_is_lost:
            self._send(place, contents, left_s())
        with self._changed:
            with late_is_lost:
                self._wait_for(
                    place, lambda: [key[0] for key in keys.values() if key not in self._held], left_s()
                )
            letters = {k: self._held.pop(key) for k, key in keys.items() if key in self._held}
            self._read |= set(keys.values())
        return {k: self._writer.open(letter) for k, letter in letters.items()}

    def _wait_for(self, place: str, missing: Callable[[], list[str]], limit_s: float) -> None:
        """Wait, holding the lock, until no peer is missing."""
        deadline = time.monotonic() + limit_s
        while late := missing():
            self._check_over()
            if (left := deadline - time.monotonic()) <= 0:
                self._give_up(place, dict.fromkeys(late, "did not answer"))
            self._changed.wait(min(left, _WAKE_S) if left > 0 else _WAKE_S)
            self.waiting()

    def _check_over(self) -> None:
        if self._over is None and (broken := self.line.broken()):
            self._over = KnownToAll(broken)
        over = self._over or (None if self._lossy else self._left)
        if over is not None:
            raise over
        if self._few and self._attendance.clock_was_set():
            raise SitesGone(f"the clock of {self.identity.name} was set")
        self._check_certificates()

    def _check_certificates(self) -> None:
        """End the session if the certificate of one of its sites was revoked meanwhile."""
        if not (gone := self.withdrawn()):
            return
        met = {name: said["certificate"] for name, (said, _) in [*self._peers.items()]}
        for name, certificate in {**met, self.identity.name: self.identity.certificate}.items():
            if (since := gone.get(fingerprint(certificate))) is not None:
                why = (
                    f"site {name} has a certificate that was withdrawn on {since:%Y-%m-%d}, "
                    "and needs a new key"
                )
                raise SitesGone(why, [name]) if self._few and name in met else Interrupted(why)

    def _give_up(self, place: str, late: Mapping[str, str]) -> None:
        """Raise an error if late sites gave no sign of life either; in lossy steps, in any case."""
        silent = [name for name in late if self._lossy or self.line.silent_s(name) >= self.timeout_s]
        if not silent:
            return
        where = " to say hello" if place == HELLO else ""
        if place.startswith("x"):
            where = f" in round {place[1:].partition('.')[0]}"
        last = f"; last refused here: {self.refused[-1]}" if self.refused else ""
        first = silent[0]
        text = f"site {first} {late[first]} for {self.timeout_s:g} s{where} (comm.timeout_s){last}"
        if self._few and not self._lossy:
            raise SitesGone(text, silent)
        raise PeerLate(text, [self._others[name] for name in silent])

    # sending

    def _send(self, place: str, contents: Mapping[str, Sequence[Buffer]], limit_s: float) -> None:
        """Seal and deliver one message to each of some sites."""
        letters = {
            name: self._writer.letter(name, self._peers[name][0]["public"], self._session, place, parts)
            for name, parts in contents.items()
        }
        self._deliver(place, letters, limit_s)

    def _deliver(self, place: str, letters: Mapping[str, bytes], limit_s: float) -> None:
        """Send messages at once, until each has been taken; none if this site no longer takes part."""
        if place not in _ENDS:
            self._check_certificates()
            if why := self.standing():
                self._last = "withdrawn"
                raise KnownToAll(f"site {self.identity.name} {why}; the run ends here")
        deadline, pause, left = time.monotonic() + limit_s, _PAUSES_S[0], dict(letters)
        with ThreadPoolExecutor(max(1, len(left))) as pool:
            while left:
                until = min(max(deadline - time.monotonic(), _WAKE_S), self.timeout_s)
                send = {
                    name: pool.submit(self.line.send, name, place, one, until) for name, one in left.items()
                }
                self.line_bytes += sum(map(len, left.values()))
                failed = {name: why for name, one in send.items() if (why := one.result())}
                left = {name: left[name] for name in failed}
                if not left:
                    return
                if place not in _ENDS:
                    self._check_over()
                if time.monotonic() >= deadline:
                    self._give_up(place, {name: f"took nothing ({why})" for name, why in failed.items()})
                with self._changed:
                    self._changed.wait(pause)
                pause = min(2 * pause, _PAUSES_S[1])
                self.waiting()
