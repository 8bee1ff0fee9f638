"""Hospitals that exchange sealed messages as files in a folder: the transport, and the resulting models."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import prototype_package
import pytest
from conftest import Told, make_study, nightly, refused, write_features, write_store
from federation_fixtures import NAMES, Federation
from safetensors.numpy import load_file
from test_oneshot import HEADS, rows_of
from test_sealed_messages import right, rounds_of, together

from wsi_fl.federation.comm import PeerTimeout
from wsi_fl.hospitals.plans.installed_code import code_digest
from wsi_fl.hospitals.plans.signed_plan import FORMAT, VERSION, FederationPlan, record_approval
from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.transports.presence import SitePresence
from wsi_fl.hospitals.transports.secure_comm import ReportableError, SecureComm
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work.start import take_part_by_folder
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.resume import RunRequest, choose_run, select_run
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import file_lock, read_lines
from wsi_fl.types import UNLABELLED, WsiFlError

pytestmark = pytest.mark.end_to_end

TOPIC = "ab" * 32
FILE = re.compile(r"S\d~(hello|end|g\d+|x\d+\.\d)~[0-9a-f]{32}\.letter")
PAUSES = {"pauses_s": (0.01, 0.1), "settled_s": 0.2}


@pytest.fixture
def share(tmp_path):
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@pytest.fixture
def line_of(share):
    """Build ends of the transport, and close them after the test."""
    made = []

    def make(name, address=None, **options):
        made.append(FolderTransport(str(address or share), name, TOPIC, **(PAUSES | options)))
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


def until(true, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def inbox(share, name):
    return share / f"wsi-fl-{TOPIC[:16]}" / name


def letters(share, name):
    folder = inbox(share, name)
    return sorted(p.name for p in folder.iterdir() if "inbox-" not in p.name) if folder.is_dir() else []


def name_of(sender, place, content):
    return f"{sender}~{place}~{hashlib.sha256(content).hexdigest()[:32]}.letter"


@pytest.mark.parametrize("where", ["a folder", "an object store"])
def test_a_sealed_message_is_delivered_and_collected(share, line_of, where):
    address = None if where == "a folder" else f"memory://{share.name}-{random.random()}"
    desk, sender, receiver = Desk(), line_of("C1", address), line_of("C2", address)
    receiver.listen(desk)
    sender.listen(Desk())
    assert sender.send("C2", "g0", b"content" * 1000, 5.0) == ""
    assert desk.seen == [b"content" * 1000] and sender.written_bytes == 7000
    fs, root = fsspec.core.url_to_fs(address or str(share))
    assert [path for path in fs.find(root) if "/inbox-" not in path and "/_alive/" not in path] == []


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


@pytest.mark.parametrize("answer", ["later", "refused"])
def test_an_unverifiable_message_stays_and_a_refused_one_is_sent_again(share, line_of, answer):
    desk, sender = Desk(answer), line_of("C1")
    line_of("C2").listen(desk)
    said = sender.send("C2", "x1.0", b"a", 5.0 if answer == "refused" else 0.2)
    if answer == "later":
        assert "has not collected it" in said and len(desk.seen) > 1
        assert letters(share, "C2") == [name_of("C1", "x1.0", b"a")]
    else:
        assert said == "site C2 refused it" and letters(share, "C2") == []
    desk.answer = "taken"
    assert sender.send("C2", "x1.0", b"a", 5.0) == ""
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


def test_a_handshake_stays_for_later_sites_and_is_removed_with_its_sender(share, line_of):
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
    assert letters(share, "C2") == []


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


@pytest.fixture
def ledgers(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
    return tmp_path


def meddling(share, do, stop):
    """Let the owner of the share act on every file while it exists."""
    done = set()
    while not stop.is_set():
        for path in share.rglob("*.letter"):
            if path.name not in done and not path.name.startswith("."):
                try:
                    if do(path):
                        done.add(path.name)
                except OSError:
                    continue
        time.sleep(0.001)


@pytest.mark.parametrize("what", ["alters", "deletes", "replays", "forges", *nightly("cuts")])
def test_tampering_by_the_owner_of_the_share_is_detected(identities, ledgers, share, line_of, what):
    """Under any tampering all sites have the right values, or report that a site timed out."""
    kept, stop = {}, threading.Event()
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
    owner = threading.Thread(target=meddling, args=(share, do, stop), daemon=True)
    owner.start()
    found = together(identities, rounds_of(ledgers), lines={n: line_of(n) for n in NAMES}, timeout_s=limit_s)
    stop.set()
    owner.join()
    if what != "deletes":  # what was spoilt once is written again
        right(found)
        return
    failed = [one for one in found.values() if isinstance(one, Exception)]
    assert failed and all(isinstance(one, ReportableError) and "\n" not in str(one) for one in failed), found


SITES, EXTRA = ("S0", "S1", "S2"), "[replay]\nbuffer = 10\n"
BASE = ["train.rounds=3", "privacy.insecure_seed=5", "privacy.sigma=4", "comm.timeout_s=150"]
OTHERS = {
    "fedavg": BASE,
    "cwt": BASE,
    "replay": [BASE[0], "privacy.enabled=false", BASE[3]],
    "oneshot": [*HEADS, *BASE[1:]],
}
REAL = 'real = true\nmax_epsilon = 5000.0\ndelta = 1e-5\nallow = ["model", "buffer", "generator", "shared"]'


def furnish(study, method, site, k):
    """Write the local files of a site."""
    if method == "prototypes":
        prototype_package.furnish(study, site, k)
        return
    if method == "oneshot":
        x, labels = rows_of(40, k, (0.0, 1.0, 0.5)[k])
        splits = ["train"] * 30 + ["test"] * 10
        write_features(study, site, x, labels, [f"p{i // 3}" for i in range(40)], splits)
        return
    write_store(study, site, seed=k)
    if method == "replay":
        from test_replay import plant

        plant(study, site, seed=k)


def plan_of(study, method, overrides, sites=SITES, name="small"):
    pipeline = study.load_pipeline(name, overrides)
    settings = dump_toml(pipeline.model_copy(update={"sites": list(sites)}), "# of a test")
    said = {"format": FORMAT, "version": VERSION, "pipeline": name, "method": method, "settings": settings}
    said |= {"sites": [{"name": site} for site in sites], "wsi_fl": "test", "code": code_digest(method)}
    return FederationPlan(json.dumps(said | {"most_bytes": 1 << 24}))


class Group:
    """Hospitals of one plan, each with a study and a store, and a share next to their folders."""

    def __init__(self, root, method, overrides, federation, *, sites=SITES):
        self.root, self.method, self.overrides, self.share = root, method, overrides, root.parent / "share"
        self.jobs = []
        self.share.mkdir(exist_ok=True)
        for k, site in enumerate(sites):
            study = make_study(root / site, n_sites=0, extra=EXTRA)
            for one in sites:
                (study.root / "sites" / f"{one}.toml").write_text(f'name = "{one}"\n{REAL}\n')
            furnish(study, method, site, k)
            identity = federation.identity(site)
            record_approval(study, plan_of(study, method, overrides, sites), identity)
            kit = federation.kit(root / f"kit-{site}", site, identity, folder=str(self.share))
            self.jobs.append({"study": str(study.root), "kit": str(kit)})

    def study(self, site):
        return Study(self.root / site)

    def expected(self):
        """The run of one process that has everything."""
        study = make_study(self.root / "one", n_sites=0, extra=EXTRA)
        for k, site in enumerate(SITES):
            said = f'name = "{site}"\nreal = false\ndelta = 1e-5\n'
            (study.root / "sites" / f"{site}.toml").write_text(said)
            furnish(study, self.method, site, k)
        train(study, method=self.method, overrides=[*self.overrides, f"sites={list(SITES)}"], backend="local")
        return study

    def result(self, site):
        document = json.loads((self.root / site / "result.json").read_text())
        log = (self.root / site / "stderr.txt").read_text()
        assert "error" not in document, (document, log[-3000:])
        return document["summary"]

    def run(self, site):
        """The folder of a site's only run of the plan."""
        (path,) = (self.root / site / "runs").glob("0*")
        return path


def models(run, site):
    """SHA-256 of a site's models in a run."""
    files = [run / "sites" / site / f"{role}.safetensors" for role in ("private", "proxy", "shared")]
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.exists()}
    assert found
    return found


def charged(study, site):
    """(round, mechanism) of all charges on a ledger, in order."""
    return [(line["round"], line["mechanism"]) for line in read_lines(study.ledger_path(site)) if line.get("mechanism")]


def start(root, groups):
    (root / "jobs.json").write_text(json.dumps([group.jobs for group in groups]))
    script = Path(__file__).parents[1] / "folder_hospitals.py"
    command = [sys.executable, str(script), str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


@pytest.fixture(scope="module")
def killed(tmp_path_factory, federation):
    """A group of which two were killed and one was called again, and what the owner of the share can read."""
    root = tmp_path_factory.mktemp("hospitals")
    group = Group(root / "killed", "proxyfl", BASE, federation)
    group.jobs[0]["calls"] = 3
    group.jobs[1]["kill"] = {"where": "_exchange_round", "round": 2}
    group.jobs[2]["kill"] = {"where": "_train_round", "round": 3}
    seen, stop = {}, threading.Event()
    owner = threading.Thread(target=meddling, args=(root / "share", partial(note, seen), stop), daemon=True)
    owner.start()
    start(root, [group])
    stop.set()
    owner.join()
    return group, seen


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
def test_a_site_that_was_killed_after_its_last_message_is_helped_to_finish(tmp_path, federation):
    """The others already had their summaries, and are started again."""
    group = Group(tmp_path / "late", "cwt", [*BASE, "train.rounds=1"], federation)
    group.jobs[2]["kill"] = {"where": "build_summary", "round": 0}
    for job in group.jobs[:2]:
        job |= {"until": str(group.root / SITES[2] / "result.json"), "leaving_s": 0.5}
    start(tmp_path, [group])
    assert [(group.root / site / "killed").exists() for site in SITES] == [False, False, True]
    for site in SITES:
        assert group.result(site)["lost"] == []
        (charge,) = charged(group.study(site), site)
        assert charge[0] == 1 and (group.run(site) / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_every_method_over_a_folder_trains_the_models_of_one_process(tmp_path, federation, method):
    group = Group(tmp_path / method, method, OTHERS[method], federation)
    start(tmp_path, [group])
    require_the_same(group)


def test_a_payload_of_another_package_over_a_folder_gives_the_models_of_one_process(tmp_path, federation):
    with prototype_package.package_installed(tmp_path / "site-packages"):
        group = Group(tmp_path / "prototypes", "prototypes", prototype_package.SETTINGS, federation)
        start(tmp_path, [group])
        require_the_same(group)


@pytest.mark.slow
def test_an_inference_only_site_receives_over_a_folder_and_pays_nothing(tmp_path, federation):
    group = Group(tmp_path / "listening", "oneshot", OTHERS["oneshot"], federation)
    *givers, listener = SITES
    for site in SITES:
        file = group.study(site).root / "sites" / f"{listener}.toml"
        file.write_text(f'name = "{listener}"\nreal = true\nrole = "receiver"\n')
    x, _ = rows_of(40, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conftest.CLASSES", UNLABELLED)
        said = np.zeros(40, int), [f"p{k}" for k in range(40)], ["train"] * 40
        write_features(group.study(listener), listener, x, *said)
    start(tmp_path, [group])
    heads = {site: load_file(group.run(site) / "sites" / site / "shared.safetensors") for site in SITES}
    for site in SITES:
        assert group.result(site)["inference_sites"] == [listener]
        assert np.array_equal(heads[site]["sums"], heads[listener]["sums"]) and heads[site]["n_sites"] == 2
    assert not heads[listener]["released"].any() and not group.study(listener).ledger_path(listener).exists()
    assert all(len(charged(group.study(site), site)) == 1 for site in givers)


@pytest.mark.slow
def test_released_class_statistics_are_synced_over_a_folder_at_no_charge(tmp_path, federation):
    """One hospital is killed after it has received them, and resumes with them."""
    settings = [*HEADS, "privacy.sigma=2.0", "train.from_released=true"]
    group = Group(tmp_path / "letters", "oneshot", settings, federation)
    for site in SITES:
        release_statistics(group.study(site), site=site, overrides=settings)
    group.jobs[1]["kill"] = {"where": "_train_sites", "round": 0}
    start(tmp_path, [group])
    for site in SITES:
        study, run = group.study(site), group.run(site)
        assert list(group.result(site)["statistics"]) == list(SITES)
        for one in SITES:
            assert study.release_path(one).read_bytes() == group.study(one).release_path(one).read_bytes()
        by_files = train(study, method="oneshot", overrides=settings, backend="local")
        assert models(study.root / by_files["run"], site) == models(run, site)
        assert len(charged(study, site)) == 1


def require_the_same(group):
    study = group.expected()
    (run,) = study.runs_path.glob("0*")
    for site in SITES:
        group.result(site)
        assert models(group.run(site), site) == models(run, site)
        assert charged(group.study(site), site) == charged(study, site)
    return run


def test_killed_and_restarted_hospitals_have_the_models_of_one_process_and_are_charged_once(killed):
    group, _ = killed
    assert [(group.root / site / "killed").exists() for site in SITES] == [False, True, True]
    run = require_the_same(group)
    expected = {row["site"]: row["epsilon"] for row in json.loads((run / "summary.json").read_text())["sites"]}
    for site in SITES:
        assert {row["site"]: row["epsilon"] for row in group.result(site)["sites"]} == expected


def test_a_finished_plan_does_not_run_again(killed, monkeypatch):
    group, _ = killed  # whose first hospital was called three times
    monkeypatch.setattr(starting, "take_part", lambda *_, **__: pytest.fail("it runs again"))
    for site in SITES:
        group.run(site)  # one
        assert take_part_by_folder(group.study(site), Kit.open(group.root / f"kit-{site}")) == group.result(site)


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
    plan = plan_of(study, "proxyfl", ["sites=['S0', 'S1']"], ["S0", "S1"])
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


def test_two_processes_of_a_study_cannot_take_part_at_once(tmp_path, federation):
    group = Group(tmp_path / "two", "proxyfl", BASE, federation)
    study, kit = group.study("S0"), Kit.open(group.root / "kit-S0")
    with file_lock(study.root / "federation" / ".S0.lock"):
        words = "another process of this study takes part"
        refused(lambda: take_part_by_folder(study, kit), words, error=WsiFlError)
    unknown = Kit(kit.path, {**kit.document, "folder": None})
    refused(lambda: take_part_by_folder(study, unknown), "names no folder")
    refused(lambda: take_part_by_folder(study, kit, without=["X"]), "unknown site 'X'")
    path = study.root / "federation" / "plan.json"
    path.write_text(path.read_text().replace("wsi_fl", "wsi_fi"))
    refused(lambda: take_part_by_folder(study, kit), "signed another plan")


@pytest.mark.slow
def test_generators_are_sent_over_a_folder_as_in_one_process(tmp_path, federation):
    """Method mpcpa: denoisers up, packages down, classifiers up."""
    import test_mpcpa

    group = Group(tmp_path / "none", "mpcpa", [], federation, sites=())
    group.root, study, sites = tmp_path, test_mpcpa.make_study(tmp_path / "one"), ("S1", "S2", "S3")
    for site in sites:
        folder = tmp_path / site
        shutil.copytree(study.root, folder, ignore=shutil.ignore_patterns("stores", "data.npz"))
        shutil.copytree(study.root / "stores" / site, folder / "stores" / site)
        for one in sites:
            file = folder / "sites" / f"{one}.toml"
            file.write_text(file.read_text().replace("real = false", REAL))
        plan = plan_of(Study(folder), "mpcpa", [], sites, "mpcpa_tiny")
        identity = federation.identity(site)
        record_approval(Study(folder), plan, identity)
        kit = federation.kit(tmp_path / f"kit-{site}", site, identity, folder=str(group.share))
        group.jobs.append({"study": str(folder), "kit": str(kit)})
    start(tmp_path, [group])
    summary = train(study, method="mpcpa", backend="local")
    for site in sites:
        assert group.result(site)["communication"]["messages"] == 3 * 3
        assert models(group.run(site), site) == models(study.root / summary["run"], site)
