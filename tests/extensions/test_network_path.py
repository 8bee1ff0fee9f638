"""How a startup kit reaches its server, directly or by a proxy; every obstacle is reported in one line."""

import socket
import ssl
import threading
from contextlib import contextmanager, suppress

import pytest
from conftest import refused
from proxies import FORBIDDEN, KNOWN, needs_proxy, proxying

from wsi_fl.hospitals.trust.certificates import build_request, build_root_certificate, generate_key, issue_certificate
from wsi_fl.hospitals.trust.kit import (
    Kit,
    _open_connection,
    check_connection,
    find_failed_step,
    find_proxy,
    parse_address,
    server_address,
)
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.types import WsiFlError

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
