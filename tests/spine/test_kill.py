"""The kill test: SIGKILL in mid-generation loses nothing, repeats nothing and changes nothing.

Real processes: a manager, three built-in engines in float32, weights over TCP. The same batch runs undisturbed and
then with an engine killed; both are compared token for token, and every log-probability with a fresh forward pass of
transformers' own model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench.house import VOCAB, open_house, prompts, small_llama
from penstock.bench.migration import NEAR_TIE, Samples, compare, disturb, worst_logprob_error
from penstock.observe.events import InstanceChanged
from penstock.sample import Finish, Prompt
from penstock.wire import Sampling


def assert_same_answers(
    model: Any, asked: list[Prompt], batch: str, sampling: Sampling, quiet: Samples, killed: Samples
) -> None:
    """At least 99.5 % token for token the same; what differs does so first at a near tie."""
    assert quiet.keys() == killed.keys()
    difference = compare(model, asked, batch, sampling, quiet, killed)
    assert difference.widest_gap < NEAR_TIE, difference.different
    assert difference.identical_share >= 0.995, difference.different


@pytest.mark.slow
async def test_an_engine_killed_in_mid_generation_changes_no_sample(tmp_path: Path) -> None:
    model = small_llama()
    stop = (11, 29)
    greedy = Sampling(max_new_tokens=120, temperature=0.0, stop_ids=stop)
    sampled = Sampling(max_new_tokens=120, temperature=0.8, top_p=0.97, top_k=60, stop_ids=stop)
    asked_greedy, asked_sampled = prompts(150), prompts(40)
    async with open_house(tmp_path, engines=4) as house:
        await house.publish(0, model)
        # Hundreds of tokens for its running samples: they are in mid-generation when it dies.
        one = await disturb(house, "greedy", asked_greedy, 1, greedy, "engine-0", 600)
        other = await disturb(house, "sampled", asked_sampled, 8, sampled, "engine-1", 600)
        gone = [event for event in house.events_of(InstanceChanged) if event.after == "gone"]
    assert {event.name for event in gone if event.before != "draining"} >= {"engine-0", "engine-1"}

    for run in (one, other):
        assert run.samples_moved > 0, "nobody was in mid-generation"
        assert run.tokens_kept > 0, "no sample went on from a token of its own"
        # An unsent frame, and the one that was on its way.
        assert 0 <= run.tokens_drawn_twice <= 2 * 4 * run.samples_moved
    for samples in (one.quiet, one.killed):
        assert samples.keys() == {(prompt, 0) for prompt in range(150)}
    for samples in (other.quiet, other.killed):
        assert samples.keys() == {(prompt, replica) for prompt in range(40) for replica in range(8)}
    for samples in (one.quiet, one.killed, other.quiet, other.killed):
        for sample in samples.values():
            assert sample.finish in (Finish.STOP, Finish.LENGTH), sample.cause
            assert len(sample.token_ids) == len(sample.logprobs) > 0
            assert all(0 <= token < VOCAB for token in sample.token_ids)
            assert (sample.finish is Finish.STOP) == (sample.token_ids[-1] in stop)
            assert len(sample.token_ids) == 120 or sample.finish is Finish.STOP
            assert [(span.version, span.start, span.end) for span in sample.version_spans] == [
                (0, 0, len(sample.token_ids))
            ]
    assert len({tuple(sample.token_ids) for sample in other.quiet.values()}) > 200, "the answers are not varied"

    assert worst_logprob_error(model, asked_greedy, one.killed) < 1e-3
    assert worst_logprob_error(model, asked_sampled, other.killed) < 1e-3
    assert_same_answers(model, asked_greedy, "greedy", greedy, one.quiet, one.killed)
    assert_same_answers(model, asked_sampled, "sampled", sampled, other.quiet, other.killed)


@pytest.mark.slow
async def test_with_no_engine_left_samples_wait_and_go_on_when_one_joins(tmp_path: Path) -> None:
    model = small_llama()
    sampling = Sampling(max_new_tokens=100, temperature=1.0)
    asked = prompts(12)
    async with open_house(tmp_path, engines=1) as house:
        await house.publish(0, model)
        quiet = await house.finish("wait", await house.submit("wait", asked, 4, sampling))
        collected = await house.submit("wait", asked, 4, sampling)
        drawn = house.processes.engines["engine-0"].tokens_generated() or 0
        await house.until(
            lambda: (house.processes.engines["engine-0"].tokens_generated() or 0) > drawn + 500, "the engine at work"
        )
        house.processes.kill_engine("engine-0", "the test")
        house.status.clear()
        await house.until(
            lambda: any("weight version 0" in status.waiting_for for status in house.status), "the view saying so"
        )
        assert not collected.ended.is_set()
        house.processes.start_engine(house.url, "the test")
        disturbed = await house.finish("wait", collected)
    assert_same_answers(model, asked, "wait", sampling, quiet, disturbed)
