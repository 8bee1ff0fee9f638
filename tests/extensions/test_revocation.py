"""Withdrawn and renewed certificates: a signed, numbered list that every party checks, and keys that vouch for keys."""

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
from federation_fixtures import Wire, at_once, command

from wsi_fl.hospitals.plans.signed_plan import (
    FederationPlan,
    check_pinned_key,
    check_revoked,
    collect_approvals,
    record_approval,
)
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.transports.presence import SitePresence, SiteReturned, SitesDroppedOut
from wsi_fl.hospitals.transports.secure_comm import SecureComm
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust import kit as kits
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    NotTrusted,
    key_fingerprint,
    parse_revocation_list,
    verify_certificate,
)
from wsi_fl.hospitals.trust.kit import REVOCATIONS_FILE, ROOT_FILE, Kit, check_connection, refuse_revoked
from wsi_fl.hospitals.trust.provisioning import (
    approval_lines,
    approve_request,
    create_renewal_request,
    create_request,
    install_certificate,
    provision_federation,
)
from wsi_fl.hospitals.trust.root_ca import RootCA, install_revocation_list, revoke_site, sync_revocation_list
from wsi_fl.hospitals.work import client as taking_part
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work.check import check_kit
from wsi_fl.hospitals.work.client import SiteGreeting
from wsi_fl.hospitals.work.start import take_part_by_folder
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.study.folder import Study
from wsi_fl.types import Interrupted, NoCommonPlan, ReportableError, WsiFlError


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Two federations of C1 and C2, each over a folder."""
    folder = tmp_path_factory.mktemp("federations")
    for name in ("one", "two"):
        provision_federation(folder / name, federation=name, shared_folder="SHARE", sites=["C1", "C2"])
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
    return Kit.open(one / name).load_identity()


def trusted_by(one):
    return RootCA.open(one).trust_pem


def list_after(name, folder):
    """The list after the certificate of a site is withdrawn."""
    return Path(revoke_site(name, folder)["file"]).read_text()


def take_part_with_certificate(one, name):
    """Take part with the certificate in the startup kit."""
    return install_certificate(one / name / f"certificate-{name}.json", one / name)


def test_a_withdrawn_certificate_is_refused_wherever_one_is_verified(one):
    identity = identity_of(one, "C1")
    said = json.loads(command("revoke", "C1", "--kit", one).stdout)
    trusted = identity_of(one, "coordinator").root
    assert (said["number"], parse_revocation_list(trusted).number) == (1, 1)
    refused(lambda: verify_certificate(identity.certificate, trusted), "of C1 was withdrawn on", error=NotTrusted)
    assert verify_certificate(identity_of(one, "C2").certificate, trusted).name == "C2"
    assert json.loads(command("join", said["file"], "--kit", one / "C1").stdout)["newer"]
    refused(lambda: identity_of(one, "C1"), "cannot be used", "was withdrawn on", "needs a new key")
    assert [step.ok for step in check_connection(Kit.open(one / "C1"))] == [False]
    refused(lambda: revoke_site("C1", one), "no certificate that could be withdrawn")
    refused(lambda: revoke_site("C7", one), "C7 has no certificate")


def test_a_withdrawal_covers_every_certificate_of_a_key_also_earlier_ones_by_the_root_ca(one):
    away = (one / "root" / "root.key").rename(one / "root.key")
    assert {"C1", "C2"} <= set(RootCA.open(one).load_keys())
    refused(lambda: revoke_site("C1", one), "put the root's key back")
    away.rename(one / "root" / "root.key")
    first = identity_of(one, "C1").certificate
    approve_request(one / "C1" / "request-C1.json", one)
    take_part_with_certificate(one, "C1")
    second = identity_of(one, "C1").certificate
    issued = one / "root" / "issued.jsonl"
    number = verify_certificate(second, trusted_by(one)).number
    kept = [line for line in map(json.loads, issued.read_text().splitlines()) if line.get("serial") != f"{number:x}"]
    issued.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    revoke_site("C1", one)
    issued.write_text("".join(f"{json.dumps(line | {'serial': None})}\n" for line in kept))
    revoke_site("C2", one)
    for certificate in (first, second, identity_of(one, "C2").certificate):
        refused(partial(verify_certificate, certificate, trusted_by(one)), "was withdrawn", error=NotTrusted)


def test_lists_that_the_root_ca_did_not_sign_are_refused(place, one):
    theirs, ours = list_after("C1", place / "two"), list_after("C2", one)
    edited = ours.splitlines()
    edited[3] = edited[3][:10] + ("A" if edited[3][10] != "A" else "B") + edited[3][11:]
    file = place / "list.pem"
    for text in (theirs, "\n".join(edited), ours[:-60], "-----BEGIN X509 CRL-----\n-----END X509 CRL-----\n"):
        file.write_text(text)
        refused(lambda: install_revocation_list(file, one / "C1"), "not signed by this federation's root", "left as it")
        assert Kit.open(one / "C1").load_revocation_list().number == 0
    (one / "C1" / "startup" / REVOCATIONS_FILE).write_text(theirs)
    refused(lambda: identity_of(one, "C1"), "cannot be used", "not signed by this federation's root")


def test_an_older_list_never_replaces_a_newer_one_and_only_the_list_is_kept(place, one):
    first, second = list_after("C1", one), list_after("C2", one)
    kit, evil = Kit.open(one / "coordinator"), (place / "two" / "root" / ROOT_FILE).read_text()
    keys = {key_fingerprint(identity_of(one, name).certificate) for name in ("C1", "C2")}
    assert kit.load_revocation_list().number == 2 and set(parse_revocation_list(trusted_by(one)).keys) == keys
    assert not any(kit.update_revocation_list(text) for text in (first, second, f"{evil}\n{second}"))
    assert kit.load_revocation_list().text == second
    assert Kit.open(one / "C1").update_revocation_list(f"{second}\n{evil}")
    assert "CERTIFICATE" not in (one / "C1" / "startup" / REVOCATIONS_FILE).read_text()


def test_the_list_is_distributed_by_the_folder(place, one):
    laid, kit = one / "share" / REVOCATIONS_FILE, Kit.open(one / "C1")
    exchanged = partial(sync_revocation_list, kit, str(laid.parent))
    assert exchanged() == ""
    revoke_site("C2", one)
    newest = laid.read_text()
    assert "was taken from the folder" in exchanged() and exchanged() == ""
    laid.write_text(list_after("C1", place / "two"))  # whoever can write there lays another
    assert "was written into the folder" in exchanged()
    laid.unlink()
    assert "was written into the folder" in exchanged() and laid.read_text() == newest
    laid.unlink()
    laid.symlink_to(one / "C1" / "federation.json")
    exchanged()
    assert laid.read_text() == newest and Kit.open(one / "C1").name == "C1"
    assert "was not asked" in sync_revocation_list(kit, str(place / "nowhere"))


def test_check_tries_the_folder_and_takes_its_list(place, one):
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
    revoke_site("C2", one)
    assert "a newer list of withdrawn certificates was taken" in steps("C1")[1][2]
    ((what, ok, said),) = steps("C2")
    assert (what, ok) == ("certificate", False) and "of C2 was withdrawn on" in said


@pytest.mark.parametrize("cannot", ["write", "read", "remove_file"])
def test_check_fails_where_a_folder_cannot_be_used(one, monkeypatch, cannot):
    def denied(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(SharedFolder, cannot, denied)
    document = check_kit(Kit.open(one / "C1"))
    assert not document["ok"] and "the folder cannot be used" in document["steps"][1]["said"]
    assert not list((one / "share").glob("check-*")) or cannot == "remove_file"


def test_start_first_takes_the_list_from_the_folder(place, one, capfd, monkeypatch):
    monkeypatch.setattr(kits, "RENEWAL_DAYS", 1000)
    revoke_site("C2", one)
    begin = lambda name: take_part_by_folder(Study(place), Kit.open(one / name))  # noqa: E731
    refused(lambda: begin("C1"), "C1 has approved no plan")
    said = capfd.readouterr().err
    assert "a newer list of withdrawn certificates was taken from the folder" in said
    assert "the certificate of C1 ends in 729 days" in said
    refused(lambda: begin("C2"), "of C2 was withdrawn on", "needs a new key")


def test_all_sites_that_begin_again_over_a_folder_have_the_newest_list(place, one, monkeypatch):
    trusted, mine = [], Kit.open(one / "C1")
    settings = SimpleNamespace(train=SimpleNamespace(min_sites=2, deadline=None))
    plan = SimpleNamespace(digest="0" * 64, sites=["C1", "C2"], pipeline=lambda: settings)
    plan.remaining_sites = lambda _: plan.sites

    def part(_, identity, *args, **given):
        trusted.append(parse_revocation_list(identity.root).number)
        if len(trusted) == 1:
            revoke_site("C2", one)  # it lies in the folder now
            raise SiteReturned("site C2 began anew")
        return {}

    monkeypatch.setattr(starting, "take_part", part)
    line, study = SimpleNamespace(close=lambda: None, waiting=set), Study(place / "study")
    assert starting._FolderWork(study, mine, plan, line, mine.folder, ()).run_to_end() == {}
    assert trusted == [0, 1]


def test_a_job_brings_the_list_and_a_forged_one_is_refused(place, one, monkeypatch):
    pytest.importorskip("nvflare")
    from wsi_fl.hospitals.flare import roles

    monkeypatch.setenv(roles.STUDY_VARIABLE, str(place))
    monkeypatch.setenv(roles.KIT_VARIABLE, str(one / "C1"))

    def do(text):
        return roles.HospitalExecutor()._run_request({"what": "check", "plan": "0" * 64, "withdrawn": text})

    ours, theirs = (list_after("C2", folder) for folder in (one, place / "two"))
    refused(lambda: do(theirs), "not signed by this federation's root", error=NotTrusted)
    refused(lambda: do(""), "approved no plan", error=ReportableError)
    refused(lambda: do(ours), "approved no plan", error=ReportableError)
    assert Kit.open(one / "C1").load_revocation_list().text == ours
    last = list_after("C1", one)
    refused(lambda: do(last), "of C1 was withdrawn")


@pytest.fixture(scope="module")
def people(federation):
    """C1, C2, and C2 with another key."""
    return [federation.identity(name) for name in ("C1", "C2", "C2")]


def trusted_without(federation, identity):
    """The trusted text after an identity was withdrawn."""
    number = verify_certificate(identity.certificate, identity.root).number
    more = {number: key_fingerprint(identity.certificate)}
    return f"{federation.root}\n{certificates.extend_revocation_list(federation.root, federation.key, more)}"


def test_the_handshake_of_a_withdrawn_key_is_refused(federation, people):
    ends, (good, bad, _) = {}, people
    knowing = Identity(good.name, good.key, good.certificate, trusted_without(federation, bad))
    who = {"C1": knowing, "C2": bad}
    met = at_once(lambda name: SecureComm(who[name], ("C1", "C2"), (0, 1), Wire(name, ends), 0.5), who)
    assert "the certificate of C2 was withdrawn" in str(met["C1"]) and isinstance(met["C2"], WsiFlError)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("least", [None, 2])
def test_a_certificate_that_is_withdrawn_during_a_session_ends_it(people, least, waits):
    """Before another message is sent, and during a wait."""
    ends, gone, both, who = {}, {}, Barrier(2), dict(zip(("C1", "C2"), people, strict=False))

    def be(name):
        identity, line = who[name], Wire(name, ends)
        given = {"load_revoked": lambda: gone, "presence": SitePresence(identity, ("C1", "C2"), least)}
        comm = SecureComm(identity, ("C1", "C2"), (0, 1), line, 20, **given)
        assert comm.gather([SiteGreeting(site=name)], SiteGreeting) == [{"site": "C1"}, {"site": "C2"}]
        both.wait(10)
        if name == "C2":
            time.sleep(0.2 if waits else 0)  # the other one has sent
            gone[key_fingerprint(identity.certificate)] = datetime(2026, 1, 31, tzinfo=UTC)
        if not waits:
            both.wait(10)
        comm.gather([SiteGreeting(site=name)], SiteGreeting)

    found = at_once(be, who)
    mine, theirs = found["C1"], found["C2"]
    said = "site C2 has a certificate that was withdrawn on 2026-01-31, and needs a new key"
    assert str(mine) == str(theirs) == said
    assert isinstance(mine, Interrupted) and not isinstance(theirs, SitesDroppedOut)
    assert isinstance(mine, SitesDroppedOut) == (least is not None)
    assert getattr(mine, "sites", ("C2",)) == ("C2",)


def test_a_plan_that_names_a_withdrawn_key_is_refused_at_once_and_its_approval_does_not_count(
    federation, people, tmp_path
):
    good, bad, new = people
    sites = [{"name": one.name, "key": key_fingerprint(one.certificate)} for one in (good, bad)]
    plan, trusted = FederationPlan(json.dumps({"sites": sites})), trusted_without(federation, bad)
    refused(lambda: check_revoked(plan, trusted, plan.sites), "a key of C2 that was withdrawn", "new plan")
    check_revoked(plan, trusted, ["C1"])  # without it a run can be finished
    knowing = Identity(good.name, good.key, good.certificate, trusted)
    given = {"approved": "", "presence": SitePresence(knowing, plan.sites, 2)}
    meeting = partial(taking_part._open_comm, Study(tmp_path), knowing, plan, (0, 1), None, 1.0, **given)
    refused(meeting, "a key of C2 that was withdrawn", error=NoCommonPlan)
    coordinator = SimpleNamespace(load_identity=lambda: knowing)  # is told before anybody is asked
    asking = partial(submitting.run_plan_job, coordinator, plan, plan.sites, {}, SilentProgress())
    refused(asking, "a key of C2 that was withdrawn")
    check_revoked(plan, federation.root, plan.sites)
    refused(lambda: check_pinned_key(plan, new.certificate, "C2"), "another key of C2", "a new key needs a new plan")
    for one in (good, bad):
        record_approval(Study(tmp_path), plan, one)
    assert collect_approvals(Study(tmp_path), plan, federation.root).signed == ("C1", "C2")
    found = collect_approvals(Study(tmp_path), plan, trusted)
    assert found.signed == ("C1",) and "the certificate of C2 was withdrawn" in found.missing["C2"]


def test_tls_refuses_a_withdrawn_certificate_on_either_side(place, one):
    pytest.importorskip("nvflare")
    from wsi_fl.hospitals.flare import processes

    def context_of(name, crt, key, serves):
        startup = one / name / "startup"
        given = {"scheme": "https", "secure": True, "ca_cert": str(startup / ROOT_FILE)}
        given |= {crt: str(startup / "client.crt"), key: str(startup / "client.key")}
        return processes._make_ssl_context(given, serves)

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
    revoke_site("C1", one)
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C1")
    shake("C2")
    (one / "C2" / "startup" / REVOCATIONS_FILE).write_text(list_after("coordinator", one))
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        shake("C2")
    context = ssl.create_default_context()
    assert refuse_revoked(context, place / "none" / ROOT_FILE).verify_flags == context.verify_flags


def test_a_renewed_certificate_is_valid_longer_and_needs_no_telephone_call(one, monkeypatch):
    old = identity_of(one, "C1")
    said = create_renewal_request(one / "C1")
    assert approve_request(Path(said["file"]), one)["withdrew"] is None
    take_part_with_certificate(one, "C1")
    new = identity_of(one, "C1")
    assert new.certificate != old.certificate
    assert key_fingerprint(new.certificate) == key_fingerprint(old.certificate)
    assert Kit.open(one / "C1").renewal_reminder() == ""

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) + timedelta(days=720)

    for module in (kits, certificates):
        monkeypatch.setattr(module, "datetime", Later)
    reminder = Kit.open(one / "C1").renewal_reminder()
    assert "ends in 9 days: `wsi-fl federation renew --kit" in reminder
    assert reminder in next(check_connection(Kit.open(one / "C1"))).said


def test_a_new_key_is_signed_by_the_current_one_and_the_old_key_ends(one):
    folder, key = one / "C1", one / "C1" / "startup" / "client.key"
    old = identity_of(one, "C1")
    said = json.loads(command("renew", "--kit", folder, "--new-key").stdout)
    again = create_renewal_request(folder, rotate=True)
    assert said["fingerprint"] == again["fingerprint"]  # asking again makes no third key
    assert identity_of(one, "C1").certificate == old.certificate
    approved = json.loads(command("approve", said["file"], "--kit", one).stdout)
    assert approved["withdrew"]["number"] == 1
    assert next(iter(approval_lines(approved))).text == f"C1 (one) is renewed until {approved['until']}"
    install_certificate(Path(approved["file"]), folder)
    new = identity_of(one, "C1")
    assert key_fingerprint(new.certificate) == said["fingerprint"] != key_fingerprint(old.certificate)
    assert [path.name for path in key.parent.glob("*.key")] == ["client.key"]
    assert key.stat().st_mode & 0o077 == 0 and Kit.open(folder).load_revocation_list().number == 1
    refused(lambda: verify_certificate(old.certificate, new.root), "withdrawn", error=NotTrusted)
    assert RootCA.open(one).load_keys()["C1"] == said["fingerprint"]


def test_a_plan_from_before_a_new_key_must_be_replaced(place, one):
    old = identity_of(one, "C1")
    sites = [{"name": "C1", "key": key_fingerprint(old.certificate)}]
    plan = FederationPlan(json.dumps({"format": "wsi-fl plan", "version": 1, "sites": sites}))
    record_approval(Study(place), plan, old)
    approved = approve_request(Path(create_renewal_request(one / "C1", rotate=True)["file"]), one)
    install_certificate(Path(approved["file"]), one / "C1")
    words = "this plan names an older key of C1; ask for a new plan, and sign it"
    refused(lambda: take_part_by_folder(Study(place), Kit.open(one / "C1")), words)


def test_a_name_cannot_be_obtained_with_a_foreign_key(place, one):
    """A key of another name or federation, a withdrawn key, or a request that was changed after it was signed."""
    stolen = shutil.copytree(one / "C1", place / "stolen")
    foreign = shutil.copytree(place / "two" / "C1", place / "foreign")
    ask = Path(create_renewal_request(foreign, rotate=True)["file"])
    refused(lambda: approve_request(ask, one), "another key already", "revoke C1")
    good, mine = (Path(create_renewal_request(folder, rotate=True)["file"]) for folder in (stolen, one / "C2"))
    other = create_request(place / "thief", name="C1", organization="x")
    file = Path(other["file"])
    bent = json.loads(good.read_text()) | {"request": json.loads(file.read_text())["request"]}
    for forged in (bent, bent | {"renews": json.loads(mine.read_text())["renews"]}, bent | {"renews": {}}):
        file.write_text(json.dumps(forged))
        refused(lambda: approve_request(file, one, other["fingerprint"]), "another key")


def test_a_name_whose_key_was_withdrawn_needs_a_new_one_and_a_telephone_call(place, one):
    stolen = shutil.copytree(one / "C1", place / "stolen")
    vouched = Path(create_renewal_request(stolen, rotate=True)["file"])
    revoke_site("C1", one)
    refused(lambda: approve_request(vouched, one), "was withdrawn", "--fingerprint")
    same = Path(create_renewal_request(stolen)["file"])
    same_key = key_fingerprint(json.loads(same.read_text())["request"])
    refused(lambda: approve_request(same, one, same_key), "was withdrawn", "new kit")
    anew = create_request(place / "anew", name="C1", organization="x")
    refused(lambda: approve_request(Path(anew["file"]), one), "--fingerprint")
    approve_request(Path(anew["file"]), one, anew["fingerprint"])
    found = install_certificate(place / "anew" / "certificate-C1.json", place / "anew", unchecked=True)
    assert found["name"] == "C1" and Kit.open(place / "anew").load_revocation_list().number == 1


def test_a_startup_kit_stays_in_its_federation(place, one):
    made = create_request(place / "C5", name="C5", organization="x")
    approve_request(Path(made["file"]), one, unchecked=True)
    install_certificate(place / "C5" / "certificate-C5.json", place / "C5", unchecked=True)
    approve_request(Path(made["file"]), place / "two", unchecked=True)
    refused(lambda: take_part_with_certificate(place, "C5"), "of another federation")
    assert Kit.open(place / "C5").document["federation"] == "one"
