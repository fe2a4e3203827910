"""Reward functions that come with Penstock, and the models for one's own.

Each takes a finished sample and returns a Score, or Unscored where its row or its tools leave no verdict. Those with
options are made by a call (`regex_match(pattern=...)`) or from `reward.options`. They decide what a right answer is;
who calls them, where and with what deadline is the scorer's business. Each is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.reward.verifiers.code import code_tests, sandbox_fusion
    from penstock.reward.verifiers.composition import weighted, within_tags
    from penstock.reward.verifiers.general import exact_match, random_reward, reasoning_gym_exact
    from penstock.reward.verifiers.mathematics import math_answer
    from penstock.reward.verifiers.text import format_match, json_schema, regex_match

__all__ = [
    "code_tests",
    "exact_match",
    "format_match",
    "json_schema",
    "math_answer",
    "random_reward",
    "reasoning_gym_exact",
    "regex_match",
    "sandbox_fusion",
    "weighted",
    "within_tags",
]

_MODULES = {
    "code_tests": "code",
    "exact_match": "general",
    "format_match": "text",
    "json_schema": "text",
    "math_answer": "mathematics",
    "random_reward": "general",
    "reasoning_gym_exact": "general",
    "regex_match": "text",
    "sandbox_fusion": "code",
    "weighted": "composition",
    "within_tags": "composition",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"penstock.reward.verifiers.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'penstock.reward.verifiers' has no attribute '{name}'")
