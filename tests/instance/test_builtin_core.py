"""Continuous batching: the same sample says the same wherever it runs, and every end has its reason."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
import torch
from builtin_models import DEVICES, VOCAB, Collected, core_for, fresh_logprobs, run_to_end, staged, start, tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import CheckpointError, EngineError
from penstock.instance.builtin.core import BuiltinCore, CoreOptions
from penstock.instance.engine import SequenceStart
from penstock.sample import Finish
from penstock.wire import Sampling

SAMPLINGS = [
    Sampling(max_new_tokens=24, temperature=0),
    Sampling(max_new_tokens=24),
    Sampling(max_new_tokens=24, temperature=0.7, top_k=6),
    Sampling(max_new_tokens=24, top_p=0.8),
    Sampling(max_new_tokens=24, temperature=1.3, top_k=20, top_p=0.9),
]

MODEL = tiny_model("qwen2", initializer_range=0.1)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def jobs(count: int = 20) -> list[SequenceStart]:
    """Ragged prompts with every way of sampling; some prompts are equal, as a group's are."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count // 2)]
    return [start(lease, prompts[lease // 2], SAMPLINGS[lease % len(SAMPLINGS)]) for lease in range(count)]


@pytest.fixture(scope="module")
def alone(device: str) -> dict[int, list[int]]:
    """Each job's tokens when it runs by itself."""
    core = core_for(MODEL, device=torch.device(device))
    return {job.lease: run_to_end(core, [job]).tokens[job.lease] for job in jobs()}


@pytest.mark.parametrize("max_running", [1, 3, 64])
def test_a_sample_says_the_same_alone_and_in_any_batch(
    device: str, alone: dict[int, list[int]], max_running: int
) -> None:
    outputs = run_to_end(core_for(MODEL, max_running=max_running, device=torch.device(device)), jobs())
    assert outputs.tokens == alone
    assert set(outputs.finishes.values()) == {Finish.LENGTH}


def test_memory_that_was_given_back_is_taken_again_and_samples_say_the_same(
    device: str, alone: dict[int, list[int]]
) -> None:
    core = core_for(MODEL, device=torch.device(device))
    core.start(jobs())
    for _ in range(3):
        core.step()
    core.rest(release_memory=True)
    assert not core.has_work
    assert core._decoder is not None
    assert core._decoder.cache.tensor_LSKPD.numel() == 0
    outputs = run_to_end(core, [replace(job, lease=100 + job.lease) for job in jobs()])
    assert {lease - 100: tokens for lease, tokens in outputs.tokens.items() if lease >= 100} == alone


def test_a_small_prefill_budget_changes_when_sequences_start_and_not_what_they_say(
    device: str,
    alone: dict[int, list[int]],
) -> None:
    core = core_for(MODEL, prefill_tokens_per_step=32, device=torch.device(device))
    collected = Collected()
    core.start(jobs())
    core.step()
    assert 0 < core.running < 20
    while core.has_work:
        core.step()
    collected.drain(core)
    assert collected.tokens == alone


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_sample_resumed_from_any_prefix_goes_on_as_if_never_stopped(device: str, sampling: Sampling) -> None:
    core = core_for(MODEL, device=torch.device(device))
    whole = run_to_end(core, [start(99, [7, 8, 9], sampling)])
    tokens, logprobs = whole.tokens[99], whole.logprobs[99]
    resumed = run_to_end(core, [start(cut, [7, 8, 9], sampling, tokens[:cut], seed=1099) for cut in range(25)])
    for cut in range(25):
        assert resumed.tokens[cut] == tokens
        assert resumed.logprobs.get(cut, []) == pytest.approx(logprobs[cut:], abs=1e-4)
    assert resumed.finishes[24] is Finish.LENGTH


def test_seeds_and_not_leases_decide_what_is_drawn(device: str) -> None:
    sampling = Sampling(max_new_tokens=24)
    outputs = run_to_end(
        core_for(MODEL, device=torch.device(device)),
        [start(0, [5], sampling, seed=1), start(1, [5], sampling, seed=1), start(2, [5], sampling)],
    )
    assert outputs.tokens[0] == outputs.tokens[1] != outputs.tokens[2]


def test_every_logprob_is_that_of_a_fresh_forward_pass_whatever_the_truncation(device: str) -> None:
    outputs = run_to_end(core_for(MODEL, device=torch.device(device)), jobs())
    for job in jobs():
        fresh = fresh_logprobs(MODEL, list(job.prompt_ids), outputs.tokens[job.lease])
        torch.testing.assert_close(torch.tensor(outputs.logprobs[job.lease]), fresh, atol=1e-4, rtol=0)


def test_equal_prompts_started_together_are_prefilled_once(device: str) -> None:
    core = core_for(MODEL, device=torch.device(device))
    sampling = Sampling(max_new_tokens=4)
    run_to_end(core, [*(start(lease, [1, 2, 3], sampling) for lease in range(8)), start(8, [1, 2], sampling)])
    assert core.tokens_prefilled == 5
    assert core.tokens_generated == 36


def test_a_stop_id_ends_a_sequence_and_is_its_last_token(device: str) -> None:
    core = core_for(MODEL, device=torch.device(device))
    tokens = run_to_end(core, [start(0, [7, 8, 9], Sampling(max_new_tokens=24))]).tokens[0]
    stop = tokens[10]
    first = tokens.index(stop)
    stopping = Sampling(max_new_tokens=24, stop_ids=(stop,))
    outputs = run_to_end(core, [start(1, [7, 8, 9], stopping, seed=1000)])
    assert outputs.tokens[1] == tokens[: first + 1]
    assert outputs.finishes[1] is Finish.STOP
    already = run_to_end(core, [start(2, [7, 8, 9], stopping, tokens[: first + 1])])
    assert already.finishes[2] is Finish.STOP
    assert already.tokens[2] == tokens[: first + 1]


def test_the_context_ends_a_sequence_and_its_last_position_is_used(device: str) -> None:
    core = core_for(MODEL, max_context_tokens=40, device=torch.device(device))
    prompt = list(range(30))
    outputs = run_to_end(core, [start(0, prompt, Sampling(max_new_tokens=500))])
    assert len(outputs.tokens[0]) == 10
    assert outputs.finishes[0] is Finish.LENGTH
    fresh = fresh_logprobs(MODEL, prompt, outputs.tokens[0])
    torch.testing.assert_close(torch.tensor(outputs.logprobs[0]), fresh, atol=1e-4, rtol=0)
    full = run_to_end(core, [start(1, prompt, Sampling(max_new_tokens=500), outputs.tokens[0])])
    assert full.finishes[1] is Finish.LENGTH
    assert core_for(MODEL, max_context_tokens=4096, device=torch.device(device)).max_context_tokens == 96


@pytest.mark.parametrize(
    ("prompt", "prefix", "cause"),
    [
        ([], [], "the prompt is empty"),
        (list(range(40)), [], "prompt of 40 tokens leaves no room in the context of 40"),
        (list(range(30)), list(range(11)), "prefix of 11 are over the context"),
        ([1, VOCAB], [], f"prompt holds token id {VOCAB}"),
        ([1, -2], [], "prompt holds token id -2"),
        ([1], [VOCAB + 5], f"prefix holds token id {VOCAB + 5}"),
    ],
)
def test_what_cannot_be_generated_fails_with_its_cause_and_harms_no_other(
    device: str, prompt: list[int], prefix: list[int], cause: str
) -> None:
    core = core_for(MODEL, max_context_tokens=40, device=torch.device(device))
    good = start(1, [3, 4], Sampling(max_new_tokens=5))
    outputs = run_to_end(core, [start(0, prompt, Sampling(max_new_tokens=20), prefix), good])
    assert outputs.finishes == {0: Finish.FAILED, 1: Finish.LENGTH}
    assert cause in outputs.causes[0]
    assert outputs.tokens[0] == prefix


def test_sequences_before_the_first_weights_fail_with_that_cause(device: str) -> None:
    core = BuiltinCore(CoreOptions(device=torch.device(device)))
    outputs = run_to_end(core, [start(0, [1], Sampling(max_new_tokens=2))])
    assert outputs.causes == {0: "the engine has no weights yet"}


def test_logits_that_are_not_finite_fail_their_sequence_and_poison_no_slot(
    device: str, alone: dict[int, list[int]]
) -> None:
    model = tiny_model("qwen2", initializer_range=0.1)
    with torch.no_grad():
        model.model.embed_tokens.weight[100] = float("nan")
    core = core_for(model, max_running=3, device=torch.device(device))
    healthy = [job for job in jobs() if 100 not in (*job.prompt_ids, *alone[job.lease])]
    assert len(healthy) > 3
    sick = [start(100 + lease, [3, 100, 4], Sampling(max_new_tokens=9)) for lease in range(5)]
    mixed = [job for pair in zip(healthy, [*sick, *healthy[5:]], strict=False) for job in pair][: 2 * len(sick)]
    outputs = run_to_end(core, [*mixed, *(job for job in healthy if job not in mixed)])
    for job in sick:
        assert outputs.finishes[job.lease] is Finish.FAILED
        assert "not finite" in outputs.causes[job.lease]
        assert outputs.tokens[job.lease] == []
    for job in healthy:
        assert outputs.tokens[job.lease] == alone[job.lease]


def test_the_kv_cache_stays_within_its_bound_by_running_fewer_sequences(device: str) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    token_bytes = 3 * 2 * 2 * 12 * 4
    core = core_for(model, max_context_tokens=1024, kv_cache_mib=2, device=torch.device(device))
    assert core.plan is not None
    assert core.plan.slots == core.max_running == 2 * 2**20 // (1024 * token_bytes)
    assert core.plan.nbytes == core.plan.slots * 1024 * token_bytes <= 2 * 2**20
    held = core._decoder.cache.tensor_LSKPD  # type: ignore[union-attr]
    assert held.numel() * held.element_size() == core.plan.nbytes
    core.start([start(lease, [1, lease], Sampling(max_new_tokens=4)) for lease in range(20)])
    core.step()
    assert core.running <= core.plan.slots < 20
    with pytest.raises(EngineError, match="one sequence of 4096 tokens needs 2"):
        core_for(model, max_context_tokens=4096, kv_cache_mib=1, device=torch.device(device))


def test_stopped_sequences_give_no_further_delta_and_others_go_on(device: str, alone: dict[int, list[int]]) -> None:
    core = core_for(MODEL, max_running=6, device=torch.device(device))
    core.start(jobs())
    for _ in range(5):
        core.step()
    gone = [0, 3, 5, 9, 19, 12345]
    core.stop(gone)
    collected = Collected()
    while core.has_work:
        core.step()
    collected.drain(core)
    assert collected.tokens == {lease: tokens for lease, tokens in alone.items() if lease not in gone}
    assert core.running == core.waiting == core.kv_tokens == 0


def test_a_lease_in_use_is_refused(device: str) -> None:
    core = core_for(MODEL, device=torch.device(device))
    core.start([start(5, [1], Sampling(max_new_tokens=3))])
    with pytest.raises(EngineError, match="lease 5 is already in use"):
        core.start([start(5, [2], Sampling(max_new_tokens=3))])


def test_a_weight_swap_takes_effect_between_two_steps_and_reuses_no_cache(device: str) -> None:
    other = tiny_model("qwen2", seed=1, initializer_range=0.1)
    sampling = Sampling(max_new_tokens=20)
    core = core_for(MODEL, version=3, device=torch.device(device))
    core.start([start(0, [1, 2, 3], sampling), start(1, [4, 5], sampling)])
    for _ in range(6):
        core.step()
    core.swap(core.prepare(staged(other, 4)))
    assert core.version == 4
    assert core.running == 0
    collected = Collected()
    while core.has_work:
        core.step()
    collected.drain(core)
    for lease, prompt in ((0, [1, 2, 3]), (1, [4, 5])):
        tokens, versions = collected.tokens[lease], collected.versions[lease]
        assert versions == sorted(versions)
        cut = versions.index(4)
        assert 0 < cut < 20
        expected = torch.cat((fresh_logprobs(MODEL, prompt, tokens)[:cut], fresh_logprobs(other, prompt, tokens)[cut:]))
        torch.testing.assert_close(torch.tensor(collected.logprobs[lease]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("part", [3, 8, 64])
def test_tokens_come_in_every_step_of_a_swap_and_none_is_drawn_from_both_versions(part: int) -> None:
    other = tiny_model("qwen2", seed=1, initializer_range=0.1)
    prompts = {0: [1, 2, 3], 1: [4, 5], 2: [6] * 20, 3: [7]}
    core = core_for(MODEL, version=3, max_running=3, renew_tokens_per_step=part)
    core.start([start(lease, prompt, Sampling(max_new_tokens=40)) for lease, prompt in prompts.items()])
    for _ in range(6):
        core.step()
    told: list[EngineError | None] = []
    core.swap_soon(core.prepare(staged(other, 4)), told.append)
    while core.swapping or core.running < 3:
        before = core.tokens_generated
        core.step()
        assert core.tokens_generated > before
        assert core.version == (3 if core.swapping else 4)
    assert told == [None]
    collected = Collected()
    while core.has_work:
        core.step()
    collected.drain(core)
    for lease, prompt in prompts.items():
        tokens, versions = collected.tokens[lease], collected.versions[lease]
        assert versions == sorted(versions)
        cut = versions.index(4)
        expected = torch.cat((fresh_logprobs(MODEL, prompt, tokens)[:cut], fresh_logprobs(other, prompt, tokens)[cut:]))
        torch.testing.assert_close(torch.tensor(collected.logprobs[lease]), expected, atol=1e-4, rtol=0)
    assert all(len(tokens) == 40 for tokens in collected.tokens.values())


def test_a_sequence_that_is_stopped_while_weights_wait_for_it_keeps_them_waiting_no_longer() -> None:
    core = core_for(MODEL, renew_tokens_per_step=2)
    core.start(jobs(4))
    core.step()
    told: list[EngineError | None] = []
    core.swap_soon(core.prepare(staged(MODEL, 1)), told.append)
    core.step()
    assert core.swapping
    assert core.waiting == 1
    waiting = set(range(4)) - {sequence.lease for sequence in core._active}
    core.stop(sorted(waiting))
    assert (core.version, told) == (1, [None])
    core.swap_soon(core.prepare(staged(MODEL, 2)), told.append)
    core.swap_soon(core.prepare(staged(MODEL, 3)), told.append)
    while core.has_work:
        core.step()
    assert (core.version, told) == (3, [None, None, None])


def test_weights_that_do_not_fit_leave_the_old_version_serving(device: str, alone: dict[int, list[int]]) -> None:
    core = core_for(MODEL, version=1, device=torch.device(device))
    with pytest.raises(EngineError, match=r"another model \(.*layers.* changed\)"):
        core.prepare(staged(tiny_model("qwen2", num_hidden_layers=2), 2))
    broken = staged(MODEL, 2)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        core.prepare(
            type(broken)(broken.manifest, {k: v for k, v in broken.tensors.items() if k != "model.norm.weight"})
        )
    assert core.version == 1
    assert run_to_end(core, jobs()).tokens == alone


def test_progress_holds_the_number_of_tokens_drawn_after_every_step(device: str) -> None:
    buffer = bytearray(8)
    core = BuiltinCore(CoreOptions(device=torch.device(device), max_context_tokens=96), memoryview(buffer))
    core.swap(core.prepare(staged(MODEL)))
    core.start(jobs(6))
    while core.has_work:
        core.step()
        assert struct.unpack("<Q", buffer)[0] == core.tokens_generated > 0
    assert core.tokens_generated == 6 * 24
    with pytest.raises(EngineError, match="8 writable bytes"):
        BuiltinCore(CoreOptions(device=torch.device(device)), memoryview(bytes(8)))


class Batching(RuleBasedStateMachine):
    """Whatever is started, stopped and swapped in whatever order, outputs come whole, once, and right."""

    def __init__(self) -> None:
        super().__init__()
        self.core = core_for(MODEL, max_running=3, prefill_tokens_per_step=24, renew_tokens_per_step=3)
        self.collected = Collected()
        self.jobs: dict[int, SequenceStart] = {}
        self.stopped: set[int] = set()

    @rule(prompt=st.lists(st.integers(0, 9), max_size=5), limit=st.integers(1, 12), how=st.sampled_from(SAMPLINGS))
    def begin(self, prompt: list[int], limit: int, how: Sampling) -> None:
        lease = len(self.jobs)
        sampling = Sampling(
            max_new_tokens=limit, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, stop_ids=(3, 40)
        )
        self.jobs[lease] = start(lease, prompt, sampling)
        self.core.start([self.jobs[lease]])

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()

    @rule()
    def take(self) -> None:
        self.collected.drain(self.core)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        leases = data.draw(st.sets(st.sampled_from(sorted(self.jobs)), max_size=3))
        unfinished = {lease for lease in leases if not self.collected.finishes.get(lease, Finish.RUNNING)}
        self.core.stop(sorted(leases))
        self.stopped |= unfinished

    @rule()
    def swap_in_the_same_weights(self) -> None:
        self.core.swap_now()
        self.core.swap(self.core.prepare(staged(MODEL, self.core.version + 1)))

    @rule()
    def swap_soon_to_the_same_weights(self) -> None:
        self.core.swap_now()
        self.core.swap_soon(self.core.prepare(staged(MODEL, self.core.version + 1)), lambda error: None)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.core.running <= 3
        assert self.core.kv_tokens <= 3 * 96

    def teardown(self) -> None:
        while self.core.has_work:
            self.core.step()
        self.collected.drain(self.core)
        reference = core_for(MODEL)
        for lease, job in self.jobs.items():
            expected = run_to_end(reference, [job])
            tokens = self.collected.tokens.get(lease, [])
            if lease in self.stopped:
                assert tokens == expected.tokens[lease][: len(tokens)]
            else:
                assert tokens == expected.tokens[lease]
                assert self.collected.finishes[lease] is expected.finishes[lease]


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
