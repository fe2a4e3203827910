"""The trainer's turn over a real socket: granted once, also to a trainer whose connection was lost meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from test_server import TOKEN, serving, transport_of

from penstock.errors import RolloutError
from penstock.rollout.client import RolloutClient
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.server import ManagerServer
from penstock.rollout.windows import Turn
from penstock.wire import TrainerTurn


@asynccontextmanager
async def client_at(server: ManagerServer, reconnect_s: float = 0.0) -> AsyncIterator[RolloutClient]:
    client = RolloutClient(server.url, TOKEN, lambda _: None, lambda _: None, reconnect_s=reconnect_s)
    await client.connect()
    try:
        yield client
    finally:
        await client.close()


def turn(state: str) -> TrainerTurn:
    return TrainerTurn(number=0, batch="train-0", version=0, state=state, window_s=0.0)


async def until(server: ManagerServer, wanted: Turn) -> None:
    async with asyncio.timeout(20.0):
        while server.manager.windows.turn is not wanted:
            await asyncio.sleep(0.005)


async def test_a_turn_is_granted_once_nobody_generates() -> None:
    async with serving() as server, client_at(server) as client:
        # Without any instance there is nobody but the engines of this machine, which may still come.
        assert await client.take_turn(turn("begins")) == 0.0
        await until(server, Turn.GENERATING)
        waiting = asyncio.create_task(client.take_turn(turn("wants")))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        # The step is over as far as the manager is concerned: no batch of it was ever there.
        server.manager.windows._step.generated = True  # type: ignore[union-attr]
        async with asyncio.timeout(20.0):
            assert await waiting == 0.0, "no engine was there to generate in its window"
        assert server.manager.windows.turn is Turn.TRAINING
        await client.take_turn(turn("waits"))
        await until(server, Turn.FREE)


async def test_a_trainer_that_comes_back_has_the_devices_that_it_had() -> None:
    async with serving(manager=ManagerConfig(trainer_grace_s=60.0)) as server:
        async with client_at(server, reconnect_s=30.0) as client:
            await client.take_turn(turn("begins"))
            await until(server, Turn.GENERATING)
            server.manager.windows._step.generated = True  # type: ignore[union-attr]
            async with asyncio.timeout(20.0):
                await client.take_turn(turn("wants"))
            # As a manager that died and knows of no turns.
            server.manager.windows.reset()
            assert client._socket is not None
            transport_of(client._socket).abort()
            await until(server, Turn.TRAINING)


async def test_a_manager_that_is_given_up_ends_the_wait_for_a_turn() -> None:
    async with serving() as server, client_at(server) as client:
        await client.take_turn(turn("begins"))
        waiting = asyncio.create_task(client.take_turn(turn("wants")))
        await until(server, Turn.GENERATING)
        assert client._socket is not None
        transport_of(client._socket).abort()
        with pytest.raises(RolloutError):
            await asyncio.wait_for(waiting, 20.0)
