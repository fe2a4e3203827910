"""A connection between trainer and manager that is lost: who comes back, with what, and for how long it is tried."""

from __future__ import annotations

import asyncio

import pytest
from test_server import TOKEN, Trainer, agent_at, serving, transport_of

from penstock.errors import RolloutError
from penstock.observe.events import Event, ManagerChanged
from penstock.rollout.client import RolloutClient
from penstock.rollout.manager import ManagerConfig


async def test_a_trainer_that_loses_its_connection_comes_back_and_gets_the_rest_once() -> None:
    async with serving(manager=ManagerConfig(trainer_grace_s=60.0)) as server:
        events: list[Event] = []
        client = RolloutClient(server.url, TOKEN, events.append, lambda _: None, reconnect_s=30.0)
        await client.connect()
        trainer = Trainer(client)
        try:
            await client.publish(1, "store:1", "weights")
            heard = await trainer.submit()
            assert client._socket is not None
            transport_of(client._socket).abort()
            async with agent_at(server) as remote:
                work = asyncio.create_task(remote.work())
                await heard.end()
                work.cancel()
            assert heard.error is None
            found = {(sample.prompt, sample.replica) for sample in heard.samples}
            assert len(found) == len(heard.samples)
            assert [event.state for event in events if isinstance(event, ManagerChanged)] == ["lost", "back"]
        finally:
            await client.close()


async def test_a_manager_that_is_ended_on_purpose_is_not_lost() -> None:
    events: list[Event] = []
    async with serving() as server:
        client = RolloutClient(server.url, TOKEN, events.append, lambda _: None, reconnect_s=60)
        await client.connect()
        heard = await Trainer(client).submit()
        client.expect_end()
    try:
        await heard.end()
        assert heard.error is not None
        assert not [event for event in events if isinstance(event, ManagerChanged)]
    finally:
        await client.close()


async def test_a_manager_that_stays_away_is_given_up_after_its_time() -> None:
    async with serving() as server:
        client = RolloutClient(server.url, TOKEN, lambda _: None, lambda _: None, reconnect_s=0.5)
        await client.connect()
        trainer = Trainer(client)
        heard = await trainer.submit()
    try:
        await heard.end()
        assert heard.error is not None
        with pytest.raises(RolloutError):
            await client.publish(1, "store:1")
    finally:
        await client.close()
