"""A verifier's process: loads one reward function, then scores samples from standard input until that closes.

Run as `python -m penstock.reward.worker FUNCTION PARENT_PID`. Knows nothing of deadlines: it is killed at them, with
all that it started, by whoever started it. What the reward function prints goes to standard error; the protocol has
a descriptor of its own that nothing else writes to.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

import msgspec

from penstock.errors import PenstockError
from penstock.reward.crossing import LENGTH, Ask, Done, Job, Ready, Refused, Reply, decode_job, encode, sample_of
from penstock.reward.faults import Faults
from penstock.reward.functions import RewardFunction, load_function, normalise
from penstock.sample import Score

__all__ = ["job_done", "main"]

PR_SET_PDEATHSIG = 1
EXIT_REFUSED = 3


def main(function_path: str, parent_pid: int) -> int:
    jobs_in, replies_out = _own_descriptors()
    _die_with_parent(parent_pid)
    options = _read_options(jobs_in)
    jobs: queue.SimpleQueue[Job | Ask] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs_in, jobs), name="penstock-jobs", daemon=True).start()
    try:
        function = load_function(function_path, options)
    except PenstockError as error:
        _send(replies_out, Refused(str(error)))
        return EXIT_REFUSED
    _send(replies_out, Ready())
    faults = Faults()
    with asyncio.Runner() as runner:
        while True:
            done = job_done(runner, function, jobs.get(), faults)
            _flush()
            _send(replies_out, done)


def _flush() -> None:
    """What a job has printed is out before its result is, so that nobody takes it for the next one's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed or replaced it
            stream.flush()


def job_done(runner: asyncio.Runner, function: RewardFunction, job: Job | Ask, faults: Faults) -> Done:
    """A job's result; whatever the function raises is in it."""
    sample = sample_of(job) if isinstance(job, Job) else None
    try:
        given = sample if isinstance(job, Job) else msgspec.json.decode(job.body)
        returned = function.call(given)
        if inspect.isawaitable(returned):
            returned = runner.run(_awaited(returned))
        if sample is None:
            return Done(job.number, answer=msgspec.json.encode(returned))
        result = normalise(returned)
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001
        # Whatever a reward function raises is its sample's cause, and no reason for the worker to end.
        cause, fault, text = faults.take(error, sample)
        return Done(job.number, cause=cause, fault=fault, traceback=text)
    if isinstance(result, Score):
        return Done(job.number, result.value, dict(result.parts))
    return Done(job.number, cause=result.cause)


async def _awaited(result: object) -> object:
    return await result  # type: ignore[misc]  # the caller has made sure that it is awaitable


def _own_descriptors() -> tuple[BinaryIO, BinaryIO]:
    """Moves the protocol away from descriptors 0 and 1, which the reward function may read, write or pass on."""
    jobs_in = os.fdopen(os.dup(0), "rb")
    replies_out = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return jobs_in, replies_out


def _die_with_parent(parent_pid: int) -> None:
    """Linux: SIGKILL when the starting thread ends, even while a verifier holds the interpreter's lock.

    Elsewhere, and for the processes that a verifier started, the closing of standard input does it.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        _end_group()


def _end_group() -> None:
    """Ends this process and everything in its group, without waiting for anybody's cleaning up."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _read_options(jobs_in: BinaryIO) -> dict[str, Any]:
    """The function's options, which come before all jobs."""
    head = jobs_in.read(LENGTH.size)
    if len(head) < LENGTH.size:
        _end_group()
    options: dict[str, Any] = msgspec.json.decode(jobs_in.read(LENGTH.unpack(head)[0]))
    return options


def _read_jobs(jobs_in: BinaryIO, jobs: queue.SimpleQueue[Job | Ask]) -> None:
    try:
        while len(head := jobs_in.read(LENGTH.size)) == LENGTH.size:
            jobs.put(decode_job(jobs_in.read(LENGTH.unpack(head)[0])))
    except Exception:
        traceback.print_exc()
        raise
    finally:
        # The scorer is gone, or what it sends can't be read: either way no job will come.
        sys.stderr.flush()
        _end_group()


def _send(replies_out: BinaryIO, reply: Reply) -> None:
    data = memoryview(encode(reply))
    while data:
        data = data[replies_out.write(data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
