"""What a manager knows at the start of a step, put together for `Offload.plan`. Nothing of the world's truth enters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.rollout.balanced import Balanced
from penstock.rollout.facts import Facts
from penstock.rollout.offload import Offload
from penstock.rollout.step_replay import Engine, Training
from penstock.simulate.machine import Machine

if TYPE_CHECKING:
    from penstock.simulate.world import World

__all__ = ["plan_step"]


def plan_step(world: World, fleet: list[Machine]) -> bool:
    """Plans the step on the machines that are there, and sets the limits unless it began with others; False while too
    little is known."""
    balance, window, profile = world.strategy.balance, world.strategy.window, world.profile
    if not isinstance(window, Offload) or not isinstance(balance, Balanced):
        return False
    if world.token_s is None or not balance.lengths.groups:
        return False
    step = world.step
    keeps = step is not None and window.keeps(balance.plan, world.clock.now - step.began_s, len(fleet))
    if keeps and len(fleet) in window.plans:
        return True
    remote = _engines(world, balance, fleet, [world.remotes.pull_s(machine.name) for machine in fleet])
    reserved = _engines(world, balance, world.reserved, [profile.training.switch_s] * len(world.reserved))
    if remote is None or reserved is None:
        return False
    training = profile.training
    timed = Training(
        world.token_s,
        training.micro_batch_samples,
        training.switch_s,
        training.optimizer_s,
        world.token_s * training.ahead_share if world.strategy.looks_ahead else 0.0,
        training.ahead_samples,
    )
    prompt_tokens = profile.lengths.prompt_tokens
    facts = Facts(balance.lengths.groups, prompt_tokens, remote, reserved, timed, joined=balance.joined())
    plan = window.plan(facts)
    if not keeps:
        balance.follow(plan)
    return True


def _engines(world: World, balance: Balanced, machines: list[Machine], starts_s: list[float]) -> list[Engine] | None:
    found = []
    for load, starts in zip(world.loads(machines), starts_s, strict=True):
        engine = balance.engine(load, starts)
        if engine is None:
            return None
        found.append(engine)
    return found
