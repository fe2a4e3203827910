"""What every test stands on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A suite that a shell starts in the background inherits SIGINT ignored, and so would whatever it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
