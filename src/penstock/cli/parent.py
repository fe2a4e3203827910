"""Children leave when their parent dies: a pipe that the parent holds open is their standard input.

SIGKILL of the parent closes the pipe too, so no signal, no polling of process ids and no platform call is needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def watch_stdin(on_eof: Callable[[], None]) -> threading.Thread:
    """Calls `on_eof` once, from a thread of its own, when standard input ends; what is sent there is ignored."""

    def watch() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            # A closed descriptor says the same as its end: there is no parent to wait for.
            pass
        on_eof()

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread
