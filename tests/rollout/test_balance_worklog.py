"""What the event log is told of work and answers: sums that stay exact, and no more rows than powers of two."""

from __future__ import annotations

import pytest
from rollout_helpers import World, submit

from penstock.observe.events import AnswersEnded, Event, InstanceWorked
from penstock.rollout.balance import Report
from penstock.rollout.worklog import EVERY_S, WorkLog, prompt_share
from penstock.wire import Heartbeat


def report(running: float, wall_s: float = 1.0, instance: str = "i0", pending: int = 0) -> Report:
    return Report(instance, wall_s, running, 100.0 * running, int(10 * running), 5, pending)


def test_work_of_like_batch_sizes_is_one_row_and_its_sums_are_exact() -> None:
    said: list[Event] = []
    now = [0.0]
    log = WorkLog(said.append, lambda: now[0])
    for running in (8, 7, 8, 2):
        log.worked(report(running), "here", True, 16)
    now[0] = EVERY_S + 1
    log.worked(report(2), "here", True, 16)
    (event,) = said
    assert isinstance(event, InstanceWorked)
    assert (event.instance, event.name, event.reserved, event.max_running) == ("i0", "here", True, 16)
    few, many = event.work
    assert (few.wall_s, few.tokens, few.steps, few.prefilled) == (2.0, 40, 20.0, 10)
    assert (many.wall_s, many.tokens, many.steps, many.most_context) == (3.0, 230, 30.0, 800)
    assert many.context_steps == 10 * 800 + 10 * 700 + 10 * 800


def test_rows_are_bounded_by_the_powers_of_two_however_much_is_reported() -> None:
    said: list[Event] = []
    log = WorkLog(said.append, lambda: 0.0)
    for k in range(3000):
        log.worked(report(1 + k % 256), "here", False, 256)
    log.gone("i0")
    (event,) = said
    assert isinstance(event, InstanceWorked)
    assert len(event.work) <= 9


def test_a_full_memory_is_seen() -> None:
    said: list[Event] = []
    log = WorkLog(said.append, lambda: 0.0)
    log.worked(report(8, pending=3), "here", False, 16)
    log.worked(report(2), "here", False, 16)
    log.gone("i0")
    event = said[0]
    assert isinstance(event, InstanceWorked)
    assert [row.full for row in event.work] == [False, True]


@pytest.mark.parametrize(
    ("waiting", "prefilled", "full"),
    [((3, 3), (5, 5), True), ((3, 3), (5, 9), False), ((0, 3), (5, 5), False), ((3, 0), (5, 5), False)],
)
def test_a_memory_is_full_where_samples_wait_beside_free_places_and_none_is_let_in(
    waiting: tuple[int, int], prefilled: tuple[int, int], full: bool
) -> None:
    """One that has just come waits for the next decode step and is let in there: that is no sign of a full memory."""
    world = World()
    world.publish(0)
    agent = world.join_ready("engine-0")
    world.trainer(submit(prompts=[[1, 2], [3, 4, 5, 6]], samples_per_prompt=3, max_new_tokens=20))
    for k in range(2):
        world.now += 1.0
        world.send(
            agent,
            Heartbeat(
                running=2,
                waiting=waiting[k],
                kv_tokens=99,
                tokens_generated=10 + 10 * k,
                tokens_prefilled=prefilled[k],
                tokens_per_s=1,
            ),
        )
    world.play_out()
    (worked,) = world.of_kind(InstanceWorked)
    assert isinstance(worked, InstanceWorked)
    assert [row.full for row in worked.work] == [full]


def test_a_run_tells_work_and_answers_of_every_batch() -> None:
    world = World()
    world.publish(0)
    agent = world.join_ready("engine-0")
    world.trainer(submit(prompts=[[1, 2], [3, 4, 5, 6]], samples_per_prompt=3, max_new_tokens=20))
    for k, drawn in enumerate((10, 40)):
        world.now += 1.0
        beat = Heartbeat(running=4, waiting=0, kv_tokens=99, tokens_generated=drawn, tokens_prefilled=k, tokens_per_s=1)
        world.send(agent, beat)
    world.play_out()
    (worked,) = world.of_kind(InstanceWorked)
    (ended,) = world.of_kind(AnswersEnded)
    assert isinstance(worked, InstanceWorked)
    assert isinstance(ended, AnswersEnded)
    assert worked.work[0].tokens == 30
    assert (ended.batch, ended.prompts, ended.samples, ended.prompt_tokens) == ("train-0", 2, 6, 3.0)
    lengths = sorted(len(sample.token_ids) for sample in world.delivered.values())
    assert (ended.quantiles[0], ended.quantiles[-1]) == (lengths[0], lengths[-1])
    assert len(ended.quantiles) == 21


def test_the_prompts_share_of_the_spread_is_found() -> None:
    assert prompt_share([[100, 100], [900, 900], [300, 300]]) == pytest.approx(1.0)
    assert prompt_share([[100, 900], [900, 100], [100, 900]]) == 0.0
    assert prompt_share([[5]]) == 0.0
