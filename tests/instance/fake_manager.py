"""A manager that does as the test says: a real aiohttp server on loopback that speaks the wire's frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from aiohttp import WSMsgType, web

from penstock.sample import Finish
from penstock.wire import (
    PROTOCOL,
    AgentHello,
    FrameFromManager,
    FrameToManager,
    Sampling,
    StartFrame,
    TokenFrame,
    Welcome,
    column,
    column_bytes,
    decode_to_manager,
    encode,
    offsets,
)
from penstock.wire.codec import PROTOCOL_HEADER

TOKEN = "the-run's-token"
F = TypeVar("F")


class Session:
    """One agent's connection, as the manager sees it."""

    def __init__(self, ws: web.WebSocketResponse) -> None:
        self.ws = ws
        self.frames: list[FrameToManager] = []
        self.changed = asyncio.Condition()
        self.closed = asyncio.Event()

    async def send(self, frame: FrameFromManager) -> None:
        await self.ws.send_bytes(encode(frame))

    async def wait_for(self, found: Callable[[list[FrameToManager]], Any], within_s: float = 60.0) -> Any:
        """The first true result of `found` on the frames received so far."""
        async with asyncio.timeout(within_s), self.changed:
            while True:
                result = found(self.frames)
                if result:
                    return result
                await self.changed.wait()

    async def next_of(self, kind: type[F], count: int = 1) -> F:
        """The `count`-th frame of this kind."""
        frames = await self.wait_for(lambda all_: (of := [f for f in all_ if isinstance(f, kind)])[count - 1 :] and of)
        return frames[count - 1]

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def tokens(self) -> dict[int, list[int]]:
        """Tokens received by lease; asserts that every row goes on where the one before ended."""
        received: dict[int, list[int]] = {}
        begun: dict[int, int] = {}
        for lease, start, ids, _ in self.rows():
            begun.setdefault(lease, start)
            assert start == begun[lease] + len(received.setdefault(lease, []))
            received[lease].extend(ids)
        return received

    def finishes(self) -> dict[int, Finish]:
        return {lease: finish for lease, _, _, finish in self.rows() if finish}

    def rows(self) -> list[tuple[int, int, list[int], Finish]]:
        rows = []
        for frame in self.of(TokenFrame):
            leases = column(frame.leases, "Q").tolist()
            starts = column(frame.starts, "I", len(leases)).tolist()
            begins = offsets(column(frame.counts, "I", len(leases)).tolist())
            ids = column(frame.token_ids, "i", begins[-1]).tolist()
            column(frame.logprobs, "f", begins[-1])
            for row, lease in enumerate(leases):
                rows.append((lease, starts[row], ids[begins[row] : begins[row + 1]], Finish(frame.finishes[row])))
        return rows


class FakeManager:
    """Accepts agents at `url`; `sessions` in order of arrival."""

    def __init__(self, port: int = 0, heartbeat_s: float = 0.05, frame_steps: int = 4) -> None:
        self.port = port
        self.sessions: list[Session] = []
        self.arrived = asyncio.Condition()
        self.attempts = 0
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        """Takes over a connection attempt, for managers that refuse or misbehave."""
        self.welcome: FrameFromManager | None = Welcome(
            instance="i-0", heartbeat_s=heartbeat_s, frame_steps=frame_steps
        )
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeManager:
        app = web.Application()
        app.router.add_get("/agent", self._agent)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        for session in self.sessions:
            await session.ws.close()
        await self._runner.cleanup()

    async def session(self, number: int = 1, within_s: float = 60.0) -> Session:
        """The `number`-th session, once its agent has said hello."""
        async with asyncio.timeout(within_s), self.arrived:
            while len(self.sessions) < number:
                await self.arrived.wait()
        session = self.sessions[number - 1]
        await session.next_of(AgentHello)
        return session

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        self.attempts += 1
        if self.answer is not None:
            return await self.answer(request)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401, text="wrong token")
        if request.headers.get(PROTOCOL_HEADER) != str(PROTOCOL):
            return web.Response(status=426, text="other protocol")
        ws = web.WebSocketResponse(max_msg_size=0)
        await ws.prepare(request)
        session = Session(ws)
        async with self.arrived:
            self.sessions.append(session)
            self.arrived.notify_all()
        if self.welcome is not None:
            await session.send(self.welcome)
        async for message in ws:
            assert message.type is WSMsgType.BINARY
            async with session.changed:
                session.frames.append(decode_to_manager(message.data))
                session.changed.notify_all()
        session.closed.set()
        return ws


def start_frame(
    leases: Sequence[int],
    version: int = 0,
    prefixes: dict[int, list[int]] | None = None,
    sampling: Sampling | None = None,
) -> StartFrame:
    """Sequences with the lease as their seed, and a prompt of three tokens."""
    prefixes = prefixes or {}
    return StartFrame(
        version=version,
        leases=column_bytes(leases, "Q"),
        seeds=column_bytes(leases, "Q"),
        prompt_ids=column_bytes([1, 2, 3] * len(leases), "i"),
        prompt_lengths=column_bytes([3] * len(leases), "I"),
        prefix_ids=column_bytes([token for lease in leases for token in prefixes.get(lease, [])], "i"),
        prefix_lengths=column_bytes([len(prefixes.get(lease, [])) for lease in leases], "I"),
        samplings=(sampling or Sampling(max_new_tokens=32),),
        sampling_of=column_bytes([0] * len(leases), "I"),
    )
