"""A reward model as a worker: its numbers, its passes, and a streamed step whose rewards come from real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MakeRun

from penstock.cli.run_reward_model import open_model_scorer
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, RewardError
from penstock.reward.worker_scorer import WorkerScorer, batch_of
from penstock.sample import Sample, Score, Unscored
from penstock.train.edge import EdgeLoop
from penstock.train.reward_model import RewardModel, micro_batches

TEXTS = ["sun", "Say: moon and stars", "a", "zebra", "the horse and the house"]


@pytest.fixture(scope="module")
def classifier(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' small Llama with a random head of two labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def scored(model: RewardModel, texts: list[str]) -> tuple[list[float], list[str]]:
    answer = model.score(batch_of(texts))
    return list(answer.column("value").data.cast("d")), answer.values("cause")


def test_a_text_has_one_value_whatever_it_is_scored_with(classifier: Path) -> None:
    model = RewardModel(str(classifier), label=1, device="cpu", tokens_per_micro_batch=40)
    together, causes = scored(model, TEXTS)
    assert causes == [""] * len(TEXTS)
    alone = [scored(model, [text])[0][0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)
    ids = model._tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert model._model(ids).logits[0, 1].item() == pytest.approx(together[0], abs=1e-5)
    assert len(set(together)) == len(TEXTS)


def test_rows_may_end_with_the_token_that_others_pad_with(classifier: Path) -> None:
    model = RewardModel(str(classifier), label=0, device="cpu")
    tokenizer = model._tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS[:3]]
    alone = [model._values([row])[0] for row in rows]
    assert model._values(rows) == pytest.approx(alone, abs=1e-5)
    cut = [model._values([row[:-1]])[0] for row in rows]
    assert all(abs(one - other) > 1e-4 for one, other in zip(alone, cut))


def test_a_causal_model_says_how_likely_yes_is(model_folder: Path) -> None:
    model = RewardModel(str(model_folder), "yes_token", yes="y", no="n", device="cpu")
    values, _ = scored(model, TEXTS)
    yes, no = (model._tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in "yn")
    for text, value in zip(TEXTS, values, strict=True):
        with torch.inference_mode():
            last = model._model(model._tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1]
        assert value == pytest.approx(torch.softmax(last[[yes, no]], 0)[0].item(), abs=1e-5)
    with pytest.raises(ConfigError, match="'yes' is 3 tokens"):
        RewardModel(str(model_folder), "yes_token", yes="yes", no="n", device="cpu")


def test_a_row_that_cannot_be_scored_has_a_cause_and_harms_no_other(classifier: Path) -> None:
    model = RewardModel(str(classifier), label=0, device="cpu")
    values, causes = scored(model, ["sun", "a" * 200, "a"])
    assert causes[0] == causes[2] == ""
    assert "over the model's 128 positions" in causes[1]
    assert values[0] == pytest.approx(scored(model, ["sun"])[0][0], abs=1e-5)
    with pytest.raises(ConfigError, match=r"2 labels; say with reward\.model\.label"):
        RewardModel(str(classifier), device="cpu")
    with pytest.raises(ConfigError, match=r"reward.model.label = 2, and the classifier has 2"):
        RewardModel(str(classifier), label=2, device="cpu")


def test_passes_hold_so_many_padded_tokens_and_every_row_once() -> None:
    assert micro_batches([3, 9, 0, 2, 8, 30], 18) == [[5], [1, 4], [0, 3]]
    assert micro_batches([], 8) == micro_batches([0], 8) == []


@contextlib.contextmanager
def opened(config: RunConfig) -> Iterator[tuple[WorkerScorer, EdgeLoop]]:
    with EdgeLoop() as edge, contextlib.ExitStack() as parts:
        yield open_model_scorer(config, edge, parts), edge


def config_of(path: Path, workers: int, mode: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": [{"kind": "jsonl", "path": "unused"}]},
            "cluster": {"execute_mode": mode, "execute_threads": 3},
            "reward": {"model": {"path": str(path), "label": 1, "device": "cpu", "workers": workers}, "timeout_s": 60},
        }
    )


class Carried:
    """A scorer that lives on another loop than the trainer's."""

    def __init__(self, scorer: WorkerScorer, edge: EdgeLoop) -> None:
        self._scorer, self._edge = scorer, edge
        self.seen: dict[str, float] = {}

    async def score(self, sample: Sample) -> Score | Unscored:
        there = asyncio.run_coroutine_threadsafe(self._scorer.score(sample), self._edge.loop)
        result = await asyncio.wrap_future(there)
        assert isinstance(result, Score), result
        self.seen[sample.prompt.text + sample.response] = result.value
        return result


def test_a_streamed_step_learns_from_rewards_of_worker_processes(
    make_run: MakeRun, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with opened(config_of(classifier, 2, "all_multithread")) as (scorer, edge):
        group: Any = scorer.calls.group
        assert (group.execute_mode, len(group), scorer.calls._pool.threads) == ("all_multithread", 2, 3)
        carried = Carried(scorer, edge)
        run = make_run(steps=1, evaluate=False, scorer=carried)
        run.trainer.run()
    assert run.metrics[0]["unscored"] == 0
    values, _ = scored(RewardModel(str(classifier), label=1, device="cpu"), list(carried.seen))
    assert list(carried.seen.values()) == pytest.approx(values, abs=1e-5)


def test_a_mode_that_leaves_workers_without_work_is_refused(classifier: Path) -> None:
    with pytest.raises(RewardError, match=r"rank_zero.* leaves 1 of the reward model's workers without work"):
        with opened(config_of(classifier, 2, "rank_zero")):
            pass
