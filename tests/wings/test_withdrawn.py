"""Certificates that are withdrawn and renewed: a signed, numbered list that every party checks, and keys that vouch."""

import json
import shutil
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
from conftest import refused
from typer.testing import CliRunner
from wires import Wire

from wsi_fl.cli.main import app
from wsi_fl.hospitals.lines.relayed import Attendance, RelayedComm, SiteReturned, SitesGone
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.plans.signed import Plan, approvals, approve, check_key, check_withdrawn
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust import kit as kits
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    NotTrusted,
    fingerprint,
    longer_list,
    verified,
    withdrawn,
)
from wsi_fl.hospitals.trust.kit import LIST, ROOT, Kit, look, refuse_withdrawn
from wsi_fl.hospitals.trust.making import approve_request, approved_lines, join, provision, renew, request
from wsi_fl.hospitals.trust.root import Root, exchange_list, revoke, take_list
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work import taking_part
from wsi_fl.hospitals.work.start import take_part_by_folder
from wsi_fl.hospitals.work.submit import check
from wsi_fl.hospitals.work.taking_part import Seen
from wsi_fl.stages.work.console import Silent
from wsi_fl.study.folder import Study
from wsi_fl.types import Interrupted, KnownToAll, NoCommonPlan, WsiFlError


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Two federations of C1 and C2, joined by a folder each."""
    folder = tmp_path_factory.mktemp("federations")
    for name in ("one", "two"):
        provision(folder / name, federation=name, shared_folder="SHARE", sites=["C1", "C2"])
    return folder


@pytest.fixture
def place(template, tmp_path):
    shutil.copytree(template, tmp_path / "all")
    for name in ("one", "two"):
        (tmp_path / "all" / name / "share").mkdir()
        for file in (tmp_path / "all" / name).glob("*/federation.json"):
            share = tmp_path / "all" / name / "share"
            file.write_text(file.read_text().replace("SHARE", str(share)))
    return tmp_path / "all"


def kit(place, name, federation="one"):
    return Kit.open(place / federation / name)


def command(*arguments):
    return CliRunner().invoke(app, ["federation", *map(str, arguments), "--json"])


def test_a_withdrawn_certificate_is_refused_wherever_one_is_verified(place):
    identity = kit(place, "C1").identity()
    said = json.loads(command("revoke", "C1", "--kit", place / "one").stdout)
    trusted = kit(place, "coordinator").identity().root
    assert (said["number"], withdrawn(trusted).number) == (1, 1)
    refused(lambda: verified(identity.certificate, trusted), "of C1 was withdrawn on", error=NotTrusted)
    assert verified(kit(place, "C2").identity().certificate, trusted).name == "C2"
    assert json.loads(command("join", said["file"], "--kit", place / "one" / "C1").stdout)["newer"]
    refused(lambda: kit(place, "C1").identity(), "cannot be used", "was withdrawn on", "needs a new key")
    assert [step.ok for step in look(kit(place, "C1"))] == [False]
    refused(lambda: revoke("C1", place / "one"), "no certificate that could be withdrawn")
    refused(lambda: revoke("C7", place / "one"), "C7 has no certificate")


def test_every_certificate_of_a_key_is_withdrawn_also_one_of_an_earlier_version(place):
    first = kit(place, "C1").identity().certificate
    approve_request(place / "one" / "C1" / "request-C1.json", place / "one")
    join(place / "one" / "C1" / "certificate-C1.json", place / "one" / "C1")
    second = kit(place, "C1").identity().certificate
    issued = place / "one" / "root" / "issued.jsonl"
    lines = [json.loads(line) for line in issued.read_text().splitlines()]
    number = verified(second, Root.open(place / "one").trusted).number
    kept = [line for line in lines if line.get("serial") != f"{number:x}"]
    issued.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    revoke("C1", place / "one")
    for one in (first, second):
        refused(lambda c=one: verified(c, Root.open(place / "one").trusted), "withdrawn", error=NotTrusted)
    for line in kept:
        line.pop("serial")
    issued.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    revoke("C2", place / "one")
    refused(
        lambda: verified(kit(place, "C2").identity().certificate, Root.open(place / "one").trusted),
        "C2 was withdrawn",
        error=NotTrusted,
    )


def test_the_key_of_the_root_is_needed_to_withdraw_and_not_to_plan(place):
    (place / "one" / "root" / "root.key").unlink()
    assert {"C1", "C2"} <= set(Root.open(place / "one").keys())
    refused(lambda: revoke("C1", place / "one"), "put the root's key back")


def test_lists_that_the_root_did_not_sign_are_refused(place):
    theirs = Path(revoke("C1", place / "two")["file"]).read_text()
    ours = Path(revoke("C2", place / "one")["file"]).read_text()
    edited = ours.splitlines()
    edited[3] = edited[3][:10] + ("A" if edited[3][10] != "A" else "B") + edited[3][11:]
    file = place / "list.pem"
    for text in (theirs, "\n".join(edited), ours[:-60], "-----BEGIN X509 CRL-----\n-----END X509 CRL-----\n"):
        file.write_text(text)
        refused(
            lambda: take_list(file, place / "one" / "C1"),
            "not signed by this federation's root",
            "left as it",
        )
        assert kit(place, "C1").withdrawn().number == 0
    (place / "one" / "C1" / "startup" / LIST).write_text(theirs)
    refused(lambda: kit(place, "C1").identity(), "cannot be used", "not signed by this federation's root")


def test_an_older_list_takes_the_place_of_no_newer_one(place):
    first = Path(revoke("C1", place / "one")["file"]).read_text()
    second = Path(revoke("C2", place / "one")["file"]).read_text()
    one = kit(place, "coordinator")
    assert one.withdrawn().number == 2 and set(withdrawn(Root.open(place / "one").trusted).keys) == {
        fingerprint(kit(place, name).identity().certificate) for name in ("C1", "C2")
    }
    assert [one.take(first), one.take(second), one.withdrawn().text == second] == [False, False, True]


def test_nothing_but_the_list_is_kept_of_what_came_with_it(place):
    text = Path(revoke("C2", place / "one")["file"]).read_text()
    evil = (place / "two" / "root" / ROOT).read_text()
    assert kit(place, "C1").take(f"{text}\n{evil}")
    assert "CERTIFICATE" not in (place / "one" / "C1" / "startup" / LIST).read_text()
    assert kit(place, "coordinator").take(f"{evil}\n{text}") is False


def test_the_list_goes_round_by_the_folder(place):
    laid = place / "one" / "share" / LIST
    assert exchange_list(kit(place, "C1"), str(laid.parent)) == ""
    revoke("C2", place / "one")
    newest = laid.read_text()
    assert "was taken from the folder" in exchange_list(kit(place, "C1"), str(laid.parent))
    assert exchange_list(kit(place, "C1"), str(laid.parent)) == ""
    laid.write_text(
        Path(revoke("C1", place / "two")["file"]).read_text()
    )  # whoever can write there lays another
    assert "was laid into the folder" in exchange_list(kit(place, "C1"), str(laid.parent))
    laid.unlink()
    assert "was laid into the folder" in exchange_list(kit(place, "C1"), str(laid.parent))
    assert laid.read_text() == newest
    laid.unlink()
    laid.symlink_to(place / "one" / "C1" / "federation.json")
    exchange_list(kit(place, "C1"), str(laid.parent))
    assert laid.read_text() == newest and kit(place, "C1").name == "C1"
    assert "was not asked" in exchange_list(kit(place, "C1"), str(place / "nowhere"))


def test_check_over_a_folder_uses_it_and_takes_its_list(place):
    kits_, share = place / "one", place / "one" / "share"

    def steps(name, *more):
        return [
            (one["what"], one["ok"], one["said"])
            for one in json.loads(command("check", kits_ / name, *more).stdout)["steps"]
        ]

    (share / "wsi-fl-1").mkdir()
    (share / "wsi-fl-1" / "a.letter").write_text("x")
    before = sorted(share.rglob("*"))
    certificate, folder = steps("C1")
    assert certificate[:2] == ("certificate", True) and folder[:2] == ("folder", True)
    assert sorted(share.rglob("*")) == before
    share.rename(place / "away")
    assert steps("C1")[1] == (
        "folder",
        False,
        f"{share}: no such folder; mount the share, or correct the address",
    )
    assert command("check", kits_ / "C1").exit_code == 1
    assert [one[1] for one in steps("C1", "--folder", place / "away")] == [True, True]
    (place / "away").rename(share)
    revoke("C2", kits_)
    assert "a newer list of withdrawn certificates was taken" in steps("C1")[1][2]
    ((what, ok, said),) = steps("C2")
    assert (what, ok) == ("certificate", False) and "of C2 was withdrawn on" in said


@pytest.mark.parametrize("cannot", ["write", "read", "remove"])
def test_check_fails_where_a_folder_cannot_be_used(place, monkeypatch, cannot):
    def denied(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Share, cannot, denied)
    document = check(kit(place, "C1"))
    assert not document["ok"]
    assert "the folder cannot be used" in document["steps"][1]["said"]
    assert not list((place / "one" / "share").glob("check-*")) or cannot == "remove"


@pytest.fixture(scope="module")
def processes():
    pytest.importorskip("nvflare")
    from wsi_fl.hospitals.flare import processes

    return processes


def test_start_takes_the_list_from_the_folder_before_anything_else(place, capfd, monkeypatch):
    study = Study(place)
    monkeypatch.setattr(kits, "SOON_DAYS", 1000)
    revoke("C2", place / "one")
    refused(lambda: take_part_by_folder(study, kit(place, "C1")), "C1 has approved no plan")
    said = capfd.readouterr().err
    assert "a newer list of withdrawn certificates was taken from the folder" in said
    assert "the certificate of C1 ends in 729 days" in said
    refused(lambda: take_part_by_folder(study, kit(place, "C2")), "of C2 was withdrawn on", "needs a new key")


@pytest.fixture(scope="module")
def roles(processes):
    from wsi_fl.hospitals.flare import roles

    return roles


def test_all_who_begin_again_over_a_folder_know_the_newest_list(place, monkeypatch):
    trusted, mine = [], kit(place, "C1")
    plan = SimpleNamespace(
        digest="0" * 64,
        sites=["C1", "C2"],
        pipeline=lambda: SimpleNamespace(train=SimpleNamespace(at_least=2)),
    )

    def part(_, identity, *args, **given):
        trusted.append(withdrawn(identity.root).number)
        if len(trusted) == 1:
            revoke("C2", place / "one")  # it lies in the folder now
            raise SiteReturned("site C2 began anew")
        return {}

    monkeypatch.setattr(starting, "take_part", part)
    line, study = SimpleNamespace(close=lambda: None, waiting=set), Study(place / "study")
    assert starting._until_done(study, mine, plan, line, mine.folder, ()) == {}
    assert trusted == [0, 1]


def test_a_job_brings_the_list_and_no_forged_one(place, roles, monkeypatch):
    monkeypatch.setenv(roles.STUDY, str(place))
    monkeypatch.setenv(roles.KIT, str(place / "one" / "C1"))

    def do(text):
        job = {"what": "check", "plan": "0" * 64, "withdrawn": text}
        return roles.Hospital()._do(job)

    ours, theirs = (Path(revoke("C2", place / name)["file"]).read_text() for name in ("one", "two"))
    refused(lambda: do(theirs), "not signed by this federation's root", error=NotTrusted)
    refused(lambda: do(""), "approved no plan", error=KnownToAll)
    refused(lambda: do(ours), "approved no plan", error=KnownToAll)
    assert kit(place, "C1").withdrawn().text == ours
    revoke("C1", place / "one")
    refused(lambda: do((place / "one" / "root" / LIST).read_text()), "of C1 was withdrawn")


def test_the_coordinator_is_told_before_anybody_is_asked(place):
    keys = {name: fingerprint(kit(place, name).identity().certificate) for name in ("C1", "C2")}
    plan = Plan(json.dumps({"sites": [{"name": name, "key": key} for name, key in keys.items()]}))
    revoke("C2", place / "one")
    asking = partial(submitting._run, kit(place, "coordinator"), plan, plan.sites, {}, Silent())
    refused(asking, "a key of C2 that was withdrawn")


@pytest.fixture(scope="module")
def people(federation):
    """C1, C2, and C2 with another key."""
    return [federation.identity(name) for name in ("C1", "C2", "C2")]


def listed(federation, *identities):
    more = {verified(one.certificate, one.root).number: fingerprint(one.certificate) for one in identities}
    return f"{federation.root}\n{longer_list(federation.root, federation.key, more)}"


def test_the_hello_of_a_withdrawn_key_is_refused(federation, people):
    ends, (good, bad, _) = {}, people
    knowing = Identity(good.name, good.key, good.certificate, listed(federation, bad))

    def meet(identity):
        RelayedComm(identity, ("C1", "C2"), (0, 1), Wire(identity.name, ends), 0.5)

    with ThreadPoolExecutor() as pool:
        met = [pool.submit(meet, one) for one in (knowing, bad)]
    assert "the certificate of C2 was withdrawn" in str(met[0].exception())
    assert isinstance(met[1].exception(), WsiFlError)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("least", [None, 2])
def test_a_certificate_that_is_withdrawn_in_the_middle_ends_the_session(people, least, waits):
    """Before anything more is sent, and while one waits."""
    ends, gone, (good, bad, _), both = {}, {}, people, Barrier(2)

    def be(identity):
        attendance, line = Attendance(identity, ("C1", "C2"), least), Wire(identity.name, ends)
        comm = RelayedComm(
            identity, ("C1", "C2"), (0, 1), line, 20, withdrawn=lambda: gone, attendance=attendance
        )
        assert comm.gather([Seen(site=identity.name)], Seen) == [{"site": "C1"}, {"site": "C2"}]
        both.wait(10)
        if identity is bad:
            time.sleep(0.2 if waits else 0)  # the other one has sent
            gone[fingerprint(bad.certificate)] = datetime(2026, 1, 31, tzinfo=UTC)
        if not waits:
            both.wait(10)
        comm.gather([Seen(site=identity.name)], Seen)

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(be, one) for one in (good, bad)]
    mine, theirs = (one.exception() for one in running)
    assert (
        str(mine)
        == str(theirs)
        == "site C2 has a certificate that was withdrawn on 2026-01-31, and needs a new key"
    )
    assert isinstance(mine, Interrupted) and not isinstance(theirs, SitesGone)
    assert isinstance(mine, SitesGone) == (least is not None)
    assert getattr(mine, "sites", ("C2",)) == ("C2",)


def test_a_plan_that_names_a_withdrawn_key_is_refused_at_once(federation, people, tmp_path):
    good, bad, new = people
    sites = [{"name": one.name, "key": fingerprint(one.certificate)} for one in (good, bad)]
    plan, trusted = Plan(json.dumps({"sites": sites})), listed(federation, bad)
    refused(lambda: check_withdrawn(plan, trusted, plan.sites), "a key of C2 that was withdrawn", "new plan")
    check_withdrawn(plan, trusted, ["C1"])  # without it a run can be finished
    knowing = Identity(good.name, good.key, good.certificate, trusted)
    all_needed = {"approved": "", "attendance": Attendance(knowing, plan.sites, 2)}
    meeting = partial(
        taking_part._introduced, Study(tmp_path), knowing, plan, (0, 1), None, 1.0, **all_needed
    )
    refused(meeting, "a key of C2 that was withdrawn", error=NoCommonPlan)
    check_withdrawn(plan, federation.root, plan.sites)
    refused(lambda: check_key(plan, new.certificate, "C2"), "another key of C2", "a new key needs a new plan")


def test_the_approval_of_a_withdrawn_key_does_not_count(federation, people, tmp_path):
    good, bad, _ = people
    plan = Plan(json.dumps({"sites": [{"name": one.name} for one in (good, bad)]}))
    for one in (good, bad):
        approve(Study(tmp_path), plan, one)
    assert approvals(Study(tmp_path), plan, federation.root).signed == ("C1", "C2")
    found = approvals(Study(tmp_path), plan, listed(federation, bad))
    assert found.signed == ("C1",) and "the certificate of C2 was withdrawn" in found.missing["C2"]


def test_tls_refuses_a_withdrawn_certificate_on_either_side(place, processes):
    startups = {name: place / "one" / name / "startup" for name in ("coordinator", "C1", "C2")}

    def shake(client):
        """The handshake of a client with a server that uses the coordinator's certificate."""
        paths = startups["coordinator"], startups[client]
        names = ("server_cert", "server_key"), ("client_cert", "client_key")
        contexts = []
        for startup, (crt, key), serves in zip(paths, names, (True, False), strict=True):
            given = {"scheme": "https", "secure": True, "ca_cert": str(startup / ROOT)}
            given |= {crt: str(startup / "client.crt"), key: str(startup / "client.key")}
            contexts.append(processes._checking(given, serves))
        (a, b), (c, d) = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
        server = contexts[0].wrap_bio(a, b, server_side=True)
        caller = contexts[1].wrap_bio(c, d, server_hostname="coordinator")
        for _ in range(4):
            for side, came, to in ((caller, d, a), (server, b, c)):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                if came.pending:
                    to.write(came.read())

    shake("C1")
    revoke("C1", place / "one")
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C1")
    shake("C2")
    text = Path(revoke("coordinator", place / "one")["file"]).read_text()
    (startups["C2"] / LIST).write_text(text)
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C2")
    context = ssl.create_default_context()
    assert refuse_withdrawn(context, place / "none" / ROOT).verify_flags == context.verify_flags


def test_a_renewed_certificate_holds_longer_and_needs_no_telephone(place, monkeypatch):
    old = kit(place, "C1").identity()
    said = renew(place / "one" / "C1")
    assert approve_request(Path(said["file"]), place / "one")["withdrew"] is None
    join(place / "one" / "C1" / "certificate-C1.json", place / "one" / "C1")
    new = kit(place, "C1").identity()
    assert new.certificate != old.certificate
    assert fingerprint(new.certificate) == fingerprint(old.certificate)
    assert kit(place, "C1").reminder() == ""

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) + timedelta(days=720)

    for module in (kits, certificates):
        monkeypatch.setattr(module, "datetime", Later)
    reminder = kit(place, "C1").reminder()
    assert "ends in 9 days: `wsi-fl federation renew --kit" in reminder
    assert reminder in next(look(kit(place, "C1"))).said


def test_a_new_key_is_vouched_for_by_the_present_one_and_the_old_one_ends(place):
    folder, key = place / "one" / "C1", place / "one" / "C1" / "startup" / "client.key"
    old = kit(place, "C1").identity()
    said = json.loads(command("renew", "--kit", folder, "--new-key").stdout)
    assert said["fingerprint"] == renew(folder, rotate=True)["fingerprint"]  # asking again makes no third key
    assert kit(place, "C1").identity().certificate == old.certificate
    approved = json.loads(command("approve", said["file"], "--kit", place / "one").stdout)
    assert approved["withdrew"]["number"] == 1
    first = next(iter(approved_lines(approved)))
    assert first.text == f"C1 (one) is renewed until {approved['until']}"
    join(Path(approved["file"]), folder)
    new = kit(place, "C1").identity()
    assert fingerprint(new.certificate) == said["fingerprint"] != fingerprint(old.certificate)
    assert [path.name for path in key.parent.glob("*.key")] == ["client.key"]
    assert key.stat().st_mode & 0o077 == 0
    assert kit(place, "C1").withdrawn().number == 1
    refused(lambda: verified(old.certificate, new.root), "withdrawn", error=NotTrusted)
    assert Root.open(place / "one").keys()["C1"] == said["fingerprint"]


def test_a_plan_of_before_a_new_key_asks_for_a_new_plan(place):
    folder, study, old = place / "one" / "C1", Study(place), kit(place, "C1").identity()
    plan = Plan(
        json.dumps(
            {
                "format": "wsi-fl plan",
                "version": 1,
                "sites": [{"name": "C1", "key": fingerprint(old.certificate)}],
            }
        )
    )
    approve(study, plan, old)
    approved = approve_request(Path(renew(folder, rotate=True)["file"]), place / "one")
    join(Path(approved["file"]), folder)
    refused(
        lambda: take_part_by_folder(study, kit(place, "C1")),
        "this plan names an older key of C1; ask for a new plan, and sign it",
    )


def test_nobody_gets_a_name_by_a_key_that_does_not_hold_it(place):
    """A key of another name, of another federation, withdrawn, or a request that was changed after it was signed."""
    stolen, foreign = place / "stolen", place / "foreign"
    shutil.copytree(place / "one" / "C1", stolen)
    shutil.copytree(place / "two" / "C1", foreign)
    ask = Path(renew(foreign, rotate=True)["file"])
    refused(lambda: approve_request(ask, place / "one"), "another key already", "revoke C1")
    mine = Path(renew(place / "one" / "C2", rotate=True)["file"])
    good = Path(renew(stolen, rotate=True)["file"])
    other = request(place / "thief", name="C1", organization="x")
    bent = json.loads(good.read_text()) | {"request": json.loads(Path(other["file"]).read_text())["request"]}
    for forged in (bent, bent | {"renews": json.loads(mine.read_text())["renews"]}, bent | {"renews": {}}):
        Path(other["file"]).write_text(json.dumps(forged))
        refused(
            lambda: approve_request(Path(other["file"]), place / "one", other["fingerprint"]), "another key"
        )


def test_a_name_whose_key_was_withdrawn_needs_a_new_one_and_a_telephone_call(place):
    stolen = shutil.copytree(place / "one" / "C1", place / "stolen")
    vouched = Path(renew(stolen, rotate=True)["file"])
    revoke("C1", place / "one")
    refused(lambda: approve_request(vouched, place / "one"), "was withdrawn", "--fingerprint")
    same = Path(renew(stolen)["file"])
    same_key = fingerprint(json.loads(same.read_text())["request"])
    refused(lambda: approve_request(same, place / "one", same_key), "was withdrawn", "new kit")
    anew = request(place / "anew", name="C1", organization="x")
    refused(lambda: approve_request(Path(anew["file"]), place / "one"), "--fingerprint")
    approve_request(Path(anew["file"]), place / "one", anew["fingerprint"])
    joined = join(place / "anew" / "certificate-C1.json", place / "anew", unchecked=True)
    assert joined["name"] == "C1" and Kit.open(place / "anew").withdrawn().number == 1


def test_a_kit_stays_in_its_federation(place):
    made = request(place / "C5", name="C5", organization="x")
    for federation in ("one", "two"):
        approve_request(Path(made["file"]), place / federation, unchecked=True)
        if federation == "one":
            join(place / "C5" / "certificate-C5.json", place / "C5", unchecked=True)
    refused(lambda: join(place / "C5" / "certificate-C5.json", place / "C5"), "of another federation")
    assert Kit.open(place / "C5").document["federation"] == "one"
