"""Held-out sets: accuracy of each by name, pass@k, and answers without a score as missing."""

from __future__ import annotations

import dataclasses
import itertools
from array import array

import pytest
from fakes import FakeScorer
from hypothesis import given
from hypothesis import strategies as st
from runs import MakeRun

from penstock.config.run import SamplingConfig
from penstock.errors import ConfigError
from penstock.observe import events
from penstock.observe.notices import Notices
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score, Unscored
from penstock.train.evaluation import evaluate, pass_at_k
from penstock.train.loop import Trainer


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(answers: list[bool], k: int) -> None:
    k = min(k, len(answers))
    choices = list(itertools.combinations(answers, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(len(answers), sum(answers), k) == pytest.approx(expected)


def test_more_answers_are_asked_for_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 of 4 answers"):
        pass_at_k(4, 1, 5)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(k, "", array("i", [5]), {}, "") for k in range(count)]


def group(prompt: Prompt, *values: float) -> Group:
    samples = [
        Sample(
            SampleId("eval-0", prompt.index, k), prompt, array("i", [6]), array("f", [0.0]), (), Finish.STOP, "", score
        )
        for k, score in enumerate(map(Score, values))
    ]
    return Group("eval-0", prompt, samples)


def test_each_set_and_all_of_them_have_accuracy_and_pass_at_k_and_what_is_missing_is_counted() -> None:
    asked = prompts(4)
    names = {0: "easy", 1: "easy", 2: "hard", 3: "hard"}
    # Of the second question one answer has no score, of the last none has one.
    groups = [group(asked[0], 1, 1, 0, 0), group(asked[1], 1, 1, 1), group(asked[2], 0, 0, 0, 0)]
    whole, sets = evaluate(groups, asked, names, 4, [1, 4, 8])
    assert whole is not None
    assert (whole.accuracy, whole.questions, whole.asked, whole.unscored) == (0.5, 3, 4, 5)
    assert whole.pass_at == {1: 0.5, 4: 0.5}
    assert whole.short == {1: 1, 4: 2}
    assert (sets["easy"].accuracy, sets["easy"].pass_at, sets["easy"].short) == (0.75, {1: 0.75, 4: 1.0}, {4: 1})
    assert (sets["hard"].accuracy, sets["hard"].unscored, sets["hard"].questions) == (0.0, 4, 1)
    assert "hard" not in evaluate(groups[:2], asked, names, 4, [1]).sets
    assert evaluate([], asked, names, 4, [1]).whole is None


def test_a_run_asks_each_held_out_question_so_often_and_tells_what_came_of_it(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score | Unscored:
        if sample.id.batch.startswith("eval") and sample.id.prompt == 3 and sample.id.replica == 1:
            return Unscored("judge was away")
        return Score(float(sample.id.replica == 0))

    run = make_run(scorer=FakeScorer(judge), steps=1)
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=8)
    config = run.trainer.config
    rollout = config.rollout.model_copy(update={"eval_samples": 4, "eval_sampling": sampling})
    ports = dataclasses.replace(run.trainer.ports, eval_sets={k: "first" if k < 4 else "rest" for k in range(8)})
    Trainer(config.model_copy(update={"rollout": rollout}), run.trainer.learner, ports).run()
    evaluated = run.of(events.Evaluated)[0]
    assert evaluated.whole.unscored == 1
    assert evaluated.whole.pass_at[4] == 1.0
    assert evaluated.sets["rest"].accuracy == 0.25
    assert evaluated.sets["first"].accuracy == pytest.approx((0.25 * 3 + 1 / 3) / 4)
    assert evaluated.sets["first"].short == {4: 1}
    said = Notices().take(evaluated)
    assert said is not None
    assert "pass@4 1.000, first 0.271, rest 0.250, 1 answer unscored" in said.text
    assert run.rollout.batches["eval-0"][1].temperature == 0.7


def test_weights_are_evaluated_alone(make_run: MakeRun) -> None:
    run = make_run(start_step=5)
    run.trainer.evaluate()
    (evaluated,) = run.of(events.Evaluated)
    assert (evaluated.step, evaluated.questions) == (5, 8)
    assert list(run.rollout.batches) == ["eval-5"]
    assert not run.of(events.CheckpointSaved)


def test_greedy_answers_are_not_asked_for_twice() -> None:
    from penstock.config import load_config

    with pytest.raises(ConfigError, match="greedy answers to one question are all the same"):
        load_config([], ["--rollout.eval_samples=4", "--model.path=m", '--data.train=[{kind="jsonl",path="a"}]'])
