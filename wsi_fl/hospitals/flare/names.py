"""Whether a server of NVIDIA FLARE is the one that was asked for: FLARE 2.9 looks at no name in certificates."""

from __future__ import annotations

from ssl import SSLContext
from typing import Any

from nvflare.fuel.f3.drivers import net_utils

_made = net_utils.get_ssl_context


def check_names() -> None:
    """Let every connection of this process to a server fail whose certificate is not for the host that is called."""
    net_utils.get_ssl_context = _checking


def _checking(params: dict[str, Any], ssl_server: bool) -> SSLContext | None:
    context: SSLContext | None = _made(params, ssl_server)
    if context is not None and not ssl_server:
        context.check_hostname = True
    return context
