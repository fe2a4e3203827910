"""What every test stands on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_configure() -> None:
    """A suite that a shell starts in the background inherits SIGINT ignored, and so would whatever it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # PyTorch's threads spin while they wait for each other, and tests go beside each other on as many cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # How long an example takes says how busy the machine is, and nothing of what is tested.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported for the tests stays; looking through it for garbage again and again is a third of that time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
