"""Environments over text: the calculator, further attempts, and what comes between two turns as token ids."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from penstock.environments import Observation, Turn, TurnTemplate
from penstock.environments.arithmetic import ArithmeticRefused, calculate
from penstock.environments.attempts import Attempts
from penstock.environments.calculator import Calculator
from penstock.environments.outcome import outcome
from penstock.errors import ConfigError, EnvironmentFault
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored
from penstock.train.recipes import character_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prompt_of(**row: Any) -> Prompt:
    return Prompt(0, "?", [1], row, "test")


def turn_of(tokenizer: Any, text: str, number: int = 0, ends: bool = True, last: bool = False) -> Turn:
    ids = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if ends else [])
    return Turn(number, array("i", ids), Finish.STOP if ends else Finish.LENGTH, 50, last)


def text_of(tokenizer: Any, observation: Observation) -> str:
    return tokenizer.decode(list(observation.token_ids))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*4", "12"), (" 17 - 4*(2+3) ", "-3"), ("7/2", "3.5"), ("7//2", "3"), ("-7 % 4", "1"), ("2**10", "1024")],
)
def test_arithmetic_is_worked_out(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "exponent"),
        ("10**99", "too large"),
        ("1e30*10", "too large"),
        ("1e400", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("__import__('os').system('true')", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 99", "only numbers"),
        ("3 *", "not an expression"),
        ("-" * 60 + "1", "nested too deeply"),
        ("1+" * 150 + "1", "more than 200 characters"),
        ("1\0", "not an expression"),
    ],
)
def test_what_is_no_arithmetic_or_too_large_is_refused(expression: str, cause: str) -> None:
    with pytest.raises(ArithmeticRefused, match=cause):
        calculate(expression)


async def test_the_calculator_answers_calls_and_judges_the_answer() -> None:
    tokenizer = character_tokenizer([])
    tool = Calculator(tokenizer, needs_tool=True)
    state = await tool.reset(prompt_of(answer="12"), 1)
    told = await tool.step(state, turn_of(tokenizer, "so <tool>3*4</tool> and <tool>1/0</tool>"))
    assert text_of(tokenizer, told) == "<result>12</result><result>error: division by zero</result>"
    assert (told.done, told.reward, told.parts) == (False, 0.0, {"tool_calls": 2.0})
    verdict = await tool.step(state, turn_of(tokenizer, "12", number=1))
    assert (verdict.done, verdict.reward, list(verdict.token_ids)) == (True, 1.0, [])
    assert verdict.parts == {"right": 1.0, "used_tool": 1.0}


async def test_an_answer_that_no_call_came_before_is_worth_nothing_where_the_tool_is_needed() -> None:
    tokenizer = character_tokenizer([])
    for needs_tool, reward in ((True, 0.0), (False, 1.0)):
        tool = Calculator(tokenizer, needs_tool=needs_tool)
        said = await tool.step(await tool.reset(prompt_of(answer="12"), 1), turn_of(tokenizer, "12"))
        assert (said.done, said.reward, said.parts["right"]) == (True, reward, 1.0)


async def test_a_turn_without_end_of_calls_gets_a_bounded_answer() -> None:
    tokenizer = character_tokenizer([])
    tool = Calculator(tokenizer)
    told = await tool.step(await tool.reset(prompt_of(answer="1"), 1), turn_of(tokenizer, "<tool>1</tool>" * 30))
    assert text_of(tokenizer, told).count("<result>") == 9


async def test_the_last_turn_is_not_answered() -> None:
    tokenizer = character_tokenizer([])
    tool = Calculator(tokenizer)
    told = await tool.step(
        await tool.reset(prompt_of(answer="1"), 1), turn_of(tokenizer, "<tool>1</tool>", ends=False, last=True)
    )
    assert told.done
    assert not told.token_ids


async def test_a_wrong_answer_may_be_put_right_for_less() -> None:
    tokenizer = character_tokenizer([])
    task = Attempts(tokenizer, attempts=3, discount=0.5, feedback="no, {attempts_left} left")
    row = {"answer": "nus", "metadata": {"source_dataset": "spell_backward", "word": "sun"}, "task_options": {}}
    state = await task.reset(prompt_of(**row), 1)
    told = await task.step(state, turn_of(tokenizer, "sun"))
    assert text_of(tokenizer, told) == "no, 2 left"
    assert (told.done, told.reward, told.parts) == (False, 0.0, {"wrong_attempts": 1.0})
    right = await task.step(state, turn_of(tokenizer, "nus", number=1))
    assert (right.done, right.reward, right.parts) == (True, 0.5, {"right": 1.0, "wrong_attempts": 0.0})
    wrong = await task.step(state, turn_of(tokenizer, "uns", number=2))
    assert wrong.done
    assert wrong.reward < 0.25
    with pytest.raises(EnvironmentFault, match="no reasoning-gym task"):
        await task.step({"answer": "nus"}, turn_of(tokenizer, "sun"))


def test_with_a_chat_template_only_what_comes_after_the_models_turn_is_encoded() -> None:
    tokenizer = character_tokenizer([])
    tokenizer.chat_template = CHATML
    template = TurnTemplate(tokenizer)
    talk = [{"role": "user", "content": "2*3?"}]
    so_far = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) + "is it 5?<eos>"
    between = template.between(turn_of(tokenizer, "is it 5?"), "no")
    talk += [{"role": "assistant", "content": "is it 5?"}, {"role": "user", "content": "no"}]
    whole = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert so_far + tokenizer.decode(between) == whole
    # A turn that another stop id ended has no end of its own yet.
    assert tokenizer.decode(template.between(turn_of(tokenizer, "is it 5?", ends=False), "no")).startswith("<eos>")


def test_a_chat_template_that_refuses_a_role_is_named_and_one_that_is_missing_too() -> None:
    tokenizer = character_tokenizer([])
    with pytest.raises(ConfigError, match="no chat template"):
        TurnTemplate(tokenizer, "require")
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(EnvironmentFault, match="no tools here"):
        TurnTemplate(tokenizer, role="tool").between(turn_of(tokenizer, "x"), "no")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(EnvironmentFault, match="leaves out what the assistant said"):
        TurnTemplate(tokenizer).between(turn_of(tokenizer, "x"), "no")


def test_the_environments_verdict_is_a_reward_function() -> None:
    sample = Sample(SampleId("b", 0, 0), prompt_of(), array("i", [1]), array("f", [0.0]), (), Finish.STOP)
    assert isinstance(outcome(sample), Unscored)
    sample.outcome = Score(0.5, {"right": 1.0})
    assert outcome(sample) == Score(0.5, {"right": 1.0})
