"""The reference: beside the actor, another model, or on workers of its own, with the same numbers."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeScorer
from runs import MakeRun, apart

from penstock.cli.run_reward_model import open_reference_scorer
from penstock.cluster import Batch, WorkerFailed
from penstock.config.run import RunConfig
from penstock.config.train import TrainConfig
from penstock.errors import ConfigError, RewardError
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score, Unscored
from penstock.train.actor import Actor
from penstock.train.batching import collate, collate_samples, idle_pass
from penstock.train.edge import EdgeLoop
from penstock.train.forward import score_tokens
from penstock.train.loading import load_causal_lm
from penstock.train.ranks import Ranks, pack, unpack
from penstock.train.reference import Reference, ReferenceScorer, _sent
from penstock.train.sharding import place

BATCH = ([[5, 6], [7]], [[8, 9, 10], [11]], [[-4.0] * 3, [-4.0]], [1.0, -1.0])


@pytest.fixture
def other_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model with the same tokens and other weights."""
    model = load_causal_lm(model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def make_actor(folder: Path, **train: Any) -> Actor:
    config = TrainConfig.model_validate({"device": "cpu", "kl_coef": 0.1, **train})
    return Actor(folder, config, total_optimizer_steps=10, horizon_tokens=8)


def sample(prompt: list[int], output: list[int]) -> Sample:
    return Sample(
        SampleId("b", 0, 0),
        Prompt(0, "", prompt, {}, ""),
        array("i", output),
        array("f", [-1.0] * len(output)),
        (),
        Finish.STOP,
        score=Score(1.0),
    )


@pytest.mark.parametrize("train", [{}, {"lora": {"rank": 4}}])
def test_another_model_may_be_the_reference(model_folder: Path, other_folder: Path, train: dict[str, Any]) -> None:
    actor = make_actor(model_folder, reference={"path": str(other_folder)}, **train)
    assert actor.reference is not None
    assert not any(parameter.requires_grad for parameter in actor.reference.parameters())
    expected = score_tokens(load_causal_lm(other_folder), collate(*BATCH)).logprobs_BT
    torch.testing.assert_close(actor._reference_logprobs(collate(*BATCH)), expected)


def test_the_actor_takes_what_workers_have_said_and_has_no_reference_itself(model_folder: Path) -> None:
    actor = make_actor(model_folder, reference={"workers": 1})
    assert actor.reference is None
    told = collate(*BATCH, reference_logprobs=[[-1.0, -2.0, -3.0], [-4.0]])
    assert actor._reference_logprobs(told).tolist() == [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
    with pytest.raises(AssertionError, match="workers have not seen"):
        actor._reference_logprobs(collate(*BATCH))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_worker_says_what_the_actors_own_reference_says(model_folder: Path, temperature: float) -> None:
    worker = Reference(str(model_folder), "cpu", "float32", temperature, tokens_per_micro_batch=5)
    prompts, outputs = BATCH[0], BATCH[1]
    answer = worker.logprobs(_sent(list(zip(prompts, outputs, strict=True))))
    expected = score_tokens(load_causal_lm(model_folder), collate(*BATCH), temperature=temperature).logprobs_BT
    for row, output in enumerate(outputs):
        found = array("f")
        found.frombytes(answer.column("logprobs").row_bytes(row))
        torch.testing.assert_close(torch.tensor(found), expected[row, : len(output)])
    half = Reference(str(model_folder), "cpu", "bfloat16", temperature, tokens_per_micro_batch=5)
    assert {parameter.dtype for parameter in half._model.parameters()} == {torch.bfloat16}
    assert len(half.logprobs(_sent([(prompts[0], outputs[0])]))) == 1


def test_what_workers_said_goes_with_the_sample_to_every_rank() -> None:
    seen = sample([1, 2], [3, 4])
    seen.reference_logprobs = array("f", [-0.5, -1.5])
    (group,) = unpack(pack([Group("b", seen.prompt, [seen])]))
    assert group.samples[0].reference_logprobs == seen.reference_logprobs
    for laid_out in (collate_samples([seen]), idle_pass(seen)):
        assert laid_out.reference_logprobs_BT is not None
        assert laid_out.reference_logprobs_BT.tolist() == [[-0.5, -1.5]]
    assert collate_samples([sample([1], [2])]).reference_logprobs_BT is None
    with pytest.raises(AssertionError, match="some samples of a pass"):
        collate_samples([seen, sample([1], [2])])


class Carried:
    """A scorer that lives on another loop than the trainer's."""

    def __init__(self, scorer: ReferenceScorer, edge: EdgeLoop) -> None:
        self._scorer, self._edge = scorer, edge

    async def score(self, sample: Sample) -> Score | Unscored:
        there = asyncio.run_coroutine_threadsafe(self._scorer.score(sample), self._edge.loop)
        return await asyncio.wrap_future(there)


@contextlib.contextmanager
def opened(model: Path, **reference: Any) -> Iterator[Carried]:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [{"kind": "jsonl", "path": "unused"}]},
            "train": {"kl_coef": 0.1, "reference": {"device": "cpu", **reference}},
        }
    )
    with EdgeLoop() as edge, contextlib.ExitStack() as parts:
        yield Carried(open_reference_scorer(config, model, FakeScorer(), edge, parts), edge)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_run_learns_the_same_from_a_reference_on_workers_as_from_its_own(
    make_run: MakeRun, model_folder: Path, kl_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options: dict[str, Any] = {"kl_coef": 0.5, "kl_in": kl_in, "evaluate": False, "streaming": False, "lr": 1e-2}
    beside = make_run(**options, scorer=FakeScorer())
    beside.trainer.run()
    with opened(model_folder, workers=2) as scorer:
        apart_from_it = make_run(**options, scorer=scorer, reference={"workers": 2})
        assert apart_from_it.trainer.learner.actor.reference is None
        apart_from_it.trainer.run()
    assert beside.metrics[1]["kl"] > 1e-4
    assert apart_from_it.metrics[1]["kl"] == pytest.approx(beside.metrics[1]["kl"], rel=1e-4)
    assert apart(beside, apart_from_it) < 1e-5


async def test_a_sample_that_the_reference_cannot_see_is_unscored() -> None:
    class Group:
        lost = ""

        @property
        def workers(self) -> Group:
            return self

        def submit(self, name: str, batch: Batch) -> Any:
            assert name == "logprobs"
            raise WorkerFailed("reference", 0, "logprobs", "OutOfMemoryError: no room")

    from penstock.cluster import SubmitPool

    with SubmitPool("reference", 1) as pool:
        scorer = ReferenceScorer(FakeScorer(), Group, pool, samples_per_call=4, timeout_s=5)  # type: ignore[arg-type]
        seen = sample([1], [2])
        found = await scorer.score(seen)
        assert isinstance(found, Unscored)
        assert found.cause.startswith("reference: ")
        assert "no room" in found.cause
        assert seen.reference_logprobs is None
        with pytest.raises(RewardError, match="the reference can't be used"):
            await scorer.start()


def test_settings_that_have_no_effect_are_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.reference needs a train\.kl_coef above 0"):
        TrainConfig.model_validate({"reference": {"workers": 1}})
    with pytest.raises(ConfigError, match="keep the shards of several ranks in host memory, and this run has one"):
        place(torch.nn.Linear(1, 1), [], Ranks(), torch.device("cuda"), "float32", cpu_offload=True)
    # One rank whose device is the host has nothing to bring there.
    assert make_actor(model_folder, reference={"offload": True}).reference is not None
