"""Hospitals that exchange sealed messages as files in a folder: the transport, and the resulting models."""

import errno
import hashlib
import os
import random
import re
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import fsspec
import pytest
from conftest import Told, make_study, nightly, refused
from federation_fixtures import NAMES, Federation
from fsspec.config import conf
from fsspec.implementations.local import LocalFileSystem
from hospitals import BASE, SITES, Bed, charged, one_installation  # noqa: F401
from test_sealed_messages import right, rounds_of, together

from wsi_fl.federation.comm import PeerTimeout
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.transports import fsspec_adapter
from wsi_fl.hospitals.transports.folder_transport import FolderTransport, list_messages
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.transports.presence import SitePresence
from wsi_fl.hospitals.transports.secure_comm import ReportableError, SecureComm
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work.start import take_part_by_folder
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.resume import RunRequest, choose_run, select_run
from wsi_fl.system.files import file_lock
from wsi_fl.types import WsiFlError

pytestmark = pytest.mark.end_to_end

TOPIC = "ab" * 32
FOLDER = f"wsi-fl-{TOPIC[:16]}"
FILE = re.compile(r"S\d~(hello|end|g\d+|x\d+\.\d)~[0-9a-f]{32}\.letter")
PAUSES = {"pauses_s": (0.01, 0.1), "settled_s": 0.2}


@pytest.fixture
def share(tmp_path):
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@contextmanager
def serve_by_webdav(folder):
    """Serve a folder by wsgidav on 127.0.0.1, and yield the settings of fsspec for it."""
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    user, password = "lymph", "not-a-secret"
    given = {"provider_mapping": {"/": str(folder)}, "verbose": 0}
    given["simple_dc"] = {"user_mapping": {"*": {user: {"password": password}}}}
    server = Server(("127.0.0.1", 0), WsgiDAVApp(given | {"http_authenticator": {"domain_controller": None}}))
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield {"base_url": f"http://127.0.0.1:{server.bind_addr[1]}", "auth": (user, password)}
    finally:
        server.stop()


@pytest.fixture(params=["a folder"])
def address(request, share, monkeypatch):
    """The address of an empty share; that of a WebDAV server holds no password."""
    if request.param != "WebDAV":
        yield str(share) if request.param == "a folder" else f"memory://{share.name}-{random.random()}"
        return
    if not all(map(find_spec, ("wsgidav", "cheroot", "webdav4"))):
        pytest.skip("needs wsgidav, cheroot and webdav4")
    with serve_by_webdav(share) as told:
        monkeypatch.setitem(conf, "webdav", told)
        yield "webdav://"


everywhere = pytest.mark.parametrize("address", ["a folder", "an object store", "WebDAV"], indirect=True)


@pytest.fixture
def line_of(address):
    """Build ends of the transport, and close them after the test."""
    made = []

    def make(name, **options):
        made.append(FolderTransport(address, name, TOPIC, **(PAUSES | options)))
        return made[-1]

    yield make
    for line in made:
        line.close()


class Desk:
    """A receiver that records sealed messages and replies as configured."""

    def __init__(self, answer="taken"):
        self.seen, self.answer = [], answer

    def __call__(self, letter):
        self.seen.append(bytes(letter))
        return self.answer


def until(true, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def send(line, to, place, letter):
    """Send a sealed message until it has arrived, and return its fate."""
    while "not collected" in (said := line.send(to, place, letter, 5.0)):
        time.sleep(0.01)
    return said


def inbox(share, name):
    return share / FOLDER / name


def letters(address, name):
    return sorted(file for file in SharedFolder(str(address)).list_entries(FOLDER, name) if "inbox-" not in file)


def name_of(sender, place, content):
    return f"{sender}~{place}~{hashlib.sha256(content).hexdigest()[:32]}.letter"


@everywhere
def test_sealed_messages_are_delivered_and_collected(address, line_of):
    desks, lines = {"C1": Desk(), "C2": Desk()}, {"C1": line_of("C1"), "C2": line_of("C2")}
    for name, line in lines.items():
        line.listen(desks[name])
    for name, to, letter in (("C1", "C2", b"content" * 200_000), ("C2", "C1", b"content")):
        assert send(lines[name], to, "g0", letter) == "", lines[name].trouble
        assert desks[to].seen == [letter] and lines[name].written_bytes == len(letter)
        assert letters(address, to) == [] and lines[name].trouble == ""


def test_no_sealed_message_is_visible_before_it_is_complete(share, line_of, monkeypatch):
    """A share that writes one byte at a time and then fails leaves nothing for the receiver."""
    desk, sender = Desk(), line_of("C1")
    line_of("C2").listen(desk)
    until(lambda: any(inbox(share, "C2").glob("inbox-*")))
    seen = []

    def fails(fs, path, target, **_):
        seen.extend(letters(share, "C2"))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("file")), "mv", fails)
        said = sender.send("C2", "g0", b"x" * 100, 1.0)
    assert "No space left" in said and "\n" not in said
    assert seen and all(name.startswith(".") for name in seen)
    assert (desk.seen, letters(share, "C2")) == ([], [])
    assert sender.send("C2", "g0", b"x" * 100, 5.0) == "" and desk.seen == [b"x" * 100]


def test_an_incomplete_file_is_left_until_complete_and_refused_if_it_never_is(share, line_of):
    desk = Desk("refused")
    line_of("C2", settled_s=0.5).listen(desk)
    until(lambda: any(inbox(share, "C2").glob("inbox-*")))
    whole, never = b"whole" * 50, b"never" * 50
    for content in (whole, never):
        (inbox(share, "C2") / name_of("C1", "g1", content)).write_bytes(content[:7])
    time.sleep(0.2)
    assert desk.seen == []
    desk.answer = "taken"
    (inbox(share, "C2") / name_of("C1", "g1", whole)).write_bytes(whole)
    until(lambda: desk.seen)
    assert desk.seen == [whole]
    desk.answer = "refused"
    until(lambda: len(desk.seen) > 1)
    until(lambda: letters(share, "C2") == [name_of("C1", "g1", never) + ".refused"])
    assert desk.seen == [whole, never[:7]]


@everywhere
@pytest.mark.parametrize("answer", ["later", "refused"])
def test_an_unverifiable_message_stays_and_a_refused_one_is_sent_again(address, line_of, answer):
    desk, sender = Desk(answer), line_of("C1")
    line_of("C2").listen(desk)
    if answer == "later":
        assert "has not collected it" in sender.send("C2", "x1.0", b"a", 0.2)
        until(lambda: len(desk.seen) > 1)
        assert letters(address, "C2") == [name_of("C1", "x1.0", b"a")]
    else:
        assert send(sender, "C2", "x1.0", b"a") == "site C2 refused it" and letters(address, "C2") == []
    desk.answer = "taken"
    assert send(sender, "C2", "x1.0", b"a") == ""
    assert sender.written_bytes == (2 if answer == "refused" else 1)


def test_a_file_that_is_too_long_is_never_read(share, line_of):
    desk, sender, receiver = Desk(), line_of("C1"), line_of("C2", most_bytes=1000)
    receiver.listen(desk)
    assert sender.send("C2", "g0", b"a" * 1001, 5.0) == "site C2 refused it"
    assert desk.seen == [] and "1001 bytes, at most 1000" in receiver.trouble
    assert sender.send("C2", "g0", b"a" * 1000, 5.0) == ""


def test_a_refusal_that_a_listing_missed_does_not_count_as_collected(share, line_of, monkeypatch):
    """A listing may begin before the refusal is written, and reach the message's path after its removal."""
    line_of("C2").listen(Desk("refused"))
    sender, missed = line_of("C1"), []
    sender.listen(Desk())
    look = sender._outgoing.list_entries

    def misses(*parts):
        there = look(*parts)
        if not missed and any(name.endswith(".refused") for name in there):
            missed.append({name for name in there if name.startswith("C1~")})
            return {name: one for name, one in there.items() if not name.startswith("C1~")}
        return there

    monkeypatch.setattr(sender._outgoing, "list_entries", misses)
    assert sender.send("C2", "g0", b"a", 5.0) == "site C2 refused it" and missed


@everywhere
def test_a_handshake_stays_for_later_sites_and_is_removed_with_its_sender(address, line_of):
    first, second, sender = Desk(), Desk(), line_of("C1")
    assert sender.send("C2", "hello", b"here I am", 5.0) == ""
    for desk in (first, second):
        receiver = line_of("C2")
        receiver.listen(desk)
        until(lambda desk=desk: desk.seen)
        time.sleep(0.1)
        assert desk.seen == [b"here I am"]  # once to each
        assert receiver.waiting() == {"C1"}
        receiver.close()
    sender.close()
    assert letters(address, "C2") == []


def test_a_live_site_sends_signs_of_life_and_a_killed_one_is_not_awaited(share, line_of):
    """The handshake of a killed process stays; the others help it to finish only once its next process runs."""
    dead, alive, looks = (line_of(name, beat_s=0.1) for name in ("C2", "C3", "C1"))
    for line in (dead, alive, looks):
        line.listen(Desk())
    for line in (dead, alive):
        assert line.send("C1", "hello", b"here I am", 5.0) == ""
    until(lambda: alive.list_signs().keys() == set(NAMES) and looks.silence_s("C2") < 1 > looks.silence_s("C3"))
    dead._stop.set()  # its hello and its last sign stay
    until(lambda: looks.silence_s("C2") > 0.5)
    assert looks.silence_s("C3") < 0.5 and looks.waiting() == {"C2", "C3"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "_LEAVING_S", 0.3)
        assert not starting._has_waiting_peer(looks, {"C2"}) and starting._has_waiting_peer(looks, {"C2", "C3"})
    (hello,) = inbox(share, "C1").glob("C3~hello~*")
    hello.unlink()  # another process of C3 gives signs, and says another hello
    until(lambda: looks.silence_s("C3") > 0.5)


def test_files_of_an_earlier_process_are_removed_when_the_next_begins(share, line_of):
    dead = line_of("C1")
    dead.send("C2", "hello", b"1", 0.0)
    dead.send("C2", "g0", b"2", 0.0)
    dead.send("C3", "g0", b"2", 0.0)
    line_of("C3").send("C2", "g0", b"of another", 0.0)
    partial = inbox(share, "C2") / f".{name_of('C1', 'g0', b'2')}.partial"
    partial.write_bytes(b"half")
    (inbox(share, "C2") / f"{name_of('C1', 'g0', b'0')}.refused").touch()
    line_of("C1").send("C2", "hello", b"3", 0.0)
    assert letters(share, "C2") == sorted([name_of("C1", "hello", b"3"), name_of("C3", "g0", b"of another")])
    assert letters(share, "C3") == []


def test_foreign_files_hide_no_sealed_message(share, line_of):
    desk, sender = Desk(), line_of("C1")
    folder = inbox(share, "C2")
    folder.mkdir(parents=True)
    (folder / "Thumbs.db").write_bytes(b"x" * 5000)
    (folder / "x~y~z.letter").write_bytes(b"x")
    (folder / name_of("C1", "g7", b"a folder")).mkdir()
    (folder / name_of("C1", "g8", b"a link")).symlink_to("/etc/passwd")
    (folder / name_of("C1", "g9", b"nowhere")).symlink_to("/nowhere")
    os.mkfifo(folder / name_of("C1", "g6", b"a pipe"))
    line_of("C2").listen(desk)
    assert sender.send("C2", "g0", b"a", 5.0) == "" and desk.seen == [b"a"]


def test_a_temporarily_missing_share_counts_as_having_collected_nothing(share, line_of):
    desk, sender, receiver = Desk("later"), line_of("C1"), line_of("C2")
    receiver.listen(desk)
    sender.send("C2", "g0", b"a", 0.1)
    away = share.with_name("away")
    share.rename(away)
    for _ in range(2):
        assert sender.send("C2", "g0", b"a", 0.1) != ""
        assert "cannot be used" in sender.send("C2", "g1", b"b", 0.1)
    share.mkdir()  # the place where it is mounted
    assert sender.send("C2", "g0", b"a", 0.1) != ""
    shutil.rmtree(share)
    away.rename(share)
    desk.answer = "taken"
    assert sender.send("C2", "g0", b"a", 5.0) == "" and sender.send("C2", "g1", b"b", 5.0) == ""
    assert desk.seen[-2:] == [b"a", b"b"]


def test_sealed_messages_have_the_permissions_of_the_folder(share, line_of):
    """Commands write for their owner only, and the receiver is another user."""
    share.chmod(0o770)
    before = os.umask(0o077)
    try:
        assert "not collected" in line_of("C1").send("C2", "g0", b"a", 0.0)
    finally:
        os.umask(before)
    (letter,) = inbox(share, "C2").glob("*.letter")
    modes = [path.stat().st_mode & 0o777 for path in (letter, *list(letter.parents)[:2])]
    assert modes == [0o660, 0o770, 0o770]


def test_a_replayed_old_handshake_disturbs_no_later_session(identities, line_of):
    """C1 has met a newer process of C2 before C1 begins again."""
    old, new = (MessageSealer(identities["C2"], started_at=time.time() - age) for age in (60, 1))
    attendance = SitePresence(identities["C1"], NAMES[:2])

    def hello(of):
        said = {"certificate": of.identity.certificate, "public": of.public, "time": of.started_at}
        return of.write_handshake({**said, "version": "", "code": "0" * 64, "gone": {}}, "")

    def session(limit_s):
        comm = SecureComm(identities["C1"], NAMES, (0, 1), line_of("C1"), limit_s, presence=attendance)
        comm.close()
        return comm._session

    line = line_of("C2")
    line.send("C1", "hello", hello(new), 1.0)
    first = session(5.0)
    line.close()
    line.send("C1", "hello", hello(old), 1.0)
    with pytest.raises(PeerTimeout):
        session(0.5)
    line.send("C1", "hello", hello(new), 1.0)
    assert session(5.0) == first


def test_a_link_in_the_folder_is_never_written_through(share, line_of, tmp_path):
    secret = tmp_path / "ledger.jsonl"
    secret.write_text("what was spent")
    secret.chmod(0o600)
    line_of("C1").listen(Desk("refused"))
    until(lambda: list(share.rglob("inbox-*")))
    folder, name = inbox(share, "C1"), f"C9~g0~{'0' * 32}.letter"
    (folder / f".{name}.refused.partial").symlink_to(secret)
    (folder / f"{name}.refused").symlink_to(secret)
    (folder / name).write_bytes(b"junk")
    until(lambda: not (folder / name).exists(), 60)
    assert secret.read_text() == "what was spent" and secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("status", "expected"), [(404, FileNotFoundError), (500, RuntimeError)])
def test_a_file_that_is_removed_before_reading_counts_as_gone(status, expected):
    """Its sender may withdraw a handshake after a listing, and webdav4 raises an HTTP error for it."""
    folder = SharedFolder("memory://gone")

    def read(fs, root):
        error = RuntimeError("not found")
        error.response = SimpleNamespace(status_code=status)
        raise error

    with pytest.raises(expected):
        folder.run_action(read)
    assert (folder._connection is not None) == (status == 404)


@pytest.fixture
def stale_handles(monkeypatch):
    """How often NFS shows a file that is a stale handle, by the end of its name; it counts down."""
    left, opened, remove = {}, fsspec_adapter._open_regular_file, LocalFileSystem.rm_file

    def require_fresh(path):
        for end, times in left.items():
            if path.endswith(end) and times:
                left[end] -= 1
                raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(fsspec_adapter, "_open_regular_file", lambda path: (require_fresh(path), opened(path))[1])
    monkeypatch.setattr(LocalFileSystem, "rm_file", lambda fs, path: (require_fresh(path), remove(fs, path))[1])
    return left


def test_a_stale_message_is_read_again_and_counts_as_gone_if_it_stays_stale(share, stale_handles):
    (share / "a").write_bytes(b"old")
    folder, stale_handles["/a"] = SharedFolder(str(share)), 1
    assert folder.read(9, "a") == b"old" and not stale_handles["/a"]
    for action in (partial(folder.read, 9, "a"), partial(folder.remove_file, "a")):
        stale_handles["/a"] = 9
        with pytest.raises(FileNotFoundError, match="Stale"):
            action()


def test_another_failure_of_the_folder_is_reported_unchanged(share, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fsspec_adapter, "_open_regular_file", fail)
    with pytest.raises(OSError, match="Input/output error") as told:
        SharedFolder(str(share)).read(9, "a")
    assert not isinstance(told.value, FileNotFoundError)


def test_a_stale_handshake_hides_no_other_handshake(share, stale_handles):
    names = [name_of(site, "hello", b"hello") for site in ("A", "B")]
    for name in names:
        SharedFolder(str(share)).write(b"hello", FOLDER, "C", name)
    stale_handles[f"/{names[0]}"] = 9
    assert [found.sender for found in list_messages(str(share), TOPIC)] == ["B"]


@pytest.fixture
def ledgers(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
    return tmp_path


@contextmanager
def owner_at(share, do):
    """Let the owner of the share act on every sealed message while it exists; the share may vanish meanwhile."""
    stop, done = threading.Event(), set()

    def meddle():
        while not stop.is_set():
            with suppress(OSError):  # the share is away
                for path in share.rglob("*.letter"):
                    with suppress(OSError):
                        if path.name not in done and not path.name.startswith(".") and do(path):
                            done.add(path.name)
            time.sleep(0.001)

    owner = threading.Thread(target=meddle, daemon=True)
    owner.start()
    try:
        yield
    finally:
        stop.set()
        owner.join()


@pytest.mark.parametrize("what", ["alters", "deletes", "replays", "forges", *nightly("cuts")])
def test_tampering_by_the_owner_of_the_share_is_detected(identities, ledgers, share, line_of, what):
    """Under any tampering all sites have the right values, or report that a site timed out."""
    kept = {}
    stranger = Federation().identity("C1")

    def do(path):
        place = path.name.split("~")[1]
        if place == "hello" and what != "replays":
            return True
        content = path.read_bytes()
        if what == "alters":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        elif what == "cuts":
            path.write_bytes(content[: len(content) // 2])
        elif what == "deletes" and place == "x2.0":
            path.unlink()
        elif what == "replays":
            kept[path.parent, path.name] = content
            for (folder, name), old in list(kept.items()):
                if not (folder / name).exists():
                    (folder / name).write_bytes(old)
        elif what == "forges":
            forged = content.replace(b'"sender": "C1"', b'"sender": "C3"') + stranger.sign(content)
            (path.parent / name_of("C3", place, forged)).write_bytes(forged)
        return True

    limit_s = 3.0 if what == "deletes" else 30.0
    with owner_at(share, do):
        found = together(identities, rounds_of(ledgers), lines={n: line_of(n) for n in NAMES}, timeout_s=limit_s)
    if what != "deletes":  # what was spoilt once is written again
        right(found)
        return
    failed = [one for one in found.values() if isinstance(one, Exception)]
    assert failed and all(isinstance(one, ReportableError) and "\n" not in str(one) for one in failed), found


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A group of which two were killed and one was called again, and what the owner of the share can read."""
    root = tmp_path_factory.mktemp("hospitals")
    bed = Bed(root, 3, folder=str(root / "share"))
    bed.sign("proxyfl", *BASE)
    bed.jobs[0]["calls"] = 3
    bed.jobs[1]["kill"] = {"where": "_exchange_round", "round": 2}
    bed.jobs[2]["kill"] = {"where": "_train_round", "round": 3}
    seen = {}
    with owner_at(bed.share, partial(note, seen)):
        bed.work()
    return bed, seen


def note(seen, path):
    """Record what the owner of a share can read."""
    seen[path.name] = path.read_bytes()
    return True


def test_the_owner_of_the_share_can_read_no_name_of_a_patient_or_a_slide(killed):
    _, seen = killed
    assert len(seen) > 50 and sum(map(len, seen.values())) > 1e5
    everything = b"".join(seen.values()) + " ".join(seen).encode()
    assert b"S0" in everything and b'"digest"' in everything
    for secret in (b"_patient_", b"_slide_", b"slide", b"epsilon", b"settings", b"shape", b"runs/"):
        assert secret not in everything
    assert all(FILE.fullmatch(name) for name in seen), sorted(seen)[:3]


@pytest.mark.slow
def test_a_site_that_was_killed_after_its_last_message_is_helped_to_finish(tmp_path):
    """The others already had their summaries, and are started again."""
    bed = Bed(tmp_path, 3, folder=str(tmp_path / "share"))
    bed.sign("cwt", *BASE, "train.rounds=1")
    bed.jobs[2]["kill"] = {"where": "build_summary", "round": 0}
    for job in bed.jobs[:2]:
        job |= {"until": str(bed.root / SITES[2] / "result.json"), "leaving_s": 0.5}
    bed.work()
    assert [(bed.root / site / "killed").exists() for site in SITES] == [False, False, True]
    for site in SITES:
        assert bed.result(site)["lost"] == []
        (charge,) = charged(bed.study(site), site)
        assert charge[0] == 1 and (bed.run(site) / "summary.json").exists()


def test_killed_and_restarted_hospitals_have_the_models_of_one_process_and_are_charged_once(killed):
    bed, _ = killed
    assert [(bed.root / site / "killed").exists() for site in SITES] == [False, True, True]
    expected = {row["site"]: row["epsilon"] for row in bed.require_the_same("proxyfl", *BASE)["sites"]}
    for site in SITES:
        assert {row["site"]: row["epsilon"] for row in bed.result(site)["sites"]} == expected


def test_a_finished_plan_does_not_run_again(killed, monkeypatch):
    bed, _ = killed  # whose first hospital was called three times
    monkeypatch.setattr(starting, "take_part", lambda *_, **__: pytest.fail("it runs again"))
    for site in SITES:
        bed.run(site)  # one
        assert take_part_by_folder(bed.study(site), bed.kit(site)) == bed.result(site)
        refused(lambda s=site: take_part_by_folder(bed.study(s), bed.kit(s), without=["X"]), "unknown site 'X'")


def has(*runs):
    return {"runs": [{"identity": identity * 32, "rounds": rounds, "lost": []} for identity, rounds in runs]}


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (has(), has(), ""),
        (has(("a", 0)), has(), ""),
        (has(("a", 0)), has(("b", 0)), ""),
        (has(("a", 0)), has(("a", 0)), "a"),
        (has(("a", 3)), has(("a", 2)), "a"),
        (has(("a", 3), ("b", 0)), has(("a", 3)), "a"),
        (has(("a", 3), ("b", 0)), has(("a", 3), ("b", 0)), "a"),
        (has(("a", 3), ("b", 1)), has(("a", 3), ("b", 0)), "b"),
    ],
)
def test_sites_resume_the_last_run_that_all_have(first, second, chosen):
    assert choose_run({"C1": first, "C2": second}) == chosen * 32
    assert choose_run({"C1": second, "C2": first}) == chosen * 32


@pytest.mark.parametrize(("first", "second"), [(has(("a", 2)), has()), (has(("b", 0)), has(("a", 1)))])
def test_no_new_run_is_charged_silently_next_to_one_with_rounds(first, second):
    words = ("has not; put its folder back into runs/", "spends its ε once more")
    refused(lambda: choose_run({"C1": first, "C2": second}), *words, error=ReportableError)


@pytest.fixture
def agreed_plan(tmp_path):
    """A study of two sites, their plan, and the status of a run of it."""
    study = make_study(tmp_path / "study", n_sites=2)
    plan = make_plan(study, method="proxyfl", out=tmp_path / "plan.json")
    return study, plan, RunContext.create(study, plan.pipeline(), "proxyfl")


def test_a_run_without_rounds_that_only_one_site_has_is_abandoned(agreed_plan):
    """The other site was killed before its folder was created."""
    study, plan, party = agreed_plan

    def told(identity, *runs):
        offered = {"number": 1, "name": "proxyfl-small", "identity": identity * 32}
        return Told({"runs": list(runs)}, offered, {"claimed": True})

    asked = RunRequest(plan.name, resumes_last=True, agreement=plan.digest)
    first = select_run(party, asked, told("1"))
    second = select_run(party, asked, told("2"))
    assert first.name == second.name and [p.name for p in study.runs_path.glob("0*")] == [second.name]
    assert second.agreement_digest == plan.digest
    both = {"identity": second.id, "rounds": 0, "lost": []}
    assert select_run(party, asked, told("3", both)).id == second.id
    lacking = replace(asked, without=["S0"])
    refused(lambda: select_run(party, lacking, told("4")), "begins with all its sites", error=ReportableError)


def test_a_site_with_local_rounds_begins_no_other_run_on_the_claim_of_a_peer(agreed_plan):
    """A false claim of an unknown continued run would make the site spend again."""
    _, plan, party = agreed_plan
    offered = {"number": 1, "name": "proxyfl-small", "identity": "1" * 32}
    asked = RunRequest(plan.name, resumes_last=True, agreement=plan.digest, approved="monday")
    mine = select_run(party, asked, Told({"runs": []}, offered, {"claimed": True}))
    state = mine.site_folder("S1").path / "state"
    state.mkdir(parents=True)
    (state / "round_00001.safetensors").touch()
    own, lie = {"identity": mine.id, "rounds": 1, "lost": []}, {"identity": "9" * 32, "rounds": 5}
    told, words = {"runs": [own, lie | {"lost": ["S1"]}]}, "S1 has another run of this plan than the others"
    refused(lambda: select_run(party, asked, Told(told)), words, error=ReportableError)
    again = replace(asked, approved="tuesday")  # by its people
    assert select_run(party, again, Told(told)).id == lie["identity"]


def test_two_processes_of_a_study_cannot_take_part_at_once(tmp_path):
    bed = Bed(tmp_path, 2, folder=str(tmp_path / "share"))
    bed.sign("proxyfl", *BASE)
    study, kit = bed.study("S0"), bed.kit("S0")
    with file_lock(study.root / "federation" / ".S0.lock"):
        words = "another process of this study takes part"
        refused(lambda: take_part_by_folder(study, kit), words, error=WsiFlError)
    unknown = Kit(kit.path, {**kit.document, "folder": None})
    refused(lambda: take_part_by_folder(study, unknown), "names no folder")
    refused(lambda: take_part_by_folder(study, kit, without=["X"]), "unknown site 'X'")
    path = study.root / "federation" / "plan.json"
    path.write_text(path.read_text().replace("wsi_fl", "wsi_fi"))
    refused(lambda: take_part_by_folder(study, kit), "signed another plan")
