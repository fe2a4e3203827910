"""An engine without a model: pseudo-random tokens at a fixed rate, for tests and for benchmarks of everything else.

Token n of a sequence is a pure function of (seed, n), as in the built-in engine, so a sample that moves to another
paced engine says the same. A round of `frame_steps` decode steps is planned at once, slept through, and sent as one
delta: the cost is a hash for every 16 tokens, whatever the rate. A round is over sooner where a sequence ends in it, as
engines tell of an end, and let the next one in, with the step that it happens in. Weights are accepted and not looked
at.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.errors import EngineError
from penstock.instance.engine import DEFAULT_CONTEXT_TOKENS, EngineInfo, EngineLoad, SequenceStart, TokenDelta
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights

BLOCK = 16
"""Tokens drawn from one hash: 64 bytes of BLAKE2b as 16 words."""
DELTAS_QUEUED = 256
"""Deltas that nobody has taken yet; the engine pauses beyond."""
DEFAULT_VOCAB_SIZE = 32_000
LONGEST_SLEEP_S = 5.0
"""A longer round is slept through in pieces, each of which counts as work done."""


@dataclass(slots=True)
class _Running:
    start: SequenceStart
    length: int
    """Output tokens so far, the prefix included."""
    limit: int


def paced_block(seed: int, block: int) -> array[int]:
    """Words `BLOCK * block` and following of a seed's stream: uint32, counter-based, without state."""
    key = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, block)
    return array("I", hashlib.blake2b(key, digest_size=4 * BLOCK).digest())


def paced_tokens(
    sequence: SequenceStart, start: int, steps: int, vocab_size: int, stop_share: float
) -> tuple[list[int], Finish]:
    """Output tokens `start` up to `start + steps`, fewer where a stop id is drawn.

    Each token is a stop id with probability `stop_share` (0 where the sequence has none): lengths are geometric with
    mean 1 / stop_share. Pure: the same for any split into calls.
    """
    stop_ids = sequence.sampling.stop_ids
    threshold = int(stop_share * 2**32) if stop_ids else 0
    words: list[int] = []
    for block in range(start // BLOCK, (start + steps - 1) // BLOCK + 1):
        words.extend(paced_block(sequence.seed, block))
    skipped = start % BLOCK
    words = words[skipped : skipped + steps]
    tokens: list[int] = []
    for word in words:
        if word < threshold:
            tokens.append(stop_ids[word % len(stop_ids)])
            return tokens, Finish.STOP
        token = word % vocab_size
        while token in stop_ids:
            token = (token + 1) % vocab_size
        tokens.append(token)
    return tokens, Finish.RUNNING


def paced_logprob(token: int, vocab_size: int) -> float:
    """A made-up log-probability, exact in float32 and never positive."""
    return -float(token % 64) / 16.0 - (0.0625 if vocab_size > 1 else 0.0)


MADE_UP_S = 0.1
"""Lateness that is made up for, however short rounds are: a lone sequence's last a millisecond or two, and a busy
computer wakes nobody as exactly as that."""


class PacedEngine:
    """An Engine that draws `tokens_per_s` tokens a second over all its sequences, at most `max_running` at once.

    `prefill_tokens_per_s` 0 makes prefill free. `mean_tokens` 0 lets every sequence run to its limit; above 0 a stop
    id ends it after so many tokens on average. `step_s` is the least time of a decode step, however few run.
    `max_context_tokens` 0 takes what `fit_context` gives.
    `clock` and `sleep` are injected, so that tests run on virtual time. `progress` is a buffer of 8 bytes that always
    holds the number of tokens drawn (uint64, little-endian).
    """

    def __init__(
        self,
        *,
        tokens_per_s: float,
        max_running: int = 64,
        max_context_tokens: int = 4096,
        vocab_size: int = 0,
        frame_steps: int = 8,
        prefill_tokens_per_s: float = 0.0,
        step_s: float = 0.0,
        mean_tokens: float = 0.0,
        progress: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fits_context = not max_context_tokens
        max_context_tokens = max_context_tokens or DEFAULT_CONTEXT_TOKENS
        if tokens_per_s <= 0 or max_running < 1 or max_context_tokens < 2 or frame_steps < 1:
            raise EngineError(
                f"a paced engine needs tokens_per_s above 0 (got {tokens_per_s:g}), max_running and frame_steps of at "
                f"least 1 (got {max_running} and {frame_steps}) and a context of at least 2 (got {max_context_tokens})"
            )
        if mean_tokens and mean_tokens < 1:
            raise EngineError(f"mean_tokens={mean_tokens:g} is impossible; give 0 (no stops) or at least 1")
        self.frame_steps = frame_steps
        self._tokens_per_s = tokens_per_s
        self._max_running = max_running
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._step_s = step_s
        self._stop_share = 1.0 / mean_tokens if mean_tokens else 0.0
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._version = -1
        self._waiting: deque[SequenceStart] = deque()
        self._running: dict[int, _Running] = {}
        self._deltas: deque[TokenDelta] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._work = asyncio.Event()
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._draws = True
        self._tokens_generated = 0
        self._tokens_prefilled = 0
        self._work_done = 0
        self._rate = 0.0

    @property
    def info(self) -> EngineInfo:
        vocab_size = self._vocab_size if self._version >= 0 else 0
        return EngineInfo("paced", "none", self._max_running, self._max_context_tokens, vocab_size)

    @property
    def version(self) -> int:
        return self._version

    def fit_context(self, max_context_tokens: int) -> None:
        """Takes the context that the run wants, unless one was given at the start or the first weights are loaded."""
        if self._fits_context and self._version < 0:
            self._max_context_tokens = max_context_tokens

    async def update_weights(self, weights: StagedWeights) -> None:
        """Takes the version number, and the vocabulary's size where the model's configuration gives one."""
        if weights.version < 0:
            raise EngineError(f"weight version {weights.version} is impossible; versions count from 0")
        if not self._vocab_size:
            self._vocab_size = _vocab_size(weights.manifest.config_json)
        self._version = weights.version

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        failed = TokenDelta(version=self._version)
        for sequence in sequences:
            cause = self._refusal(sequence)
            if cause:
                _add(failed, sequence.lease, len(sequence.prefix_ids), [], self._vocab_size, Finish.FAILED)
                failed.causes[sequence.lease] = cause
            else:
                self._waiting.append(sequence)
        if failed.leases:
            self._deltas.append(failed)
            self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="paced-engine")
            self._task.add_done_callback(self._ended)
        self._work.set()

    def stop(self, leases: Sequence[int]) -> None:
        gone = set(leases)
        for lease in gone:
            self._running.pop(lease, None)
        if any(sequence.lease in gone for sequence in self._waiting):
            self._waiting = deque(sequence for sequence in self._waiting if sequence.lease not in gone)

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """Ends after `flush` or `close`, once every delta has been taken."""
        while True:
            while self._deltas:
                yield self._deltas.popleft()
                self._room.set()
            if self._failure is not None:
                raise EngineError(f"the paced engine stopped: {self._failure}")
            if not self._draws:
                return
            self._news.clear()
            await self._news.wait()

    def load(self) -> EngineLoad:
        held = sum(len(running.start.prompt_ids) + running.length for running in self._running.values())
        rate = self._rate if self._running else 0.0
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=held,
            tokens_generated=self._tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            tokens_per_s=rate,
            work_done=self._work_done,
        )

    async def flush(self) -> None:
        """Draws no more. Tokens are drawn at a round's end, so all of them are in `deltas` already."""
        await self.close()

    async def hand_over(self) -> None:
        """Ends every sequence; the round that it was in the middle of is not drawn."""
        self._running.clear()
        self._waiting.clear()

    async def close(self) -> None:
        self._draws = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._news.set()

    # ---- the decode loop

    async def _run(self) -> None:
        due = self._clock()
        while self._draws:
            if not self._waiting and not self._running:
                self._work.clear()
                await self._work.wait()
                due = self._clock()
                continue
            while len(self._deltas) >= DELTAS_QUEUED:
                self._room.clear()
                await self._room.wait()
            prefilled = self._admit()
            planned, tokens, steps = self._plan()
            duration = self._duration(prefilled, tokens, steps)
            # From the due time, not from now: a round that is late is made up for in the next ones.
            due = max(due, self._clock() - max(duration, MADE_UP_S)) + duration
            while (left := due - self._clock()) > 0:
                await self._sleep(min(left, LONGEST_SLEEP_S))
                self._work_done += 1
            self._draw(planned)
            self._rate = tokens / duration

    def _admit(self) -> int:
        """Moves waiting sequences in; the number of tokens to prefill for them."""
        prefilled = 0
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting.popleft()
            room = self._max_context_tokens - len(sequence.prompt_ids)
            limit = min(sequence.sampling.max_new_tokens, room)
            self._running[sequence.lease] = _Running(sequence, len(sequence.prefix_ids), limit)
            prefilled += len(sequence.prompt_ids) + len(sequence.prefix_ids)
        self._tokens_prefilled += prefilled
        return prefilled

    def _plan(self) -> tuple[dict[int, tuple[list[int], Finish]], int, int]:
        """The coming round: each sequence's tokens and finish, how many tokens in all, and the number of steps: up to
        the first one in which a sequence ends."""
        planned: dict[int, tuple[list[int], Finish]] = {}
        steps = self.frame_steps
        for lease, running in self._running.items():
            most = min(steps, running.limit - running.length)
            tokens, finish = paced_tokens(running.start, running.length, most, self._vocab_size, self._stop_share)
            if finish is Finish.RUNNING and running.length + len(tokens) >= running.limit:
                finish = Finish.LENGTH
            planned[lease] = tokens, finish
            steps = min(steps, len(tokens))
        for lease, (tokens, _) in planned.items():
            if len(tokens) > steps:
                planned[lease] = tokens[:steps], Finish.RUNNING
        return planned, steps * len(planned), steps

    def _duration(self, prefilled: int, tokens: int, steps: int) -> float:
        prefill_s = prefilled / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0
        return prefill_s + max(tokens / self._tokens_per_s, steps * self._step_s)

    def _draw(self, planned: dict[int, tuple[list[int], Finish]]) -> None:
        delta = TokenDelta(version=self._version)
        for lease, (tokens, finish) in planned.items():
            running = self._running.get(lease)
            if running is None:
                continue
            _add(delta, lease, running.length, tokens, self._vocab_size, finish)
            running.length += len(tokens)
            if finish:
                del self._running[lease]
        self._tokens_generated += len(delta.token_ids)
        if self._progress is not None:
            self._progress[:8] = struct.pack("<Q", self._tokens_generated)
        if delta.leases:
            self._deltas.append(delta)
            self._news.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = task.exception()
        self._news.set()

    def _refusal(self, sequence: SequenceStart) -> str:
        """Why a sequence can't be generated; empty where it can."""
        if self._version < 0:
            return "the engine has no weights yet"
        if not sequence.prompt_ids:
            return "the prompt is empty"
        used = len(sequence.prompt_ids) + len(sequence.prefix_ids)
        if used >= self._max_context_tokens:
            return f"prompt and prefix of {used} tokens leave no room in a context of {self._max_context_tokens}"
        if len(sequence.prefix_ids) >= sequence.sampling.max_new_tokens:
            return f"the prefix of {len(sequence.prefix_ids)} tokens leaves none of max_new_tokens to draw"
        return ""


def _add(delta: TokenDelta, lease: int, start: int, tokens: list[int], vocab_size: int, finish: Finish) -> None:
    delta.leases.append(lease)
    delta.starts.append(start)
    delta.counts.append(len(tokens))
    delta.finishes.append(finish)
    delta.token_ids.extend(tokens)
    delta.logprobs.extend(paced_logprob(token, vocab_size) for token in tokens)


def _vocab_size(config_json: str) -> int:
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise EngineError(f"the version's config.json is not JSON: {error}") from error
    size = config.get("vocab_size", 0) if isinstance(config, dict) else 0
    return size if isinstance(size, int) and size > 0 else DEFAULT_VOCAB_SIZE
