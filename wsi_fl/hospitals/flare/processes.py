"""What every process of NVIDIA FLARE is given: it knows whom to refuse, and ends with whoever started it.

FLARE 2.9 looks at no name in certificates and at no list of withdrawn ones, and nobody would be there to end what goes
on after its parent.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from ssl import SSLContext
from typing import Any

from nvflare.fuel.f3.drivers import net_utils
from nvflare.fuel.f3.drivers.driver_params import DriverParams

from wsi_fl.hospitals.trust.kit import refuse_withdrawn

_LOOK_S = 0.25
_made = net_utils.get_ssl_context


def check_names() -> None:
    """Let every connection of this process fail whose certificate is withdrawn, or not for the host that is called."""
    net_utils.get_ssl_context = _checking


def _checking(params: dict[str, Any], ssl_server: bool) -> SSLContext | None:
    context: SSLContext | None = _made(params, ssl_server)
    if context is None:
        return None
    context.check_hostname = not ssl_server
    return refuse_withdrawn(context, Path(params[DriverParams.CA_CERT.value]))


def end_with(parent: int) -> None:
    """Let this process end at once when its parent has ended, in whatever way that did.

    Args:
        parent: its process id, from before this process began.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)  # at once: threads of libraries would wait for each other

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
