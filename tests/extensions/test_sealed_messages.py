"""Sealed messages between hospitals: a transport that loses, repeats, reorders, alters and invents changes nothing."""

import itertools
import random
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import refused
from federation_fixtures import NAMES, Federation, Wire, at_once
from test_communication import release_of
from typing_extensions import TypedDict

from wsi_fl.federation.comm import LocalComm, PeerTimeout
from wsi_fl.federation.documents import Count
from wsi_fl.federation.message import BYTES, Outgoing
from wsi_fl.hospitals.transports import presence, secure_comm
from wsi_fl.hospitals.transports.presence import SitePresence, SiteReturned, SitesDroppedOut
from wsi_fl.hospitals.transports.secure_comm import Handshake, SecureComm
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.certificates import Identity, NotTrusted, key_fingerprint, verify_certificate
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer, SealedMessage
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.types import ReportableError


class Said(TypedDict):
    n: Count


def together(identities, work, *, meddle=None, timeout_s=20.0, given=None, lines=None):
    """Let each site work in its own thread; return its result or exception."""
    ends = {}

    def be(name):
        line = lines[name] if lines else Wire(name, ends, meddle)
        options = {"timeout_s": timeout_s} | ((given or {}).get(name, {}))
        return work(SecureComm(identities[name], NAMES, (0, 1, 2), line, **options))

    return at_once(be, NAMES, 60)


def rounds_of(folder, n=4, refusals=None):
    """A ring of releases and a gathering per round; the reasons of refused messages are added to a list."""

    def work(comm):
        me = comm.sites[0]
        heard = []
        for round_ in range(1, n + 1):
            told = comm.gather([Said(n=100 * round_ + me)], Said)
            assert told == [{"n": 100 * round_ + k} for k in range(3)]
            values = np.arange(5, dtype=np.float32) + 10 * round_ + me
            release = release_of(folder / comm.identity.name, "s", round_, values)
            item = Outgoing(me, (me + 1) % 3, 0.5, release)
            (message,) = comm.exchange([item], [((me - 1) % 3, me)], round_=round_, hop=0, size=5)
            heard.append(message.vector.tolist())
        refusals is None or refusals.extend(comm.refusals)
        return heard, comm.traffic[me].messages, comm.traffic[me].bytes, comm.sent_bytes

    return work


def right(found, rounds=4):
    """Check that every site has received its left neighbour's values in every round."""
    for me, name in enumerate(NAMES):
        left = [((np.arange(5) + 10 * r + (me - 1) % 3) / 2).tolist() for r in range(1, rounds + 1)]
        assert found[name][0] == left, found[name]


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_relayed_exchange_equals_that_of_one_process(identities, folder):
    found = together(identities, rounds_of(folder))
    right(found)
    for me, name in enumerate(NAMES):
        _, messages, n_bytes, line_bytes = found[name]
        assert messages == 4
        (folder / f"local-{name}").mkdir()
        local = LocalComm(3)
        release = release_of(folder / f"local-{name}", "s", 1, np.zeros(5))
        local.exchange([Outgoing(me, (me + 1) % 3, 0.5, release)], [], round_=1, hop=0, size=5)
        assert n_bytes == 4 * local.traffic[me].bytes
        assert line_bytes - n_bytes < (2 + 4 * 3) * 2000  # two hellos; a release and two documents per round


def test_losses_repeats_delays_and_disorder_change_nothing(identities, folder):
    chance, kept, lock, counts = random.Random(3), [], threading.Lock(), Counter()

    def meddle(sender, to, name, letter):
        with lock:
            draw = chance.random()
            if draw < 0.2:
                counts["lost"] += 1
                return []
            if draw < 0.4:
                counts["twice"] += 1
                return [letter, letter]
            if draw < 0.6 and kept:  # an old one comes again, of whomever
                counts["later"] += 1
                return [chance.choice(kept), letter]
            kept.append(letter)
        time.sleep(chance.random() / 50)
        return [letter]

    right(together(identities, rounds_of(folder, 6), meddle=meddle, timeout_s=60.0), 6)
    assert len(counts) == 3 and min(counts.values()) > 3


@pytest.mark.parametrize("how", ["head", "signature", "body", "name", "federation"])
def test_an_altered_or_forged_message_is_refused_and_the_original_accepted(identities, folder, how):
    """C3 writes in the name of C1, a stranger with C1's name does, or a bit was flipped on the way."""
    stranger, refused = Federation().identity("C1"), []

    def forged(letter, to):
        read = SealedMessage.read(letter)
        if how in ("name", "federation"):
            writer = MessageSealer(identities["C3"] if how == "name" else stranger)
            written = writer._sign_message(to, read.header["session"], read.header["place"], bytes(read.body))
            return written.replace(b'"sender": "C3"', b'"sender": "C1"')
        signed, signature = letter.index(read.header_bytes), letter.index(read.signature)
        at = {"head": signed + 12, "signature": signature + 5, "body": len(letter) - 3}[how]
        return letter[:at] + bytes([letter[at] ^ 1]) + letter[at + 1 :]

    def meddle(sender, to, name, letter):
        return [letter] if sender != "C1" or name == "hello" else [forged(letter, to), letter]

    right(together(identities, rounds_of(folder, refusals=refused), meddle=meddle))
    known = {"head": "B1 came, who takes no part", "body": "was altered on its way"}
    said = known.get(how, "was not signed by it")
    assert len([one for one in refused if said in one]) > 3, refused


@pytest.mark.parametrize("whose", ["a stranger's", "another than the plan's"])
def test_a_key_of_another_federation_or_another_than_the_pinned_one_is_never_accepted(federation, identities, whose):
    keys = {name: key_fingerprint(one.certificate) for name, one in identities.items()}
    other = (Federation() if whose == "a stranger's" else federation).identity("C2")
    given = {name: {"keys": keys} for name in NAMES}
    found = together({**identities, "C2": other}, lambda comm: None, given=given, timeout_s=1.0)
    assert all(isinstance(one, PeerTimeout) for one in found.values())
    said = "does not belong to this federation" if whose == "a stranger's" else "another key than the plan's"
    assert any(said in str(one) for one in found.values()), found
    assert together(identities, lambda comm: None, given=given) == dict.fromkeys(NAMES)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"version": "9.9"}, ReportableError, "has wsi-fl 9.9"),
        ({"code": "2" * 64}, ReportableError, "(22222222)"),
        ({"plan": "1" * 64}, PeerTimeout, "for another plan"),
    ],
)
def test_another_version_or_code_ends_the_run_before_training_and_another_plan_is_awaited(
    identities, given, error, said
):
    timeout_s = 1.0 if error is PeerTimeout else 6.0
    found = together(identities, lambda comm: None, given={"C2": given}, timeout_s=timeout_s)
    assert all(isinstance(one, error) for one in found.values())
    assert any(said in str(one) for one in found.values()), found


def test_an_old_handshake_for_another_plan_is_ignored_and_no_site_is_blamed(identities, folder):
    """Anyone with write access to a shared folder may put it before the new ones."""
    writer, refused = MessageSealer(identities["C3"]), []
    said = Handshake(
        certificate=identities["C3"].certificate,
        public=writer.public,
        time=writer.started_at - 60,
        version="",
        code="0" * 64,
        gone={},
    )
    old = writer.write_handshake(said, "1" * 64)

    def meddle(sender, to, name, letter):
        return [old, letter] if name == "hello" and to != "C3" else [letter]

    right(together(identities, rounds_of(folder, refusals=refused), meddle=meddle))
    assert {"a handshake as C3 for another plan (11111111) was ignored"} == set(refused)


def test_a_clock_that_is_wrong_by_a_day_is_named(identities, monkeypatch):
    real = time.time

    def clock():
        return real() + (86400 if threading.current_thread().name == "C1" else 0)

    monkeypatch.setattr(secure_comm.time, "time", clock)
    found = together(identities, lambda comm: None, timeout_s=1.0)
    assert any("the clock of C1 is 24.0 h ahead" in str(one) for one in found.values()), found


def test_a_site_whose_clock_was_corrected_begins_again(identities, monkeypatch):
    """Its handshake was of another time, and the others may have refused it."""
    ahead = dict.fromkeys(NAMES, 0.0)
    monkeypatch.setattr(presence, "_clock_offset_s", lambda: ahead.get(threading.current_thread().name, 0.0))

    def work(comm):
        comm.gather([Said(n=1)], Said)
        if comm.identity.name == "C1":
            ahead["C1"] = -86400.0
            with pytest.raises(SitesDroppedOut, match="the clock of C1 was set"):
                comm.gather([Said(n=2)], Said)

    def be(name):
        return {"presence": SitePresence(identities[name], NAMES, 2)}

    found = together(identities, work, given={name: be(name) for name in NAMES})
    assert found == dict.fromkeys(NAMES)


@pytest.mark.parametrize(("days", "words"), [(800, "request a new"), (-1, "this clock says")])
def test_an_expired_certificate_is_named(federation, monkeypatch, days, words):
    identity, now = federation.identity("C1"), datetime.now(UTC) + timedelta(days=days)
    monkeypatch.setattr(certificates, "datetime", SimpleNamespace(now=lambda _: now))
    expired = partial(verify_certificate, identity.certificate, federation.root)
    refused(expired, "the certificate of C1 holds from", "set the clock", words, error=NotTrusted)


def test_a_key_with_a_chosen_exponent_is_refused_everywhere(federation, monkeypatch):
    """With a free exponent, a key with a similar fingerprint is soon found, or no private key is needed."""
    usual = certificates.generate_private_key
    monkeypatch.setattr(certificates, "generate_private_key", lambda public_exponent, key_size: usual(3, key_size))
    chosen = certificates.generate_key()
    request = certificates.build_request(chosen, "C1", "org")
    refused(
        lambda: certificates.issue_certificate(request, federation.key, federation.root, role="hospital"),
        "exponent",
        "65537",
    )
    monkeypatch.setattr(certificates, "_EXPONENT", 3)  # a federation that does not look
    theirs = certificates.issue_certificate(request, federation.key, federation.root, role="hospital")
    root = certificates.build_root_certificate(chosen, "a federation")
    below = certificates.issue_certificate(request, chosen, root, role="hospital")
    monkeypatch.setattr(certificates, "_EXPONENT", 65537)
    refused(lambda: verify_certificate(theirs, federation.root), "of C1", "exponent 3", error=NotTrusted)
    refused(lambda: verify_certificate(below, root), "exponent 3", error=NotTrusted)
    refused(lambda: Identity.load(chosen, theirs, federation.root), "cannot be used", "exponent 3")


def test_a_sealed_message_that_is_too_long_is_refused(identities, folder):
    given = {"C2": {"most_bytes": 4000}}

    def work(comm):
        me = comm.sites[0]
        release = release_of(folder / comm.identity.name, "s", 1, np.zeros(5000))
        outgoing = [Outgoing(0, 1, 1.0, release)] if me == 0 else []
        comm.exchange(outgoing, [(0, 1)] if me == 1 else [], round_=1, hop=0, size=5000)

    found = together(identities, work, given=given, timeout_s=1.0)
    assert "took nothing" in str(found["C1"])
    assert "a message of 20" in str(found["C2"]) and "at most 4000" in str(found["C2"])


def test_the_memory_for_unread_messages_of_a_peer_is_bounded(identities, folder):
    """C1 runs ahead of C2, which reads nothing: at most two of the longest messages wait."""
    read = threading.Event()

    def work(comm):
        me = comm.sites[0]
        if me == 2:
            return None
        if me == 1:
            assert read.wait(20)
            return sum(len(one.body) for one in comm._inbox._messages.values())
        for round_ in (1, 2, 3):
            item = Outgoing(0, 1, 1.0, release_of(folder / "C1", "s", round_, np.zeros(1500)))
            try:
                comm.exchange([item], [], round_=round_, hop=0, size=1500)
            except PeerTimeout:
                return round_
            finally:
                read.set() if round_ == 3 else None
        return None

    found = together(identities, work, given={"C2": {"most_bytes": 7000}}, timeout_s=1.0)
    assert found["C1"] == 3, found
    assert 2 * 6000 < found["C2"] <= 2 * 7000


def test_bytes_and_wrong_lengths_arrive_as_in_one_process(identities, folder):
    def work(comm):
        if comm.sites[0] == 0:
            terms, values = PrivacyTerms(1e-5, allow=("buffer",)), np.arange(7, dtype=np.uint8)
            ledger = PrivacyLedger(folder / "b.jsonl", site="s", run="r", terms=terms)
            buffer = ledger.release(1, values, schema="ab" * 32, mechanism=None, content="buffer")
            items = [Outgoing(0, k, 1.0, buffer) for k in (1, 2)]
            comm.exchange(items, [], round_=1, hop=5, size=7, kind=BYTES)
            return None
        agreed = 7 if comm.sites[0] == 1 else 8
        (message,) = comm.exchange([], [(0, comm.sites[0])], round_=1, hop=5, size=agreed, kind=BYTES)
        return message

    found = together(identities, work)
    assert found["C2"].vector.tolist() == list(range(7))
    assert found["C3"].refused == "it has 7 values, agreed on 8"


def test_the_transport_can_read_no_message(identities, folder):
    seen = []

    def probe(sender, to, name, letter):
        seen.append(letter)
        return [letter]

    secret = np.frombuffer(b"patient_0042.tif" * 4, np.float32)

    def work(comm):
        me = comm.sites[0]
        item = Outgoing(me, (me + 1) % 3, 1.0, release_of(folder / comm.identity.name, "s", 1, secret))
        comm.exchange([item], [((me - 1) % 3, me)], round_=1, hop=0, size=len(secret))
        comm.gather([Said(n=424242424242)], Said)

    assert together(identities, work, meddle=probe) == dict.fromkeys(NAMES)
    assert len(seen) >= 6 + 3 + 6
    assert b"patient" not in b"".join(seen) and b"424242" not in b"".join(seen)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_vanished_site_is_named_and_an_ending_site_reports_its_end(identities, how):
    def work(comm):
        if comm.sites[0] == 2:
            getattr(comm, how)()
            return None
        return comm.gather([Said(n=1)], Said)

    began = time.monotonic()
    found = together(identities, work, timeout_s=1.0 if how == "close" else 20.0)
    if how == "close":
        late = [found[n] for n in ("C1", "C2") if isinstance(found[n], PeerTimeout)]
        assert any("site C3" in str(one) and one.sites == [2] for one in late), found
    else:
        said = "site C3 ended the run; its own log says why"
        assert [str(found[n]) for n in ("C1", "C2")] == [said] * 2 and time.monotonic() - began < 10


def test_a_site_that_ends_after_a_gathering_does_not_keep_others_from_completing_it(identities):
    """C2 has not yet heard C1 when C3, which has heard all, ends: C1 and C2 are in step, and learn it in the next."""
    ended_s = []

    def meddle(sender, to, name, letter):
        if (sender, to, name) == ("C3", "C2", "end"):
            ended_s.append(time.monotonic())
        is_late = (sender, to, name) == ("C1", "C2", "g0") and (not ended_s or time.monotonic() < ended_s[0] + 0.3)
        return [] if is_late else [letter]

    def work(comm):
        heard = comm.gather([Said(n=comm.sites[0])], Said)
        if comm.identity.name == "C3":
            comm.abort()
            return heard
        with pytest.raises(ReportableError, match="site C3 ended the run"):
            comm.gather([Said(n=0)], Said)
        return heard

    found = together(identities, work, meddle=meddle)
    assert ended_s and found == {name: [Said(n=k) for k in range(3)] for name in NAMES}


def test_a_restarted_process_is_noticed(identities):
    ends = {}

    def work(comm):
        if comm.sites[0] == 2:
            time.sleep(0.3)
            ends.pop("C3", None)
            with pytest.raises(PeerTimeout):
                SecureComm(identities["C3"], NAMES, (0, 1, 2), Wire("C3", ends), 1.0)
            return None
        return comm.gather([Said(n=1)], Said)

    found = together(identities, work, lines={name: Wire(name, ends) for name in NAMES}, timeout_s=8.0)
    assert all(isinstance(found[name], SiteReturned) for name in ("C1", "C2")), found


@pytest.fixture
def kept(identities, folder):
    """The messages that a relay stored of a first run, by sender, receiver and name."""
    found = {}

    def keep(sender, to, name, letter):
        found[sender, to, name] = letter
        return [letter]

    together(identities, rounds_of(folder, 2), meddle=keep)
    for name in NAMES:
        (folder / name / "s.jsonl").unlink()
    return found


def test_messages_of_an_earlier_session_are_refused(identities, folder, kept):
    refused = []

    def play_back(sender, to, name, letter):
        return [letter] if name == "hello" else [kept[sender, to, name], letter]

    right(together(identities, rounds_of(folder, 2, refused), meddle=play_back), 2)
    assert any("another session" in one for one in refused)


def test_old_handshakes_may_stop_a_run_and_never_change_it(identities, folder, kept):
    def play_back(sender, to, name, letter):
        return [kept[sender, to, name], letter] if name == "hello" else [letter]

    found = together(identities, rounds_of(folder, 2), meddle=play_back, timeout_s=2.0)
    for me, name in enumerate(NAMES):
        values = [((np.arange(5) + 10 * r + (me - 1) % 3) / 2).tolist() for r in (1, 2)]
        assert isinstance(found[name], ReportableError) or found[name][0] == values


FOUR = ("C1", "C2", "C3", "C4")


def membership_of(me, at_least=2, **heard):
    one = SitePresence(SimpleNamespace(name=me), FOUR, at_least)
    one.sealer.latest_handshakes.update(heard)
    return one


def dropped_sites(one):
    return [name for name in FOUR if one.has_dropped_out(name)]


def test_a_site_that_timed_out_has_dropped_out_until_its_newer_handshake():
    one = membership_of("C1", C2=5.0, C3=6.0)
    assert dropped_sites(one) == []
    one.mark_dropped_out(["C3", "C4"], "silent")
    assert dropped_sites(one) == ["C3", "C4"] and one.dropped_out == {"C3": 6.0, "C4": 0.0}
    one.sealer.latest_handshakes["C3"] = 6.5
    assert dropped_sites(one) == ["C4"]
    one.sealer.latest_handshakes["C4"] = 1.0  # it came for the first time
    assert dropped_sites(one) == []


def test_below_the_minimum_dropped_out_sites_are_missing_and_two_halves_never_continue_separately():
    one = membership_of("C1", at_least=3)
    one.mark_dropped_out(["C3"], "silent")
    assert one.missing_sites() == []
    one.mark_dropped_out(["C4"], "silent")
    assert one.missing_sites() == ["C3", "C4"]
    one.sealer.latest_handshakes["C4"] = 1.0
    assert one.missing_sites() == []
    for me, away in (("C1", ["C3", "C4"]), ("C3", ["C1", "C2"])):
        half = membership_of(me)
        half.mark_dropped_out(away, "silent")
        assert half.missing_sites() == away


def test_a_site_that_was_left_behind_notices_and_sends_a_later_handshake():
    one = membership_of("C1")
    since = one.sealer.started_at
    assert not one.merge_peer_view({"C1": since - 1.0})  # that was an earlier process of it
    assert one.merge_peer_view({"C1": since + 5.0, "C9": 3.0}) and "C9" not in one.dropped_out
    one.mark_dropped_out((), "the others went on")
    assert one.sealer.started_at > since + 5.0 and not one.merge_peer_view({"C1": since + 5.0})
    needed = membership_of("C1", at_least=None)  # where all are, no site is dropped on the word of a peer
    assert not needed.merge_peer_view({"C1": 1e11, "C2": 1e11}) and needed.dropped_out == {}


def test_a_handshake_after_a_clock_correction_has_the_new_time(monkeypatch):
    """Other sites refuse handshakes of the future, and any later than a refused one."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 2 * 86400)
        one = membership_of("C1")
        assert not one.has_clock_jumped()
    assert one.has_clock_jumped()
    one.mark_dropped_out((), "its clock was set")
    assert abs(one.sealer.started_at - real()) < 60 and not one.has_clock_jumped()


def test_membership_does_not_depend_on_the_order_of_messages():
    dice = random.Random(3)
    told = [{name: float(dice.randrange(5)) for name in dice.sample(FOUR, 2)} for _ in range(4)]
    found = set()
    for order in itertools.permutations(told):
        one = membership_of("C1", C2=2.0, C3=2.0, C4=2.0)
        for beliefs in order:
            one.merge_peer_view(beliefs)
        found.add((tuple(dropped_sites(one)), tuple(sorted(one.dropped_out.items()))))
    assert len(found) == 1
