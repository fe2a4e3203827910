"""An engine behind HTTP: any server that a dialect speaks to, behind the `Engine` protocol.

Decides what is asked of the server and when: one streaming request for each sequence, `max_running` at once, the rest
waits here; chunks of all sequences gathered into one delta; weights swapped while nothing runs, the sequences begun
again from their last token. What is said to the server is the dialect's business, whose process it is the
supervisor's. A server that says what no sound server says is given up as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from penstock.errors import EngineError
from penstock.instance.dialect import Chunk, Dialect, ServerFacts
from penstock.instance.engine import DEFAULT_CONTEXT_TOKENS, EngineInfo, EngineLoad, SequenceStart, TokenDelta
from penstock.instance.liveness import ServerWork
from penstock.instance.model_folder import config_in, quantization_in
from penstock.instance.outgoing import Outgoing, TokenCount
from penstock.instance.sequences import ABORTS_ALLOWED, Held, check_chunk, check_version, refusal
from penstock.instance.supervise import Server
from penstock.instance.weight_folder import WeightFolders, difference, identity, parse_config
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights

END_S = 5.0
"""For the server to end what runs, with the last tokens; then the connections are closed."""
ABORT_AGAIN_S = 0.5
"""A request may have been on its way when its abort came."""
CONNECT_S = 10.0
LAST_WORDS_S = 2.0
"""For a server's process to end after its connections broke; then its log says why."""
WORK_POLL_S = 2.0
"""A server at work is asked so often which weights it serves, and where it gave no token, what it gets done."""
CONTROL_CONNECTIONS = 8
KEEP_ALIVE_S = 2.0
"""Less than servers keep a connection open that nothing is asked on: one that closes just then breaks a request."""

NETWORK_ERRORS = (OSError, aiohttp.ClientError, TimeoutError)

_log = logging.getLogger("penstock.engine")


class ServedEngine:
    """Create it inside the event loop that will call it.

    `max_context_tokens` 0 takes what `fit_context` gives. `progress`: 8 writable bytes that hold the number of output
    tokens that came, as a little-endian uint64. `tensor_parallel` is what the server is configured to have, for as long
    as it has not said so itself.
    """

    def __init__(
        self,
        dialect: Dialect,
        server: Server,
        *,
        max_running: int = 64,
        max_context_tokens: int = 0,
        folders: WeightFolders | None = None,
        progress: memoryview | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        self._dialect = dialect
        self._server = server
        self._max_running = max_running
        self._fits_context = not max_context_tokens
        self._max_context_tokens = max_context_tokens or DEFAULT_CONTEXT_TOKENS
        self._folders = folders or WeightFolders(untie=dialect.unties_embeddings)
        self._tensor_parallel = tensor_parallel
        self._facts: ServerFacts | None = None
        self._model: Mapping[str, Any] = {}
        """Of the first weights: what later ones must be alike in."""
        self._vocab_size = 0
        self._folder: Path | None = None
        self._swapping = asyncio.Lock()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_running + CONTROL_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self._watch: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._work = ServerWork()
        self._nonce = secrets.token_hex(4)
        self._waiting: deque[Held] = deque()
        self._running: dict[int, Held] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused = False
        self._flushed = False
        self._out = Outgoing()
        self._death: EngineError | None = None
        self._closed = False
        self._count = TokenCount(progress)
        self._tokens_prefilled = 0

    # ---- the protocol

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            kind=self._dialect.kind,
            device=self._facts.device if self._facts else "",
            max_running=self._max_running,
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
            tensor_parallel=(self._facts.tensor_parallel if self._facts else 0) or self._tensor_parallel,
        )

    @property
    def version(self) -> int:
        return self._out.version

    @property
    def frame_steps(self) -> int:
        """Tokens of a sequence that the server gathers in one chunk, where it can be told."""
        return self._dialect.frame_steps

    @frame_steps.setter
    def frame_steps(self, steps: int) -> None:
        self._dialect.frame_steps = steps

    def fit_context(self, max_context_tokens: int) -> None:
        """Takes the context that the run wants, unless one was given at the start or the first weights are loaded."""
        if self._fits_context and self.version < 0:
            self._max_context_tokens = max_context_tokens

    async def update_weights(self, weights: StagedWeights) -> None:
        """The first call starts the server where that is this engine's to do, and checks that it fits the run."""
        self._check_alive()
        config = parse_config(weights.manifest.config_json)
        model = identity(weights, config)
        if self._model and (why := difference(self._model, model)):
            raise EngineError(f"weight version {weights.version} is of another model: {why}")
        async with self._swapping:
            folder = await asyncio.to_thread(self._folders.write, weights)
            try:
                if self.version < 0:
                    await self._begin(folder, weights.version, config)
                else:
                    await self._swap(folder, weights.version)
            except BaseException:
                await asyncio.to_thread(self._folders.remove, folder)
                raise
            old, self._folder, self._model = self._folder, folder, model
            if old is not None:
                await asyncio.to_thread(self._folders.remove, old)

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        self._check_alive()
        for sequence in sequences:
            cause = refusal(sequence, self.version, self._max_context_tokens, self._vocab_size)
            if cause:
                self._out.gather(sequence.lease, len(sequence.prefix_ids), Chunk(finish=Finish.FAILED, cause=cause))
            else:
                self._waiting.append(Held(sequence, list(sequence.prefix_ids)))
        self._fill()

    def stop(self, leases: Sequence[int]) -> None:
        """Closes the requests; the server ends them when it finds that nobody reads."""
        gone = set(leases)
        self._out.forget(leases)
        for lease in gone:
            self._running.pop(lease, None)
            if (task := self._tasks.get(lease)) is not None:
                task.cancel()
        if any(held.lease in gone for held in self._waiting):
            self._waiting = deque(held for held in self._waiting if held.lease not in gone)
        self._fill()

    def deltas(self) -> AsyncIterator[TokenDelta]:
        """Ends after `close`, once every delta has been taken."""
        return self._out.deltas()

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=sum(held.context_tokens for held in self._running.values()),
            tokens_generated=self._count.tokens,
            tokens_prefilled=self._tokens_prefilled,
            tokens_per_s=self._count.per_s(),
            work_done=self._work.done,
        )

    async def flush(self) -> None:
        self._flushed = True
        await self._end_running()
        self._out.cut()

    async def hand_over(self) -> None:
        """Ends every request at its last token. The server keeps its memory: it takes that once, when it starts."""
        swapping = self._paused
        try:
            await self._end_running()
            self._out.cut()
            self._waiting.clear()
        finally:
            self._paused = swapping

    async def close(self) -> None:
        self._closed = self._paused = True
        tasks = [*self._tasks.values(), *filter(None, (self._watch, self._polling))]
        for task in tasks:
            task.cancel()
        try:
            await self._server.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()
        finally:
            await asyncio.to_thread(self._folders.close)
            self._out.end(self._death)

    # ---- weights

    async def _begin(self, folder: Path, version: int, config: Mapping[str, Any]) -> None:
        longest = config.get("max_position_embeddings")
        if self._server.managed and isinstance(longest, int):
            self._max_context_tokens = min(self._max_context_tokens, longest)
        limits = self._dialect.limits(self._max_running, self._max_context_tokens)
        try:
            await self._server.start(self._http, folder, limits)
            facts = await self._dialect.facts(self._http, self._server.base_url)
            self._check_facts(facts, config, quantization_in(config_in(folder)))
            await self._load(folder, version)
        except (EngineError, *NETWORK_ERRORS) as error:
            cause = str(error) if isinstance(error, EngineError) else self._broken(error)
            if self._server.managed:
                self._die(cause)
            raise EngineError(cause) from error
        self._watch = asyncio.create_task(self._watch_server(), name="engine-server")
        self._polling = asyncio.create_task(self._poll_work(), name="engine-work")
        self._facts = facts
        self._vocab_size = facts.vocab_size or int(config["vocab_size"])
        self._max_running = min(self._max_running, facts.max_running or self._max_running)
        self._out.version = version
        _log.info("%s at %s serves weight version %d", facts.software, self._server.base_url, version)

    def _check_facts(self, facts: ServerFacts, config: Mapping[str, Any], quantization: str) -> None:
        """Raises EngineError where the server holds another model than the run's weights are of, or might."""
        if not self._server.managed and not (facts.model_type and facts.vocab_size):
            raise EngineError(
                f"the server at {self._server.base_url} holds {facts.model}, and this machine has no config.json that "
                "says what model that is; weights of another one would break it: start it on a folder of this machine"
            )
        for what, theirs, ours in (
            ("model_type", facts.model_type, config.get("model_type")),
            ("vocab_size", facts.vocab_size, config.get("vocab_size")),
        ):
            if theirs and theirs != ours:
                raise EngineError(
                    f"the server at {self._server.base_url} holds {facts.model} with {what}={theirs}, and the run's "
                    f"model has {what}={ours}; start it on the run's model"
                )
        if facts.quantization != quantization:
            # Servers would take the one for the other without a word.
            theirs, ours = facts.quantization or "floats", quantization or "floats"
            raise EngineError(
                f"the server at {self._server.base_url} holds {facts.model} as {theirs} and is to be given {ours}; "
                "start it on a model of that kind (--engine-codes says which, where weights are quantized)"
            )
        if facts.max_context_tokens and facts.max_context_tokens < self._max_context_tokens:
            raise EngineError(
                f"the server at {self._server.base_url} has a context of {facts.max_context_tokens} tokens and the "
                f"run wants {self._max_context_tokens}; start it with a longer one"
            )
        if not facts.vocab_size and not isinstance(config.get("vocab_size"), int):
            raise EngineError("neither the server nor the model's config.json says how large the vocabulary is")

    async def _swap(self, folder: Path, version: int) -> None:
        """Everything that runs is ended at its last token, and goes on with the new weights, or with the old ones."""
        try:
            await self._end_running()
            self._out.cut()
            try:
                await self._load(folder, version)
            except EngineError as error:
                await self._fall_back(error)
                raise
            self._out.version = version
        finally:
            self._paused = False
            self._fill()

    async def _fall_back(self, error: EngineError) -> None:
        """After a swap that failed half way: the old weights once more, or the end of this engine."""
        try:
            if self._folder is None:
                raise EngineError("there are no older weights")
            await self._load(self._folder, self.version)
        except EngineError as second:
            self._die(f"no weights can be relied on after a swap that failed ({error}): {second}")

    async def _load(self, folder: Path, version: int) -> None:
        try:
            await self._dialect.load(self._http, self._server.base_url, folder, version)
        except NETWORK_ERRORS as error:
            raise EngineError(self._broken(error)) from error

    def _broken(self, error: BaseException) -> str:
        return f"the {self._dialect.kind} server broke the connection: {_words(error)}"

    # ---- sequences

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            if self._paused or self._flushed or self._closed or self._death is not None:
                return
            held = self._waiting.popleft()
            held.attempts += 1
            held.request_id = f"{self._nonce}-{held.lease}-{held.attempts}"
            held.prefilled = False
            self._running[held.lease] = held
            task = asyncio.create_task(self._generate(held), name=held.request_id)
            self._tasks[held.lease] = task
            task.add_done_callback(lambda done, held=held: self._ended(held, done))  # type: ignore[misc]

    async def _generate(self, held: Held) -> None:
        """One request, from its start to the sequence's end or the request's."""
        start = held.next_start(self._max_context_tokens)
        stream = self._dialect.generate(self._http, self._server.base_url, held.request_id, start)
        try:
            async for chunk in stream:
                await self._out.room.wait()
                if self._take(held, chunk):
                    return
            self._dropped(held, "the server's answer ended before the sequence did")
        except EngineError as error:
            self._die(str(error))
        except NETWORK_ERRORS as error:
            await self._lost(held, error)
        finally:
            if isinstance(stream, AsyncGenerator):  # Closed here, its connection is closed now and not some day.
                await stream.aclose()

    def _take(self, held: Held, chunk: Chunk) -> bool:
        """True where the request is over. Raises EngineError for what no sound server says."""
        check_chunk(chunk, held, self.version, self._vocab_size)
        if chunk.token_ids and not held.prefilled:
            held.prefilled = True
            self._tokens_prefilled += held.context_tokens
        begin = len(held.drawn)
        held.drawn.extend(chunk.token_ids)
        self._count.add(len(chunk.token_ids))
        if chunk.aborted and (finish := self._finish_of(held)):
            chunk.aborted, chunk.finish = False, finish
        if chunk.token_ids or chunk.finish:
            self._out.gather(held.lease, begin, chunk)
        if chunk.aborted:
            self._dropped(held, chunk.cause)
        return chunk.aborted or chunk.finish is not Finish.RUNNING

    def _finish_of(self, held: Held) -> Finish:
        """How a sequence that was ended just now would have ended anyway; RUNNING where it would not have."""
        sampling = held.start.sampling
        if len(held.drawn) > len(held.start.prefix_ids) and held.drawn[-1] in sampling.stop_ids:
            return Finish.STOP
        full = len(held.drawn) >= sampling.max_new_tokens or held.context_tokens >= self._max_context_tokens
        return Finish.LENGTH if full else Finish.RUNNING

    def _dropped(self, held: Held, cause: str) -> None:
        """A request that ended before its sequence: begun again from its last token, but not for ever."""
        if not self._paused and not self._flushed:
            held.aborts += 1
        if held.aborts <= ABORTS_ALLOWED:
            self._waiting.appendleft(held)
            return
        cause = f"the server ended it {held.aborts} times before its end: {cause or 'it does not say why'}"
        self._out.gather(held.lease, len(held.drawn), Chunk(finish=Finish.FAILED, cause=cause))

    async def _lost(self, held: Held, error: BaseException) -> None:
        """A broken connection is the server's end, unless it answers."""
        if await self._dialect.is_up(self._http, self._server.base_url):
            # One that was started again answers too, with weights of its own.
            await self._ask_version()
            self._dropped(held, f"its connection broke: {_words(error)}")
            return
        if self._watch is not None and self._server.managed:
            await asyncio.wait((self._watch,), timeout=LAST_WORDS_S)
        self._die(f"the {self._dialect.kind} server at {self._server.base_url} is gone: {_words(error)}")

    def _ended(self, held: Held, task: asyncio.Task[None]) -> None:
        if self._tasks.get(held.lease) is task:  # And not of a request that took its place already.
            del self._tasks[held.lease]
            self._running.pop(held.lease, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"reading the server's answer failed: {error!r}")
        self._fill()

    async def _end_running(self) -> None:
        """Ends every request, with its last tokens where the server gives them in time; none is begun meanwhile."""
        self._paused = True
        deadline = time.monotonic() + END_S
        while self._tasks and time.monotonic() < deadline:
            ids = [held.request_id for held in self._running.values()]
            with contextlib.suppress(EngineError, *NETWORK_ERRORS):
                async with asyncio.timeout(END_S):
                    await self._dialect.abort(self._http, self._server.base_url, ids)
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=ABORT_AGAIN_S)
        late = dict(self._tasks)
        for lease, task in late.items():
            # Its connection is closed, and what was not read is drawn again.
            held = self._running.pop(lease, None)
            if task.cancel() and held is not None:
                self._waiting.appendleft(held)
        if late:
            await asyncio.wait(late.values())

    # ---- the end

    async def _watch_server(self) -> None:
        self._die(await self._server.died())

    async def _poll_work(self) -> None:
        """Asks a server that has work and gives no token what it gets done meanwhile; no answer is no work."""
        counted = -1
        while True:
            await asyncio.sleep(WORK_POLL_S)
            if self._running and counted == self._count.tokens:
                if self._facts is not None and self._facts.device == "cpu":
                    self._work.computed(self._server.cpu_s())
                with contextlib.suppress(EngineError, *NETWORK_ERRORS):
                    self._work.said(await self._dialect.figures(self._http, self._server.base_url))
            counted = self._count.tokens
            if self._running:
                await self._ask_version()

    async def _ask_version(self) -> None:
        """Gives up a server that serves other weights than it was given here.

        Not every server says with each token which weights drew it, and vLLM does with a sequence's last ones alone.
        One that does not answer has said nothing: that it hangs, or is gone, is found elsewhere.
        """
        if self._swapping.locked():
            return
        async with self._swapping:
            try:
                said = await self._dialect.weight_version(self._http, self._server.base_url)
            except (EngineError, *NETWORK_ERRORS):
                return
            try:
                check_version(said, self.version)
            except EngineError as error:
                self._die(str(error))

    def _die(self, cause: str) -> None:
        """Deltas that were made are still given out; then their reader gets the cause."""
        if self._death is not None or self._closed:
            return
        self._death = EngineError(cause)
        self._out.end(self._death)
        for task in self._tasks.values():
            task.cancel()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._closed:
            raise EngineError(f"the {self._dialect.kind} engine is closed")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
