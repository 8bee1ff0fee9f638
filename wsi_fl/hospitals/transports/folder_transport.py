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

from wsi_fl.hospitals.transports.fsspec_adapter import FolderEntry, SharedFolder
from wsi_fl.hospitals.transports.transport import MAX_MESSAGE_BYTES, Receipt
from wsi_fl.hospitals.trust.sealed_messages import HANDSHAKE, Buffer
from wsi_fl.types import single_line

_INBOX_PREFIX, _MESSAGE_SUFFIX, _REFUSED_SUFFIX, _ALIVE_FOLDER = "inbox-", ".letter", ".refused", "_alive"
_MESSAGE_FILE = re.compile(
    r"(?P<sender>[A-Za-z0-9][A-Za-z0-9._-]{0,199})~(?P<place>[a-z0-9.]{1,30})~(?P<digest>[0-9a-f]{32})\.letter"
)
_MAX_AGE_S = 30 * 86400.0
_MAX_HANDSHAKE_BYTES = 1 << 16
"""Bytes that are read of a handshake in a mere listing."""
_WATCH_S = 5.0
"""Longest time that one call of `send` watches a message: its caller must notice other things too."""


def _topic_folder(topic: str) -> str:
    return f"wsi-fl-{topic[:16]}"


class _StoredMessage(NamedTuple):
    """A message or a sign of life in the folder: when it was written, if the share knows, and a handshake's content."""

    sender: str
    place: str
    time: float | None
    content: bytes


def list_messages(address: str, topic: str) -> list[_StoredMessage]:
    """Return the files of a topic in a folder now; the share's backend raises errors of its own."""
    share, messages = SharedFolder(address), []
    share.check_address()
    for receiver in share.list_folders(_topic_folder(topic)):
        inbox = (_topic_folder(topic), receiver)
        for name, entry in share.list_entries(*inbox).items():
            with suppress(FileNotFoundError):  # its sender removed it
                if match := _MESSAGE_FILE.fullmatch(name):
                    is_handshake = match["place"] == HANDSHAKE
                    content = share.read(_MAX_HANDSHAKE_BYTES, *inbox, name) if is_handshake else b""
                    messages.append(_StoredMessage(match["sender"], match["place"], entry.time, content))
                elif receiver == _ALIVE_FOLDER:
                    messages.append(_StoredMessage(name.partition("~")[0], receiver, entry.time, b""))
    return messages


def _inbox_markers(entries: Mapping[str, FolderEntry]) -> set[str]:
    return {name for name in entries if name.startswith(_INBOX_PREFIX)}


class FolderTransport:
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

    lag_s = _MAX_AGE_S

    def __init__(
        self,
        address: str,
        me: str,
        topic: str,
        *,
        most_bytes: int = MAX_MESSAGE_BYTES,
        pauses_s: tuple[float, float] = (0.05, 4.0),
        settled_s: float = 30.0,
        beat_s: float = 15.0,
    ) -> None:
        self.trouble = ""
        """The folder's last failure."""
        self.written_bytes = 0
        """All that was written: messages, repetitions included."""
        self._me, self._topic = me, _topic_folder(topic)
        self._max_bytes, self._pauses, self._settled_s, self.beat_s = most_bytes, pauses_s, settled_s, beat_s
        self._incoming, self._outgoing = SharedFolder(address), SharedFolder(address)
        self._outgoing.check_address()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._reset_state()

    def _reset_state(self) -> None:
        """Forget all messages: those of an earlier session do not count."""
        self._is_clean = False
        self._placed: dict[tuple[str, str], set[str]] = {}
        self._seen_handshakes: set[str] = set()
        self._partial: dict[str, tuple[int, float]] = {}
        self._signs: dict[str, tuple[set[str], float]] = {}
        self._handshakes: dict[str, tuple[str, float]] = {}
        """Sender → the file of its handshake that was taken last, and when that was last seen."""
        self._sign, self._last_beat_s = "", -inf

    def listen(self, receive: Callable[[Buffer], Receipt]) -> None:
        """Hand over the files in this site's inbox from now on, from a thread."""
        self.close()
        self._reset_state()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch_inbox, args=(receive, self._stop), daemon=True)
        self._thread.start()

    def send(self, receiver: str, sequence_id: str, message: bytes, timeout_s: float) -> str:
        """Write a message into a site's inbox, and watch it for a while; return "" once it was taken, or why not.

        A handshake counts as taken once written. An uncollected message stays, and the next call with the same message
        goes on watching it.
        """
        file = f"{self._me}~{sequence_id}~{hashlib.sha256(message).hexdigest()[:32]}{_MESSAGE_SUFFIX}"
        try:
            self._remove_leftovers()
            if (receiver, file) not in self._placed:
                markers = _inbox_markers(self._outgoing.list_entries(self._topic, receiver))
                self._outgoing.write(message, self._topic, receiver, file)
                with self._lock:
                    self._placed[receiver, file] = markers
                    self.written_bytes += len(message)
            return "" if sequence_id == HANDSHAKE else self._await_receipt(receiver, file, min(timeout_s, _WATCH_S))
        except Exception as error:
            return self._note_error(error)

    def failure_reason(self) -> str:
        """Return "": a missing folder may come back."""
        return ""

    def list_signs(self, share: SharedFolder | None = None) -> dict[str, set[str]]:
        """Return the signs of life in the folder, by site; those of a living process change."""
        signs: dict[str, set[str]] = {}
        try:
            for name in (share or self._outgoing).list_entries(self._topic, _ALIVE_FOLDER):
                signs.setdefault(name.partition("~")[0], set()).add(name)
        except Exception as error:
            self._note_error(error)
        return signs

    def silence_s(self, site: str) -> float:
        """Return the seconds since a site's sign of life changed or its handshake was there, as seen from here.

        Another process of the site, whose handshake is refused, gives signs too.
        """
        handshake_s, sign_s = (times.get(site, ("", -inf))[1] for times in (self._handshakes, self._signs))
        return time.monotonic() - min(handshake_s, sign_s)

    def close(self) -> None:
        """Stop listening, and remove the handshake; messages that wait for their receivers stay."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_WATCH_S)
        self._thread = None
        if self._sign:
            self._discard_file(self._outgoing, _ALIVE_FOLDER, self._sign)
        for receiver, file in list(self._placed):
            if file.startswith(f"{self._me}~{HANDSHAKE}~"):
                self._discard_file(self._outgoing, receiver, file)

    def waiting(self) -> set[str]:
        """Return the sites whose handshake to this one is there."""
        try:
            names = self._outgoing.list_entries(self._topic, self._me)
        except Exception as error:
            self._note_error(error)
            return set()
        matches = (_MESSAGE_FILE.fullmatch(name) for name in names)
        return {match["sender"] for match in matches if match and match["place"] == HANDSHAKE}

    # sending

    def _remove_leftovers(self) -> None:
        """Remove, once, the files that an earlier process or session of this site left for others."""
        prefixes = (f"{self._me}~", f".{self._me}~")
        with self._lock:
            for receiver in [] if self._is_clean else self._outgoing.list_folders(self._topic):
                for name in self._outgoing.list_entries(self._topic, receiver):
                    if receiver not in (self._me, _ALIVE_FOLDER) and name.startswith(prefixes):
                        self._discard_file(self._outgoing, receiver, name)
            self._is_clean = True

    def _await_receipt(self, receiver: str, file: str, limit_s: float) -> str:
        """Watch a message until it was collected; return "" if it was taken, or its fate."""
        deadline, pause = time.monotonic() + limit_s, self._pauses[0]
        while True:
            entries = self._outgoing.list_entries(self._topic, receiver)
            markers, current_markers = self._placed[receiver, file], _inbox_markers(entries)
            if file in entries:
                self._placed[receiver, file] = markers | current_markers
            elif current_markers:
                # once more: a listing may have begun before the receiver's refusal, and ended after the deletion
                entries = self._outgoing.list_entries(self._topic, receiver)
                if file in entries:
                    continue
                del self._placed[receiver, file]
                if markers and not markers & current_markers:
                    return "the folder was made again"
                if f"{file}{_REFUSED_SUFFIX}" not in entries:
                    return ""
                self._outgoing.remove_file(self._topic, receiver, f"{file}{_REFUSED_SUFFIX}")
                return f"site {receiver} refused it"
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return f"it lies in the folder, and site {receiver} has not collected it"
            self._stop.wait(min(pause, remaining_s))
            pause = min(1.5 * pause, self._pauses[1])

    # receiving

    def _watch_inbox(self, receive: Callable[[Buffer], Receipt], stop: threading.Event) -> None:
        pause = self._pauses[0]
        while not stop.is_set():
            busy = False
            try:
                self._give_sign()
                busy = self._collect_messages(receive, stop)
            except Exception as error:
                self._note_error(error)
            pause = self._pauses[0] if busy else min(1.5 * pause, self._pauses[1])
            stop.wait(pause)

    def _give_sign(self) -> None:
        """Give a sign of life when it is due, and read those of others; a new name is no sign yet."""
        now_s = time.monotonic()
        if now_s - self._last_beat_s < self.beat_s:
            return
        self._last_beat_s = now_s
        old, self._sign = self._sign, f"{self._me}~{token_hex(4)}"
        self._incoming.write(b"", self._topic, _ALIVE_FOLDER, self._sign)
        if old:
            self._discard_file(self._incoming, _ALIVE_FOLDER, old)
        for name in self.list_signs(self._incoming).pop(self._me, set()) - {self._sign}:
            self._discard_file(self._incoming, _ALIVE_FOLDER, name)  # of an earlier process
        for site, names in self.list_signs(self._incoming).items():
            previous, _ = self._signs.get(site, (set(), 0.0))
            if previous != names:
                self._signs[site] = (names, now_s if previous else -inf)

    def _collect_messages(self, receive: Callable[[Buffer], Receipt], stop: threading.Event) -> bool:
        """Look once into the inbox; return whether a file was taken or refused."""
        entries = self._incoming.list_entries(self._topic, self._me)
        if not _inbox_markers(entries):
            self._incoming.write(b"", self._topic, self._me, f"{_INBOX_PREFIX}{token_hex(4)}")
        now_s = time.monotonic()
        self._handshakes |= {sender: (file, now_s) for sender, (file, _) in self._handshakes.items() if file in entries}
        matches = [(match, entries[name]) for name in entries if (match := _MESSAGE_FILE.fullmatch(name))]
        self._partial = {name: progress for name, progress in self._partial.items() if name in entries}
        busy = False
        for match, entry in sorted(matches, key=lambda pair: (pair[0]["place"] != HANDSHAKE, pair[1].name)):
            if stop.is_set():
                return busy
            try:
                busy |= self._judge_file(match, entry, receive)
            except FileNotFoundError:  # its sender removed it
                continue
            except Exception as error:  # one file that cannot be read hides no other
                self._note_error(error)
        return busy

    def _judge_file(self, match: re.Match[str], entry: FolderEntry, receive: Callable[[Buffer], Receipt]) -> bool:
        """Hand over a complete file; return whether it is dealt with."""
        name, is_handshake = entry.name, match["place"] == HANDSHAKE
        if is_handshake and name in self._seen_handshakes:
            return False
        answer: Receipt = "refused"
        if entry.size > self._max_bytes:
            self.trouble = f"{name} has {entry.size} bytes, at most {self._max_bytes} are agreed on; it was not read"
        else:
            content = self._incoming.read(self._max_bytes, self._topic, self._me, name)
            if hashlib.sha256(content).hexdigest()[:32] != match["digest"] and self._can_grow(entry, len(content)):
                return False
            answer = receive(content)
        if is_handshake:
            self._seen_handshakes.add(name)  # it is its sender's to remove
            if answer == "taken":
                self._handshakes[match["sender"]] = name, time.monotonic()
        elif answer != "later":
            if answer == "refused":
                self._incoming.write(b"", self._topic, self._me, f"{name}{_REFUSED_SUFFIX}")
            self._discard_file(self._incoming, self._me, name)
        return answer != "later"

    def _can_grow(self, entry: FolderEntry, size: int) -> bool:
        """Return whether an incomplete file may still be arriving."""
        known_size, since = self._partial.get(entry.name, (-1, 0.0))
        if known_size != size:
            since = time.monotonic()
            self._partial[entry.name] = (size, since)
        return time.monotonic() - since < self._settled_s

    def _discard_file(self, share: SharedFolder, receiver: str, file: str) -> None:
        try:
            share.remove_file(self._topic, receiver, file)
        except FileNotFoundError:
            return
        except Exception as error:
            self._note_error(error)

    def _note_error(self, error: Exception) -> str:
        self.trouble = f"the folder cannot be used: {type(error).__name__}: {single_line(error)}"[:300]
        return self.trouble
