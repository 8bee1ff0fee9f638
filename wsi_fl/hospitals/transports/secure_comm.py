"""A `Comm` over an untrusted transport: an engine or a shared folder that carries bytes between hospitals.

Each process introduces itself with a handshake. All handshakes together make the session; later messages are sealed,
signed and bound to it. A transport may be slow, lose, repeat, reorder, alter or invent: messages that do not verify are
refused, lost ones are sent again until the deadline, and repeated ones are taken once.

As a session binds the handshakes of all its members, sites that disagree on who is there exchange nothing; see
`presence`.
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
from typing import TypeVar, cast

import numpy as np

from wsi_fl.federation.comm import PeerTimeout, Traffic, count_traffic
from wsi_fl.federation.documents import ProtocolError, decode_document, encode_document
from wsi_fl.federation.message import (
    HEADER_BYTES,
    NUMBERS,
    Message,
    Outgoing,
    PayloadType,
    pack_message,
    unpack_message,
)
from wsi_fl.hospitals.faults import FaultCode, mark_fault
from wsi_fl.hospitals.transports.inbox import Inbox
from wsi_fl.hospitals.transports.presence import MAX_CLOCK_SKEW_S, SitePresence, SiteReturned, SitesDroppedOut
from wsi_fl.hospitals.transports.transport import MAX_MESSAGE_BYTES, Receipt, Transport
from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, key_fingerprint
from wsi_fl.hospitals.trust.sealed_messages import (
    ALL_RECEIVERS,
    HANDSHAKE,
    Buffer,
    Handshake,
    SealedMessage,
    derive_session,
)
from wsi_fl.types import Interrupted, ReportableError

_T = TypeVar("_T")

_END_REASONS: dict[str, tuple[FaultCode, str]] = {
    "end": ("site_ended", "ended the run; its own log says why"),
    "withdrawn": ("withdrew", "withdrew its approval of this plan"),
}
"""Sequence ids of a site's last message, and their meaning."""
_RETRY_PAUSES_S = (0.05, 2.0)
_WAKE_S = 0.5
_FAREWELL_S = 5.0


@dataclass
class SecureComm:
    """One process per site, over a transport.

    Args:
        identity: of this site.
        names: of all sites of the study, by index.
        running: indices of the participants, the same everywhere.
        transport: the transport, listened to from now on.
        timeout_s: how long to wait for a peer.
        version, code: of wsi-fl, and the SHA-256 of the installed code; the same at all sites.
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
        PeerTimeout: when a site did not introduce itself in time.
        SitesDroppedOut: the same, if the others may go on without it.
        ReportableError: when one has another plan, version, code or time.
    """

    identity: Identity
    names: Sequence[str]
    running: tuple[int, ...]
    transport: Transport
    timeout_s: float
    version: str = ""
    code: str = "0" * 64
    plan: str = ""
    most_bytes: int = MAX_MESSAGE_BYTES
    keys: Mapping[str, str] = field(default_factory=dict)
    on_wait: Callable[[], None] = lambda: None
    presence: SitePresence | None = None
    find_stop_reason: Callable[[], str] = lambda: ""
    load_revoked: Callable[[], Mapping[str, datetime]] = dict
    sent_bytes: int = 0
    """All that was sent: messages with headers and signatures, documents too."""
    refusals: list[str] = field(default_factory=list)
    """Reasons of the last refusals."""

    def __post_init__(self) -> None:
        me = list(self.names).index(self.identity.name)
        if me not in self.running:
            raise ReportableError(f"site {self.identity.name} takes no part in this run")
        self.n_sites, self.sites = len(self.names), cast("tuple[int, ...]", (me,))
        self.traffic: dict[int, Traffic] = {me: Traffic()}
        self._peer_indices = {self.names[k]: k for k in self.running if k != me}
        self._invited = set(self._peer_indices)
        self._presence = self.presence or SitePresence(self.identity, self.names)
        self._sealer, self._tolerates_dropout = self._presence.sealer, self._presence.min_sites is not None
        self._n_gathered, self._session = 0, ""
        self._met_s, self._steps = time.monotonic(), 0
        self._peers: dict[str, tuple[Handshake, Holder]] = {}
        self._inbox = Inbox(self.most_bytes)
        self._end_error: ReportableError | None = None
        self._peer_error: ReportableError | None = None
        """A peer's end of the run; ignored while sites may drop out."""
        self._ended_peer, self._ended_s = "", inf
        self._lossy, self._farewell = False, "end"
        self._condition = threading.Condition()
        self.transport.listen(self._receive)
        self._exchange_handshakes()

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
        started_s, site_index = time.perf_counter(), self.sites[0]
        contents: dict[str, Sequence[Buffer]] = {}
        for item in outgoing:
            head, vector = pack_message(item, round_, hop)
            contents[self.names[item.receiver]] = (head, np.ascontiguousarray(vector).data.cast("B"))
        senders = [sender for sender, receiver in expected if receiver == site_index]
        arrived = self._swap_messages(f"x{round_}.{hop}", contents, senders, lossy=lossy)
        count_traffic(self.traffic, outgoing, time.perf_counter() - started_s)
        messages = []
        for sender, content in arrived.items():
            body = content[HEADER_BYTES:]
            vector = np.frombuffer(body[: len(body) - len(body) % kind.itemsize], kind)
            head = bytes(content[:HEADER_BYTES])
            messages.append(unpack_message(head, vector, sender, site_index, round_, size, kind=kind))
        return messages

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return one document of every site; see `Comm`."""
        (document,) = documents
        document_bytes = encode_document(document, kind, self.identity.name)
        contents, senders = (dict.fromkeys(self._peer_indices, (document_bytes,)), list(self._peer_indices.values()))
        texts = self._swap_messages(self._next_sequence_id(), contents, senders, patient=patient)
        texts[self.sites[0]] = memoryview(document_bytes)
        self._met_s, self._steps = time.monotonic(), 0
        return [decode_document(bytes(texts[k]), kind, self.names[k]) for k in self.running]

    def exchange_documents(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Give documents to single sites; see `Comm`."""
        site_index = self.sites[0]
        contents = {
            self.names[to]: (encode_document(document, kind, self.identity.name),)
            for (_, to), document in documents.items()
        }
        senders = [sender for sender, receiver in expected if receiver == site_index]
        texts = self._swap_messages(self._next_sequence_id(), contents, senders, lossy=True)
        return {(k, site_index): decode_document(bytes(text), kind, self.names[k]) for k, text in texts.items()}

    def _next_sequence_id(self) -> str:
        """Return the sequence id of the next documents, the same at every site."""
        self._n_gathered += 1
        return f"g{self._n_gathered - 1}"

    def abort(self, code: int = 1) -> None:
        """End this site's part for all others, so that none waits for it; the process itself goes on."""
        del code
        if self._session and self._end_error is self._peer_error is None:
            with suppress(Exception):  # the transport itself may have failed
                self._send_messages(self._farewell, dict.fromkeys(self._peer_indices, (b"",)), _FAREWELL_S)
        self.close()

    def close(self) -> None:
        """Stop listening; every further call fails."""
        with self._condition:
            self._end_error = self._end_error or ReportableError(f"site {self.identity.name} has left the run")
            self._condition.notify_all()
        self.transport.close()

    # handshakes

    def _exchange_handshakes(self) -> None:
        """Send this site's handshake to all, and collect theirs."""
        handshake = Handshake(
            certificate=self.identity.certificate,
            public=self._sealer.public,
            time=self._sealer.started_at,
            version=self.version,
            code=self.code,
            gone=dict(self._presence.dropped_out),
        )
        message = self._sealer.write_handshake(handshake, self.plan)
        self._deliver_messages(HANDSHAKE, dict.fromkeys(self._peer_indices, message), self.timeout_s)
        with self._condition:
            self._wait_for_peers(HANDSHAKE, self._presence.missing_sites, inf)
            self._wait_for_peers(
                HANDSHAKE, lambda: [name for name in self._session_peers() if name not in self._peers], self.timeout_s
            )
            self._peer_indices = {name: self._peer_indices[name] for name in self._session_peers()}
            self._peers = {name: self._peers[name] for name in self._peer_indices}
            self.running = tuple(sorted((*self.sites, *self._peer_indices.values())))
            handshakes = [(name, peer_handshake["public"]) for name, (peer_handshake, _) in self._peers.items()]
            self._session = derive_session([*handshakes, (self.identity.name, self._sealer.public)], self.plan)

    def _session_peers(self) -> list[str]:
        """Return the peers of the session that begins."""
        return [name for name in self._peer_indices if not self._presence.has_dropped_out(name)]

    def _receive_handshake(self, message: SealedMessage) -> Receipt:
        """Take a handshake: the first one, or that of a process that began again."""
        handshake, holder = message.read_handshake(self.identity.root)
        name, is_known = holder.name, holder.name in self._peers
        latest = self._sealer.latest_handshakes.get(name, 0.0)
        if handshake["time"] < latest:
            return "refused"  # of a process that ended
        if is_known and handshake["time"] == latest:
            return "taken"
        if reason := self._explain_foreign_handshake(handshake, name, message):
            return self._note_refusal(reason)
        if mismatch := self._explain_mismatch(handshake, name):
            code, text = mismatch
            if self._tolerates_dropout:  # the others go on without it
                return self._note_refusal(text)
            self._peer_error = mark_fault(ReportableError(f"{text}; nothing was trained"), code, name)
        else:
            if self._session:
                self._peer_error = SiteReturned(f"site {name} began again")
            else:
                self._peers[name] = (handshake, holder)
            self._sealer.latest_handshakes[name] = handshake["time"]
            if self._presence.merge_peer_view(handshake["gone"]):
                self._peer_error = SitesDroppedOut(f"the others went on without {self.identity.name}, which was silent")
        self._condition.notify_all()
        return "taken"

    def _explain_foreign_handshake(self, handshake: Handshake, name: str, message: SealedMessage) -> str:
        """Return why a handshake is none of this run's; "" if it is one.

        One for another plan may be an old one that somebody copied here again, so nobody is blamed.
        """
        key_print, behind_s = key_fingerprint(handshake["certificate"]), time.time() - handshake["time"]
        if name not in self._invited:
            return f"{name} sent a handshake, and takes no part in this run"
        if self.keys.get(name, key_print) != key_print:
            return f"somebody sent a handshake as {name} with another key than the plan's"
        if behind_s > MAX_CLOCK_SKEW_S + self.transport.lag_s + self.timeout_s:  # an old one, or a clock that is behind
            return f"{name} sent a handshake {behind_s / 3600:.1f} h ago by this clock"
        if message.header["session"] != self.plan:
            return f"a handshake as {name} for another plan ({str(message.header['session'])[:8]}) was ignored"
        return ""

    def _explain_mismatch(self, handshake: Handshake, name: str) -> tuple[FaultCode, str] | None:
        """Return how a peer differs from this site, as a code and in words; None if it does not."""
        me, ahead_s = self.identity.name, max([handshake["time"], *handshake["gone"].values()]) - time.time()
        if ahead_s > MAX_CLOCK_SKEW_S:
            return "clock", f"the clock of {name} is {ahead_s / 3600:.1f} h ahead"
        if (handshake["version"], handshake["code"]) != (self.version, self.code):
            peer_version = f"{handshake['version']} ({handshake['code'][:8]})"
            local_version = f"{self.version} ({self.code[:8]})"
            return "", f"{name} has wsi-fl {peer_version}, {me} has {local_version}"
        return None

    # arrivals

    def _receive(self, data: Buffer) -> Receipt:
        """Judge an arrival, in the transport's thread."""
        if len(data) > self.most_bytes:
            return self._note_refusal(
                f"a message of {len(data)} bytes arrived, at most {self.most_bytes} are agreed on"
            )
        try:
            message = SealedMessage.read(data)
            with self._condition:
                return self._judge_message(message)
        except (ProtocolError, NotTrusted) as error:
            return self._note_refusal(str(error))

    def _judge_message(self, message: SealedMessage) -> Receipt:
        header = message.header
        if header["place"] == HANDSHAKE and header["to"] == ALL_RECEIVERS:
            return self._receive_handshake(message)
        if header["sender"] not in self._peer_indices:
            return self._note_refusal(f"a message of {header['sender']} came, who takes no part in this run")
        peer = self._peers.get(header["sender"])
        if peer is None or not self._session or self._inbox.is_full(message):
            return "later"
        message.verify_sender(peer[1])
        if header["to"] != self.identity.name or header["session"] != self._session:
            return self._note_refusal(f"a message of {header['sender']} is of another session or for another receiver")
        if not self._inbox.add_message(message):
            return "taken"
        if header["place"] in _END_REASONS:
            code, text = _END_REASONS[header["place"]]
            reason, sender = f"site {header['sender']} {text}", header["sender"]
            error = SitesDroppedOut(reason, [sender]) if self._tolerates_dropout else ReportableError(reason)
            if not self._ended_peer:
                self._peer_error = mark_fault(error, code, sender)
                self._ended_peer, self._ended_s = sender, time.monotonic()
        self._condition.notify_all()
        return "taken"

    def _note_refusal(self, reason: str) -> Receipt:
        self.refusals = [*self.refusals[-9:], reason]
        return "refused"

    def _swap_messages(
        self,
        sequence_id: str,
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

        def remaining_s() -> float:
            return ends_s - time.monotonic() if lossy else inf if patient else self.timeout_s

        names = [self.names[k] for k in senders]
        late_is_lost = suppress(PeerTimeout) if lossy else nullcontext()
        with late_is_lost:
            self._send_messages(sequence_id, contents, remaining_s())
        with self._condition:
            with late_is_lost:
                self._wait_for_peers(sequence_id, lambda: self._inbox.list_missing(names, sequence_id), remaining_s())
            messages = self._inbox.read(names, sequence_id)
        return {self._peer_indices[name]: self._sealer.open(message) for name, message in messages.items()}

    def _wait_for_peers(self, sequence_id: str, missing: Callable[[], list[str]], limit_s: float) -> None:
        """Wait, holding the lock, until no peer is missing."""
        deadline = time.monotonic() + limit_s
        while late := missing():
            self._raise_if_ended(sequence_id)
            if (remaining_s := deadline - time.monotonic()) <= 0:
                self._give_up(sequence_id, dict.fromkeys(late, "did not answer"))
            self._condition.wait(min(remaining_s, _WAKE_S) if remaining_s > 0 else _WAKE_S)
            self.on_wait()

    def _raise_if_ended(self, sequence_id: str) -> None:
        if self._end_error is None and (broken := self.transport.failure_reason()):
            self._end_error = mark_fault(ReportableError(broken), "aborted")
        is_ignored = self._lossy or self._can_complete(sequence_id)
        error = self._end_error or (None if is_ignored else self._peer_error)
        if error is not None:
            raise error
        if self._tolerates_dropout and self._presence.has_clock_jumped():
            raise SitesDroppedOut(f"the clock of {self.identity.name} was set")
        self._check_certificates()

    def _can_complete(self, sequence_id: str) -> bool:
        """Return whether a peer ended just now, after its document of this gathering: the others complete it too.

        Otherwise some would go on to the next step, and others not.
        """
        if self._tolerates_dropout or not sequence_id.startswith("g") or not self._ended_peer:
            return False
        is_waiting = time.monotonic() < self._ended_s + _FAREWELL_S
        return is_waiting and not self._inbox.list_missing([self._ended_peer], sequence_id)

    def _check_certificates(self) -> None:
        """End the session if the certificate of one of its sites was revoked meanwhile."""
        if not (revoked_keys := self.load_revoked()):
            return
        certificates = {name: handshake["certificate"] for name, (handshake, _) in [*self._peers.items()]}
        for name, certificate in {**certificates, self.identity.name: self.identity.certificate}.items():
            if (revoked_on := revoked_keys.get(key_fingerprint(certificate))) is not None:
                reason = (
                    f"site {name} has a certificate that was withdrawn on {revoked_on:%Y-%m-%d}, and needs a new key"
                )
                can_drop = self._tolerates_dropout and name in certificates
                raise mark_fault(SitesDroppedOut(reason, [name]) if can_drop else Interrupted(reason), "revoked", name)

    def _give_up(self, sequence_id: str, late: Mapping[str, str]) -> None:
        """Raise an error if late sites gave no sign of life either; in lossy steps, in any case."""
        silent = [name for name in late if self._lossy or self.transport.silence_s(name) >= self.timeout_s]
        if not silent:
            return
        occasion = " to say hello" if sequence_id == HANDSHAKE else ""
        if sequence_id.startswith("x"):
            occasion = f" in round {sequence_id[1:].partition('.')[0]}"
        refusal = f"; last refused here: {self.refusals[-1]}" if self.refusals else ""
        first = silent[0]
        text = f"site {first} {late[first]} for {self.timeout_s:g} s{occasion} (comm.timeout_s){refusal}"
        if self._tolerates_dropout and not self._lossy:
            raise SitesDroppedOut(text, silent)
        raise mark_fault(PeerTimeout(text, [self._peer_indices[name] for name in silent]), "lost", first)

    # sending

    def _send_messages(self, sequence_id: str, contents: Mapping[str, Sequence[Buffer]], limit_s: float) -> None:
        """Seal and deliver one message to each of some sites."""
        messages = {
            name: self._sealer.seal_message(name, self._peers[name][0]["public"], self._session, sequence_id, parts)
            for name, parts in contents.items()
        }
        self._deliver_messages(sequence_id, messages, limit_s)

    def _deliver_messages(self, sequence_id: str, messages: Mapping[str, bytes], limit_s: float) -> None:
        """Send messages at once, until each has been taken; none if this site no longer takes part."""
        if sequence_id not in _END_REASONS:
            self._check_certificates()
            if reason := self.find_stop_reason():
                self._farewell = "withdrawn"
                text = f"site {self.identity.name} {reason}; the run ends here"
                raise mark_fault(ReportableError(text), "withdrew", self.identity.name)
        deadline, pause, pending = time.monotonic() + limit_s, _RETRY_PAUSES_S[0], dict(messages)
        with ThreadPoolExecutor(max(1, len(pending))) as pool:
            while pending:
                limit = min(max(deadline - time.monotonic(), _WAKE_S), self.timeout_s)
                futures = {
                    name: pool.submit(self.transport.send, name, sequence_id, message, limit)
                    for name, message in pending.items()
                }
                self.sent_bytes += sum(map(len, pending.values()))
                failed = {name: reason for name, future in futures.items() if (reason := future.result())}
                pending = {name: pending[name] for name in failed}
                if not pending:
                    return
                if sequence_id not in _END_REASONS:
                    self._raise_if_ended(sequence_id)
                if time.monotonic() >= deadline:
                    self._give_up(sequence_id, {name: f"took nothing ({reason})" for name, reason in failed.items()})
                with self._condition:
                    self._condition.wait(pause)
                pause = min(2 * pause, _RETRY_PAUSES_S[1])
                self.on_wait()
