"""Certificates that are withdrawn and renewed: a signed, numbered list that every party checks, and keys that vouch."""

import json
import shutil
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
from conftest import refused
from typer.testing import CliRunner
from wires import Wire, at_once

from wsi_fl.cli.main import app
from wsi_fl.hospitals.lines.relayed import Attendance, RelayedComm, SiteReturned, SitesGone
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.plans.signed import Plan, approvals, approve, check_key, check_withdrawn
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust import kit as kits
from wsi_fl.hospitals.trust.certificates import Identity, NotTrusted, fingerprint, verified, withdrawn
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
    place = shutil.copytree(template, tmp_path / "all")
    for file in place.glob("*/*/federation.json"):
        share = file.parents[1] / "share"
        share.mkdir(exist_ok=True)
        file.write_text(file.read_text().replace("SHARE", str(share)))
    return place


@pytest.fixture
def one(place):
    """The folder of a federation; `place / "two"` is that of another."""
    return place / "one"


def identity_of(one, name):
    return Kit.open(one / name).identity()


def trusted_by(one):
    return Root.open(one).trusted


def list_after(name, folder):
    """The list once the certificate of a site is withdrawn."""
    return Path(revoke(name, folder)["file"]).read_text()


def joined(one, name):
    """Join by the certificate that lies in the kit."""
    return join(one / name / f"certificate-{name}.json", one / name)


def command(*arguments):
    return CliRunner().invoke(app, ["federation", *map(str, arguments), "--json"])


def test_a_withdrawn_certificate_is_refused_wherever_one_is_verified(one):
    identity = identity_of(one, "C1")
    said = json.loads(command("revoke", "C1", "--kit", one).stdout)
    trusted = identity_of(one, "coordinator").root
    assert (said["number"], withdrawn(trusted).number) == (1, 1)
    refused(lambda: verified(identity.certificate, trusted), "of C1 was withdrawn on", error=NotTrusted)
    assert verified(identity_of(one, "C2").certificate, trusted).name == "C2"
    assert json.loads(command("join", said["file"], "--kit", one / "C1").stdout)["newer"]
    refused(lambda: identity_of(one, "C1"), "cannot be used", "was withdrawn on", "needs a new key")
    assert [step.ok for step in look(Kit.open(one / "C1"))] == [False]
    refused(lambda: revoke("C1", one), "no certificate that could be withdrawn")
    refused(lambda: revoke("C7", one), "C7 has no certificate")


def test_every_certificate_of_a_key_is_withdrawn_also_one_of_an_earlier_version_by_the_root_s_key(one):
    away = (one / "root" / "root.key").rename(one / "root.key")
    assert {"C1", "C2"} <= set(Root.open(one).keys())
    refused(lambda: revoke("C1", one), "put the root's key back")
    away.rename(one / "root" / "root.key")
    first = identity_of(one, "C1").certificate
    approve_request(one / "C1" / "request-C1.json", one)
    joined(one, "C1")
    second = identity_of(one, "C1").certificate
    issued = one / "root" / "issued.jsonl"
    number = verified(second, trusted_by(one)).number
    kept = [
        line
        for line in map(json.loads, issued.read_text().splitlines())
        if line.get("serial") != f"{number:x}"
    ]
    issued.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    revoke("C1", one)
    issued.write_text("".join(f"{json.dumps(line | {'serial': None})}\n" for line in kept))
    revoke("C2", one)
    for certificate in (first, second, identity_of(one, "C2").certificate):
        refused(partial(verified, certificate, trusted_by(one)), "was withdrawn", error=NotTrusted)


def test_lists_that_the_root_did_not_sign_are_refused(place, one):
    theirs, ours = list_after("C1", place / "two"), list_after("C2", one)
    edited = ours.splitlines()
    edited[3] = edited[3][:10] + ("A" if edited[3][10] != "A" else "B") + edited[3][11:]
    file = place / "list.pem"
    for text in (theirs, "\n".join(edited), ours[:-60], "-----BEGIN X509 CRL-----\n-----END X509 CRL-----\n"):
        file.write_text(text)
        refused(lambda: take_list(file, one / "C1"), "not signed by this federation's root", "left as it")
        assert Kit.open(one / "C1").withdrawn().number == 0
    (one / "C1" / "startup" / LIST).write_text(theirs)
    refused(lambda: identity_of(one, "C1"), "cannot be used", "not signed by this federation's root")


def test_an_older_list_takes_the_place_of_no_newer_one_and_nothing_but_the_list_is_kept(place, one):
    first, second = list_after("C1", one), list_after("C2", one)
    kit, evil = Kit.open(one / "coordinator"), (place / "two" / "root" / ROOT).read_text()
    keys = {fingerprint(identity_of(one, name).certificate) for name in ("C1", "C2")}
    assert kit.withdrawn().number == 2 and set(withdrawn(trusted_by(one)).keys) == keys
    assert [kit.take(first), kit.take(second), kit.take(f"{evil}\n{second}")] == [False] * 3
    assert kit.withdrawn().text == second and Kit.open(one / "C1").take(f"{second}\n{evil}")
    assert "CERTIFICATE" not in (one / "C1" / "startup" / LIST).read_text()


def test_the_list_goes_round_by_the_folder(place, one):
    laid, kit = one / "share" / LIST, Kit.open(one / "C1")
    exchanged = partial(exchange_list, kit, str(laid.parent))
    assert exchanged() == ""
    revoke("C2", one)
    newest = laid.read_text()
    assert "was taken from the folder" in exchanged() and exchanged() == ""
    laid.write_text(list_after("C1", place / "two"))  # whoever can write there lays another
    assert "was laid into the folder" in exchanged()
    laid.unlink()
    assert "was laid into the folder" in exchanged() and laid.read_text() == newest
    laid.unlink()
    laid.symlink_to(one / "C1" / "federation.json")
    exchanged()
    assert laid.read_text() == newest and Kit.open(one / "C1").name == "C1"
    assert "was not asked" in exchange_list(kit, str(place / "nowhere"))


def test_check_over_a_folder_uses_it_and_takes_its_list(place, one):
    share = one / "share"

    def steps(name, *more):
        found = json.loads(command("check", one / name, *more).stdout)["steps"]
        return [(step["what"], step["ok"], step["said"]) for step in found]

    (share / "wsi-fl-1").mkdir()
    (share / "wsi-fl-1" / "a.letter").write_text("x")
    before = sorted(share.rglob("*"))
    assert [step[:2] for step in steps("C1")] == [("certificate", True), ("folder", True)]
    assert sorted(share.rglob("*")) == before
    share.rename(place / "away")
    missing = f"{share}: no such folder; mount the share, or correct the address"
    assert steps("C1")[1] == ("folder", False, missing)
    assert command("check", one / "C1").exit_code == 1
    assert [step[1] for step in steps("C1", "--folder", place / "away")] == [True, True]
    (place / "away").rename(share)
    revoke("C2", one)
    assert "a newer list of withdrawn certificates was taken" in steps("C1")[1][2]
    ((what, ok, said),) = steps("C2")
    assert (what, ok) == ("certificate", False) and "of C2 was withdrawn on" in said


@pytest.mark.parametrize("cannot", ["write", "read", "remove"])
def test_check_fails_where_a_folder_cannot_be_used(one, monkeypatch, cannot):
    def denied(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Share, cannot, denied)
    document = check(Kit.open(one / "C1"))
    assert not document["ok"] and "the folder cannot be used" in document["steps"][1]["said"]
    assert not list((one / "share").glob("check-*")) or cannot == "remove"


def test_start_takes_the_list_from_the_folder_before_anything_else(place, one, capfd, monkeypatch):
    monkeypatch.setattr(kits, "SOON_DAYS", 1000)
    revoke("C2", one)
    begin = lambda name: take_part_by_folder(Study(place), Kit.open(one / name))  # noqa: E731
    refused(lambda: begin("C1"), "C1 has approved no plan")
    said = capfd.readouterr().err
    assert "a newer list of withdrawn certificates was taken from the folder" in said
    assert "the certificate of C1 ends in 729 days" in said
    refused(lambda: begin("C2"), "of C2 was withdrawn on", "needs a new key")


def test_all_who_begin_again_over_a_folder_know_the_newest_list(place, one, monkeypatch):
    trusted, mine = [], Kit.open(one / "C1")
    settings = SimpleNamespace(train=SimpleNamespace(min_sites=2))
    plan = SimpleNamespace(digest="0" * 64, sites=["C1", "C2"], pipeline=lambda: settings)

    def part(_, identity, *args, **given):
        trusted.append(withdrawn(identity.root).number)
        if len(trusted) == 1:
            revoke("C2", one)  # it lies in the folder now
            raise SiteReturned("site C2 began anew")
        return {}

    monkeypatch.setattr(starting, "take_part", part)
    line, study = SimpleNamespace(close=lambda: None, waiting=set), Study(place / "study")
    assert starting._until_done(study, mine, plan, line, mine.folder, ()) == {}
    assert trusted == [0, 1]


def test_a_job_brings_the_list_and_no_forged_one(place, one, monkeypatch):
    pytest.importorskip("nvflare")
    from wsi_fl.hospitals.flare import roles

    monkeypatch.setenv(roles.STUDY, str(place))
    monkeypatch.setenv(roles.KIT, str(one / "C1"))

    def do(text):
        return roles.Hospital()._do({"what": "check", "plan": "0" * 64, "withdrawn": text})

    ours, theirs = (list_after("C2", folder) for folder in (one, place / "two"))
    refused(lambda: do(theirs), "not signed by this federation's root", error=NotTrusted)
    refused(lambda: do(""), "approved no plan", error=KnownToAll)
    refused(lambda: do(ours), "approved no plan", error=KnownToAll)
    assert Kit.open(one / "C1").withdrawn().text == ours
    last = list_after("C1", one)
    refused(lambda: do(last), "of C1 was withdrawn")


@pytest.fixture(scope="module")
def people(federation):
    """C1, C2, and C2 with another key."""
    return [federation.identity(name) for name in ("C1", "C2", "C2")]


def listed(federation, *identities):
    more = {verified(one.certificate, one.root).number: fingerprint(one.certificate) for one in identities}
    return f"{federation.root}\n{certificates.longer_list(federation.root, federation.key, more)}"


def test_the_hello_of_a_withdrawn_key_is_refused(federation, people):
    ends, (good, bad, _) = {}, people
    knowing = Identity(good.name, good.key, good.certificate, listed(federation, bad))
    who = {"C1": knowing, "C2": bad}
    met = at_once(lambda name: RelayedComm(who[name], ("C1", "C2"), (0, 1), Wire(name, ends), 0.5), who)
    assert "the certificate of C2 was withdrawn" in str(met["C1"]) and isinstance(met["C2"], WsiFlError)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("least", [None, 2])
def test_a_certificate_that_is_withdrawn_in_the_middle_ends_the_session(people, least, waits):
    """Before anything more is sent, and while one waits."""
    ends, gone, both, who = {}, {}, Barrier(2), dict(zip(("C1", "C2"), people, strict=False))

    def be(name):
        identity, line = who[name], Wire(name, ends)
        given = {"withdrawn": lambda: gone, "attendance": Attendance(identity, ("C1", "C2"), least)}
        comm = RelayedComm(identity, ("C1", "C2"), (0, 1), line, 20, **given)
        assert comm.gather([Seen(site=name)], Seen) == [{"site": "C1"}, {"site": "C2"}]
        both.wait(10)
        if name == "C2":
            time.sleep(0.2 if waits else 0)  # the other one has sent
            gone[fingerprint(identity.certificate)] = datetime(2026, 1, 31, tzinfo=UTC)
        if not waits:
            both.wait(10)
        comm.gather([Seen(site=name)], Seen)

    found = at_once(be, who)
    mine, theirs = found["C1"], found["C2"]
    said = "site C2 has a certificate that was withdrawn on 2026-01-31, and needs a new key"
    assert str(mine) == str(theirs) == said
    assert isinstance(mine, Interrupted) and not isinstance(theirs, SitesGone)
    assert isinstance(mine, SitesGone) == (least is not None)
    assert getattr(mine, "sites", ("C2",)) == ("C2",)


def test_a_plan_that_names_a_withdrawn_key_is_refused_at_once_and_its_approval_does_not_count(
    federation, people, tmp_path
):
    good, bad, new = people
    sites = [{"name": one.name, "key": fingerprint(one.certificate)} for one in (good, bad)]
    plan, trusted = Plan(json.dumps({"sites": sites})), listed(federation, bad)
    refused(lambda: check_withdrawn(plan, trusted, plan.sites), "a key of C2 that was withdrawn", "new plan")
    check_withdrawn(plan, trusted, ["C1"])  # without it a run can be finished
    knowing = Identity(good.name, good.key, good.certificate, trusted)
    given = {"approved": "", "attendance": Attendance(knowing, plan.sites, 2)}
    meeting = partial(taking_part._introduced, Study(tmp_path), knowing, plan, (0, 1), None, 1.0, **given)
    refused(meeting, "a key of C2 that was withdrawn", error=NoCommonPlan)
    coordinator = SimpleNamespace(identity=lambda: knowing)  # is told before anybody is asked
    asking = partial(submitting._run, coordinator, plan, plan.sites, {}, Silent())
    refused(asking, "a key of C2 that was withdrawn")
    check_withdrawn(plan, federation.root, plan.sites)
    refused(lambda: check_key(plan, new.certificate, "C2"), "another key of C2", "a new key needs a new plan")
    for one in (good, bad):
        approve(Study(tmp_path), plan, one)
    assert approvals(Study(tmp_path), plan, federation.root).signed == ("C1", "C2")
    found = approvals(Study(tmp_path), plan, trusted)
    assert found.signed == ("C1",) and "the certificate of C2 was withdrawn" in found.missing["C2"]


def test_tls_refuses_a_withdrawn_certificate_on_either_side(place, one):
    pytest.importorskip("nvflare")
    from wsi_fl.hospitals.flare import processes

    def context_of(name, crt, key, serves):
        startup = one / name / "startup"
        given = {"scheme": "https", "secure": True, "ca_cert": str(startup / ROOT)}
        given |= {crt: str(startup / "client.crt"), key: str(startup / "client.key")}
        return processes._checking(given, serves)

    def shake(client):
        """The handshake of a client with a server that uses the coordinator's certificate."""
        (a, b), (c, d) = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
        serving = context_of("coordinator", "server_cert", "server_key", True)
        server = serving.wrap_bio(a, b, server_side=True)
        calling = context_of(client, "client_cert", "client_key", False)
        caller = calling.wrap_bio(c, d, server_hostname="coordinator")
        for _ in range(4):
            for side, came, to in ((caller, d, a), (server, b, c)):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                if came.pending:
                    to.write(came.read())

    shake("C1")
    revoke("C1", one)
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C1")
    shake("C2")
    (one / "C2" / "startup" / LIST).write_text(list_after("coordinator", one))
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C2")
    context = ssl.create_default_context()
    assert refuse_withdrawn(context, place / "none" / ROOT).verify_flags == context.verify_flags


def test_a_renewed_certificate_holds_longer_and_needs_no_telephone(one, monkeypatch):
    old = identity_of(one, "C1")
    said = renew(one / "C1")
    assert approve_request(Path(said["file"]), one)["withdrew"] is None
    joined(one, "C1")
    new = identity_of(one, "C1")
    assert new.certificate != old.certificate
    assert fingerprint(new.certificate) == fingerprint(old.certificate)
    assert Kit.open(one / "C1").reminder() == ""

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) + timedelta(days=720)

    for module in (kits, certificates):
        monkeypatch.setattr(module, "datetime", Later)
    reminder = Kit.open(one / "C1").reminder()
    assert "ends in 9 days: `wsi-fl federation renew --kit" in reminder
    assert reminder in next(look(Kit.open(one / "C1"))).said


def test_a_new_key_is_vouched_for_by_the_present_one_and_the_old_one_ends(one):
    folder, key = one / "C1", one / "C1" / "startup" / "client.key"
    old = identity_of(one, "C1")
    said = json.loads(command("renew", "--kit", folder, "--new-key").stdout)
    assert said["fingerprint"] == renew(folder, rotate=True)["fingerprint"]  # asking again makes no third key
    assert identity_of(one, "C1").certificate == old.certificate
    approved = json.loads(command("approve", said["file"], "--kit", one).stdout)
    assert approved["withdrew"]["number"] == 1
    assert next(iter(approved_lines(approved))).text == f"C1 (one) is renewed until {approved['until']}"
    join(Path(approved["file"]), folder)
    new = identity_of(one, "C1")
    assert fingerprint(new.certificate) == said["fingerprint"] != fingerprint(old.certificate)
    assert [path.name for path in key.parent.glob("*.key")] == ["client.key"]
    assert key.stat().st_mode & 0o077 == 0 and Kit.open(folder).withdrawn().number == 1
    refused(lambda: verified(old.certificate, new.root), "withdrawn", error=NotTrusted)
    assert Root.open(one).keys()["C1"] == said["fingerprint"]


def test_a_plan_of_before_a_new_key_asks_for_a_new_plan(place, one):
    old = identity_of(one, "C1")
    sites = [{"name": "C1", "key": fingerprint(old.certificate)}]
    approve(Study(place), Plan(json.dumps({"format": "wsi-fl plan", "version": 1, "sites": sites})), old)
    approved = approve_request(Path(renew(one / "C1", rotate=True)["file"]), one)
    join(Path(approved["file"]), one / "C1")
    words = "this plan names an older key of C1; ask for a new plan, and sign it"
    refused(lambda: take_part_by_folder(Study(place), Kit.open(one / "C1")), words)


def test_nobody_gets_a_name_by_a_key_that_does_not_hold_it(place, one):
    """A key of another name, of another federation, withdrawn, or a request that was changed after it was signed."""
    stolen = shutil.copytree(one / "C1", place / "stolen")
    foreign = shutil.copytree(place / "two" / "C1", place / "foreign")
    ask = Path(renew(foreign, rotate=True)["file"])
    refused(lambda: approve_request(ask, one), "another key already", "revoke C1")
    good, mine = (Path(renew(folder, rotate=True)["file"]) for folder in (stolen, one / "C2"))
    other = request(place / "thief", name="C1", organization="x")
    file = Path(other["file"])
    bent = json.loads(good.read_text()) | {"request": json.loads(file.read_text())["request"]}
    for forged in (bent, bent | {"renews": json.loads(mine.read_text())["renews"]}, bent | {"renews": {}}):
        file.write_text(json.dumps(forged))
        refused(lambda: approve_request(file, one, other["fingerprint"]), "another key")


def test_a_name_whose_key_was_withdrawn_needs_a_new_one_and_a_telephone_call(place, one):
    stolen = shutil.copytree(one / "C1", place / "stolen")
    vouched = Path(renew(stolen, rotate=True)["file"])
    revoke("C1", one)
    refused(lambda: approve_request(vouched, one), "was withdrawn", "--fingerprint")
    same = Path(renew(stolen)["file"])
    same_key = fingerprint(json.loads(same.read_text())["request"])
    refused(lambda: approve_request(same, one, same_key), "was withdrawn", "new kit")
    anew = request(place / "anew", name="C1", organization="x")
    refused(lambda: approve_request(Path(anew["file"]), one), "--fingerprint")
    approve_request(Path(anew["file"]), one, anew["fingerprint"])
    found = join(place / "anew" / "certificate-C1.json", place / "anew", unchecked=True)
    assert found["name"] == "C1" and Kit.open(place / "anew").withdrawn().number == 1


def test_a_kit_stays_in_its_federation(place, one):
    made = request(place / "C5", name="C5", organization="x")
    approve_request(Path(made["file"]), one, unchecked=True)
    join(place / "C5" / "certificate-C5.json", place / "C5", unchecked=True)
    approve_request(Path(made["file"]), place / "two", unchecked=True)
    refused(lambda: joined(place, "C5"), "of another federation")
    assert Kit.open(place / "C5").document["federation"] == "one"
