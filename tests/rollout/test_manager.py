"""The manager on a virtual clock: who loads what, who gets what, what waiting costs, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_helpers import VOCABULARY, SimulatedAgent, World, output_of, submit, tokens

from penstock.observe.events import (
    BatchEnded,
    ConnectionRefused,
    FrameRefused,
    InstanceChanged,
    RowsRefused,
    SampleFailed,
    SamplesMoved,
    WaitingForInstances,
    WaitingOver,
    Warned,
    WeightsFailed,
    WeightsLoaded,
    decode_event,
)
from penstock.rollout.fleet import FleetConfig, State
from penstock.rollout.manager import TRAINER, Manager, ManagerConfig
from penstock.sample import Finish, SampleId, sample_seed
from penstock.wire import (
    MAX_FRAME_BYTES,
    AgentHello,
    BatchDone,
    CancelBatch,
    EventFrame,
    FinishedFrame,
    FrameToManager,
    Goodbye,
    Heartbeat,
    LoadFailed,
    LoadWeights,
    ReleaseBatch,
    StartFrame,
    StopFrame,
    VersionPublished,
    Welcome,
    column,
    column_bytes,
    encode,
)

BEAT = Heartbeat(running=0, waiting=0, kv_tokens=0, tokens_generated=0, tokens_prefilled=0, tokens_per_s=0.0)


def ready_world(agents: int = 1, **options: int) -> tuple[World, list[SimulatedAgent]]:
    world = World()
    world.publish(0)
    return world, [world.join_ready(f"engine-{k}", **options) for k in range(agents)]


def check_delivered(world: World, batch: str, prompts: int, samples_per_prompt: int, limit: int) -> None:
    """Every sample of a batch came once, token for token what an undisturbed engine draws."""
    for prompt in range(prompts):
        for replica in range(samples_per_prompt):
            got = world.delivered[batch, prompt, replica]
            ids, logprobs, finish = output_of(sample_seed(0, SampleId(batch, prompt, replica)), limit)
            assert got.token_ids == ids
            assert got.logprobs == logprobs
            assert got.finish is finish


def test_a_batch_runs_to_its_end() -> None:
    world, _ = ready_world(2)
    world.trainer(submit(prompts=[[1, 2], [3]], samples_per_prompt=9))
    world.play_out()
    check_delivered(world, "train-0", 2, 9, 8)
    done = world.done["train-0"]
    assert (done.samples, done.failed) == (18, 0)
    assert done.tokens == sum(len(d.token_ids) for d in world.delivered.values())
    assert world.manager.tracker.batch("train-0") is None
    assert not world.of_kind(SamplesMoved)


def test_samples_go_to_the_shortest_queue_and_the_rest_wait_at_the_manager() -> None:
    world, [small] = ready_world(max_running=2)
    large = world.join_ready("large", max_running=6)
    world.trainer(submit(prompts=[[1]], samples_per_prompt=4))
    assert (len(small.sequences), len(large.sequences)) == (1, 3)
    world.trainer(submit("train-1", prompts=[[1]], samples_per_prompt=20))
    assert (len(small.sequences), len(large.sequences)) == (4, 8)
    assert world.manager.tracker.queued == 12


def test_the_oldest_batch_is_worked_on_first() -> None:
    world = World()
    world.publish(0)
    world.trainer(submit("train-0", samples_per_prompt=3))
    world.trainer(submit("train-1", samples_per_prompt=3))
    agent = world.join_ready(max_running=2)
    seeds = {sequence.seed for sequence in agent.sequences.values()}
    expected = [SampleId("train-0", 0, k) for k in range(3)] + [SampleId("train-1", 0, 0)]
    assert seeds == {sample_seed(0, sample) for sample in expected}


def test_an_instance_gets_no_work_before_it_holds_the_version() -> None:
    world = World()
    world.publish(0)
    agent = world.join()
    assert agent.loading == LoadWeights(version=0, source="store:0")
    world.trainer(submit(samples_per_prompt=2))
    assert not agent.sequences
    world.send(agent, agent.ready())
    assert len(agent.sequences) == 2
    assert len(world.of_kind(WeightsLoaded)) == 1


def test_an_agent_that_joins_first_waits_for_the_first_version() -> None:
    world = World()
    agent = world.join()
    assert agent.loading is None
    world.publish(3)
    assert agent.loading is not None
    assert agent.loading.version == 3


def test_weights_are_not_swapped_under_running_samples() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    world.publish(1)
    assert agent.loading is None
    world.play_out()
    assert agent.version == 1
    assert all(d.spans == [(0, len(d.token_ids))] for d in world.delivered.values())


def test_a_version_that_samples_wait_for_comes_before_a_newer_one() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    world.publish(1)
    world.lose(agent)
    late = world.join("late")
    assert late.loading is not None
    assert late.loading.version == 0
    world.play_out()
    check_delivered(world, "train-0", 1, 3, 8)
    assert late.version == 1


def test_the_version_of_an_open_batch_is_not_forgotten_however_many_follow() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    for version in range(1, 100):
        world.publish(version)
    world.lose(agent)
    world.join("late")
    world.play_out()
    check_delivered(world, "train-0", 1, 3, 8)
    for version in range(100, 200):
        world.publish(version)
    assert 0 not in world.manager.versions


def test_a_failed_load_is_tried_again_and_given_up_at_its_deadline() -> None:
    world = World()
    world.publish(0)
    agent = world.join()
    for _ in range(3):
        agent.loading = None
        world.send(agent, LoadFailed(version=0, cause="checksum of chunk 3"))
        assert agent.loading is None
        for _ in range(5):
            world.pass_time(1.0)
            world.send(agent, BEAT)
        assert agent.loading is not None
    for _ in range(20):
        world.pass_time(1.0)
        if agent.peer in world.agents:
            world.send(agent, BEAT)
    [(_, cause)] = world.closed
    assert "was not loaded after 31.0 s" in cause
    assert "checksum of chunk 3" in cause
    assert len(world.of_kind(WeightsFailed)) == 3


def test_samples_of_a_lost_instance_go_on_elsewhere_from_their_last_token() -> None:
    world, [first, second] = ready_world(2)
    world.trainer(submit(prompts=[[1, 2]], samples_per_prompt=8, max_new_tokens=20))
    world.play(first, 2)
    kept = sum(sequence.drawn for sequence in first.sequences.values())
    running = len(first.sequences)
    world.lose(first)
    [moved] = world.of_kind(SamplesMoved)
    assert isinstance(moved, SamplesMoved)
    assert (moved.samples, moved.tokens_kept) == (running, kept)
    world.play_out()
    assert second.instance == "engine-1"
    check_delivered(world, "train-0", 1, 8, 20)
    assert world.manager.tracker.tokens_accepted == world.done["train-0"].tokens


def test_a_late_frame_of_a_machine_given_up_for_dead_changes_nothing() -> None:
    world, [first, _] = ready_world(2)
    world.trainer(submit(samples_per_prompt=4))
    late = first.draw(list(first.sequences), 2)
    world.pass_time(6.5)
    assert first.peer not in world.agents
    before = world.manager.tracker.tokens_accepted
    world.send(first, late)
    assert world.manager.tracker.tokens_accepted == before
    assert world.manager.counts.frames_refused == 1


def test_rows_of_a_cancelled_batch_are_refused_and_counted_once_a_tick() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    rows = [(lease, 0, [10], Finish.RUNNING) for lease in agent.sequences]
    world.trainer(CancelBatch(batch="train-0", cause="no longer needed"))
    assert not agent.sequences
    world.send(agent, tokens(*rows))
    world.pass_time(0.1)
    [refused] = world.of_kind(RowsRefused)
    assert isinstance(refused, RowsRefused)
    assert refused.rows == 3
    [ended] = world.of_kind(BatchEnded)
    assert isinstance(ended, BatchEnded)
    assert "no longer needed" in ended.cause


def test_an_instance_silent_for_three_heartbeats_is_given_up() -> None:
    world, [quiet, lively] = ready_world(2)
    world.trainer(submit(samples_per_prompt=8))
    for _ in range(7):
        world.pass_time(1.0)
        world.send(lively, BEAT)
    assert [peer for peer, _ in world.closed] == [quiet.peer]
    assert "3 heartbeats" in world.closed[0][1]
    world.play_out()
    check_delivered(world, "train-0", 1, 8, 8)


def test_a_connection_without_a_hello_is_closed() -> None:
    world = World()
    world.carry_out(world.manager.on_agent_connected("mute", world.now))
    world.pass_time(11.0)
    assert world.closed[0][0] == "mute"
    assert "no hello" in world.closed[0][1]
    [refused] = world.of_kind(ConnectionRefused)
    assert isinstance(refused, ConnectionRefused)
    assert refused.cause == world.closed[0][1]


def test_with_no_instance_left_samples_wait_and_go_on_when_one_joins() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=5))
    world.play(agent, 1)
    world.lose(agent, "killed")
    [waiting] = world.of_kind(WaitingForInstances)
    assert isinstance(waiting, WaitingForInstances)
    assert "an instance with weight version 0" in waiting.waiting_for
    world.pass_time(20.0)
    assert "killed" in world.statuses[-1].waiting_for
    world.join_ready("another")
    [over] = world.of_kind(WaitingOver)
    assert isinstance(over, WaitingOver)
    assert over.waited_s == 20.0
    world.play_out()
    check_delivered(world, "train-0", 1, 5, 8)
    assert world.statuses[-1].waiting_for


def test_waiting_for_a_load_is_announced_only_when_it_takes_long() -> None:
    world = World()
    world.publish(0)
    agent = world.join()
    world.trainer(submit())
    world.pass_time(1.0)
    assert "1 loading" in world.statuses[-1].waiting_for
    assert not world.of_kind(WaitingForInstances)
    world.pass_time(2.5)
    assert len(world.of_kind(WaitingForInstances)) == 1
    world.send(agent, agent.ready())
    assert len(world.of_kind(WaitingOver)) == 1


def test_waiting_past_the_deadline_is_an_error_that_names_what_was_missing() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=2, version=12, deadline_s=5.0))
    world.trainer(submit("train-1", samples_per_prompt=2, deadline_s=500.0))
    for _ in range(6):
        world.pass_time(1.0)
        world.send(agent, BEAT)
    failed = world.failed["train-0"]
    assert failed.deadline
    assert "weight version 12 to be published (the latest is 0)" in failed.cause
    assert "deadline_s = 5" in failed.cause
    world.play_out()
    assert "train-1" in world.done


def test_a_deadline_names_the_instances_that_send_nothing() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=2, deadline_s=5.0))
    for _ in range(6):
        world.pass_time(1.0)
        world.send(agent, BEAT)
    assert "2 samples are with engine-0, without a token" in world.failed["train-0"].cause
    assert not agent.sequences, "it is told to stop them"


def test_a_batch_behind_another_is_not_late_while_that_one_makes_progress() -> None:
    world, [agent] = ready_world(max_running=1)
    world.trainer(submit("train-0", samples_per_prompt=3, max_new_tokens=40, deadline_s=5.0))
    world.trainer(submit("train-1", samples_per_prompt=3, max_new_tokens=40, deadline_s=5.0))
    for _ in range(400):
        world.pass_time(1.0)
        if not agent.sequences:
            break
        world.send(agent, agent.draw([next(iter(agent.sequences))], 1))
    assert set(world.done) == {"train-0", "train-1"}
    assert not world.failed


def test_an_engine_that_only_hands_samples_back_makes_no_progress() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=1))
    for _ in range(16):
        [lease] = agent.sequences
        agent.sequences.clear()
        world.send(agent, tokens((lease, 0, [], Finish.ABORTED)))
    [failed] = world.of_kind(SampleFailed)
    assert isinstance(failed, SampleFailed)
    assert "16 times" in failed.cause
    assert world.done["train-0"].failed == 1


def test_a_sample_that_kills_every_engine_is_set_aside_and_the_rest_go_on() -> None:
    world = World()
    world.publish(0)
    world.trainer(submit(samples_per_prompt=1))
    for life in range(3):
        agent = world.join_ready(f"engine-{life}")
        assert len(agent.sequences) == 1
        world.lose(agent, "the process was killed")
    got = world.delivered["train-0", 0, 0]
    assert got.finish is Finish.FAILED
    assert got.token_ids == []
    assert "3 times" in got.cause
    assert "the process was killed" in got.cause
    assert world.done["train-0"].failed == 1


def test_a_sample_that_the_engine_refuses_is_missing_with_its_cause() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=2))
    lease = next(iter(agent.sequences))
    del agent.sequences[lease]
    world.send(agent, tokens((lease, 0, [], Finish.FAILED), causes={0: "the prompt is too long"}))
    world.play_out()
    assert world.done["train-0"] == BatchDone(
        batch="train-0", samples=1, failed=1, tokens=len(world.delivered["train-0", 0, 1].token_ids)
    )
    assert "the prompt is too long" in world.delivered["train-0", 0, 0].cause


def test_a_goodbye_is_no_accident() -> None:
    world, [first, _] = ready_world(2)
    world.trainer(submit(samples_per_prompt=6))
    for _ in range(5):
        world.send(first, first.draw(list(first.sequences), 1))
        world.send(first, Goodbye(cause="SIGTERM"))
        world.agents.pop(first.peer, None)
        first = world.join_ready("engine-0")
    world.play_out()
    check_delivered(world, "train-0", 1, 6, 8)
    gone = [e for e in world.of_kind(InstanceChanged) if isinstance(e, InstanceChanged) and e.after == "gone"]
    assert all(e.orderly and e.cause == "SIGTERM" for e in gone)


def test_one_that_comes_back_is_another_instance() -> None:
    world, [first] = ready_world()
    world.lose(first)
    again = world.join_ready("engine-0")
    assert (first.instance, again.instance) == ("engine-0", "engine-0~2")


def gone_events(world: World) -> list[InstanceChanged]:
    return [e for e in world.of_kind(InstanceChanged) if isinstance(e, InstanceChanged) and e.after == "gone"]


def test_every_transition_of_a_life_is_an_event_with_its_cause() -> None:
    world, _ = ready_world()
    world.now += 1
    world.carry_out(world.manager.shutdown(world.now, "the run is over"))
    world.pass_time(40)
    told = [(e.before, e.after, e.cause) for e in world.of_kind(InstanceChanged) if isinstance(e, InstanceChanged)]
    assert [(before, after) for before, after, _ in told] == [
        ("", "joining"),
        ("joining", "loading"),
        ("loading", "ready"),
        ("ready", "draining"),
        ("draining", "gone"),
    ]
    assert all(cause for _, _, cause in told)


def test_one_that_was_lost_comes_back_through_loading_and_takes_work_of_the_step_at_once() -> None:
    world, [first] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    world.send(first, first.draw(list(first.sequences), 1))
    world.lose(first)
    again = world.join("engine-0")
    assert again.loading is not None
    assert not again.sequences
    world.send(again, again.ready())
    assert len(again.sequences) == 3
    world.play_out()
    check_delivered(world, "train-0", 1, 3, 8)


def test_an_end_says_whether_it_was_orderly() -> None:
    world, agents = ready_world(4)
    world.lose(agents[0])
    world.send(agents[1], Goodbye(cause="got SIGTERM"))
    world.send(agents[2], Goodbye(cause="the engine failed: out of memory", engine_failed=True))
    world.carry_out(world.manager.shutdown(world.now, "the run is over"))
    world.lose(agents[3])
    assert [event.orderly for event in gone_events(world)] == [False, True, False, True]
    assert [row.orderly for row in world.manager.status(world.now).instances] == [False, True, False, True]


def flap(world: World, times: int) -> SimulatedAgent:
    for _ in range(times):
        world.lose(world.join_ready("spot"))
        world.pass_time(1)
    return world.join("spot")


def test_an_agent_that_keeps_being_lost_waits_for_weights_and_work_and_is_told_so() -> None:
    world, _ = ready_world(0)
    agent = flap(world, 4)
    assert agent.held_off_s == 4
    assert agent.loading is None
    [row] = [row for row in world.manager.status(world.now).instances if row.state == "joining"]
    assert "waits 4 s for work, since it came and was lost quickly 4 times" in row.cause
    world.trainer(submit())
    world.pass_time(3.9)
    assert agent.loading is None
    world.pass_time(0.2)
    assert agent.loading is not None
    world.play_out()
    check_delivered(world, "train-0", 1, 1, 8)


def test_one_that_leaves_in_good_order_may_come_back_at_once() -> None:
    world, _ = ready_world(0)
    for _ in range(9):
        agent = world.join_ready("spot")
        world.send(agent, Goodbye(cause="got SIGTERM"))
    assert world.join("spot").loading is not None


def test_a_name_made_of_the_process_id_is_known_again_when_the_process_is_another() -> None:
    world, _ = ready_world(0)
    for pid in range(1, 6):
        peer = f"flapping-{pid}"
        world.carry_out(world.manager.on_agent_connected(peer, world.now))
        hello = AgentHello(name=f"host-{pid}", engine="x", pid=pid, host="host", max_running=1, max_context_tokens=1024)
        decisions = world.manager.on_agent_frame(peer, hello, world.now)
        [welcome] = [frame for _, frame in decisions.frames if isinstance(frame, Welcome)]
        if pid < 5:
            world.carry_out(world.manager.on_agent_lost(peer, "the connection was cut", world.now + 0.1))
            world.now += 1
    assert welcome.hold_off_s == 4


def test_samples_go_only_where_the_context_has_room_for_prompt_and_output() -> None:
    world = World()
    world.publish(3)
    small = [world.join_ready(f"small-{k}", context_tokens=2048) for k in range(2)]
    large = world.join_ready("large", context_tokens=8192)
    world.trainer(submit(prompts=[[1] * 3000, [2]], samples_per_prompt=4, version=3, max_new_tokens=2000))
    # Those of the short prompt wait too: a batch's need is that of its longest one.
    assert [len(agent.sequences) for agent in (*small, large)] == [0, 0, 6]
    world.trainer(submit("train-1", samples_per_prompt=4, version=3, max_new_tokens=2000))
    assert [len(agent.sequences) for agent in (*small, large)] == [2, 2, 6]
    assert not world.manager.waiting.waiting_for, "it waits for room, and not for an instance"
    world.play_out()
    check_delivered(world, "train-0", 2, 4, 2000)
    check_delivered(world, "train-1", 1, 4, 2000)


def test_samples_of_a_lost_instance_wait_for_one_with_their_context_and_go_on_there() -> None:
    world = World()
    world.publish(3)
    for k in range(2):
        world.join_ready(f"small-{k}", context_tokens=2048)
    large = world.join_ready("large", context_tokens=5000)
    world.trainer(submit(prompts=[[1] * 3000], samples_per_prompt=4, version=3, max_new_tokens=2000))
    world.play(large, 5)
    world.lose(large)
    world.pass_time(1.0)
    assert world.statuses[-1].waiting_for == (
        "an instance with weight version 3 and a context of 5000 tokens (1 gone, 2 ready with a context of 2048)"
    )
    world.join_ready("larger", context_tokens=8192)
    world.play_out()
    check_delivered(world, "train-0", 1, 4, 2000)
    assert [type(e) for e in world.events if isinstance(e, WaitingForInstances | WaitingOver)] == [
        WaitingForInstances,
        WaitingOver,
    ]
    assert not world.of_kind(SampleFailed)
    assert not world.of_kind(RowsRefused)


def test_waiting_for_a_context_that_nobody_has_ends_at_the_deadline_with_that_cause() -> None:
    world, [agent] = ready_world(context_tokens=10)
    world.trainer(submit(max_new_tokens=8, deadline_s=5.0))
    for _ in range(6):
        world.pass_time(1.0)
        world.send(agent, BEAT)
    assert "a context of 11 tokens (1 ready with a context of 10)" in world.failed["train-0"].cause


def test_an_instance_too_small_for_an_older_batch_is_not_kept_on_its_version() -> None:
    world, [small] = ready_world(context_tokens=20)
    world.trainer(submit("train-0", samples_per_prompt=2, max_new_tokens=100))
    world.publish(1)
    world.trainer(submit("train-1", samples_per_prompt=2, version=1))
    world.play_out()
    check_delivered(world, "train-1", 1, 2, 8)
    assert small.version == 1
    assert "train-0" not in world.done
    world.join_ready("large", context_tokens=200)
    world.play_out()
    check_delivered(world, "train-0", 1, 2, 100)


def test_an_engine_that_ends_a_sample_before_its_length_is_not_believed() -> None:
    world, [short] = ready_world()
    world.trainer(submit(prompts=[[1]], samples_per_prompt=1, max_new_tokens=8))
    for _ in range(2):
        [lease] = short.sequences
        short.sequences.clear()
        world.send(short, tokens((lease, 0, [10, 11], Finish.LENGTH)))
    world.pass_time(1.0)
    [refused] = world.of_kind(RowsRefused)
    assert isinstance(refused, RowsRefused)
    assert (refused.rows, refused.cause) == (2, "finished by LENGTH before max_new_tokens")
    [(peer, cause)] = world.closed
    assert (peer, cause) == (short.peer, "its engine's rows make no sense: finished by LENGTH before max_new_tokens")
    world.join_ready("other")
    world.play_out()
    check_delivered(world, "train-0", 1, 1, 8)


def test_names_are_forgotten_in_time_and_no_id_is_ever_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout.fleet.NAMES_REMEMBERED", 3)
    world = World()
    given = []
    for name in ("a", "b", "a", "c", "d", "e", "a", "b", "f", "g", "h", "a", "b", "a"):
        agent = world.join(name)
        given.append(agent.instance)
        world.lose(agent)
        assert len(world.manager.fleet._names_used) <= 3
    assert len(set(given)) == len(given)
    assert given[:4] == ["a", "b", "a~2", "c"]


@pytest.mark.parametrize(
    "frame",
    [
        tokens((1, 0, [1], Finish.RUNNING), version=5),
        tokens((1, 0, [1], Finish.RUNNING), starts=b""),
        submit(),
        AgentHello(name="again", engine="x", pid=1, host="h", max_running=1, max_context_tokens=1),
    ],
)
def test_an_agent_that_sends_nonsense_is_cut_off_and_its_samples_go_on(frame: FrameToManager) -> None:
    world, [bad, _] = ready_world(2)
    world.trainer(submit("eval-0", samples_per_prompt=6))
    world.send(bad, frame)
    assert [peer for peer, _ in world.closed] == [bad.peer]
    [refused] = world.of_kind(FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert refused.peer == "engine-0"
    world.play_out()
    check_delivered(world, "eval-0", 1, 6, 8)


@pytest.mark.parametrize(
    "hello",
    [
        AgentHello(name="../etc", engine="x", pid=1, host="h", max_running=1, max_context_tokens=1),
        AgentHello(name="a", engine="x", pid=1, host="h", max_running=0, max_context_tokens=1),
        AgentHello(name="a", engine="x", pid=1, host="h", max_running=1, max_context_tokens=0),
        BEAT,
    ],
)
def test_a_hello_that_makes_no_sense_closes_the_connection(hello: FrameToManager) -> None:
    world = World()
    world.carry_out(world.manager.on_agent_connected("peer", 0.0))
    world.carry_out(world.manager.on_agent_frame("peer", hello, 0.0))
    assert [peer for peer, _ in world.closed] == ["peer"]
    assert len(world.manager.fleet) == 0


def test_a_batch_that_makes_no_sense_fails_with_the_cause() -> None:
    world, _ = ready_world()
    world.trainer(submit(prompt_lengths=column_bytes([9], "I")))
    assert "column" in world.failed["train-0"].cause
    assert not world.failed["train-0"].deadline
    assert len(world.of_kind(FrameRefused)) == 1


def test_a_batch_under_a_name_in_use_does_not_disturb_the_one_that_is_open() -> None:
    world, _ = ready_world()
    world.trainer(submit(samples_per_prompt=4))
    world.trainer(submit(samples_per_prompt=4))
    world.play_out()
    assert not world.failed
    [warned] = world.of_kind(Warned)
    assert isinstance(warned, Warned)
    assert "already open" in warned.message


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (CancelBatch(batch="nope", cause="x"), Warned),
        (ReleaseBatch(batch="nope"), Warned),
        (VersionPublished(version=-1, source="store:1"), FrameRefused),
        (VersionPublished(version=1, source=""), FrameRefused),
        (BEAT, FrameRefused),
    ],
)
def test_what_a_trainer_gets_wrong_is_named(frame: FrameToManager, kind: type) -> None:
    world, _ = ready_world()
    world.trainer(frame)
    assert len(world.of_kind(kind)) == 1


def test_an_open_batch_is_not_released() -> None:
    world, _ = ready_world()
    world.trainer(submit())
    world.trainer(ReleaseBatch(batch="train-0"))
    [warned] = world.of_kind(Warned)
    assert isinstance(warned, Warned)
    assert "still open" in warned.message
    world.play_out()
    assert "train-0" in world.done
    assert world.manager.ended_batches
    world.trainer(ReleaseBatch(batch="train-0"))
    assert not world.manager.ended_batches


def test_a_lost_trainer_takes_its_batches_and_versions_along_and_instances_stay() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    world.carry_out(world.manager.on_trainer_lost("the connection was cut", world.now))
    assert not agent.sequences
    assert world.manager.fleet.count(State.JOINING) == 1
    world.send(agent, tokens((1, 0, [10], Finish.RUNNING)))
    assert not world.closed, "a late frame of the old run is no offence"
    world.carry_out(world.manager.on_trainer_connected(world.now))
    world.publish(0)
    assert agent.loading is not None, "version 0 of another run is another version"
    world.trainer(submit(samples_per_prompt=3))
    world.play_out()
    check_delivered(world, "train-0", 1, 3, 8)


def test_events_of_the_time_before_the_trainer_reach_it_when_it_comes() -> None:
    manager = Manager(ManagerConfig())
    manager.on_agent_connected("peer", 0.0)
    hello = AgentHello(name="early", engine="x", pid=1, host="h", max_running=1, max_context_tokens=1)
    assert not [f for p, f in manager.on_agent_frame("peer", hello, 0.0).frames if p == TRAINER]
    [(peer, frame)] = manager.on_trainer_connected(1.0).frames
    assert peer == TRAINER
    assert isinstance(frame, EventFrame)
    event = decode_event(frame.events[0])
    assert isinstance(event, InstanceChanged)
    assert event.name == "early"


def test_shutdown_asks_every_instance_to_leave_and_fails_open_batches() -> None:
    world, [agent] = ready_world()
    world.trainer(submit(samples_per_prompt=3))
    world.carry_out(world.manager.shutdown(world.now, "the run is over"))
    assert agent.draining
    assert world.failed["train-0"].cause == "the run is over"
    world.send(agent, BEAT)
    assert not agent.sequences


def test_an_instance_that_does_not_leave_when_asked_is_cut_off() -> None:
    world, [agent] = ready_world()
    world.carry_out(world.manager.shutdown(world.now, "the run is over"))
    for _ in range(31):
        world.pass_time(1.0)
        if agent.peer in world.agents:
            world.send(agent, BEAT)
    assert "still there" in world.closed[0][1]


def test_starts_are_cut_to_frames_of_a_bounded_size() -> None:
    world = World(ManagerConfig(fleet=FleetConfig(), max_frame_bytes=4096))
    world.publish(0)
    agent = world.join_ready(max_running=64)
    frames: list[StartFrame] = []
    take = agent.take

    def count(frame: object) -> None:
        if isinstance(frame, StartFrame):
            frames.append(frame)
        take(frame)

    agent.take = count  # type: ignore[method-assign]
    world.trainer(submit(prompts=[[token % VOCABULARY for token in range(100)]], samples_per_prompt=20))
    assert len(frames) == 5
    assert all(len(frame.prompt_ids) <= 2048 for frame in frames)
    assert sum(len(column(frame.leases, "Q")) for frame in frames) == 20


def test_agents_are_told_the_context_and_the_frame_limit_and_are_never_sent_more_than_any_agent_takes() -> None:
    for limit, told in ((1 << 20, 1 << 20), (1 << 30, MAX_FRAME_BYTES)):
        manager = Manager(ManagerConfig(max_context_tokens=8192, max_frame_bytes=limit))
        manager.on_agent_connected("peer", 0.0)
        hello = AgentHello(name="a", engine="x", pid=1, host="h", max_running=1, max_context_tokens=2048)
        [(_, welcome)] = manager.on_agent_frame("peer", hello, 0.0).frames
        assert isinstance(welcome, Welcome)
        assert (welcome.max_context_tokens, welcome.max_frame_bytes) == (8192, told)


def test_stops_are_cut_to_frames_of_a_bounded_size() -> None:
    world = World(ManagerConfig(fleet=FleetConfig(), max_frame_bytes=4096))
    world.publish(0)
    agent = world.join_ready(max_running=1000)
    world.trainer(submit(prompts=[[1]], samples_per_prompt=1000))
    assert len(agent.sequences) == 1000
    stops = [
        frame
        for peer, frame in world.manager.on_trainer_frame(CancelBatch(batch="train-0", cause="enough"), 0.0).frames
        if peer == agent.peer and isinstance(frame, StopFrame)
    ]
    assert max(len(encode(frame)) for frame in stops) <= 4096
    assert sorted(lease for frame in stops for lease in column(frame.leases, "Q")) == sorted(agent.sequences)


def test_a_batch_whose_samples_could_not_go_on_elsewhere_in_one_frame_is_refused() -> None:
    world = World(ManagerConfig(fleet=FleetConfig(), max_frame_bytes=4096))
    world.trainer(submit(prompts=[[1] * 400], max_new_tokens=400))
    assert "a sample of 800 tokens" in world.failed["train-0"].cause
    assert "manager.max_frame_mib" in world.failed["train-0"].cause
    assert not list(world.manager.tracker.batches())


def test_finished_samples_are_cut_to_frames_of_a_bounded_size() -> None:
    world = World(ManagerConfig(fleet=FleetConfig(), max_frame_bytes=4096))
    world.publish(0)
    agent = world.join_ready(max_running=64)
    world.trainer(submit(prompts=[[1]], samples_per_prompt=64, max_new_tokens=100))
    drawn = agent.draw(list(agent.sequences), 102)
    frames = [f for _, f in world.manager.on_agent_frame(agent.peer, drawn, 0.0).frames if isinstance(f, FinishedFrame)]
    assert len(frames) > 1
    assert max(len(encode(frame)) for frame in frames) <= 4096
    assert sum(len(frame.finishes) for frame in frames) == 64


def test_the_status_names_every_instance_and_counts_every_sample() -> None:
    world, [first, second] = ready_world(2)
    world.trainer(submit(samples_per_prompt=20))
    world.lose(second)
    world.pass_time(0.6)
    status = world.statuses[-1]
    assert [(row.instance, row.state) for row in status.instances] == [("engine-0", "ready"), ("engine-1", "gone")]
    assert (status.queued, status.running, status.finished) == (14, 6, 0)
    assert (status.instances[0].running, status.instances[0].pending) == (4, 2)
    world.play(first, 1)
    world.pass_time(0.5)
    assert world.statuses[-1].tokens_accepted == 4 + 2
    assert world.statuses[-1].instances[0].tokens_per_s > 0


class ManagerMachine(RuleBasedStateMachine):
    """Agents join, draw, vanish, leave, fall silent, repeat themselves and come late, while batches come and go."""

    @initialize()
    def start(self) -> None:
        self.world = World(
            ManagerConfig(fleet=FleetConfig(heartbeat_s=2.0), max_pending_per_instance=1, max_strikes=10**6)
        )
        self.world.publish(0)
        self.submitted: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.version = 0
        self.batches = 0
        self.old_frames: list[tuple[SimulatedAgent, FrameToManager]] = []

    def agent(self, data: st.DataObject) -> SimulatedAgent | None:
        agents = list(self.world.agents.values())
        return data.draw(st.sampled_from(agents)) if agents else None

    @precondition(lambda self: len(self.world.agents) < 4)
    @rule(max_running=st.integers(1, 3), context_tokens=st.sampled_from([7, 1024]))
    def join(self, max_running: int, context_tokens: int) -> None:
        self.world.join("engine", max_running, context_tokens)

    @precondition(lambda self: len(self.submitted) - len(self.world.done) < 3)
    @rule(prompts=st.integers(1, 3), samples=st.integers(1, 3), longest=st.integers(1, 3))
    def submit(self, prompts: int, samples: int, longest: int) -> None:
        name = f"train-{self.batches}"
        self.batches += 1
        self.submitted[name] = prompts * samples
        self.world.trainer(
            submit(name, [[1] * longest] * prompts, samples, self.version, max_new_tokens=6, deadline_s=1e9)
        )

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.world.publish(self.version)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = sorted(self.submitted.keys() - self.world.done.keys() - self.cancelled)
        if running and data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(running))
            self.cancelled.add(name)
            self.world.trainer(CancelBatch(batch=name, cause="no longer needed"))

    @rule(data=st.data(), count=st.integers(1, 4))
    def work(self, data: st.DataObject, count: int) -> None:
        agent = self.agent(data)
        if agent is None:
            return
        if agent.loading is not None:
            self.world.send(agent, agent.ready())
        elif agent.sequences:
            some = data.draw(st.lists(st.sampled_from(sorted(agent.sequences)), min_size=1, unique=True))
            frame = agent.draw(some, count)
            self.world.send(agent, frame)
            self.old_frames.append((agent, frame))

    @rule(data=st.data())
    def fail_to_load(self, data: st.DataObject) -> None:
        agent = self.agent(data)
        if agent is not None and agent.loading is not None:
            version, agent.loading = agent.loading.version, None
            self.world.send(agent, LoadFailed(version=version, cause="the source hung up"))

    @precondition(lambda self: self.old_frames)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        agent, frame = data.draw(st.sampled_from(self.old_frames[-5:]))
        self.world.send(agent, frame)

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """An agent loses tokens of its own: the next frame has a gap."""
        agent = self.agent(data)
        if agent is not None and agent.sequences:
            agent.draw([next(iter(agent.sequences))], 1)

    @rule(data=st.data(), how=st.sampled_from(["crash", "goodbye", "nonsense"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        agent = self.agent(data)
        if agent is None:
            return
        if how == "goodbye":
            self.world.send(agent, Goodbye(cause="preempted"))
        elif how == "nonsense":
            self.world.send(agent, tokens((1, 0, [1], Finish.RUNNING), logprobs=b""))
        self.world.lose(agent)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]), quiet=st.booleans())
    def pass_time(self, seconds: float, quiet: bool) -> None:
        self.world.pass_time(seconds)
        for agent in list(self.world.agents.values()):
            if not quiet:
                self.world.send(agent, BEAT)

    @invariant()
    def every_sample_is_in_one_state(self) -> None:
        if not hasattr(self, "world"):
            return
        manager = self.world.manager
        for batch in manager.tracker.batches():
            assert sum(manager.tracker.state_counts(batch).values()) == self.submitted[batch.name]
        held = [lease for agent in self.world.agents.values() for lease in agent.sequences]
        assert len(set(held)) == len(held)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for agent in list(world.agents.values()):
            world.lose(agent)
        world.join("last", max_running=3)
        for _ in range(300):
            world.pass_time(0.5)
            for agent in list(world.agents.values()):
                world.send(agent, BEAT)
                world.play(agent)
            if not list(world.manager.tracker.batches()):
                break
        for name, samples in self.submitted.items():
            got = [key for key in world.delivered if key[0] == name]
            if name not in self.cancelled:
                assert world.done[name].samples == len(got) == samples
                assert world.done[name].failed == 0
            for key in got:
                ids, logprobs, finish = output_of(sample_seed(0, SampleId(*key)), 6)
                sample = world.delivered[key]
                assert (sample.token_ids, sample.logprobs, sample.finish) == (ids, logprobs, finish)


ManagerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_whatever_happens_no_sample_is_lost_and_none_comes_twice = ManagerMachine.TestCase
