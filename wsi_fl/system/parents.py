"""Ending with the process that started this one: nobody is there to end what goes on after that."""

from __future__ import annotations

import os
import threading
import time

_LOOK_S = 0.25


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
