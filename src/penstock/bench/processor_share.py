"""A fixed share of the processor for some processes, whatever else runs, by a cgroup's quota: a machine of known size.

Of cgroups v1 (cpu.cfs_quota_us) or v2 (cpu.max); needs root. Periods are short, so that a machine whose share is used
up waits for milliseconds. Measures nothing but whether the quota binds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PenstockError

__all__ = ["ProcessorShare", "check_that_it_binds", "processor_share"]

PERIOD_US = 10_000
CGROUPS = Path("/sys/fs/cgroup")
BUSY_S = 0.5
SLACK = 1.15
BUSY = """
import sys, time
began, used = time.perf_counter(), time.process_time()
while time.perf_counter() < began + float(sys.argv[1]):
    pass
print((time.process_time() - used) / (time.perf_counter() - began))
"""

_numbers = itertools.count()


class ProcessorShare:
    """A cgroup that processes are put in, with all of their threads."""

    def __init__(self, folder: Path, share: float) -> None:
        self.share = share
        """Of one core; 1.5 is one and a half."""
        self._folder = folder

    def hold(self, process: int) -> None:
        """Raises PenstockError."""
        try:
            (self._folder / "cgroup.procs").write_text(str(process))
        except OSError as error:
            raise PenstockError(f"process {process} can't be put in {self._folder}: {error}") from error


@contextlib.contextmanager
def processor_share(share: float, root: Path = CGROUPS) -> Iterator[ProcessorShare]:
    """A group with `share` of one core, within this process's own (v1) or at the top (v2).

    Raises PenstockError where none can be made. Whoever is left in it at the end goes back to where it came from.
    """
    parent, quota = _parent(root), max(1000, round(share * PERIOD_US))
    folder = parent / f"penstock-bench-{os.getpid()}-{next(_numbers)}"
    limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    if root == parent:
        limits = {"cpu.max": f"{quota} {PERIOD_US}"}
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(value)
    except OSError as error:
        raise PenstockError(f"no share of the processor can be set in {parent}: {error}") from error
    try:
        yield ProcessorShare(folder, share)
    finally:
        for process in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(process)
        folder.rmdir()


def check_that_it_binds(group: ProcessorShare) -> float:
    """The share that a busy process got in `group`. Raises PenstockError where it is more than that allows."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(BUSY_S)], stdout=subprocess.PIPE, text=True)
    try:
        group.hold(busy.pid)
        got = float(busy.communicate(timeout=60)[0])
    finally:
        busy.kill()
        busy.wait(10)
    # Before it was put there it may have run for a moment.
    if got > SLACK * group.share + 0.02:
        raise PenstockError(f"a quota of {group.share:g} of a core does not bind here: a busy process got {got:.2f}")
    return got


def _parent(root: Path) -> Path:
    """Of groups to be made. Raises PenstockError."""
    if (root / "cpu" / "cgroup.procs").exists():
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        return root / "cpu" / next((path.lstrip("/") for _, names, path in own if "cpu" in names.split(",")), "")
    controllers = root / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return root
    raise PenstockError(f"{root} has no cgroups with a processor's quota")
