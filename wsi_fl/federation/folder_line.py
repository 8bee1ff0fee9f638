"""Letters as files in a folder that all sites can reach: a network share, SFTP, S3, WebDAV, whatever fsspec opens.

Below the address there is one folder per topic, and in it an inbox per site. A letter is a file in its receiver's
inbox, `<sender>~<place>~<SHA-256>.letter`: the name says nothing else, and tells whether the file is whole. Receivers
look every few seconds, and delete what they took; beside what they refused they leave an empty `….refused`, so that
its sender writes it again. A hello stays until its sender leaves: a peer that begins later finds it too. Each inbox has
an empty file `inbox-<random>`. Only while that is there is a letter that is gone believed to have been collected: a
share that vanished, or was made anew, has collected nothing.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import fsspec

from wsi_fl.federation.letters import HELLO, Buffer
from wsi_fl.federation.relayed import MOST_BYTES, Answer
from wsi_fl.types import UsageError, one_line

_INBOX, _LETTER, _REFUSED, _PARTIAL = "inbox-", ".letter", ".refused", ".partial"
_FILE = re.compile(
    r"(?P<sender>[A-Za-z0-9][A-Za-z0-9._-]{0,199})~(?P<place>[a-z0-9.]{1,30})~(?P<digest>[0-9a-f]{32})\.letter"
)
_WHOLE_AT_ONCE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""What shows an object when all of it has arrived; elsewhere a letter is moved to its name when it is whole."""
_LAG_S = 30 * 86400.0
_ANSWER_S = 5.0
"""Longest time that one call of `send` watches a letter: who waits must notice other things too."""


@dataclass(frozen=True)
class _Entry:
    """A file of an inbox."""

    name: str
    size: int


@dataclass
class _Share:
    """The folder, for one thread at a time; connected anew after a failure.

    Every failure of a share is an `Exception` of its own: each backend of fsspec has others.
    """

    address: str
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _connected: tuple[Any, str] | None = None

    def do(self, action: Callable[[Any, str], Any]) -> Any:
        """Do something, given the file system and the root's path in it."""
        with self._lock:
            try:
                if self._connected is None:
                    self._connected = fsspec.core.url_to_fs(self.address, skip_instance_cache=True)
                return action(*self._connected)
            except FileNotFoundError:
                raise
            except Exception:
                self._connected = None
                raise

    def check(self) -> None:
        """Refuse an address that can be none, or a folder of this machine that is not there."""
        try:
            self.do(_require_root)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{self.address}: no address of a folder: {one_line(error)}") from None
        except FileNotFoundError:
            raise UsageError(
                f"{self.address}: no such folder; mount the share, or correct the address"
            ) from None
        except Exception:  # not reached now, perhaps later
            return

    def entries(self, *parts: str) -> dict[str, _Entry]:
        """Return the files of a folder by name; FileNotFoundError where it is not there."""

        def look(fs: Any, root: str) -> dict[str, _Entry]:
            fs.invalidate_cache()
            listed = fs.ls("/".join([root, *parts]), detail=True)
            files = [one for one in listed if one.get("type") == "file" and not one.get("islink")]
            found = (_Entry(str(one["name"]).rsplit("/", 1)[-1], int(one.get("size") or 0)) for one in files)
            return {one.name: one for one in found}

        found: dict[str, _Entry] = self.do(look)
        return found

    def folders(self, *parts: str) -> list[str]:
        """Return the names of the folders in a folder; none where it is not there."""

        def look(fs: Any, root: str) -> list[str]:
            fs.invalidate_cache()
            listed = fs.ls("/".join([root, *parts]), detail=True)
            return [
                str(one["name"]).rstrip("/").rsplit("/", 1)[-1]
                for one in listed
                if one["type"] == "directory"
            ]

        try:
            found: list[str] = self.do(look)
        except FileNotFoundError:
            return []
        return found

    def read(self, most_bytes: int, *parts: str) -> bytes:
        """Return the content of a file, and no more than one byte beyond what is allowed."""

        def read(fs: Any, root: str) -> bytes:
            with fs.open("/".join([root, *parts]), "rb") as file:
                return bytes(file.read(most_bytes + 1))

        content: bytes = self.do(read)
        return content

    def write(self, content: bytes, *parts: str) -> None:
        """Write a file, which is there whole or not at all."""

        def write(fs: Any, root: str) -> None:
            _require_root(fs, root)
            folder, path = "/".join([root, *parts[:-1]]), "/".join([root, *parts])
            fs.makedirs(folder, exist_ok=True)
            if not _protocols(fs).isdisjoint(_WHOLE_AT_ONCE):
                fs.pipe_file(path, content)
                return
            temporary = f"{folder}/.{parts[-1]}{_PARTIAL}"
            try:
                with fs.open(temporary, "wb") as file:
                    file.write(content)
                fs.mv(temporary, path)
            except Exception:
                _remove(fs, temporary)
                raise

        self.do(write)

    def remove(self, *parts: str) -> None:
        """Delete a file that may be gone already."""
        self.do(lambda fs, root: fs.rm_file("/".join([root, *parts])))


def _inboxes(there: Mapping[str, _Entry]) -> set[str]:
    return {name for name in there if name.startswith(_INBOX)}


def _protocols(fs: Any) -> set[str]:
    said = fs.protocol
    return {said} if isinstance(said, str) else set(said)


def _require_root(fs: Any, root: str) -> None:
    """A folder of this machine is never made: where a share is not mounted, letters would lie beneath it."""
    if "file" in _protocols(fs) and not fs.isdir(root):
        raise FileNotFoundError(root)


def _remove(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    except Exception:  # the share is what failed
        return


class FolderLine:
    """A `Line` over a folder that all sites can reach.

    Args:
        address: of the folder, an fsspec URL, or a path on this machine; options and keys stand in fsspec's own
            configuration files, never in an address.
        me: the name of the site at this end.
        topic: what the letters are about, the SHA-256 of the signed plan: letters of other topics are never seen.
        most_bytes: of a letter; a longer file is deleted without being read.
        pauses_s: the shortest and the longest time between two looks into the folder, in seconds.
        settled_s: how long a file that is not whole may take to become so, before it is judged as it is.

    Raises:
        UsageError: when the address can be none, or is a folder of this machine that is not there.
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
    ) -> None:
        self.trouble = ""
        """What the folder last failed with."""
        self.written_bytes = 0
        """All that was written: letters, as often as they were."""
        self._me, self._topic = me, f"wsi-fl-{topic[:16]}"
        self._most, self._pauses, self._settled_s = most_bytes, pauses_s, settled_s
        self._looking, self._sending = _Share(address), _Share(address)
        self._sending.check()
        self._stop, self._beginning = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        """Know nothing of letters: those of an earlier session are others."""
        self._clean = False
        self._laid: dict[tuple[str, str], set[str]] = {}
        self._met: set[str] = set()
        self._growing: dict[str, tuple[int, float]] = {}

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        """From now on hand over what lies in this site's inbox, from a thread."""
        self.close()
        self._forget()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(take, self._stop), daemon=True)
        self._thread.start()

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        """Lay a letter into a site's inbox, and watch it for a while; return "" once it was taken, or why not.

        A hello is there as soon as it is written. What was not collected yet stays, and the next call with the same
        letter goes on watching it.
        """
        file = f"{self._me}~{name}~{hashlib.sha256(letter).hexdigest()[:32]}{_LETTER}"
        try:
            self._begin()
            if (to, file) not in self._laid:
                before = _inboxes(self._there(self._sending, to))
                self._sending.write(letter, self._topic, to, file)
                with self._beginning:
                    self._laid[to, file] = before
                    self.written_bytes += len(letter)
            return "" if name == HELLO else self._await(to, file, min(timeout_s, _ANSWER_S))
        except Exception as error:
            return self._note(error)

    def broken(self) -> str:
        """Return "": a folder that is not there now may come back."""
        return ""

    def close(self) -> None:
        """Stop listening, and take back the hello; letters that wait for their receivers stay."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_S)
        self._thread = None
        for to, file in list(self._laid):
            if file.startswith(f"{self._me}~{HELLO}~"):
                self._discard(self._sending, to, file)

    def waiting(self) -> set[str]:
        """Return the sites that have said hello to this one and not left since."""
        try:
            names = self._sending.entries(self._topic, self._me)
        except Exception as error:
            self._note(error)
            return set()
        said = (_FILE.fullmatch(name) for name in names)
        return {one["sender"] for one in said if one and one["place"] == HELLO}

    # sending

    def _begin(self) -> None:
        """Remove what an earlier process of this site, or session of this process, left for others, once."""
        mine = (f"{self._me}~", f".{self._me}~")
        with self._beginning:
            for to in [] if self._clean else self._sending.folders(self._topic):
                for name in self._sending.entries(self._topic, to):
                    if to != self._me and name.startswith(mine):
                        self._discard(self._sending, to, name)
            self._clean = True

    def _await(self, to: str, file: str, limit_s: float) -> str:
        """Watch a letter until it was collected; return "" when it was taken, or what became of it."""
        deadline, pause = time.monotonic() + limit_s, self._pauses[0]
        while True:
            there = self._there(self._sending, to)
            known, now = self._laid[to, file], _inboxes(there)
            if file in there:
                self._laid[to, file] = known | now
            elif now:
                del self._laid[to, file]
                if known and not known & now:
                    return "the folder was made anew"
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
                busy = self._collect(take, stop)
            except Exception as error:
                self._note(error)
            pause = self._pauses[0] if busy else min(1.5 * pause, self._pauses[1])
            stop.wait(pause)

    def _collect(self, take: Callable[[Buffer], Answer], stop: threading.Event) -> bool:
        """Look once into the inbox; return whether something was taken or refused."""
        there = self._there(self._looking, self._me)
        if not _inboxes(there):
            self._looking.write(b"", self._topic, self._me, f"{_INBOX}{token_hex(4)}")
        found = [(said, there[name]) for name in there if (said := _FILE.fullmatch(name))]
        self._growing = {name: known for name, known in self._growing.items() if name in there}
        busy = False
        for said, entry in sorted(found, key=lambda one: (one[0]["place"] != HELLO, one[1].name)):
            if stop.is_set():
                return busy
            try:
                busy |= self._judge(said, entry, take)
            except FileNotFoundError:  # its sender took it back
                continue
            except Exception as error:  # one file that cannot be read hides no other
                self._note(error)
        return busy

    def _judge(self, said: re.Match[str], entry: _Entry, take: Callable[[Buffer], Answer]) -> bool:
        """Hand over a file that is whole; return whether it is done with."""
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
        elif answer != "later":
            if answer == "refused":
                self._looking.write(b"", self._topic, self._me, f"{name}{_REFUSED}")
            self._discard(self._looking, self._me, name)
        return answer != "later"

    def _may_grow(self, entry: _Entry, size: int) -> bool:
        """Return whether a file that is not whole may still be on its way."""
        known, since = self._growing.get(entry.name, (-1, 0.0))
        if known != size:
            since = time.monotonic()
            self._growing[entry.name] = (size, since)
        return time.monotonic() - since < self._settled_s

    def _there(self, share: _Share, to: str) -> Mapping[str, _Entry]:
        """What lies in an inbox; nothing where there is none."""
        try:
            return share.entries(self._topic, to)
        except FileNotFoundError:
            return {}

    def _discard(self, share: _Share, to: str, file: str) -> None:
        try:
            share.remove(self._topic, to, file)
        except FileNotFoundError:
            return
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> str:
        self.trouble = f"the folder cannot be used: {type(error).__name__}: {one_line(error)}"[:300]
        return self.trouble
