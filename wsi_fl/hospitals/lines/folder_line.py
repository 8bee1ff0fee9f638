"""Messages as files in a folder that all sites can reach: a network share, SFTP, S3, WebDAV, or another fsspec backend.

Below the address there is one folder per topic, and in it an inbox per site. A message is a file in its receiver's
inbox, `<sender>~<place>~<SHA-256>.letter`; the digest shows whether the file is complete. Receivers look every few
seconds, and delete what they took; beside a refused file they leave an empty `….refused`, so that its sender writes it
again. A handshake stays until its sender leaves, for peers that begin later. Each inbox has an empty file
`inbox-<random>`. Only while that exists does a missing message count as collected: a share that vanished, or was made
again, has collected nothing. In the folder `_alive` each listening process keeps one empty file, `<site>~<random>`, and
renames it now and then: a sign of life, by the reader's own clock alone.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from secrets import token_hex
from typing import NamedTuple

from wsi_fl.hospitals.lines.relayed import MOST_BYTES, Answer
from wsi_fl.hospitals.lines.share import Entry, Share
from wsi_fl.hospitals.trust.letters import HELLO, Buffer
from wsi_fl.types import one_line

_INBOX, _LETTER, _REFUSED, _ALIVE = "inbox-", ".letter", ".refused", "_alive"
_FILE = re.compile(
    r"(?P<sender>[A-Za-z0-9][A-Za-z0-9._-]{0,199})~(?P<place>[a-z0-9.]{1,30})~(?P<digest>[0-9a-f]{32})\.letter"
)
_LAG_S = 30 * 86400.0
_MOST_HELLO = 1 << 16
"""Bytes that are read of a handshake in a mere listing."""
_ANSWER_S = 5.0
"""Longest time that one call of `send` watches a message: its caller must notice other things too."""


def _folder_of(topic: str) -> str:
    return f"wsi-fl-{topic[:16]}"


class _Lying(NamedTuple):
    """A message or a sign of life in the folder: when it was written, if the share knows, and a handshake's content."""

    sender: str
    place: str
    time: float | None
    content: bytes


def lying(address: str, topic: str) -> list[_Lying]:
    """Return the files of a topic in a folder now; the share's backend raises errors of its own."""
    share, found = Share(address), []
    share.check()
    for to in share.folders(_folder_of(topic)):
        inbox = (_folder_of(topic), to)
        for name, entry in share.entries(*inbox).items():
            with suppress(FileNotFoundError):  # its sender removed it
                if said := _FILE.fullmatch(name):
                    hello = said["place"] == HELLO
                    content = share.read(_MOST_HELLO, *inbox, name) if hello else b""
                    found.append(_Lying(said["sender"], said["place"], entry.time, content))
                elif to == _ALIVE:
                    found.append(_Lying(name.partition("~")[0], to, entry.time, b""))
    return found


def _inboxes(there: Mapping[str, Entry]) -> set[str]:
    return {name for name in there if name.startswith(_INBOX)}


class FolderLine:
    """A transport over a folder that all sites can reach.

    Args:
        address: of the folder, an fsspec URL, or a path on this machine; options and keys belong into fsspec's own
            configuration files, never into an address.
        me: the name of the local site.
        topic: of the messages, the SHA-256 of the signed plan: messages of other topics are never seen.
        most_bytes: of a message; a longer file is deleted unread.
        pauses_s: the shortest and the longest time between two looks into the folder, in seconds.
        settled_s: how long a file may stay incomplete before it is judged as it is.
        beat_s: time between two signs of life, in seconds.

    Raises:
        UsageError: when the address is invalid, or names a missing folder of this machine.
    """

    lag_s = _LAG_S

    def __init__(
        self,
        address: str,
        me: str,
        topic: str,
        *,
        most_bytes: int = MOST_BYTES,
        pauses_s: tuple[float, float] = (0.05, 4.0),
        settled_s: float = 30.0,
        beat_s: float = 15.0,
    ) -> None:
        self.trouble = ""
        """The folder's last failure."""
        self.written_bytes = 0
        """All that was written: messages, repetitions included."""
        self._me, self._topic = me, _folder_of(topic)
        self._most, self._pauses, self._settled_s, self.beat_s = most_bytes, pauses_s, settled_s, beat_s
        self._looking, self._sending = Share(address), Share(address)
        self._sending.check()
        self._stop, self._beginning = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget all messages: those of an earlier session do not count."""
        self._clean = False
        self._laid: dict[tuple[str, str], set[str]] = {}
        self._met: set[str] = set()
        self._growing: dict[str, tuple[int, float]] = {}
        self._signs: dict[str, tuple[set[str], float]] = {}
        self._greeted: dict[str, tuple[str, float]] = {}
        """Sender → the file of its handshake that was taken last, and when that was last seen."""
        self._sign, self._beaten = "", -inf

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        """Hand over the files in this site's inbox from now on, from a thread."""
        self.close()
        self._forget()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(take, self._stop), daemon=True)
        self._thread.start()

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        """Write a message into a site's inbox, and watch it for a while; return "" once it was taken, or why not.

        A handshake counts as taken once written. An uncollected message stays, and the next call with the same message
        goes on watching it.
        """
        file = f"{self._me}~{name}~{hashlib.sha256(letter).hexdigest()[:32]}{_LETTER}"
        try:
            self._begin()
            if (to, file) not in self._laid:
                before = _inboxes(self._sending.entries(self._topic, to))
                self._sending.write(letter, self._topic, to, file)
                with self._beginning:
                    self._laid[to, file] = before
                    self.written_bytes += len(letter)
            return "" if name == HELLO else self._await(to, file, min(timeout_s, _ANSWER_S))
        except Exception as error:
            return self._note(error)

    def broken(self) -> str:
        """Return "": a missing folder may come back."""
        return ""

    def signs(self, share: Share | None = None) -> dict[str, set[str]]:
        """Return the signs of life in the folder, by site; those of a living process change."""
        found: dict[str, set[str]] = {}
        try:
            for name in (share or self._sending).entries(self._topic, _ALIVE):
                found.setdefault(name.partition("~")[0], set()).add(name)
        except Exception as error:
            self._note(error)
        return found

    def silent_s(self, site: str) -> float:
        """Return the seconds since a site's sign of life changed or its handshake was there, as seen from here.

        Another process of the site, whose handshake is refused, gives signs too.
        """
        lying, changed = (known.get(site, ("", -inf))[1] for known in (self._greeted, self._signs))
        return time.monotonic() - min(lying, changed)

    def close(self) -> None:
        """Stop listening, and remove the handshake; messages that wait for their receivers stay."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_S)
        self._thread = None
        if self._sign:
            self._discard(self._sending, _ALIVE, self._sign)
        for to, file in list(self._laid):
            if file.startswith(f"{self._me}~{HELLO}~"):
                self._discard(self._sending, to, file)

    def waiting(self) -> set[str]:
        """Return the sites whose handshake to this one is there."""
        try:
            names = self._sending.entries(self._topic, self._me)
        except Exception as error:
            self._note(error)
            return set()
        said = (_FILE.fullmatch(name) for name in names)
        return {one["sender"] for one in said if one and one["place"] == HELLO}

    # sending

    def _begin(self) -> None:
        """Remove, once, the files that an earlier process or session of this site left for others."""
        mine = (f"{self._me}~", f".{self._me}~")
        with self._beginning:
            for to in [] if self._clean else self._sending.folders(self._topic):
                for name in self._sending.entries(self._topic, to):
                    if to not in (self._me, _ALIVE) and name.startswith(mine):
                        self._discard(self._sending, to, name)
            self._clean = True

    def _await(self, to: str, file: str, limit_s: float) -> str:
        """Watch a message until it was collected; return "" if it was taken, or its fate."""
        deadline, pause = time.monotonic() + limit_s, self._pauses[0]
        while True:
            there = self._sending.entries(self._topic, to)
            known, now = self._laid[to, file], _inboxes(there)
            if file in there:
                self._laid[to, file] = known | now
            elif now:
                # once more: a listing may have begun before the receiver's refusal, and ended after the deletion
                there = self._sending.entries(self._topic, to)
                if file in there:
                    continue
                del self._laid[to, file]
                if known and not known & now:
                    return "the folder was made again"
                if f"{file}{_REFUSED}" not in there:
                    return ""
                self._sending.remove(self._topic, to, f"{file}{_REFUSED}")
                return f"site {to} refused it"
            left = deadline - time.monotonic()
            if left <= 0:
                return f"it lies in the folder, and site {to} has not collected it"
            self._stop.wait(min(pause, left))
            pause = min(1.5 * pause, self._pauses[1])

    # receiving

    def _watch(self, take: Callable[[Buffer], Answer], stop: threading.Event) -> None:
        pause = self._pauses[0]
        while not stop.is_set():
            busy = False
            try:
                self._beat()
                busy = self._collect(take, stop)
            except Exception as error:
                self._note(error)
            pause = self._pauses[0] if busy else min(1.5 * pause, self._pauses[1])
            stop.wait(pause)

    def _beat(self) -> None:
        """Give a sign of life when it is due, and read those of others; a new name is no sign yet."""
        now = time.monotonic()
        if now - self._beaten < self.beat_s:
            return
        self._beaten = now
        old, self._sign = self._sign, f"{self._me}~{token_hex(4)}"
        self._looking.write(b"", self._topic, _ALIVE, self._sign)
        if old:
            self._discard(self._looking, _ALIVE, old)
        for name in self.signs(self._looking).pop(self._me, set()) - {self._sign}:
            self._discard(self._looking, _ALIVE, name)  # of an earlier process
        for site, names in self.signs(self._looking).items():
            known, _ = self._signs.get(site, (set(), 0.0))
            if known != names:
                self._signs[site] = (names, now if known else -inf)

    def _collect(self, take: Callable[[Buffer], Answer], stop: threading.Event) -> bool:
        """Look once into the inbox; return whether a file was taken or refused."""
        there = self._looking.entries(self._topic, self._me)
        if not _inboxes(there):
            self._looking.write(b"", self._topic, self._me, f"{_INBOX}{token_hex(4)}")
        now = time.monotonic()
        self._greeted |= {one: (file, now) for one, (file, _) in self._greeted.items() if file in there}
        found = [(said, there[name]) for name in there if (said := _FILE.fullmatch(name))]
        self._growing = {name: known for name, known in self._growing.items() if name in there}
        busy = False
        for said, entry in sorted(found, key=lambda one: (one[0]["place"] != HELLO, one[1].name)):
            if stop.is_set():
                return busy
            try:
                busy |= self._judge(said, entry, take)
            except FileNotFoundError:  # its sender removed it
                continue
            except Exception as error:  # one file that cannot be read hides no other
                self._note(error)
        return busy

    def _judge(self, said: re.Match[str], entry: Entry, take: Callable[[Buffer], Answer]) -> bool:
        """Hand over a complete file; return whether it is dealt with."""
        name, hello = entry.name, said["place"] == HELLO
        if hello and name in self._met:
            return False
        answer: Answer = "refused"
        if entry.size > self._most:
            self.trouble = (
                f"{name} has {entry.size} bytes, at most {self._most} are agreed on; it was not read"
            )
        else:
            content = self._looking.read(self._most, self._topic, self._me, name)
            if hashlib.sha256(content).hexdigest()[:32] != said["digest"] and self._may_grow(
                entry, len(content)
            ):
                return False
            answer = take(content)
        if hello:
            self._met.add(name)  # it is its sender's to remove
            if answer == "taken":
                self._greeted[said["sender"]] = name, time.monotonic()
        elif answer != "later":
            if answer == "refused":
                self._looking.write(b"", self._topic, self._me, f"{name}{_REFUSED}")
            self._discard(self._looking, self._me, name)
        return answer != "later"

    def _may_grow(self, entry: Entry, size: int) -> bool:
        """Return whether an incomplete file may still be arriving."""
        known, since = self._growing.get(entry.name, (-1, 0.0))
        if known != size:
            since = time.monotonic()
            self._growing[entry.name] = (size, since)
        return time.monotonic() - since < self._settled_s

    def _discard(self, share: Share, to: str, file: str) -> None:
        try:
            share.remove(self._topic, to, file)
        except FileNotFoundError:
            return
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> str:
        self.trouble = f"the folder cannot be used: {type(error).__name__}: {one_line(error)}"[:300]
        return self.trouble
