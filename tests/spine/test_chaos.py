"""Everything that may happen to machines, networks and the manager, at once, and no sample notices."""

from __future__ import annotations

import asyncio

import pytest

from penstock.bench.chaos_plan import KINDS, plan
from penstock.bench.chaos_run import RUN_SEED, VOCABULARY, Report, Shape, chaos_run, reward
from penstock.instance import SequenceStart
from penstock.instance.paced import paced_logprob, paced_tokens
from penstock.sample import Finish, SampleId, sample_seed
from penstock.wire import Sampling

FAULTS = 200
FEW = 50
HANG_S = 900.0
"""No run takes so long, on however busy a machine; each wait in it has a deadline of its own."""


def undisturbed(step: int, prompt: int, replica: int, length: int) -> tuple[list[int], list[float]]:
    seed = sample_seed(RUN_SEED, SampleId(f"step-{step}", prompt, replica))
    start = SequenceStart(lease=0, seed=seed, prompt_ids=[1], prefix_ids=[], sampling=Sampling(max_new_tokens=length))
    tokens, _ = paced_tokens(start, 0, length, VOCABULARY, 0.0)
    return tokens, [paced_logprob(token, VOCABULARY) for token in tokens]


def assert_nobody_noticed(shape: Shape, report: Report) -> None:
    everyone = {(prompt, replica) for prompt in range(shape.prompts) for replica in range(shape.samples_per_prompt)}
    assert report.failed == []
    assert report.twice == 0
    assert report.wrong_version == 0
    assert len(report.samples) >= shape.steps
    for step, samples in enumerate(report.samples):
        assert samples.keys() == everyone
        for (prompt, replica), sample in samples.items():
            tokens, logprobs = undisturbed(step, prompt, replica, shape.max_new_tokens)
            assert (sample.token_ids.tolist(), sample.finish) == (tokens, Finish.LENGTH)
            assert sample.logprobs.tolist() == logprobs
        expected = sum(map(reward, samples.values())) / len(samples)
        assert report.rewards[step] == expected


@pytest.mark.parametrize(
    ("steps", "faults"),
    [pytest.param(3, FEW, marks=pytest.mark.slow), pytest.param(10, FAULTS, marks=pytest.mark.ci)],
)
@pytest.mark.timeout(HANG_S)
async def test_faults_of_every_kind_change_no_sample_of_a_run(steps: int, faults: int) -> None:
    shape = Shape(steps=steps)
    async with asyncio.timeout(HANG_S):
        report = await chaos_run(shape, plan(2, faults, shape.tokens))
    assert report.injected.total() == faults
    assert set(report.injected) == set(KINDS)
    assert report.lost > 0
    assert_nobody_noticed(shape, report)


def test_a_seed_gives_the_same_faults_at_the_same_tokens_and_another_seed_others() -> None:
    tokens = Shape().tokens
    assert plan(5, FAULTS, tokens) == plan(5, FAULTS, tokens)
    assert plan(5, FAULTS, tokens) != plan(6, FAULTS, tokens)
    planned = plan(5, FAULTS, tokens)
    assert {fault.kind for fault in planned} == set(KINDS)
    assert planned[-1].at_tokens < tokens
    assert len({fault.at_tokens for fault in planned}) < FAULTS, "some come together"
