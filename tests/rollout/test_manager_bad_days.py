"""What bad engines, broken machines and impostors cost, on a virtual clock."""

from __future__ import annotations

import math

import pytest
from rollout_helpers import VOCABULARY, SimulatedAgent, World, logprob_of, output_of, submit, tokens

from penstock.observe.events import FrameRefused, RowsRefused, SampleFailed
from penstock.sample import Finish
from penstock.wire import Goodbye, StartFrame, StopFrame, TokenFrame, VersionReady, column, column_bytes


class Watched(SimulatedAgent):
    """Remembers the seeds that it was given and why work was taken back."""

    def __init__(self, agent: SimulatedAgent) -> None:
        super().__init__(**{name: getattr(agent, name) for name in SimulatedAgent.__dataclass_fields__})
        self.seeds: list[int] = []
        self.taken_back: list[str] = []

    def take(self, frame: object) -> None:
        if isinstance(frame, StartFrame):
            self.seeds += column(frame.seeds, "Q").tolist()
        if isinstance(frame, StopFrame):
            self.taken_back.append(frame.cause)
        super().take(frame)


def watched(world: World, name: str, max_running: int = 4) -> Watched:
    agent = Watched(world.join(name, max_running))
    world.agents[agent.peer] = agent
    if agent.loading is not None:
        world.send(agent, agent.ready())
    return agent


def published() -> World:
    world = World()
    world.publish(0)
    return world


def spoilt(agent: SimulatedAgent, value: float | None = None, token: int | None = None) -> TokenFrame:
    """Its next tokens, one each, with every log-probability or every id replaced."""
    frame = agent.draw(list(agent.sequences), 1)
    count = len(frame.token_ids) // 4
    if value is not None:
        frame.logprobs = column_bytes([value] * count, "f")
    if token is not None:
        frame.token_ids = column_bytes([token] * count, "i")
    return frame


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"value": math.nan}, "a log-probability of nan"),
        ({"value": math.inf}, "a log-probability of inf"),
        ({"value": -math.inf}, "a log-probability of -inf"),
        ({"value": 0.5}, "a log-probability of 0.5"),
        ({"token": VOCABULARY}, f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        ({"token": -7}, f"token id -7 is outside the vocabulary of {VOCABULARY}"),
    ],
)
def test_an_engine_that_only_draws_nonsense_is_refused_with_the_reason_before_it_strikes_samples_out(
    spoil: dict[str, float], says: str
) -> None:
    world = published()
    bad, good = watched(world, "bad", 6), watched(world, "good", 6)
    world.trainer(submit(samples_per_prompt=12))
    assert len(bad.sequences) == 6
    world.send(bad, spoilt(bad, **spoil))  # type: ignore[arg-type]
    world.pass_time(0.1)
    assert [peer for peer, _ in world.closed] == [bad.peer]
    [refused] = world.of_kind(FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert says in refused.cause
    assert any(isinstance(e, RowsRefused) and e.instance == "bad" and says in e.cause for e in world.events)
    assert says in bad.taken_back[0]
    for _ in range(100):
        world.play(good)
    assert world.done["train-0"].failed == 0


@pytest.mark.parametrize("others", [0, 1])
def test_the_last_sample_of_a_batch_is_not_set_aside_because_one_engine_only_draws_nonsense(others: int) -> None:
    world = published()
    bad = watched(world, "bad", 6)
    world.trainer(submit())
    for _ in range(others):
        watched(world, "good", 6)
    for _ in range(2):
        assert len(bad.sequences) == 1, "it is given back to the same engine: no other holds work"
        world.send(bad, spoilt(bad, math.nan))
    world.pass_time(0.1)
    assert [peer for peer, _ in world.closed] == [bad.peer]
    watched(world, "another", 6)
    world.play_out()
    assert world.done["train-0"].failed == 0


def test_a_manager_that_stood_still_gives_nobody_up_for_what_it_did_not_hear() -> None:
    world = published()
    agent = watched(world, "engine")
    world.trainer(submit())
    silence_s = world.manager.config.fleet.heartbeat_s * world.manager.config.fleet.heartbeats_missed
    world.now += 100.0
    world.manager.on_pause(100.0, world.now)
    world.pass_time(0.0)
    assert not world.closed
    world.pass_time(silence_s + 0.1)
    assert [peer for peer, _ in world.closed] == [agent.peer], "what is silent while it listens is given up as ever"


def test_one_sample_that_no_engine_can_draw_is_set_aside_and_costs_no_engine() -> None:
    world = published()
    agent = watched(world, "engine", 8)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=64))
    cursed = next(iter(agent.sequences))
    seed = agent.sequences[cursed].seed
    for _ in range(200):
        rows = [lease for lease, held in agent.sequences.items() if held.seed != seed]
        if rows:
            world.send(agent, agent.draw(rows, 1))
        for lease in [lease for lease, held in agent.sequences.items() if held.seed == seed]:
            world.send(agent, spoilt_row(agent, lease))
    assert not world.closed
    assert world.done["train-0"].failed == 1
    [failed] = world.of_kind(SampleFailed)
    assert isinstance(failed, SampleFailed)
    assert "3 times" in failed.cause
    assert "a log-probability of nan" in failed.cause


def spoilt_row(agent: SimulatedAgent, lease: int) -> TokenFrame:
    held = agent.sequences[lease]
    row = (lease, held.drawn, output_of(held.seed, held.limit)[0][held.drawn : held.drawn + 1], Finish.RUNNING)
    return tokens(row, logprobs=column_bytes([math.nan], "f"))


def test_an_agent_can_only_speak_of_samples_leased_to_it() -> None:
    world = published()
    victim, impostor = watched(world, "victim"), watched(world, "impostor")
    world.trainer(submit(samples_per_prompt=2))
    [lease], [own] = victim.sequences, impostor.sequences
    forged = (lease, 0, [11, 12], Finish.RUNNING)
    world.send(impostor, tokens(forged))
    world.send(impostor, tokens((lease, 0, [], Finish.ABORTED), (lease, 0, [], Finish.FAILED)))
    assert world.manager.counts.rows_refused == 3
    assert world.manager.tracker.tokens_accepted == 0
    world.send(impostor, impostor.draw([own], 1))
    world.play_out()
    assert world.done["train-0"].failed == 0
    held = next(iter(world.delivered.values()))
    assert held.logprobs[0] in {logprob_of(seed, 0) for seed in victim.seeds + impostor.seeds}


def test_an_old_lease_of_its_own_is_worth_nothing() -> None:
    world = published()
    agent = watched(world, "engine")
    world.trainer(submit())
    [old] = agent.sequences
    held = agent.sequences.pop(old)
    world.send(agent, tokens((old, 0, [], Finish.ABORTED)))
    [fresh] = agent.sequences
    assert fresh != old
    ids, _, _ = output_of(held.seed, held.limit)
    world.send(agent, tokens((old, 0, ids[:1], Finish.RUNNING)))
    assert world.manager.counts.rows_refused == 1
    assert world.manager.tracker.tokens_accepted == 0
    world.play_out()
    [done] = world.delivered.values()
    assert done.token_ids == ids


@pytest.mark.parametrize("between_s", [0.0, 0.1])
@pytest.mark.parametrize("first", ["the batch", "the engine", "two batches"])
def test_an_engine_of_another_vocabulary_gets_no_work_and_is_refused_with_the_reason(
    first: str, between_s: float
) -> None:
    world = published()
    if first != "the engine":
        world.trainer(submit(prompts=[[1, 2, 40]]))
    if first == "two batches":
        world.trainer(submit("eval-0", prompts=[[1, 2, 41]]))
    if between_s and first != "the engine":
        world.pass_time(between_s)
    stranger = world.join("stranger")
    world.send(stranger, VersionReady(version=0, vocab_size=40, max_context_tokens=1024, load_s=0.1, bytes_fetched=1))
    if first == "the engine":
        if between_s:
            world.pass_time(between_s)
        world.trainer(submit(prompts=[[1, 2, 40]]))
        assert not stranger.sequences
    world.pass_time(0.1)
    assert [peer for peer, _ in world.closed] == [stranger.peer]
    [refused] = world.of_kind(FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert "its vocabulary of 40 has no token 40, which is in the prompts of batch train-0" in refused.cause
    watched(world, "engine")
    world.play_out()
    assert world.done["train-0"].failed == 0


def test_finished_members_of_a_group_are_never_generated_again() -> None:
    world = published()
    first = watched(world, "first", 8)
    world.trainer(submit(prompts=[[1], [2]], samples_per_prompt=4, max_new_tokens=6))
    for _ in range(3):
        world.send(first, first.draw(list(first.sequences), 1))
    unfinished = {held.seed for held in first.sequences.values()}
    finished = set(first.seeds) - unfinished
    assert finished
    assert unfinished
    world.lose(first)
    second = watched(world, "second", 8)
    world.play_out()
    assert set(second.seeds) == unfinished
    assert world.done["train-0"].samples == 8


def test_a_sample_that_kills_its_engine_under_a_live_agent_is_set_aside_after_three_times() -> None:
    world = published()
    world.trainer(submit())
    for life in range(3):
        agent = watched(world, f"engine-{life}")
        assert len(agent.sequences) == 1
        world.send(agent, Goodbye(cause="the engine failed: CUDA out of memory", engine_failed=True))
        world.agents.pop(agent.peer, None)
    [failed] = world.delivered.values()
    assert failed.finish is Finish.FAILED
    assert "3 times" in failed.cause
    assert "CUDA out of memory" in failed.cause
