"""What every process of NVIDIA FLARE is given: it asks for the right server, and ends with whoever started it.

FLARE 2.9 looks at no name in certificates, and nobody would be there to end what goes on after its parent.
"""

from __future__ import annotations

import os
import threading
import time
from ssl import SSLContext
from typing import Any

from nvflare.fuel.f3.drivers import net_utils

_LOOK_S = 0.25
_made = net_utils.get_ssl_context


def check_names() -> None:
    """Let every connection of this process to a server fail whose certificate is not for the host that is called."""
    net_utils.get_ssl_context = _checking


def _checking(params: dict[str, Any], ssl_server: bool) -> SSLContext | None:
    context: SSLContext | None = _made(params, ssl_server)
    if context is not None and not ssl_server:
        context.check_hostname = True
    return context


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
