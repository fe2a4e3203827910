"""How much of a fleet one core can track: the rollout manager under simulated agents.

Measures the whole way from an agent's bytes to the manager's answers as bytes: decode, tracker, dispatch of
replacements, encode. The agents' own work (making frames) is left out. Time is the processor's, since the question is
what one core can do; the machine's other work does not count. The baseline is what a user would otherwise write: one
JSON message for each sequence's new tokens, appended to Python lists.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from penstock.bench.common import Result, at_least, at_most, median
from penstock.bench.manager_sockets import measure_edge
from penstock.bench.manager_world import VOCABULARY, FrameMaker, World
from penstock.wire import ReleaseBatch, TokenFrame, column_bytes, encode

DESCRIPTION = "rollout manager on one core: tokens tracked and samples finished per second, memory per token"

TOKENS_TARGET = 500_000
FLEET_TARGET = 1_000_000
STEP_TARGET_S = 2.0
API_TARGET_S = 0.1
FINISHED_TARGET = 10_000
MEMORY_TARGET_BYTES = 16
MEASURE_S = 600.0


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 5
    rounds = 6 if quick else 12
    results = []
    for agents, row_tokens, target in (
        (64, 8, TOKENS_TARGET),
        (64, 4, TOKENS_TARGET),
        (64, 1, 0),
        (256, 8, FLEET_TARGET),
    ):
        rates = [_tracking_rate(agents, row_tokens, rounds) for _ in range(repetitions)]
        what = f"tokens tracked, {agents} agents x 256 samples, {row_tokens} tokens a row"
        if target:
            results.append(at_least(what, median(rates), target, "tokens/s"))
        else:
            results.append(Result(what, median(rates), "tokens/s"))
        if (agents, row_tokens) == (64, 8):
            ratios = [rate / _json_rate(row_tokens, rounds) for rate in rates]
            results.append(
                Result("the same against one JSON message a sequence", median(ratios), "x", note="same run, one core")
            )
    edge = [measure_edge(64, 8, 8 if quick else 40).tokens_per_cpu_s for _ in range(1 if quick else 3)]
    note = "a process of its own; its user and system time, status frames included"
    results.append(
        at_least(
            "tokens tracked by `penstock manager` from 64 sockets, 8 tokens a row",
            median(edge),
            TOKENS_TARGET,
            "tokens/s",
            note,
        )
    )
    results += _fleet(quick)
    finished = [_finished_rate(64, 16, 6 if quick else 20) for _ in range(repetitions)]
    results.append(
        at_least(
            "samples finished, of 16 tokens each, replaced at once", median(finished), FINISHED_TARGET, "samples/s"
        )
    )
    tokens = 256 if quick else 1024
    results.append(
        at_most(
            f"memory per token tracked, 65,536 samples of {tokens} tokens",
            _in_a_process_of_its_own(_memory_per_token, 256, tokens),
            MEMORY_TARGET_BYTES,
            "bytes",
            note="growth of the resident set",
        )
    )
    batches = 12 if quick else 48
    results.append(
        at_most(
            f"growth over {batches} batches of 8,192 samples, after the first quarter",
            _in_a_process_of_its_own(_growth_mib, batches),
            4.0,
            "MiB",
            note="resident set; an idle manager keeps what a batch needed",
        )
    )
    return results


# ---- what is measured


def _fleet(quick: bool) -> list[Result]:
    """256 agents with 65,536 running samples, and what else is asked of the manager then."""
    accepted_s = [_accepting_s() for _ in range(1 if quick else 3)]
    edge = measure_edge(256, 8, 10 if quick else 40, tokens_per_s=FLEET_TARGET, operator=True)
    behind = measure_edge(256, 8, 10 if quick else 40, operator=True)
    asked = "answers of /instances, /samples and /metrics in turn, as their client waits"
    return [
        at_most(
            "a step of 100,000 samples accepted, 65,536 of them given to 256 agents",
            median(accepted_s),
            STEP_TARGET_S,
            "s",
        ),
        at_least(
            "tokens tracked by `penstock manager` from 256 sockets, by its processor time",
            edge.tokens_per_cpu_s,
            FLEET_TARGET,
            "tokens/s",
            note=f"{edge.tokens_per_s:,.0f} a second came in of {FLEET_TARGET:,} offered by agents on the same cores",
        ),
        at_most(
            "operator's API meanwhile, over HTTP: 99 of 100 answers within",
            _p99_s(edge.answers_s),
            API_TARGET_S,
            "s",
            note=f"{len(edge.answers_s)} {asked}; the slowest {max(edge.answers_s):.3f} s",
        ),
        Result(
            "the same while agents send all that the manager takes, and have more waiting",
            _p99_s(behind.answers_s),
            "s",
            note=f"{len(behind.answers_s)} answers, the slowest {max(behind.answers_s):.3f} s; "
            f"{behind.tokens_per_s:,.0f} tokens came in a second",
        ),
    ]


def _p99_s(answers_s: list[float]) -> float:
    return sorted(answers_s)[int(0.99 * len(answers_s))]


def _accepting_s() -> float:
    """Processor seconds from a SubmitBatch's bytes to those of the frames that give its samples out."""
    return World(256).submit("bench", prompts=12_500, samples_per_prompt=8, length=1 << 20)


def _tracking_rate(agents: int, row_tokens: int, rounds: int) -> float:
    """Tokens per processor second while every sample goes on."""
    world = World(agents)
    world.submit("bench", prompts=agents * 32, samples_per_prompt=8, length=1 << 20)
    total_s, total = 0.0, 0
    for _ in range(rounds):
        took_s, tokens = world.play(row_tokens, 1 << 20)
        if tokens != agents * 256 * row_tokens:
            raise RuntimeError(f"{tokens} tokens were tracked of {agents * 256 * row_tokens} sent")
        total_s += took_s
        total += tokens
    return total / total_s


def _finished_rate(agents: int, length: int, rounds: int) -> float:
    """Finished samples per processor second: tokens tracked, sample sent to the trainer, replacement dispatched.

    Samples start staggered, so that frames finish some rows and carry on others.
    """
    world = World(agents)
    samples = agents * 256 * (rounds + 2)
    world.submit("bench", prompts=samples // 8, samples_per_prompt=8, length=length)
    for number, agent in enumerate(world.agents.values()):
        _stagger(world, agent, number)
    before, seconds = world.finished, 0.0
    for _ in range(rounds):
        took_s, _ = world.play(4, length)
        seconds += took_s
    return (world.finished - before) / seconds


def _stagger(world: World, agent: FrameMaker, number: int) -> None:
    """Takes the sequences of one agent to different lengths, 0 to 12 tokens."""
    leases = list(agent.drawn)
    counts = [4 * ((k + number) % 4) for k in range(len(leases))]
    frame = TokenFrame(
        version=1,
        leases=column_bytes(leases, "Q"),
        starts=column_bytes([0] * len(leases), "I"),
        counts=column_bytes(counts, "I"),
        finishes=bytes(len(leases)),
        token_ids=bytes(4 * sum(counts)),
        logprobs=bytes(4 * sum(counts)),
    )
    world.agent(agent.peer, encode(frame))
    agent.drawn = dict(zip(leases, counts, strict=True))


def _memory_per_token(agents: int, length: int) -> float:
    """Growth of the resident set while `agents` x 256 samples get `length` tokens each, per token."""
    world = World(agents)
    world.submit("bench", prompts=agents * 32, samples_per_prompt=8, length=length + 1)
    world.play(1, 1 << 20)
    gc.collect()
    before = _resident_bytes()
    tokens = 0
    while tokens < agents * 256 * (length - 32):
        tokens += world.play(32, 1 << 20)[1]
    gc.collect()
    return (_resident_bytes() - before) / tokens


def _growth_mib(batches: int) -> float:
    """Growth of the resident set from the end of the first quarter of many batches in sequence to their end."""
    world = World(64, max_running=64)
    baseline = 0
    for number in range(batches):
        world.submit(f"train-{number}", prompts=1024, samples_per_prompt=8, length=32)
        while world.manager.tracker.batch(f"train-{number}") is not None:
            world.play(8, 32)
        world.trainer(ReleaseBatch(batch=f"train-{number}"))
        if number == batches // 4:
            gc.collect()
            baseline = _resident_bytes()
    gc.collect()
    return max(0, _resident_bytes() - baseline) / 2**20


# ---- the usual way


def _json_rate(row_tokens: int, rounds: int) -> float:
    """Tokens per processor second of the usual way: a JSON message for each sequence, tokens in Python lists."""
    held: dict[str, tuple[list[int], list[float]]] = {f"sample-{k}": ([], []) for k in range(256)}
    seconds, tokens = 0.0, 0
    for _ in range(rounds * 16):
        messages = list(_json_messages(held, row_tokens))
        begin = time.process_time()
        for message in messages:
            fields = json.loads(message)
            ids, values = held[fields["id"]]
            if fields["start"] != len(ids):
                raise RuntimeError("the baseline lost a token")
            ids.extend(fields["token_ids"])
            values.extend(fields["logprobs"])
        seconds += time.process_time() - begin
        tokens += 256 * row_tokens
    return tokens / seconds


def _json_messages(held: dict[str, tuple[list[int], list[float]]], row_tokens: int) -> Iterator[str]:
    for name, (ids, _) in held.items():
        yield json.dumps(
            {
                "id": name,
                "start": len(ids),
                "token_ids": [(7 * k) % VOCABULARY for k in range(row_tokens)],
                "logprobs": [-0.0123456789 * (k + 1) for k in range(row_tokens)],
                "finish_reason": None,
            }
        )


def _in_a_process_of_its_own(measure: Callable[..., float], *arguments: int) -> float:
    """Where another benchmark has left memory behind, a resident set does not grow by what is used."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *arguments).result(timeout=MEASURE_S)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
