"""Into a federation: request, approval, join; what does not fit is refused in one line."""

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import refused
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.hospitals.trust import making
from wsi_fl.hospitals.trust.certificates import NotTrusted, verified
from wsi_fl.hospitals.trust.kit import Kit, likely_reason, look, server_of
from wsi_fl.hospitals.trust.making import provision, request
from wsi_fl.types import WsiFlError

approve_request, join = (partial(one, unchecked=True) for one in (making.approve_request, making.join))


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    provision(folder / "one", federation="one", server="localhost:1")
    provision(folder / "two", federation="two", shared_folder=str(folder / "share"), sites=["C9"])
    return folder


def asked(folder, name="C1", **given):
    return request(folder / name, name=name, organization="A hospital", **given)


def test_a_key_is_made_at_the_hospital_and_never_leaves_it(founded, tmp_path):
    made = asked(tmp_path)
    key = tmp_path / "C1" / "startup" / "client.key"
    assert key.stat().st_mode & 0o077 == 0
    sent = (tmp_path / "C1" / "request-C1.json").read_text()
    assert "PRIVATE" not in sent
    certificate = approve_request(tmp_path / "C1" / "request-C1.json", founded / "one", made["fingerprint"])
    assert "PRIVATE" not in Path(certificate["file"]).read_text()
    joined = join(tmp_path / "C1" / "certificate-C1.json", tmp_path / "C1", certificate["root_fingerprint"])
    assert joined["name"] == "C1"
    assert Kit.open(tmp_path / "C1").identity().name == "C1"
    allowed = json.loads((tmp_path / "C1" / "local" / "resources.json").read_text())
    assert allowed["class_allow_list"] == ["wsi_fl.hospitals.flare.roles.Hospital"]
    assert not allowed["allow_log_streaming"]
    rights = json.loads((tmp_path / "C1" / "local" / "authorization.json").read_text())["permissions"]
    assert set(rights) == {"project_admin"}
    assert rights["project_admin"]["byoc"] == rights["project_admin"]["shell_commands"] == "none"
    issued = (founded / "one" / "root" / "issued.jsonl").read_text()
    assert "C1" in issued


def test_a_fingerprint_that_was_read_out_must_fit(founded, tmp_path):
    asked(tmp_path, "C2")
    file = tmp_path / "C2" / "request-C2.json"
    refused(
        lambda: approve_request(file, founded / "one", "AB:" * 31 + "CD"),
        "its fingerprint is",
        "ask C2 again",
    )
    approve_request(file, founded / "one")
    certificate = tmp_path / "C2" / "certificate-C2.json"
    refused(lambda: join(certificate, tmp_path / "C2", "AB:CD"), "do not join")


def test_a_new_name_and_a_new_kit_need_a_fingerprint(founded, tmp_path):
    made = asked(tmp_path, "C10")
    file, kit, root = Path(made["file"]), tmp_path / "C10", founded / "one"

    def says(*arguments):
        return CliRunner().invoke(app, ["federation", *map(str, arguments), "--json"])

    approve = ("approve", file, "--kit", root)
    for more in ((), ("--fingerprint", ""), ("--fingerprint", " : "), ("--fingerprint", "", "--unchecked")):
        assert "have C10 read its fingerprint out by telephone" in said(*approve, *more)
    assert "C10" not in (root / "root" / "issued.jsonl").read_text()
    assert says(*approve, "--unchecked").exit_code == 0
    assert says(*approve).exit_code == 0  # the key that has the name vouches for itself
    assert "--unchecked" in said(*approve, "--fingerprint", "")
    take = ("join", kit / "certificate-C10.json", "--kit", kit)
    for more in ((), ("--fingerprint", "")):
        assert "have the coordinator read the root's fingerprint out" in said(*take, *more)
    assert not (kit / "federation.json").exists()
    assert says(*take, "--unchecked").exit_code == 0
    assert says(*take).exit_code == 0  # it knows the root


def test_a_key_that_is_there_says_its_fingerprint_again(tmp_path):
    made = asked(tmp_path, "C11")
    refused(lambda: asked(tmp_path, "C11"), "there is a key already", made["fingerprint"])


def test_a_name_is_given_to_one_key_and_some_to_none(founded, tmp_path):
    asked(tmp_path, "C3")
    approve_request(tmp_path / "C3" / "request-C3.json", founded / "one")
    approve_request(tmp_path / "C3" / "request-C3.json", founded / "one")  # the same key may ask again
    asked(tmp_path / "other", "C3")
    refused(
        lambda: approve_request(tmp_path / "other" / "C3" / "request-C3.json", founded / "one"), "another key"
    )
    for name, role in (
        ("server", "hospital"),
        ("coordinator", "hospital"),
        ("C4", "coordinator"),
        ("C4", "server"),
    ):
        asked(tmp_path / role, name, role=role)
        file = tmp_path / role / name / f"request-{name}.json"
        refused(partial(approve_request, file, founded / "one"), "cannot be the name")
    asked(tmp_path / "second", "server", role="server")
    file = tmp_path / "second" / "server" / "request-server.json"
    refused(lambda: approve_request(file, founded / "one"), "another key")


def test_a_certificate_of_another_key_is_refused(founded, tmp_path):
    asked(tmp_path / "a", "C5")
    approve_request(tmp_path / "a" / "C5" / "request-C5.json", founded / "one")
    asked(tmp_path / "b", "C5")
    file = tmp_path / "a" / "C5" / "certificate-C5.json"
    refused(lambda: join(file, tmp_path / "b" / "C5"), "belongs to another key")


def test_a_kit_is_left_as_it_is_by_a_certificate_that_does_not_fit(founded, tmp_path):
    for name in ("C6", "C7"):
        asked(tmp_path, name)
        approve_request(tmp_path / name / f"request-{name}.json", founded / "one")
    join(tmp_path / "C6" / "certificate-C6.json", tmp_path / "C6")
    refused(
        lambda: join(tmp_path / "C7" / "certificate-C7.json", tmp_path / "C6"),
        "belongs to another key",
        "was left as it is",
    )
    assert Kit.open(tmp_path / "C6").identity().name == "C6"
    forged = json.loads((tmp_path / "C6" / "certificate-C6.json").read_text()) | {"name": "C8"}
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    refused(lambda: join(tmp_path / "forged.json", tmp_path / "C6"), "says C8", "belongs to C6")
    assert Kit.open(tmp_path / "C6").name == "C6"


def said(*arguments):
    """The one line of a command that fails, wherever it stands."""
    result = CliRunner().invoke(app, ["federation", *map(str, arguments)])
    assert isinstance(result.exception, WsiFlError), result.output
    return str(result.exception)


@pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'")
def test_the_coordinators_kit_starts_nothing_in_any_folder(founded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "has nothing to start" in said("start", founded / "one" / "coordinator")


def test_what_is_missing_on_the_command_line_is_named(founded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--study DIR" in said("start", founded / "two" / "C9")
    assert "over a folder hospitals alone start" in said("start", founded / "two" / "coordinator")
    asked(tmp_path, "C1")
    request_file = tmp_path / "C1" / "request-C1.json"
    gone = tmp_path / "request-nobody.json"
    assert f"{gone}: no such file" in said("approve", gone, "--kit", founded / "one")
    line = said("approve", request_file, "--kit", founded / "one" / "coordinator")
    assert "give --kit the folder that `provision` made" in line
    assert "give --plan FILE" in said("submit", "--kit", founded / "one" / "coordinator")
    line = said("status", "--kit", founded / "one")
    assert f"the coordinator's is {founded / 'one' / 'coordinator'}" in line


def test_a_request_gives_nobody_a_role(founded, tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    made = asked(tmp_path, "C8")
    key = load_pem_private_key((tmp_path / "C8" / "startup" / "client.key").read_bytes(), None)
    said = {
        NameOID.COMMON_NAME: "C8",
        NameOID.ORGANIZATION_NAME: "A",
        NameOID.UNSTRUCTURED_NAME: "project_admin",
    }
    name = x509.Name([x509.NameAttribute(*one) for one in said.items()])
    bent = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
    file = Path(made["file"])
    document = json.loads(file.read_text()) | {"request": bent.public_bytes(Encoding.PEM).decode()}
    file.write_text(json.dumps(document))
    certificate = json.loads(Path(approve_request(file, founded / "one")["file"]).read_text())["certificate"]
    subject = x509.load_pem_x509_certificate(certificate.encode()).subject
    assert [one.oid for one in subject] == [NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME]


def test_the_root_itself_speaks_for_nobody(founded):
    root = (founded / "one" / "root" / "rootCA.pem").read_text()
    with pytest.raises(NotTrusted, match="may sign others"):
        verified(root, root)


def test_nonsense_is_refused(founded, tmp_path):
    (tmp_path / "x.json").write_text("[]")
    for action in (
        lambda: approve_request(tmp_path / "x.json", founded / "one"),
        lambda: approve_request(tmp_path / "none.json", founded / "one"),
        lambda: join(tmp_path / "x.json", tmp_path),
        lambda: Kit.open(tmp_path),
        lambda: request(tmp_path / "kit", name="../up", organization="x"),
        lambda: provision(founded, federation="again", server="localhost:1"),
        lambda: provision(tmp_path / "new", federation="x"),
        lambda: provision(tmp_path / "new", federation="x", server="localhost:http"),
        lambda: provision(tmp_path / "new", federation="x", server="evil -m /x --set a=b:8602"),
    ):
        with pytest.raises(WsiFlError) as caught:
            action()
        assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_named(founded):
    steps = list(look(Kit.open(founded / "one" / "coordinator")))
    assert [step.ok for step in steps] == [True, True, False]
    assert "no way through to localhost port 1" in likely_reason(Kit.open(founded / "one" / "coordinator"))


def test_over_a_folder_no_server_is_asked_for(founded):
    kit = Kit.open(founded / "two" / "C9")
    assert kit.folder == str(founded / "share")
    assert [step.what for step in look(kit)] == ["certificate"]
    refused(lambda: server_of(kit), "has no server")
    assert not (founded / "two" / "C9" / "startup" / "fed_client.json").exists()
