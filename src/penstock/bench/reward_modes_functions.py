"""What `reward_modes` has for rewards. Apart from it, so that a process that only scores imports nothing heavy."""

from __future__ import annotations

import time
import urllib.request

from penstock.sample import Sample

WAIT_S = 60.0


def computing(sample: Sample, *, seconds: float) -> float:
    """Python that holds the interpreter until its thread has had `seconds` of a processor; 0 or 1 by replica."""
    began, counted = time.thread_time(), 0
    while time.thread_time() - began < seconds:
        counted += sum(range(200))
    return float(sample.id.replica % 2)


def asking(sample: Sample, *, url: str) -> float:
    """The number that a server at `url` answers with after a while."""
    with urllib.request.urlopen(f"{url}?replica={sample.id.replica}", timeout=WAIT_S) as answer:
        return float(answer.read())
