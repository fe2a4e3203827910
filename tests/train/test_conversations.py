"""Conversations in the training loop: what is learned from, what is told, and what an environment can't do to a run."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollout, FakeScorer
from runs import MakeRun, Run

from penstock.config.train import TrainConfig
from penstock.environments import Observation, Turn
from penstock.environments.outcome import outcome
from penstock.errors import RolloutError
from penstock.observe import events
from penstock.rollout.client import FinishedSample
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score, Unscored, is_turn
from penstock.train.actor import Actor
from penstock.train.appraisal import Appraiser
from penstock.train.batching import collate_samples
from penstock.train.forward import score_tokens
from penstock.train.loading import load_causal_lm
from penstock.train.ranks import Ranks, pack, unpack
from penstock.train.tally import Tally

TOLD = [61, 62, 63]
BUDGET = {"max_new_tokens": 30}


@dataclass
class Asks:
    """Asks back as often as a sample's seed says, 0 to 2 times, then gives 1 for an even last token."""

    answer: Callable[[Turn], Any] = lambda turn: Observation(TOLD, parts={"asked": 1.0})
    closed: int = 0
    seeds: set[int] = field(default_factory=set)

    async def reset(self, prompt: Prompt, seed: int) -> int:
        self.seeds.add(seed)
        return seed % 3

    async def step(self, state: int, turn: Turn) -> Observation:
        if turn.number < state:
            answered = self.answer(turn)
            return await answered if asyncio.iscoroutine(answered) else answered
        return Observation(done=True, reward=float(turn.token_ids[-1] % 2 == 0))

    async def close(self, state: int) -> None:
        self.closed += 1


def talking(make_run: MakeRun, environment: Asks, **options: Any) -> Run:
    scorer = FakeScorer(judge=outcome)
    return make_run(scorer=scorer, environment=environment, sampling=BUDGET, **options)


def conversation(prompt: Prompt, replica: int, length: int, value: float) -> Sample:
    """A sample of `length` tokens, of which each third one is its environment's."""
    own = [(k + replica) % 3 != 1 or k == length - 1 for k in range(length)]
    ids = [5 + (7 * k + 3 * replica) % 50 for k in range(length)]
    logprobs = array("f", [-3.5 if mine else 0.0 for mine in own])
    identity = SampleId("train-0", prompt.index, replica)
    sample = Sample(identity, prompt, array("i", ids), logprobs, (), Finish.STOP, score=Score(value))
    sample.learned = array("b", own)
    return sample


def test_a_run_learns_from_conversations_and_says_what_was_asked(make_run: MakeRun) -> None:
    environment = Asks()
    run = talking(make_run, environment)
    run.trainer.run()
    samples = [sample for sample in run.scorer.scored if sample.id.batch.startswith("train-")]
    assert len(samples) == 2 * 16
    assert {sample.turns for sample in samples} == {1, 2, 3}
    for sample in samples:
        assert sample.learned is not None
        own = [token for token, mine in zip(sample.token_ids, sample.learned, strict=True) if mine]
        told = [token for token, mine in zip(sample.token_ids, sample.learned, strict=True) if not mine]
        assert told == TOLD * (sample.turns - 1)
        assert len(own) == sum(span.end - span.start for span in sample.version_spans)
        assert sample.outcome is not None
        assert sample.outcome.parts == ({"asked": sample.turns - 1.0} if sample.turns > 1 else {})
    assert run.metrics[0]["reward/asked"] > 0
    first = [sample for sample in samples if sample.id.batch == "train-0"]
    assert run.metrics[0]["turns_mean"] == sum(sample.turns for sample in first) / 16
    assert run.metrics[0]["environment_tokens"] == sum(len(sample.token_ids) - sample.own_tokens for sample in first)
    assert run.metrics[0]["response_tokens"] == sum(s.own_tokens for s in samples if s.id.batch == "train-0")
    assert environment.closed == len(run.scorer.scored), "an evaluation's conversations are over too"
    assert len(environment.seeds) == len(run.scorer.scored), "each sample has a seed of its own"
    # All that the manager was asked for is released, turns with their batch.
    assert sorted(run.rollout.released) == sorted(run.rollout.batches)


def test_a_turns_prompt_is_all_that_was_said_and_its_budget_what_is_left(make_run: MakeRun) -> None:
    run = talking(make_run, Asks(), evaluate=False, talk={"max_turn_tokens": 6})
    run.trainer.run()
    turns = [name for name in run.rollout.batches if is_turn(name)]
    assert turns
    by_name = {str(sample.id): sample for sample in run.scorer.scored}
    for name in turns:
        batch, prompt, replica = name.rsplit(".turn-")[0].split(".")
        sample = by_name[f"{batch}/{prompt}.{replica}"]
        version, sampling, _ = run.rollout.batches[name]
        (asked,) = run.rollout.prompts[name]
        so_far = list(asked.token_ids)[len(sample.prompt.token_ids) :]
        assert so_far == list(sample.token_ids[: len(so_far)])
        assert so_far[-3:] == TOLD
        assert sampling.max_new_tokens == min(6, 30 - len(so_far))
        assert version == run.rollout.batches[batch][0]


def test_what_a_run_says_does_not_depend_on_who_is_first(make_run: MakeRun) -> None:
    def told(run: Run) -> dict[str, list[int]]:
        return {str(sample.id): list(sample.token_ids) for sample in run.scorer.scored}

    one = talking(make_run, Asks(), evaluate=False, streaming=False)
    other = talking(make_run, Asks(), evaluate=False, streaming=False)
    other.rollout.gate = lambda batch, number: 0.02 if number == 0 else 0.0
    one.trainer.run()
    other.trainer.run()
    assert told(one) == told(other)


def test_conversations_may_share_the_trainers_devices(make_run: MakeRun) -> None:
    run = talking(make_run, Asks(), window=0.5)
    run.trainer.run()
    assert {sample.turns for sample in run.scorer.scored} == {1, 2, 3}
    assert all("window_s" in metrics for metrics in run.metrics.values())
    assert run.rollout.turns[-1] == ("train-1", "ended")


def faulty(what: str) -> Callable[[Turn], Any]:
    def answer(turn: Turn) -> Any:
        match what:
            case "raises":
                raise LookupError("no such tool")
            case "hangs":
                return asyncio.Event().wait()
            case "says nothing":
                return Observation()
            case "says too much":
                return Observation([61] * 31)
        return Observation([99])

    return answer


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raises", "environment: step raised LookupError: no such tool"),
        ("hangs", "environment: step took longer than 2 s"),
        ("says nothing", "environment: it answered without a token"),
        ("invents tokens", "environment: step answered with token id 99; the vocabulary has 64"),
    ],
)
def test_an_environments_fault_leaves_its_samples_unscored_with_the_cause(
    what: str, cause: str, make_run: MakeRun
) -> None:
    run = talking(
        make_run,
        Asks(faulty(what)),
        evaluate=False,
        unscored="drop_sample",
        steps=1,
        talk={"timeout_s": 2.0 if what == "hangs" else 60.0},
        observe={"samples_every": 1, "samples_per_step": 16},
    )
    run.trainer.run()
    ((_, recorded),) = run.recorded
    broken = [sample for sample in recorded if isinstance(sample.score, Unscored)]
    assert all(sample.finish is Finish.FAILED and len(sample.token_ids) for sample in broken)
    (told,) = run.of(events.Unscorable)
    assert next(iter(told.causes)).startswith(cause)
    # Those that are never answered are learned from.
    asked = sum(seed % 3 > 0 for seed in run.trainer.ports.environment._environment.seeds)  # type: ignore[union-attr]
    assert sum(told.causes.values()) == asked == run.metrics[0]["unscored"]
    assert 0 < asked == len(broken) < 16
    assert not any(is_turn(name) for name in run.rollout.batches)


def test_an_answer_that_does_not_fit_truncates_its_conversation(make_run: MakeRun) -> None:
    run = talking(make_run, Asks(faulty("says too much")), evaluate=False, steps=1)
    run.trainer.run()
    cut = [sample for sample in run.scorer.scored if sample.finish is Finish.LENGTH]
    assert len(cut) == sum(seed % 3 > 0 for seed in run.trainer.ports.environment._environment.seeds)  # type: ignore[union-attr]
    assert all(sample.turns == 1 and sample.learned and all(sample.learned) for sample in cut)
    assert run.metrics[0]["truncated_share"] == len(cut) / 16


def test_a_turn_that_cant_be_generated_fails_its_sample(make_run: MakeRun) -> None:
    def fails(batch: str, sample: FinishedSample) -> FinishedSample:
        if not is_turn(batch):
            return sample
        nothing = array("i"), array("f")
        return FinishedSample(sample.prompt, sample.replica, *nothing, (), Finish.FAILED, "the engine is out of it")

    run = talking(make_run, Asks(), rollout=FakeRollout(alter=fails), evaluate=False, unscored="drop_sample", steps=1)
    run.trainer.run()
    (told,) = run.of(events.Unscorable)
    assert list(told.causes) == ["generation failed: turn 1: the engine is out of it"]
    assert run.metrics[0]["failed"] == told.causes[next(iter(told.causes))]


def test_a_run_that_ends_in_mid_conversation_cancels_its_turns_and_closes_what_is_open(make_run: MakeRun) -> None:
    begun = threading.Event()

    def stuck(batch: str, number: int) -> float:
        if is_turn(batch):
            begun.set()
            return 600.0
        return 0.0

    def watch() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    environment = Asks()
    run = talking(make_run, environment, rollout=FakeRollout(gate=stuck), evaluate=False, watch=watch)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    turns = {name for name in run.rollout.batches if is_turn(name)}
    assert turns
    assert turns <= run.rollout.cancelled.keys()


def test_a_batch_that_the_manager_gives_up_for_a_turn_ends_the_step(make_run: MakeRun) -> None:
    class Gives(FakeRollout):
        async def submit(self, batch: str, *args: Any, listener: Any = None, **kwargs: Any) -> None:
            if is_turn(batch):
                listener.on_failed(RolloutError(f"batch {batch} made no progress"))
            else:
                await super().submit(batch, *args, listener=listener, **kwargs)

    run = talking(make_run, Asks(), rollout=Gives(), evaluate=False)
    with pytest.raises(RolloutError, match="turn-1 made no progress"):
        run.trainer.run()


# ---- the gradient


def config_of(folder: Path, **train: Any) -> tuple[Actor, TrainConfig]:
    config = TrainConfig.model_validate({"lr": 1e-3, "device": "cpu", "tokens_per_micro_batch": 64, **train})
    return Actor(folder, config, total_optimizer_steps=4, horizon_tokens=16), config


def groups_of_two() -> list[Group]:
    groups = []
    for k in range(2):
        prompt = Prompt(k, "", [5 + k, 6, 7], {}, "")
        samples = [conversation(prompt, 0, 7 + k, 1.0), conversation(prompt, 1, 11, 0.0)]
        groups.append(Group("train-0", prompt, samples))
    return groups


def appraised(folder: Path, **train: Any) -> tuple[Actor, list[Any]]:
    actor, config = config_of(folder, **train)
    actor.begin_step(1.0)
    appraiser = Appraiser(config, actor, None, Ranks())
    return actor, appraiser.passes(groups_of_two(), Tally(0), {}, lambda: None)


def fresh_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """Of a conversation's own tokens, by a forward pass over all of it."""
    ids = [*sample.prompt.token_ids, *sample.token_ids]
    start = len(sample.prompt.token_ids)
    logprobs_TV = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
    assert sample.learned is not None
    own = torch.tensor(list(sample.learned), dtype=torch.bool)
    return logprobs_TV[range(len(own)), list(sample.token_ids)][own]


def test_a_pass_scores_own_tokens_after_all_that_was_said(model_folder: Path) -> None:
    samples = [sample for group in groups_of_two() for sample in group.samples]
    batch = collate_samples(samples)
    model = load_causal_lm(model_folder)
    logprobs_BT = score_tokens(model, batch).logprobs_BT
    for row, sample in enumerate(samples):
        assert sample.learned is not None
        assert 0 < sum(sample.learned) < len(sample.learned)
        assert batch.mask_BT[row, : len(sample.learned)].int().tolist() == list(sample.learned)
        expected = fresh_logprobs(model, sample)
        torch.testing.assert_close(logprobs_BT[row][batch.mask_BT[row]], expected, atol=2e-5, rtol=1e-5)


def test_the_gradient_of_conversations_is_that_of_the_models_own_tokens(model_folder: Path) -> None:
    actor, passes = appraised(model_folder, advantage="dr_grpo", old_logprobs="recompute")
    for batch in passes:
        actor.accumulate(batch)
    denominator = actor.mini_batch.denominator
    assert denominator is not None
    found = [parameter.grad / denominator for parameter in actor.model.parameters()]
    # On policy the ratio is 1, and its gradient that of the log-probability.
    model = load_causal_lm(model_folder)
    samples = [sample for group in groups_of_two() for sample in group.samples]
    loss, own_tokens = torch.zeros(()), 0
    for sample in samples:
        assert isinstance(sample.score, Score)
        logprobs = fresh_logprobs(model, sample)
        loss = loss - (sample.score.value - 0.5) * logprobs.sum()
        own_tokens += len(logprobs)
    (loss / own_tokens).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    apart = [one - other for one, other in zip(found, expected, strict=True)]
    assert float(torch.nn.utils.get_total_norm(apart) / torch.nn.utils.get_total_norm(expected)) < 1e-5


def test_advantages_over_tokens_leave_the_environments_out(model_folder: Path) -> None:
    _, passes = appraised(model_folder, advantage="reinforce_plus_plus", old_logprobs="recompute")
    own = torch.cat([batch.advantages_BT[batch.mask_BT] for batch in passes])
    assert sum(int(batch.mask_BT.sum()) for batch in passes) == sum(
        sample.own_tokens for group in groups_of_two() for sample in group.samples
    )
    torch.testing.assert_close(own.mean(), torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(own.std(), torch.ones(()), atol=1e-3, rtol=0)
    assert all(batch.advantages_BT[~batch.mask_BT].eq(0).all() for batch in passes)


def test_other_ranks_get_what_is_learned_from() -> None:
    groups = groups_of_two()
    for before, after in zip(groups, unpack(pack(groups)), strict=True):
        assert [sample.learned for sample in after.samples] == [sample.learned for sample in before.samples]


@pytest.mark.parametrize("advantage", ["gae", "remax", "opo"])
def test_conversations_have_a_critic_a_greedy_baseline_or_lengths_of_their_own(
    advantage: str, make_run: MakeRun
) -> None:
    run = talking(make_run, Asks(), evaluate=False, steps=1, advantage=advantage)
    run.trainer.run()
    assert run.metrics[0]["optimizer_steps"] == 1
    assert run.metrics[0]["environment_tokens"] > 0
    if advantage == "remax":
        assert any(is_turn(name) for name in run.rollout.batches if name.startswith("greedy-0."))
    assert sorted(run.rollout.released) == sorted(run.rollout.batches)
