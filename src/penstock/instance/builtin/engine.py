"""The built-in engine behind the `Engine` protocol: one compute thread around a `BuiltinCore`.

Decides when a delta is cut (every `frame_steps` decode steps, and at once when nothing is left to run) and that the
thread sleeps while there is nothing to do or its reader lags. What is generated is the core's business. Commands
reach the thread through one queue and deltas come back through another, bounded one; nothing else is shared but
counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from penstock.errors import CheckpointError, EngineError
from penstock.instance.builtin.core import BuiltinCore, CoreOptions, PreparedWeights
from penstock.instance.builtin.ranks import RankDied, Ranks
from penstock.instance.engine import DEFAULT_CONTEXT_TOKENS, EngineInfo, EngineLoad, SequenceStart, TokenDelta
from penstock.instance.sequences import without
from penstock.weights.manifest import StagedWeights

_log = logging.getLogger(__name__)

_UNREAD_DELTAS = 1
"""Deltas that may wait for their reader or be in its hands; then the thread stops decoding.

What a machine has drawn and not sent is what its loss costs, so it is bounded here, however late the reader is: one
delta. To draw on while it is sent made nothing faster: reader and thread have one interpreter.
"""

_READ_S = 0.05
"""A reader that is at it takes a delta sooner; a new version doesn't wait for one that isn't."""
_RATE_WINDOW_S = 5.0
_CLOSE_DEADLINE_S = 30.0


class _Stopped(list[int]):
    """Leases stopped: no later delta holds them."""


class BuiltinEngine:
    """PyTorch continuous batching on a CPU or a GPU. Create it inside the event loop that will call it."""

    def __init__(
        self,
        device: str = "auto",
        dtype: str | None = None,
        max_running: int = 64,
        max_context_tokens: int = 2048,
        kv_cache_mib: int = 1024,
        frame_steps: int = 8,
        threads: int | None = None,
        progress: memoryview | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        """`dtype` None takes the weights' own, or float32 where that is slow (`serving_dtype`); `threads` None leaves
        PyTorch's choice of CPU threads.

        `progress`: 8 writable bytes (of a mapped file, say) that hold the number of output tokens drawn, as a
        little-endian uint64, after every step. `max_context_tokens` 0 takes what `fit_context` gives.
        `tensor_parallel` ranks share each model, this process and others that it starts, and the threads; on a CPU.
        Raises EngineError for options that can't be met.
        """
        counts = (("max_running", max_running), ("frame_steps", frame_steps), ("threads", threads))
        for name, value in (*counts, ("tensor_parallel", tensor_parallel)):
            if value is not None and value < 1:
                raise EngineError(f"{name} is {value}; it must be at least 1")
        options = CoreOptions(
            device=resolve_device(device),
            dtype=_resolve_dtype(dtype),
            max_running=max_running,
            max_context_tokens=max_context_tokens or DEFAULT_CONTEXT_TOKENS,
            kv_cache_mib=kv_cache_mib,
        )
        if tensor_parallel > 1 and options.device.type != "cpu":
            raise EngineError(f"tensor_parallel={tensor_parallel} is for device cpu, and this is {options.device}")
        self.frame_steps = frame_steps
        """Decode steps gathered in one delta; may be changed at any time."""
        self._fits_context = not max_context_tokens
        self._threads = threads if threads is None else max(1, threads // tensor_parallel)
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[TokenDelta | _Stopped | None] = asyncio.Queue()
        """None: the thread has ended. Bounded by `_UNREAD_DELTAS`, which the thread heeds."""
        self._stopped: set[int] = set()
        self._death: BaseException | None = None
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._swap_answers: set[Future[None]] = set()
        """Of those who wait for weights to serve."""
        self._unread = 0
        self._closing = False
        self._flushed = False
        self._rate: deque[tuple[float, int]] = deque()
        self._layout = ThreadPoolExecutor(1, thread_name_prefix="penstock-weights")
        own_threads = self._threads or max(1, torch.get_num_threads() // tensor_parallel)
        self._ranks = Ranks(tensor_parallel, own_threads, self._rank_died) if tensor_parallel > 1 else None
        self._core = BuiltinCore(options, progress, self._ranks)
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    # ---- the protocol, called from the event loop

    @property
    def info(self) -> EngineInfo:
        core = self._core
        return EngineInfo(
            kind="builtin",
            device=str(core.options.device),
            max_running=core.max_running,
            max_context_tokens=core.max_context_tokens,
            vocab_size=core.spec.vocab_size if core.spec else 0,
            tensor_parallel=self._ranks.count if self._ranks else 1,
        )

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the KV cache; 0 until the first weights are loaded."""
        return self._core.plan.nbytes if self._core.plan else 0

    @property
    def version(self) -> int:
        return self._core.version

    def fit_context(self, max_context_tokens: int) -> None:
        """Takes the context that the run wants, unless one was given at the start or the first weights are loaded."""
        if self._fits_context:
            self._core.fit_context(max_context_tokens)

    async def update_weights(self, weights: StagedWeights) -> None:
        self._check_alive()
        try:
            prepared = await self._loop.run_in_executor(self._layout, self._core.prepare, weights)
        except CheckpointError as error:
            raise EngineError(f"weight version {weights.version} does not fit: {error}") from error
        except RankDied as error:
            self._rank_died(error)
            raise EngineError(f"the built-in engine died: {error}") from error
        first = self.version < 0
        await self._swap(prepared)
        wanted = self._core.options.max_running
        if first and self._core.max_running < wanted:
            _log.warning(
                "%d sequences run at once and not %d: kv_cache_mib=%d holds no more of %d tokens each",
                self._core.max_running,
                wanted,
                self._core.options.kv_cache_mib,
                self._core.max_context_tokens,
            )

    async def _swap(self, prepared: PreparedWeights) -> None:
        """Returns when `prepared` serves: after a few steps, or at once where there are none to be made."""
        answer: Future[None] = Future()

        def told(error: EngineError | None) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error) if error is not None else answer.set_result(None)

        def begin() -> None:
            if not answer.cancelled():
                self._core.swap_soon(prepared, told)

        answer.add_done_callback(self._swap_answers.discard)
        self._swap_answers.add(answer)
        try:
            self._tell(begin)
        except EngineError:
            self._swap_answers.discard(answer)
            raise
        await asyncio.wrap_future(answer)

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        taken = list(sequences)
        self._tell(lambda: self._core.start(taken))

    def stop(self, leases: Sequence[int]) -> None:
        stopped = _Stopped(leases)
        self._stopped.update(stopped)

        def forget() -> None:
            self._core.stop(stopped)
            self._loop.call_soon_threadsafe(self._read.put_nowait, stopped)

        self._tell(forget)

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        while True:
            item = await self._read.get()
            if item is None:
                self._read.put_nowait(None)
                if self._death is not None:
                    raise EngineError(f"the built-in engine died: {self._death!r}") from self._death
                return
            if isinstance(item, _Stopped):
                self._stopped.difference_update(item)
                continue
            delta = without(item, self._stopped)
            try:
                if delta.leases:
                    yield delta
            finally:
                # Who comes for the next one, or goes, has done with this one.
                with self._wake:
                    self._unread -= 1
                    self._wake.notify()

    def load(self) -> EngineLoad:
        core = self._core
        return EngineLoad(
            running=core.running,
            waiting=core.waiting,
            kv_tokens=core.kv_tokens,
            tokens_generated=core.tokens_generated,
            tokens_prefilled=core.tokens_prefilled,
            tokens_per_s=self._tokens_per_s(),
            work_done=core.work_done,
        )

    async def flush(self) -> None:
        def flush() -> None:
            self._flushed = True
            self._send_deltas()

        await self._ask(flush)

    async def hand_over(self) -> None:
        """A GPU's memory is given back: it is the trainer's meanwhile, which is another process."""

        def rest() -> None:
            self._send_deltas()
            self._core.rest(release_memory=self._core.options.device.type == "cuda")

        await self._ask(rest)

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_DEADLINE_S)
        self._layout.shutdown(wait=False, cancel_futures=True)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)
        if self._thread.is_alive():
            raise EngineError(f"the engine's thread did not end its step within {_CLOSE_DEADLINE_S:.0f} s")

    def _rank_died(self, death: RankDied) -> None:
        """Wakes the compute thread, which may be waiting for work, and ends it. Called from another thread."""

        def end() -> None:
            raise death

        with contextlib.suppress(EngineError):
            self._tell(end)

    # ---- between the loop and the thread

    def _tell(self, run: Callable[[], None], answer: Future[None] | None = None) -> None:
        with self._wake:
            self._check_alive()
            self._commands.append(_Command(run, answer))
            self._wake.notify()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(f"the built-in engine died: {self._death!r}") from self._death
        if self._closing:
            raise EngineError("the built-in engine is closed")

    async def _ask(self, run: Callable[[], None]) -> None:
        """Runs `run` between two steps; raises what it raises, or EngineError if the engine ends before."""
        answer: Future[None] = Future()
        self._tell(run, answer)
        await asyncio.wrap_future(answer)

    def _post(self, item: TokenDelta | _Stopped | None) -> None:
        """From the thread to the reader of deltas. A closed event loop has no reader left: the thread then ends."""
        try:
            self._loop.call_soon_threadsafe(self._read.put_nowait, item)
        except RuntimeError:
            with self._wake:
                self._closing = True

    # ---- the compute thread

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever kills the thread is told to the reader of deltas
            with self._wake:
                self._death = error
        finally:
            self._end()

    def _serve(self) -> None:
        core, steps = self._core, 0
        while self._run_commands():
            if core.has_work and not self._flushed:
                core.step()
                steps += 1
            if steps >= self.frame_steps or not core.has_work:
                self._send_deltas()
                steps = 0

    def _run_commands(self) -> bool:
        """Waits until there is something to do, runs the commands that came; False once the engine is to end.

        Weights that would serve some steps later do so now, where no step is to be made or the reader is far behind.
        """
        core, stuck = self._core, False
        with self._wake:
            while not (self._closing or self._commands or self._may_step() or stuck):
                if core.swapping:
                    stuck = not core.has_work or self._flushed or not self._wake.wait(_READ_S)
                else:
                    self._wake.wait()
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        if stuck:
            core.swap_now()
        for command in commands:
            command.run()
        return True

    def _may_step(self) -> bool:
        return self._core.has_work and not self._flushed and self._unread < _UNREAD_DELTAS

    def _send_deltas(self) -> None:
        while (delta := self._core.take_delta()) is not None:
            with self._wake:
                self._unread += 1
            self._post(delta)
        self._rate.append((time.monotonic(), self._core.tokens_generated))
        while len(self._rate) > 2 and self._rate[0][0] < self._rate[-1][0] - _RATE_WINDOW_S:
            self._rate.popleft()

    def _end(self) -> None:
        with self._wake:
            self._closing = True
            left = list(self._commands)
            self._commands.clear()
        for answer in [*(command.answer for command in left), *self._swap_answers]:
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_exception(EngineError(f"the built-in engine ended: {self._death or 'it was closed'}"))
        self._post(None)

    def _tokens_per_s(self) -> float:
        """Mean rate over the last seconds, up to now, so that it falls to 0 when nothing runs."""
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in self._rate.copy() if at >= now - _RATE_WINDOW_S]
        if not recent or now <= recent[0][0]:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (now - recent[0][0])


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to run between two steps, and who waits for it."""

    work: Callable[[], None]
    answer: Future[None] | None

    def run(self) -> None:
        """An EngineError is the asker's; anything else, or an error that nobody awaits, ends the engine.

        What its asker has given up meanwhile is not done.
        """
        if self.answer is not None and not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.work()
        except BaseException as error:
            if self.answer is None:
                raise
            if isinstance(error, EngineError):
                self.answer.set_exception(error)
                return
            self.answer.set_exception(EngineError(f"the built-in engine died: {error!r}"))
            raise
        if self.answer is not None:
            self.answer.set_result(None)


def resolve_device(device: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU; raises EngineError for what this machine lacks."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"device {device!r} is not a device: expected auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r} is not supported by the built-in engine: expected auto, cpu or cuda")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"device {device!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return resolved


def _resolve_dtype(dtype: str | None) -> torch.dtype | None:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype is not None and dtype not in known:
        raise EngineError(f"dtype {dtype!r} is not supported by the built-in engine: expected {' or '.join(known)}")
    return known[dtype] if dtype is not None else None
