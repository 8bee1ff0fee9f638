"""A `Comm` over a line that is not trusted: whatever carries bytes between hospitals, an engine or a shared folder.

Each process introduces itself with a hello. All hellos together make the session; what comes afterwards is sealed,
signed and bound to it (`letters`). A line may be slow, lose, repeat, reorder, alter or invent: what does not verify is
refused, what was lost is sent again until the deadline, and what came twice is taken once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol, TypeVar, cast

import numpy as np

from wsi_fl.federation.comm import PeerLate, Traffic, count
from wsi_fl.federation.documents import NotAgreed, decoded, encoded
from wsi_fl.federation.message import HEADER_BYTES, NUMBERS, Message, Outgoing, PayloadType, pack, received
from wsi_fl.hospitals.lines.attendance import Attendance, LeftOut, SiteReturned, SitesGone
from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, fingerprint
from wsi_fl.hospitals.trust.letters import EVERYBODY, HELLO, Buffer, Hello, Letter, Writer, session_of
from wsi_fl.types import KnownToAll

T = TypeVar("T")

Answer = Literal["taken", "later", "refused"]
"""What a receiver says of a letter: it has it, it cannot judge it yet, or it never will take it."""
_END, _WITHDRAWN = "end", "withdrawn"
_ENDS = {
    _END: "ended the run; its own log says why",
    _WITHDRAWN: "withdrew its approval of this plan",
}
"""Places of the last letter of a site, and what it tells."""
MOST_BYTES = 1 << 30
"""The longest letter that is taken, where the signed plan does not say what to expect."""
_PAUSES_S = (0.05, 2.0)
_WAKE_S = 0.5
_SKEW_S = 900.0
_END_S = 5.0
_MOST_HELD = 64
"""Letters of one peer that wait to be read: a site is never more than a few places ahead."""


class Line(Protocol):
    """Carries letters; knows nothing of what is in them.

    Attributes:
        lag_s: how old a letter may be when it arrives: seconds for an engine, days for a folder.
    """

    lag_s: float

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        """From now on hand over what arrives, from any thread."""
        ...

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        """Carry a letter to a site; return "" once it is there, or why not, and it may be tried again.

        Args:
            name: of the letter among those of the sender and the receiver in this session.
        """
        ...

    def broken(self) -> str:
        """Return why the line will carry nothing any more; "" while it may."""
        ...

    def silent_s(self, site: str) -> float:
        """Return for how many seconds no sign of life of a site's process came; infinite where none ever did."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


@dataclass
class _Peer:
    """What is known of a peer since its hello."""

    hello: Hello
    holder: Holder


@dataclass
class RelayedComm:
    """One process per site, over a line.

    Args:
        identity: of this site.
        names: of all sites of the study, by index.
        running: indices of those that take part, the same everywhere.
        line: listened to from now on.
        timeout_s: how long to wait for a peer.
        version, code: of wsi-fl, and the SHA-256 of what is installed; all sites must have the same.
        plan: SHA-256 of the signed plan; "" without one.
        most_bytes: of a letter.
        keys: the fingerprint of each site's key, where the plan pins them: no other key speaks for the site.
        waiting: called now and then while this process waits.
        writer: of this process; the same one when it begins again, so that its peers need not. Default: a new one.
        attendance: who is there, where the others may go on without a site; then `running` becomes those of the
            session, and a site that falls silent or ends makes every call raise `SitesGone`. By default all of
            `running` are needed.
        standing: asked before anything is sent, returns in words why this site takes part no longer; "" while it does.

    Raises:
        PeerLate: when a site did not introduce itself in time.
        SitesGone: the same, where the others may go on without it.
        KnownToAll: when one brings another plan, version, code or time.
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
    waiting: Callable[[], None] | None = None
    writer: Writer | None = None
    attendance: Attendance | None = None
    standing: Callable[[], str] | None = None
    line_bytes: int = 0
    """All that was sent: letters with heads and signatures, documents too."""
    refused: list[str] = field(default_factory=list)
    """Why letters were not taken, the last ones."""

    def __post_init__(self) -> None:
        me = list(self.names).index(self.identity.name)
        if me not in self.running:
            raise KnownToAll(f"site {self.identity.name} takes no part in this run")
        self.n_sites, self.sites = len(self.names), cast("tuple[int, ...]", (me,))
        self.traffic: dict[int, Traffic] = {me: Traffic()}
        self._others = {self.names[k]: k for k in self.running if k != me}
        self._invited = set(self._others)
        self._writer = self.writer or Writer(self.identity, since=time.time())
        self._gathered, self._session = 0, ""
        self._met_s, self._steps = time.monotonic(), 0
        self._peers: dict[str, _Peer] = {}
        self._held: dict[tuple[str, str], Letter] = {}
        self._read: set[tuple[str, str]] = set()
        self._over: KnownToAll | None = None
        self._left: KnownToAll | None = None
        """What a peer did to end the run; while sites may be lost, nobody heeds it."""
        self._lossy, self._last = False, _END
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
        """Send releases and receive those that are expected; see `Comm`."""
        began, mine, place = time.perf_counter(), self.sites[0], f"x{round_}.{hop}"
        where = f" in round {round_}"
        contents: dict[str, Sequence[Buffer]] = {}
        for item in outgoing:
            head, vector = pack(item, round_, hop)
            contents[self.names[item.receiver]] = (head, np.ascontiguousarray(vector).data.cast("B"))
        senders = [sender for sender, receiver in expected if receiver == mine]
        arrived = self._swap(place, contents, senders, where, lossy=lossy)
        count(self.traffic, outgoing, time.perf_counter() - began)
        return [_message(content, sender, mine, round_, size, kind) for sender, content in arrived.items()]

    def gather(self, documents: Sequence[T], kind: type[T], *, patient: bool = False) -> list[T]:
        """Return one document of every site; see `Comm`."""
        (document,) = documents
        mine = encoded(document, kind, self.identity.name)
        contents, senders = dict.fromkeys(self._others, (mine,)), list(self._others.values())
        texts = self._swap(self._place(), contents, senders, "", patient=patient)
        texts[self.sites[0]] = memoryview(mine)
        self._met_s, self._steps = time.monotonic(), 0
        return [decoded(bytes(texts[k]), kind, self.names[k]) for k in self.running]

    def hand(
        self, documents: Mapping[tuple[int, int], T], kind: type[T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], T]:
        """Give documents to single sites; see `Comm`."""
        mine = self.sites[0]
        contents = {
            self.names[to]: (encoded(document, kind, self.identity.name),)
            for (_, to), document in documents.items()
        }
        senders = [sender for sender, receiver in expected if receiver == mine]
        texts = self._swap(self._place(), contents, senders, "", lossy=True)
        return {(k, mine): decoded(bytes(text), kind, self.names[k]) for k, text in texts.items()}

    def _place(self) -> str:
        """Return the place of the next documents, the same at every site."""
        self._gathered += 1
        return f"g{self._gathered - 1}"

    def abort(self, code: int = 1) -> None:
        """Tell all sites that this one ends here, so that none waits for it in vain; the process itself goes on."""
        del code
        if self._session and self._over is self._left is None:
            with suppress(Exception):  # the line may be what failed
                self._send(self._last, dict.fromkeys(self._others, (b"",)), _END_S, "")
        self.close()

    def close(self) -> None:
        """Stop listening; every further call fails."""
        with self._changed:
            self._over = self._over or KnownToAll(f"site {self.identity.name} has left the run")
            self._changed.notify_all()
        self.line.close()

    # hellos

    def _introduce(self) -> None:
        """Tell everybody who this is, and learn who the others are."""
        said = Hello(
            certificate=self.identity.certificate,
            public=self._writer.public,
            time=self._writer.since,
            version=self.version,
            code=self.code,
            gone=dict(self.attendance.gone) if self.attendance else {},
        )
        letter = self._writer.hello(said, self.plan)
        self._deliver(HELLO, dict.fromkeys(self._others, letter), self.timeout_s, " to say hello")
        with self._changed:
            self._wait_for(lambda: self.attendance.lacking() if self.attendance else [], inf, "")
            self._wait_for(
                lambda: [n for n in self._expected() if n not in self._peers],
                self.timeout_s,
                " to say hello",
            )
            self._others = {name: self._others[name] for name in self._expected()}
            self._peers = {name: self._peers[name] for name in self._others}
            self.running = tuple(sorted((*self.sites, *self._others.values())))
            hellos = [(name, peer.hello["public"]) for name, peer in self._peers.items()]
            self._session = session_of([*hellos, (self.identity.name, self._writer.public)], self.plan)

    def _expected(self) -> list[str]:
        """Return the peers of the session that begins."""
        return self.attendance.expected() if self.attendance else list(self._others)

    def _meet(self, letter: Letter) -> Answer:
        """Take a hello: the first one, or that of a process that began anew."""
        said, holder = letter.hello(self.identity.root)
        name = holder.name
        known, heard = self._peers.get(name), self._writer.heard.get(name, 0.0)
        if said["time"] < heard or (known is not None and said["time"] == heard):
            return "taken"  # again, or one of a process that ended
        if why := self._stranger(said, holder):
            return self._refuse(why)
        problem = self._unlike(said, holder, letter)
        if problem and self.attendance:  # the others go on without it
            return self._refuse(problem)
        if problem:
            self._left = KnownToAll(f"{problem}; nothing was trained")
        elif self._session:
            self._left = SiteReturned(f"site {name} began anew")
        else:
            self._peers[name] = _Peer(said, holder)
        if not problem:
            self._writer.heard[name] = said["time"]
            self._hear_of_others(said)
        self._changed.notify_all()
        return "taken"

    def _stranger(self, said: Hello, holder: Holder) -> str:
        """Why a hello is none of this run's; empty where it is one."""
        name, print_ = holder.name, fingerprint(said["certificate"])
        behind_s = time.time() - said["time"]
        if name not in self._invited:
            return f"{name} said hello, and takes no part in this run"
        if self.keys.get(name, print_) != print_:
            return f"somebody said hello as {name} with another key than the plan's"
        if behind_s > _SKEW_S + self.line.lag_s + self.timeout_s:  # an old one, or a clock that is behind
            return f"{name} said hello {behind_s / 3600:.1f} h ago by this clock"
        return ""

    def _unlike(self, said: Hello, holder: Holder, letter: Letter) -> str:
        """What a peer has otherwise than this site; empty where it is alike."""
        name, me = holder.name, self.identity.name
        ahead_s = max([said["time"], *said["gone"].values()]) - time.time()
        if ahead_s > _SKEW_S:
            return f"the clock of {name} is {ahead_s / 3600:.1f} h ahead"
        if letter.head["session"] != self.plan:
            return f"{name} has approved another plan than {me}"
        if (said["version"], said["code"]) != (self.version, self.code):
            return (
                f"{name} has wsi-fl {said['version']} ({said['code'][:8]}), {me} has {self.version} "
                f"({self.code[:8]})"
            )
        return ""

    def _hear_of_others(self, said: Hello) -> None:
        """Believe what a peer says of who is gone."""
        if self.attendance is None:
            return
        self.attendance.learn(said["gone"])
        if self.attendance.left_out(self._writer.since):
            self._left = LeftOut(f"the others went on without {self.identity.name}, which was silent")

    # what arrives

    def _take(self, data: Buffer) -> Answer:
        """Judge what arrived, in the line's thread."""
        if len(data) > self.most_bytes:
            return self._refuse(
                f"a letter of {len(data)} bytes arrived, at most {self.most_bytes} are agreed on"
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
            return self._refuse(f"a letter of {head['sender']} came, who takes no part in this run")
        peer = self._peers.get(head["sender"])
        if peer is None or not self._session or self._is_full(letter):
            return "later"
        letter.check(peer.holder)
        if head["to"] != self.identity.name or head["session"] != self._session:
            return self._refuse(f"a letter of {head['sender']} is of another session or for somebody else")
        key = (head["sender"], head["place"])
        if key in self._held or key in self._read:
            return "taken"
        if head["place"] in _ENDS:
            why = f"site {head['sender']} {_ENDS[head['place']]}"
            self._left = SitesGone(why, [head["sender"]]) if self.attendance else KnownToAll(why)
        self._held[key] = letter
        self._changed.notify_all()
        return "taken"

    def _is_full(self, letter: Letter) -> bool:
        """Whether so much of a peer waits to be read that a further letter has to wait too."""
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
        where: str,
        *,
        patient: bool = False,
        lossy: bool = False,
    ) -> dict[int, memoryview]:
        """Send letters, then wait for those of some sites at the same place, and open them.

        Where it is lossy, who is late is left out: the k-th time since all met, k timeouts after that.
        """
        self._lossy, self._steps = lossy, self._steps + lossy
        ends_s = self._met_s + self._steps * self.timeout_s

        def left_s() -> float:
            return ends_s - time.monotonic() if lossy else inf if patient else self.timeout_s

        keys = {k: (self.names[k], place) for k in senders}
        late_is_lost = suppress(PeerLate) if lossy else nullcontext()
        with late_is_lost:
            self._send(place, contents, left_s(), where)
        with self._changed:
            with late_is_lost:
                self._wait_for(
                    lambda: [name for name, _ in keys.values() if (name, place) not in self._held],
                    left_s(),
                    where,
                )
            letters = {k: self._held.pop(key) for k, key in keys.items() if key in self._held}
            self._read |= set(keys.values())
        return {k: self._writer.open(letter) for k, letter in letters.items()}

    def _wait_for(self, missing: Callable[[], list[str]], limit_s: float, where: str) -> None:
        """Wait, holding the lock, until nobody is missing."""
        deadline = time.monotonic() + limit_s
        while late := missing():
            self._check_over()
            left = deadline - time.monotonic()
            if left <= 0 and (silent := self._silent(late)):
                raise self._late(silent, where, "did not answer")
            self._changed.wait(min(left, _WAKE_S) if left > 0 else _WAKE_S)
            if self.waiting is not None:
                self.waiting()

    def _check_over(self) -> None:
        if self._over is None and (broken := self.line.broken()):
            self._over = KnownToAll(broken)
        over = self._over or (None if self._lossy else self._left)
        if over is not None:
            raise over

    def _silent(self, late: Sequence[str]) -> list[str]:
        """Return those who gave no sign of life either; where late sites are left out, all who are late."""
        return [n for n in late if self._lossy or self.line.silent_s(n) >= self.timeout_s]

    def _late(self, late: Sequence[str], where: str, what: str) -> PeerLate | SitesGone:
        last = f"; last refused here: {self.refused[-1]}" if self.refused else ""
        text = f"site {late[0]} {what} for {self.timeout_s:g} s{where} (comm.timeout_s){last}"
        if self.attendance is not None and not self._lossy:
            return SitesGone(text, late)
        return PeerLate(text, [self._others[name] for name in late])

    # what is sent

    def _send(self, place: str, contents: Mapping[str, Sequence[Buffer]], limit_s: float, where: str) -> None:
        """Seal and deliver one letter to each of some sites."""
        letters = {
            name: self._writer.letter(name, self._peers[name].hello["public"], self._session, place, parts)
            for name, parts in contents.items()
        }
        self._deliver(place, letters, limit_s, where)

    def _deliver(self, place: str, letters: Mapping[str, bytes], limit_s: float, where: str) -> None:
        """Send letters, all at once, until each has been taken.

        Raises:
            KnownToAll: when this site takes part no longer; nothing was sent then.
        """
        if place not in _ENDS and self.standing is not None and (why := self.standing()):
            self._last = _WITHDRAWN
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
                if time.monotonic() >= deadline and (silent := self._silent(list(failed))):
                    raise self._late(silent, where, f"took nothing ({failed[silent[0]]})")
                with self._changed:
                    self._changed.wait(pause)
                pause = min(2 * pause, _PAUSES_S[1])
                if self.waiting is not None:
                    self.waiting()


def _message(
    content: memoryview, sender: int, receiver: int, round_: int, size: int, kind: PayloadType
) -> Message:
    """What a letter of an exchange holds: header and values, or why it is of no use."""
    body = content[HEADER_BYTES:]
    whole = len(body) - len(body) % kind.itemsize
    vector = np.frombuffer(body[:whole], kind)
    return received(bytes(content[:HEADER_BYTES]), vector, sender, receiver, round_, size, kind=kind)
