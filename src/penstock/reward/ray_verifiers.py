"""Verifier actors: reward functions in processes that Ray places, on this machine or on others.

As `processes`, with Ray in the place of pipes: one sample at a time for each actor, so that a time limit starts when
the work does; an actor that is late is killed and another takes its place; a sample is never given to a second one.
Samples cross as `crossing` writes them. Lives on the asyncio loop that `start` is called on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from penstock.cluster.ray_actors import the_ray
from penstock.errors import PenstockError, RewardError
from penstock.reward.crossing import LENGTH, Done, decode_job, decode_reply, encode, job_of
from penstock.reward.faults import FaultLog, Faults
from penstock.reward.functions import load_function
from penstock.sample import Sample, Score, Unscored

__all__ = ["RayVerifiers"]

START_TIMEOUT_S = 300.0


class _Verifier:
    """What an actor is: the function, loaded once."""

    def __init__(self, function_path: str, options: dict[str, Any]) -> None:
        self._refusal = ""
        try:
            self._function = load_function(function_path, options)
        except PenstockError as error:
            self._refusal = str(error)
        self._runner = asyncio.Runner()
        self._faults = Faults()

    def refusal(self) -> str:
        """Why the function can't be loaded, or nothing."""
        return self._refusal

    def score(self, job: bytes) -> bytes:
        from penstock.reward.worker import job_done  # a program of its own, which its package must not import

        return encode(job_done(self._runner, self._function, decode_job(job[LENGTH.size :]), self._faults))


class RayVerifiers:
    """`actors` Ray actors for one reward function."""

    def __init__(
        self,
        function_path: str,
        actors: int,
        timeout_s: float,
        output: Path | None = None,
        options: Mapping[str, Any] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Joins the Ray cluster that RAY_ADDRESS names, or starts one here. Raises MissingExtra."""
        self._ray = the_ray()
        self._function_path = function_path
        self._options = dict(options or {})
        self._actors = actors
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._faults = FaultLog(output)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        self._living: set[Any] = set()
        self._numbers = count()
        self._starting: asyncio.Task[None] | None = None
        self._arrivals: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._own_ray = False
        self._closed = False

    async def start(self) -> None:
        """Returns when an actor has loaded the function. Raises RewardError."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample; waits for a free actor first, which each gives up in time. Raises RewardError."""
        await self.start()
        try:
            job = job_of(next(self._numbers), sample)
        except ValueError as error:
            return Unscored(str(error))
        actor = await self._an_actor()
        kept = False
        try:
            reply = await asyncio.wait_for(_awaited(actor.score.remote(job)), self._timeout_s)
            kept = True
        except TimeoutError:
            return Unscored(f"the reward function took longer than {self._timeout_s:g} s; its actor was killed")
        except self._ray.exceptions.RayError as error:
            return Unscored(f"the actor of the reward function is gone: {error}")
        finally:
            self._back(actor, kept)
        done = decode_reply(reply[LENGTH.size :])
        assert isinstance(done, Done)
        if done.fault:
            self._faults.take(done.fault, done.traceback)
        result = done.result()
        return result if not isinstance(result, bytes) else Unscored("the actor answered something else")

    async def close(self) -> None:
        """Kills all actors; ends Ray where this started it."""
        self._closed = True
        for task in self._arrivals:
            task.cancel()
        self._fail(RewardError("the verifiers were closed"))
        for actor in self._living:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor, no_restart=True)
        self._living.clear()
        if self._own_ray:
            await asyncio.to_thread(self._ray.shutdown)
            self._own_ray = False

    async def _start(self) -> None:
        if not self._ray.is_initialized():
            await asyncio.to_thread(self._ray.init, include_dashboard=False, log_to_driver=True)
            self._own_ray = True
        self._failure = asyncio.get_running_loop().create_future()
        for _ in range(self._actors):
            self._spawn()
        self._free.put_nowait(await self._an_actor())

    async def _an_actor(self) -> Any:
        """A free actor. Raises RewardError once none can start."""
        assert self._failure is not None
        taking = asyncio.ensure_future(self._free.get())
        try:
            await asyncio.wait({taking, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            raise self._failure.exception() or RewardError("the verifiers failed")
        finally:
            if not taking.done():
                taking.cancel()

    def _spawn(self) -> None:
        remote = self._ray.remote(_Verifier).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        actor = remote.remote(self._function_path, self._options)
        self._living.add(actor)
        task = asyncio.create_task(self._arrival(actor))
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def _arrival(self, actor: Any) -> None:
        """An actor takes samples once it has loaded the function; one that can't ends the pool with the cause."""
        try:
            refusal = await asyncio.wait_for(_awaited(actor.refusal.remote()), self._start_timeout_s)
        except TimeoutError:
            refusal = f"an actor for the reward function did not start in {self._start_timeout_s:g} s"
        except self._ray.exceptions.RayError as error:
            refusal = f"an actor for the reward function did not start: {error}"
        if refusal:
            self._fail(RewardError(refusal))
        else:
            self._free.put_nowait(actor)

    def _fail(self, error: RewardError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # whoever waits is told; nobody may

    def _back(self, actor: Any, kept: bool) -> None:
        if kept and not self._closed:
            self._free.put_nowait(actor)
            return
        self._living.discard(actor)
        self._ray.kill(actor, no_restart=True)
        if not self._closed:
            self._spawn()


async def _awaited(reference: Any) -> Any:
    return await reference
