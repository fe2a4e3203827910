"""What a decision costs: the balance policy with 256 instances and 65,536 samples, and 10,000 agents in the simulator.

Time is the processor's, of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.bench.common import Result, at_most, median
from penstock.rollout.balance import InstanceLoad, PlacedSample, Queue, Report
from penstock.rollout.balanced import Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.offload import Offload
from penstock.rollout.step_replay import Limits, Plan
from penstock.simulate.profiles import Lengths, MachineProfile, Prices, Profile, Training
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import static_trace
from penstock.simulate.world import simulate

DESCRIPTION = "cost of a balance decision per sample, and of simulating 10,000 agents with the real policies"

INSTANCES, SAMPLES = 256, 65_536
AGENTS = 10_000
TARGET_US = 20.0


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
        Result(f"assigning one: {INSTANCES} instances", 1e6 * median(one), "us", note="grows with instances"),
        Result(
            f"assigning one within a plan's limits, after a report: {INSTANCES} instances", 1e6 * median(fresh), "us"
        ),
    ]
    few, many = (2_000, 4_000) if quick else (4_000, 20_000)
    costs = [_agents_s(samples) for samples in (few, many)]
    growth = (costs[1] / costs[0]) / (many / few)
    note = f"{costs[0]:.1f} s for {few:,} samples, {costs[1]:.1f} s for {many:,}; two steps each"
    results.append(at_most(f"{AGENTS:,} agents: growth of cost / growth of samples", growth, 1.0, "ratio", note=note))
    return results


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
