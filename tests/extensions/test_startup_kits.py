"""Entry into a federation: request, approval, startup kit, and how it reaches its server, directly or by a proxy.

Every mismatch and every obstacle is reported in one line.
"""

import json
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import refused
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from federation_fixtures import command, needs_flare
from proxies import FORBIDDEN, KNOWN, needs_proxy, proxying

from wsi_fl.hospitals.trust import provisioning
from wsi_fl.hospitals.trust.certificates import (
    NotTrusted,
    build_request,
    build_root_certificate,
    generate_key,
    issue_certificate,
    verify_certificate,
)
from wsi_fl.hospitals.trust.kit import (
    Kit,
    _open_connection,
    check_connection,
    find_failed_step,
    find_proxy,
    parse_address,
    server_address,
)
from wsi_fl.hospitals.trust.provisioning import create_request, provision_federation
from wsi_fl.types import WsiFlError

approve_request, join = (
    partial(one, unchecked=True) for one in (provisioning.approve_request, provisioning.install_certificate)
)


@pytest.fixture(scope="module")
def federation_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    provision_federation(folder / "one", federation="one", server="localhost:1")
    provision_federation(folder / "two", federation="two", shared_folder=str(folder / "share"), sites=["C9"])
    return folder


def request_file(folder, name="C1", **given):
    """The file of a request."""
    made = create_request(folder / name, name=name, organization="A hospital", **given)
    return Path(made["file"]), made["fingerprint"]


def test_a_key_is_made_at_the_hospital_and_never_leaves_it(federation_folder, tmp_path):
    (file, fingerprint), kit = request_file(tmp_path), tmp_path / "C1"
    assert (kit / "startup" / "client.key").stat().st_mode & 0o077 == 0
    assert "PRIVATE" not in file.read_text()
    certificate = approve_request(file, federation_folder / "one", fingerprint)
    assert "PRIVATE" not in Path(certificate["file"]).read_text()
    joined = join(kit / "certificate-C1.json", kit, certificate["root_fingerprint"])
    assert joined["name"] == Kit.open(kit).load_identity().name == "C1"
    allowed = json.loads((kit / "local" / "resources.json").read_text())
    assert allowed["class_allow_list"] == ["wsi_fl.hospitals.flare.roles.HospitalExecutor"]
    assert not allowed["allow_log_streaming"]
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert set(rights) == {"project_admin"}
    assert rights["project_admin"]["byoc"] == rights["project_admin"]["shell_commands"] == "none"
    assert "C1" in (federation_folder / "one" / "root" / "issued.jsonl").read_text()


def test_a_fingerprint_that_was_read_out_must_match_and_is_shown_again(federation_folder, tmp_path):
    file, fingerprint = request_file(tmp_path, "C2")
    refused(lambda: request_file(tmp_path, "C2"), "there is a key already", fingerprint)
    wrong = partial(approve_request, file, federation_folder / "one", "AB:" * 31 + "CD")
    refused(wrong, "its fingerprint is", "ask C2 again")
    approve_request(file, federation_folder / "one")
    refused(lambda: join(tmp_path / "C2" / "certificate-C2.json", tmp_path / "C2", "AB:CD"), "do not join")


def test_a_new_name_and_a_new_startup_kit_need_a_fingerprint(federation_folder, tmp_path):
    (file, _), kit, root = request_file(tmp_path, "C10"), tmp_path / "C10", federation_folder / "one"
    approve = ("approve", file, "--kit", root)
    for more in ((), ("--fingerprint", ""), ("--fingerprint", " : "), ("--fingerprint", "", "--unchecked")):
        assert "have C10 read its fingerprint out by telephone" in error_line(*approve, *more)
    assert "C10" not in (root / "root" / "issued.jsonl").read_text()
    assert command(*approve, "--unchecked").exit_code == 0
    assert command(*approve).exit_code == 0  # the key that has the name vouches for itself
    assert "--unchecked" in error_line(*approve, "--fingerprint", "")
    take = ("join", kit / "certificate-C10.json", "--kit", kit)
    for more in ((), ("--fingerprint", "")):
        assert "have the coordinator read the root's fingerprint out" in error_line(*take, *more)
    assert not (kit / "federation.json").exists() and command(*take, "--unchecked").exit_code == 0
    assert command(*take).exit_code == 0  # it knows the root


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("server", "hospital", "cannot be the name"),
        ("coordinator", "hospital", "cannot be the name"),
        ("C4", "coordinator", "cannot be the name"),
        ("C4", "server", "cannot be the name"),
        ("server", "server", "another key"),
        ("C3", "hospital", "another key"),
    ],
)
def test_a_name_is_given_to_one_key_only_and_reserved_names_to_none(federation_folder, tmp_path, name, role, words):
    if name == "C3":
        first, _ = request_file(tmp_path / "first", name)
        for _ in range(2):  # the same key may ask again
            approve_request(first, federation_folder / "one")
    file, _ = request_file(tmp_path, name, role=role)
    refused(lambda: approve_request(file, federation_folder / "one"), words)


def test_a_certificate_that_does_not_match_leaves_the_startup_kit_unchanged(federation_folder, tmp_path):
    for name in ("C6", "C7"):
        approve_request(request_file(tmp_path, name)[0], federation_folder / "one")
    own, other = (tmp_path / name / f"certificate-{name}.json" for name in ("C6", "C7"))
    join(own, tmp_path / "C6")
    refused(lambda: join(other, tmp_path / "C6"), "belongs to another key", "was left as it is")
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(json.loads(own.read_text()) | {"name": "C8"}))
    refused(lambda: join(forged, tmp_path / "C6"), "says C8", "belongs to C6")
    assert Kit.open(tmp_path / "C6").load_identity().name == Kit.open(tmp_path / "C6").name == "C6"
    request_file(tmp_path / "again", "C6")
    refused(lambda: join(own, tmp_path / "again" / "C6"), "belongs to another key")


def error_line(*arguments):
    """The one line of a command that fails, on either output stream."""
    result = command(*arguments)
    assert isinstance(result.exception, WsiFlError), result.output
    return str(result.exception)


@needs_flare
def test_the_coordinators_startup_kit_starts_nothing_in_any_folder(federation_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "has nothing to start" in error_line("start", federation_folder / "one" / "coordinator")


def test_missing_arguments_of_the_command_line_are_named(federation_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--study DIR" in error_line("start", federation_folder / "two" / "C9")
    assert "over a folder hospitals alone start" in error_line("start", federation_folder / "two" / "coordinator")
    (file, _), gone, one = request_file(tmp_path, "C1"), tmp_path / "request-nobody.json", federation_folder / "one"
    assert f"{gone}: no such file" in error_line("approve", gone, "--kit", one)
    line = error_line("approve", file, "--kit", one / "coordinator")
    assert "give --kit the folder that `provision` made" in line
    assert "give --plan FILE" in error_line("submit", "--kit", one / "coordinator")
    assert f"the coordinator's is {one / 'coordinator'}" in error_line("status", "--kit", one)


def test_a_request_grants_no_role_and_the_root_ca_is_no_participant(federation_folder, tmp_path):
    file, _ = request_file(tmp_path, "C8")
    key = load_pem_private_key((tmp_path / "C8" / "startup" / "client.key").read_bytes(), None)
    named = (NameOID.COMMON_NAME, "C8"), (NameOID.ORGANIZATION_NAME, "A")
    named += ((NameOID.UNSTRUCTURED_NAME, "project_admin"),)
    name = x509.Name([x509.NameAttribute(*one) for one in named])
    bent = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
    document = json.loads(file.read_text()) | {"request": bent.public_bytes(Encoding.PEM).decode()}
    file.write_text(json.dumps(document))
    certificate = json.loads(Path(approve_request(file, federation_folder / "one")["file"]).read_text())["certificate"]
    subject = x509.load_pem_x509_certificate(certificate.encode()).subject
    assert [one.oid for one in subject] == [NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME]
    root = (federation_folder / "one" / "root" / "rootCA.pem").read_text()
    refused(lambda: verify_certificate(root, root), "may sign others", error=NotTrusted)


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"', "{}", '{"name": "C1"}', "{", "\xff"])
def test_a_startup_kit_with_a_damaged_document_is_named(tmp_path, content):
    (tmp_path / "federation.json").write_bytes(content.encode("latin1"))
    refused(lambda: Kit.open(tmp_path), "federation.json: ", "put its backup back", error=WsiFlError)


def test_malformed_requests_are_refused(federation_folder, tmp_path):
    (tmp_path / "x.json").write_text("[]")
    for action in (
        lambda: approve_request(tmp_path / "x.json", federation_folder / "one"),
        lambda: approve_request(tmp_path / "none.json", federation_folder / "one"),
        lambda: join(tmp_path / "x.json", tmp_path),
        lambda: Kit.open(tmp_path),
        lambda: create_request(tmp_path / "kit", name="../up", organization="x"),
        lambda: provision_federation(federation_folder, federation="again", server="localhost:1"),
        lambda: provision_federation(tmp_path / "new", federation="x"),
        lambda: provision_federation(tmp_path / "new", federation="x", server="localhost:http"),
        lambda: provision_federation(tmp_path / "new", federation="x", server="evil -m /x --set a=b:8602"),
    ):
        refused(action, error=WsiFlError)


def test_an_unreachable_server_is_named_and_over_a_folder_no_server_is_needed(federation_folder):
    kit = Kit.open(federation_folder / "one" / "coordinator")
    assert [step.ok for step in check_connection(kit)] == [True, True, False]
    assert "no way through to localhost port 1" in find_failed_step(kit).said
    kit = Kit.open(federation_folder / "two" / "C9")
    assert kit.folder == str(federation_folder / "share")
    assert [step.what for step in check_connection(kit)] == ["certificate"]
    refused(lambda: server_address(kit), "has no server")
    assert not (kit.path / "startup" / "fed_client.json").exists()


PASSWORD = "s:cr@t%"
WRITTEN = "s%3Acr%40t%25"
"""As it stands in a URL."""


@pytest.fixture(autouse=True)
def no_proxy_here(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def serve_tls(startup, host="127.0.0.1"):
    """The port of a server with the key and certificate in a folder, which requires clients of the same root CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)

    def serve():
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(3)
                    secured.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    """Federations by the address of their server, each with a hospital C1; their ports come later."""
    folder = tmp_path_factory.mktemp("founded")
    for name, host in (("straight", "localhost"), ("named", KNOWN), ("six", "[::1]")):
        provision_federation(folder / name, federation=name, server=f"{host}:1", sites=["C1"])
    return folder


def kit_of(founded, name, port, host=None):
    """The hospital's startup kit, whose server is at a port."""
    kit = Kit.open(founded / name / "C1")
    old = str(kit.document["server"]).rpartition(":")[0]
    return Kit(kit.path, kit.document | {"server": f"{host or old}:{port}"})


def steps_of(kit):
    return {step.what: (step.ok, step.said) for step in check_connection(kit)}


def test_the_default_port_of_a_server_is_that_of_https_and_invalid_addresses_are_refused(tmp_path):
    made = provision_federation(tmp_path, federation="one", server="fl.example.org")
    assert made["server"] == "fl.example.org:443"
    assert server_address(Kit.open(tmp_path / "coordinator")) == ("fl.example.org", 443)
    for text in ("", "::1", "a:b", "[::1", "[fl]", "a:0", "a:65536", "[::1]:x", "a b:[", "a:1:2"):
        with pytest.raises(ValueError):
            parse_address(text)


def test_a_device_that_intercepts_tls_is_named(founded, tmp_path):
    root_key, key = generate_key(), generate_key()
    root = build_root_certificate(root_key, "Hospital Proxy CA")
    shown = issue_certificate(build_request(key, "server", "one"), root_key, root, role="server", hosts=("localhost",))
    for name, text in (("rootCA.pem", root), ("server.crt", shown), ("server.key", key)):
        (tmp_path / name).write_text(text)
    with serve_tls(tmp_path) as port:
        steps = steps_of(kit_of(founded, "straight", port))
    ok, said = steps["mutual TLS"]
    assert not ok and "\n" not in said and "opens TLS" in said and "exception" in said
    said = said.replace("O=one,CN=server", "CN=server,O=one")
    assert "a certificate for CN=server,O=one, issued by CN=Hospital Proxy CA" in said


def test_a_server_of_the_federation_by_another_name_is_no_interception(founded):
    with serve_tls(founded / "straight" / "server" / "startup") as port:
        assert find_failed_step(kit_of(founded, "straight", port)) is None
        said = find_failed_step(kit_of(founded, "straight", port, host="127.0.0.1")).said
    assert "the server's certificate was refused" in said and "opens TLS" not in said


def test_a_server_can_be_reached_by_its_ipv6_address(founded):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with serve_tls(founded / "six" / "server" / "startup", "::1") as port:
        kit = kit_of(founded, "six", port)
        assert server_address(kit) == ("::1", port)
        assert [ok for ok, _ in steps_of(kit).values()] == [True] * 4


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The port of a proxy that requires a password."""
    with proxying(tmp_path_factory.mktemp("guarded"), PASSWORD) as port:
        yield port


@needs_proxy
def test_check_goes_through_a_proxy_and_names_it(founded, guarded, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{WRITTEN}@127.0.0.1:{guarded}")
    with serve_tls(founded / "named" / "server" / "startup") as port:
        steps = steps_of(kit_of(founded, "named", port))
    assert list(steps) == ["certificate", "proxy", "mutual TLS"]
    assert all(ok for ok, _ in steps.values()), steps
    assert f"through the proxy 127.0.0.1:{guarded} (HTTPS_PROXY)" in steps["proxy"][1]
    assert WRITTEN not in str(steps) and PASSWORD not in str(steps)


@needs_proxy
@pytest.mark.parametrize(
    ("user", "port", "words"),
    [
        ("", 1, "asks for a user and a password, or does not take those given (407)"),
        ("user:wrong@", 1, "does not take those given (407): write it as HTTPS_PROXY=http://USER:PASSWORD@"),
        (f"user:{WRITTEN}@", FORBIDDEN, f"forbids {KNOWN} port {FORBIDDEN} (403)"),
        (f"user:{WRITTEN}@", 1, f"does not get through to {KNOWN} port 1 ("),
    ],
)
def test_a_proxy_failure_is_reported_in_one_line(founded, guarded, monkeypatch, user, port, words):
    monkeypatch.setenv("HTTPS_PROXY", f"http://{user}127.0.0.1:{guarded}")
    said = find_failed_step(kit_of(founded, "named", port)).said
    assert said.startswith(f"the proxy 127.0.0.1:{guarded} (HTTPS_PROXY) ") and words in said
    assert "\n" not in said and "wrong" not in said and WRITTEN not in said


def test_a_missing_or_unsupported_proxy_is_named(founded, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{WRITTEN}@127.0.0.1:1")
    said = find_failed_step(kit_of(founded, "named", 443)).said
    assert "the proxy 127.0.0.1:1 (HTTPS_PROXY) cannot be reached" in said and WRITTEN not in said
    for url in ("socks5://h:1", "https://user:pw@h:1", "http://h:port", "http://:1"):
        monkeypatch.setenv("HTTPS_PROXY", url)
        refused(lambda: _open_connection("a.org", 443), "names no proxy that can be used", error=WsiFlError)


def test_a_proxy_needs_no_scheme_and_is_not_used_for_hosts_of_no_proxy(monkeypatch):
    assert find_proxy("fl.example.org") is None
    monkeypatch.setenv("HTTPS_PROXY", "user:pw@proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "localhost,.inside.org")
    assert str(find_proxy("fl.example.org")) == "proxy.example.org:3128"
    assert "pw" not in repr(find_proxy("fl.example.org"))
    assert find_proxy("localhost") is find_proxy("fl.inside.org") is None
