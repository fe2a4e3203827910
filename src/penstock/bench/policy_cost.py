"""What a decision costs: the balance policy with 256 instances and 65,536 samples, and 10,000 agents in the simulator.

Samples are assigned all at once, as when a step begins, and one by one, as they end one in a frame and others wait: by
the policy in the manager, and by the manager with all that it does for one. Time is the processor's, of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.bench.common import Result, at_most, median
from penstock.bench.manager_world import FrameMaker, World
from penstock.rollout.balance import InstanceLoad, PlacedSample, Queue, Report
from penstock.rollout.balanced import Balanced
from penstock.rollout.balancing import Balancing
from penstock.rollout.curves import Speed
from penstock.rollout.offload import Offload
from penstock.rollout.step_replay import Limits, Plan
from penstock.sample import Finish, SampleId, turn_batch
from penstock.simulate.profiles import Lengths, MachineProfile, Prices, Profile, Training
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import static_trace
from penstock.simulate.world import simulate
from penstock.wire import TokenFrame, column_bytes, encode

DESCRIPTION = "cost of a balance decision per sample, and of simulating 10,000 agents with the real policies"

INSTANCES, SAMPLES = 256, 65_536
AGENTS = 10_000
TARGET_US = 20.0
STOP_ID = 7
CONVERSATIONS = 16_384
TURNS_A_TICK = 100


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 7
    policy = _learned()
    each = SAMPLES // INSTANCES
    empty = [InstanceLoad(f"i{k}", 0, each) for k in range(INSTANCES)]
    queue = Queue(fresh=SAMPLES, samples_per_prompt=8)
    assign = [_cpu_s(lambda: policy.assign(queue, empty)) / SAMPLES for _ in range(repetitions)]
    loads, held = _uneven()
    moves = [_cpu_s(lambda: policy.moves(0, loads, held.__getitem__)) / SAMPLES for _ in range(repetitions)]
    one = [_cpu_s(lambda: policy.assign(Queue(fresh=1), loads)) for _ in range(50)]
    policy.follow(Plan(Limits(0.5, 0.2), Limits(), 100.0))
    in_step = Queue(fresh=SAMPLES, samples_per_prompt=8, elapsed_s=1.0, prompt_tokens=512.0)
    planned = [_cpu_s(lambda: policy.assign(in_step, empty)) / SAMPLES for _ in range(repetitions)]
    fresh = []
    for k in range(50):
        policy.report(Report(f"i{k}", 1.0, 50.0, 2e5, 5000, 0))
        fresh.append(_cpu_s(lambda: policy.assign(Queue(fresh=1, elapsed_s=1.0, prompt_tokens=512.0), loads)))
    what = f"{INSTANCES} instances, {SAMPLES:,} samples"
    results = [
        at_most(f"assigning all: {what}", 1e6 * median(assign), TARGET_US, "us/sample"),
        at_most(f"looking for moves: {what}", 1e6 * median(moves), TARGET_US, "us/sample"),
        at_most(f"assigning all, within a plan's limits: {what}", 1e6 * median(planned), TARGET_US, "us/sample"),
        *_one_by_one(what),
        *_turns(),
        Result(
            f"a look at all {INSTANCES} instances for one sample",
            1e6 * median(one),
            "us",
            note="at a tick, or for a policy without `fill`; grows with instances",
        ),
        Result("the same within a plan's limits, after a report", 1e6 * median(fresh), "us"),
    ]
    few, many = (2_000, 4_000) if quick else (4_000, 20_000)
    costs = [_agents_s(samples) for samples in (few, many)]
    growth = (costs[1] / costs[0]) / (many / few)
    note = f"{costs[0]:.1f} s for {few:,} samples, {costs[1]:.1f} s for {many:,}; two steps each"
    results.append(at_most(f"{AGENTS:,} agents: growth of cost / growth of samples", growth, 1.0, "ratio", note=note))
    return results


def _one_by_one(what: str) -> list[Result]:
    """Samples that end one in a frame, and are made up for by those that wait."""
    world = World(INSTANCES)
    world.submit("bench", prompts=4 * SAMPLES // 8, samples_per_prompt=8, length=1 << 20, stop_id=STOP_ID)
    policy_s = _timed(world.manager.balancing, "fill")
    frame_s: dict[bool, list[float]] = {True: [], False: []}
    for agent in world.agents.values():
        for ends in frame_s:
            leases = list(agent.drawn)
            frame_s[ends].append(world.agent(agent.peer, _frame(agent, leases, leases[0] if ends else -1)))
    if world.finished != INSTANCES or len(policy_s) != INSTANCES:
        raise RuntimeError(f"{world.finished} samples ended, {len(policy_s)} decisions were made, of {INSTANCES} each")
    whole_s = median(frame_s[True]) - median(frame_s[False])
    return [
        at_most(f"assigning one by one, as samples end: {what}", 1e6 * median(policy_s), TARGET_US, "us/sample"),
        Result(
            "the manager's whole work for one that ends and one that begins",
            1e6 * whole_s,
            "us/sample",
            note="beyond that for a frame of 256 rows in which none ends; with both frames that it causes",
        ),
    ]


def _turns() -> list[Result]:
    """Conversations: on each sample that ends follows its next turn, a batch of its own."""
    world = World(INSTANCES)
    world.submit("talk", prompts=CONVERSATIONS, samples_per_prompt=1, length=1 << 20, stop_id=STOP_ID)
    policy_s = _timed(world.manager.balancing, "stays")
    ends_s: list[float] = []
    turn_s: list[float] = []
    tick_s: list[float] = []
    tracker = world.manager.tracker
    for number in range(2 * CONVERSATIONS):
        agent = world.agents[f"agent-{number % INSTANCES}"]
        instance = world.manager.fleet.get(agent.peer)
        assert instance is not None
        sample = next(tracker.samples_of(instance.id))
        ends_s.append(world.agent(agent.peer, _frame(agent, [sample.lease], sample.lease)))
        turn = 1 + number // CONVERSATIONS
        name, prompt = turn_batch(SampleId("talk", sample.id.prompt, 0), turn), sample.id.prompt
        turn_s.append(world.submit(name, 1, 1, 1 << 20, stop_id=STOP_ID, first_prompt=prompt))
        if number % TURNS_A_TICK == 0:
            tick_s.append(world.tick())
    open_turns = sum(1 for _ in tracker.batches())
    if open_turns < CONVERSATIONS or len(policy_s) < CONVERSATIONS:
        raise RuntimeError(f"{open_turns} turns are open and {len(policy_s)} went on where they were")
    late = CONVERSATIONS
    what = f"{INSTANCES} instances, {open_turns:,} turns open"
    return [
        at_most(
            f"where a conversation's next turn goes: {what}", 1e6 * median(policy_s[late:]), TARGET_US, "us/sample"
        ),
        Result(
            "the manager's whole work for the end of one turn and the next one",
            1e6 * (median(ends_s[late:]) + median(turn_s[late:])),
            "us/sample",
            note=f"{1e6 * median(turn_s[:TURNS_A_TICK]):.0f} us for the next one at first, "
            f"{1e6 * median(turn_s[-TURNS_A_TICK:]):.0f} us at last",
        ),
        Result("a tick of the manager then", 1e3 * median(tick_s[len(tick_s) // 2 :]), "ms", note="ten a second"),
    ]


def _timed(holder: Balancing, method: str) -> list[float]:
    """Processor seconds of each call from now on."""
    found: list[float] = []
    asked = getattr(holder, method)

    def timed(*told: object) -> object:
        began = time.process_time()
        answer = asked(*told)
        found.append(time.process_time() - began)
        return answer

    setattr(holder, method, timed)
    return found


def _frame(agent: FrameMaker, leases: Sequence[int], ending: int) -> bytes:
    """A token more of some sequences; one of them ends with it, or none."""
    starts = [agent.drawn[lease] for lease in leases]
    agent.drawn |= {lease: agent.drawn[lease] + 1 for lease in leases}
    agent.drawn.pop(ending, None)
    return encode(
        TokenFrame(
            version=1,
            leases=column_bytes(leases, "Q"),
            starts=column_bytes(starts, "I"),
            counts=column_bytes([1] * len(leases), "I"),
            finishes=bytes(Finish.STOP if lease == ending else Finish.RUNNING for lease in leases),
            token_ids=column_bytes([STOP_ID if lease == ending else 1 for lease in leases], "i"),
            logprobs=bytes(4 * len(leases)),
        )
    )


def _cpu_s(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return time.process_time() - began


def _learned() -> Balanced:
    policy, truth = Balanced(8), Speed(0.008, 3e-5, 3e-8, 3e-5)
    for k in range(16 * INSTANCES):
        running, context = 1 + k * 7 % 200, 4000.0 * (1 + k * 7 % 200)
        wall_s = 100 * truth.step_s(running, context)
        policy.report(Report(f"i{k % INSTANCES}", wall_s, running, context, 100 * running, 0))
    for k in range(4096):
        policy.finished(k // 8, 500 + k * 3571 % 12_000)
    policy.batch_ended()
    return policy


def _uneven() -> tuple[list[InstanceLoad], dict[str, list[PlacedSample]]]:
    """Half of the instances have three times as many samples as the other half."""
    loads, held = [], {}
    each = SAMPLES // INSTANCES
    for k in range(INSTANCES):
        count = each * 3 // 2 if k % 2 else each // 2
        rows = [PlacedSample(k * 1000 + n, 50 * n % 6000, 512 + 50 * n % 6000, True) for n in range(count)]
        held[f"i{k}"] = rows
        loads.append(InstanceLoad(f"i{k}", count, 2 * each))
    return loads, held


def _agents_s(samples: int) -> float:
    """Two simulated steps of so many samples on many small machines."""
    machine = MachineProfile(
        step_base_s=0.01,
        sequence_s=1e-4,
        context_s=1e-6,
        prefill_s_per_token=1e-5,
        max_running=8,
        kv_tokens=20_000,
    )
    profile = Profile(
        name="many",
        prompts=samples // 4,
        samples_per_prompt=4,
        weights_gb=0.01,
        reserved_instances=1,
        reserved=machine,
        spot=machine,
        training=Training(s_per_token=1e-6, micro_batch_samples=64),
        prices=Prices(reserved=1.0, spot=1.0, on_demand=1.0),
        lengths=Lengths(prompt_tokens=32, median_tokens=200, max_tokens=500),
    )
    strategy = Strategy("penstock", Balanced(8), Offload(), FixedSize(AGENTS))
    return _cpu_s(lambda: simulate(profile, static_trace(AGENTS, 1e9), strategy, steps=2))
