"""A balance policy of the user's own that fails in a live manager: the run ends in its words, and no peer is blamed."""

from __future__ import annotations

import asyncio
import builtins
import re
from collections.abc import Sequence

import pytest
from test_server import LIMIT_BYTES, TOKEN, agent_at, eventually, serving, trainer_at

from penstock.errors import PolicyError, RolloutError
from penstock.observe.events import Warned
from penstock.rollout.balance import InstanceLoad, Move, Queue, ShortestQueue
from penstock.rollout.client import RolloutClient
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.outbox import Decisions
from penstock.rollout.provision_types import Add, Call, ProvisionConfig, Seen


class Nonsense(ShortestQueue):
    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return [999] if loads else []


class Early(ShortestQueue):
    """Fails on the trainer's own frame, when no instance is ready yet."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return [999]


class Weightless(ShortestQueue):
    def weight(self, load: InstanceLoad) -> float:
        return -1.0


class Breaks(ShortestQueue):
    def finished(self, prompt: int, output_tokens: int) -> None:
        raise KeyError("no such prompt")


class Late(ShortestQueue):
    """Fails in a tick, where no peer has spoken."""

    def moves(self, *_shown: object) -> list[Move]:
        return None  # type: ignore[return-value]


class OneBatch(ShortestQueue):
    """Gives out no more once a batch has ended."""

    ended = False

    def room(self, load: InstanceLoad) -> int:
        return 6

    def batch_ended(self) -> None:
        self.ended = True

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        if self.ended:
            raise ValueError("one is enough")
        return super().assign(queue, loads)


def config(policy: str) -> ManagerConfig:
    balance = f"test_server_policy:{policy}"
    fleet = FleetConfig(heartbeat_s=5.0)
    return ManagerConfig(fleet=fleet, status_s=0.05, max_frame_bytes=LIMIT_BYTES, balance=balance)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("Nonsense", "test_server_policy:Nonsense makes no sense: assign picked instance 999"),
        ("Early", "test_server_policy:Early makes no sense: assign picked instance 999"),
        ("Weightless", "test_server_policy:Weightless makes no sense: Weightless.weight gave [-1.0]"),
        ("Breaks", "test_server_policy:Breaks failed in finished: KeyError: 'no such prompt'"),
        ("Late", "test_server_policy:Late makes no sense: moves gave None"),
    ],
)
async def test_a_policy_that_fails_ends_the_server_and_the_batch_in_its_words(
    policy: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(manager=config(policy)) as server, trainer_at(server) as trainer:
        await trainer.client.publish(1, "store:1")
        async with agent_at(server) as remote:
            work = asyncio.create_task(remote.work())
            heard = await trainer.submit(limit=900 if policy == "Late" else 12, deadline_s=600)
            with pytest.raises(PolicyError, match=re.escape(says)):
                async with asyncio.timeout(60):
                    await server.failed()
            await heard.end()
            assert says in str(heard.error)
            await eventually(lambda: remote.agent.draining)
            assert trainer.gone() == [], "the agent did nothing wrong"
            assert any(says in event.message for event in trainer.of_kind(Warned))
            work.cancel()
    assert "Error handling request" not in caplog.text


async def test_who_comes_to_a_server_that_has_failed_hears_why_and_it_closes_in_time() -> None:
    async with serving(manager=config("Early")) as server:
        async with trainer_at(server) as trainer:
            await trainer.client.publish(1, "store:1")
            heard = await trainer.submit()
            await heard.end()
        other = RolloutClient(server.url, TOKEN, lambda event: None, lambda status: None)
        with pytest.raises(RolloutError, match=r"HTTP status 503: this manager has failed: .*Early makes no sense"):
            await other.connect()
        with pytest.raises(PolicyError, match="Early"):
            await server.failed()
        async with asyncio.timeout(20):
            await server.close()


async def test_a_batch_that_had_ended_is_delivered_though_the_next_one_fails() -> None:
    async with serving(manager=config("OneBatch")) as server, trainer_at(server) as trainer:
        await trainer.client.publish(1, "store:1")
        async with agent_at(server) as remote:
            work = asyncio.create_task(remote.work())
            first = await trainer.submit("train-0")
            second = await trainer.submit("train-1", samples=20)
            await first.end()
            await second.end()
            assert first.done is not None
            assert len(first.samples) == 6
            assert "one is enough" in str(second.error)
            work.cancel()


class Rented:
    """Machines that are there at once; says which were given back."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.released: list[str] = []

    async def add(self, count: int) -> list[str]:
        self.there += [f"rented-{len(self.there) + k}" for k in range(count)]
        return self.there[-count:]

    async def release(self, machine: str) -> None:
        self.there.remove(machine)
        self.released.append(machine)

    async def list(self) -> builtins.list[Seen]:
        return [Seen(machine) for machine in self.there]

    async def close(self) -> None:
        pass


async def test_machines_are_released_though_the_policy_has_failed() -> None:
    async with serving(manager=config("Early")) as server, trainer_at(server) as trainer:
        provisioner = Rented()
        server.provide(ProvisionConfig(), provisioner, release_s=20.0)
        await eventually(lambda: provisioner.there)
        await trainer.client.publish(1, "store:1")
        async with agent_at(server, "rented-0") as remote:
            heard = await trainer.submit()
            await heard.end()
            await remote.until(lambda: remote.agent.draining)
            # It leaves as agents do that are asked to.
            await remote.socket.close()
        await server.close()
        assert provisioner.released == ["rented-0"]


async def test_an_error_over_a_provisioners_answer_ends_the_run_and_machines_are_still_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(manager=config("OneBatch")) as server:
        provisioner = Rented()
        taken = server.manager.on_provisioner
        broken = True

        def answered(call: Call, *told: object) -> Decisions:
            if broken and isinstance(call, Add):
                raise ValueError("no such machine")
            return taken(call, *told)  # type: ignore[arg-type]

        monkeypatch.setattr(server.manager, "on_provisioner", answered)
        server.provide(ProvisionConfig(), provisioner, release_s=20.0)
        with pytest.raises(ValueError, match="no such machine"):
            await asyncio.wait_for(server.failed(), 20.0)
        broken = False
        await server.close()
        assert provisioner.released == ["rented-0"]
