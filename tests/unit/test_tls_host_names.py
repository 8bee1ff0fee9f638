"""A hospital connects only to a server whose certificate has the configured host name."""

import socket
import ssl
import threading
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from wsi_fl.hospitals.trust.provisioning import provision_federation

pytestmark = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs the extra flare")


@pytest.fixture(scope="module")
def kit_server(tmp_path_factory):
    """Return the port of a server with its kit on 127.0.0.1, the list of its clients, and the kit of a hospital."""
    folder = tmp_path_factory.mktemp("called")
    provision_federation(folder, federation="one", server="localhost:1", sites=["C1"])
    startup, through = folder / "server" / "startup", []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=startup / "rootCA.pem")
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                    if secured.recv(3) == b"GET":
                        through.append(True)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], through, folder / "C1"
    listener.close()


def connect_by_flare(kit, host, port):
    """Connect by FLARE's driver, as a client, a job process and the coordinator do."""
    from nvflare.fuel.f3.drivers.aio_http_driver import AioHttpDriver

    startup = kit / "startup"
    files = {"ca_cert": "rootCA.pem", "client_cert": "client.crt", "client_key": "client.key"}
    params = {"url": f"https://{host}:{port}", "secure": True, "host": host, "port": port}
    params |= {key: str(startup / name) for key, name in files.items()}
    AioHttpDriver().connect(SimpleNamespace(params=params))


@pytest.mark.parametrize("checked", [False, True])
def test_a_server_with_another_host_name_is_refused(kit_server, monkeypatch, checked):
    from nvflare.fuel.f3.drivers import aio_http_driver, net_utils
    from nvflare.fuel.f3.drivers.aio_http_driver import AioHttpDriver

    from wsi_fl.hospitals.flare.processes import patch_connections

    monkeypatch.setattr(net_utils, "get_ssl_context", net_utils.get_ssl_context)
    monkeypatch.setattr(AioHttpDriver, "connect", AioHttpDriver.connect)
    monkeypatch.setattr(aio_http_driver, "aiohttp", aio_http_driver.aiohttp)
    if checked:  # what is tested here is that FLARE itself looks at no name, and that it does then
        patch_connections()
    port, through, kit = kit_server
    for host, welcome in (("localhost", True), ("127.0.0.1", not checked)):
        through.clear()
        with pytest.raises(Exception) as ended:
            connect_by_flare(kit, host, port)
        assert bool(through) == welcome and ("certificate is not valid for" in str(ended.value)) != welcome


@pytest.mark.parametrize("module", ["client", "job", "jobs"])
def test_every_connection_checks_host_names(module, monkeypatch):
    """Clients and job processes check from their start, the coordinator's commands from their connection."""
    from wsi_fl.hospitals.flare import jobs, processes

    checked = []
    monkeypatch.setattr(
        processes, "patch_connections", lambda: checked.append(True) or (_ for _ in ()).throw(SystemExit)
    )
    monkeypatch.setenv("WSI_FL_STARTED_BY", "1")
    monkeypatch.setattr(jobs, "require_server", lambda _: None)
    monkeypatch.setattr(processes, "_end_with_parent", lambda _: None)
    kit = SimpleNamespace(role="coordinator", path="kit", document={"server": "localhost:1"})
    with pytest.raises(SystemExit):
        processes.main(module) if module != "jobs" else jobs.list_connected(kit)
    assert checked
