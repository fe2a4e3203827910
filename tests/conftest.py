"""What every test stands on."""

from __future__ import annotations

import signal

from hypothesis import settings


def pytest_configure() -> None:
    """A suite that a shell starts in the background inherits SIGINT ignored, and so would whatever it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes says how busy the machine is, and nothing of what is tested.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
