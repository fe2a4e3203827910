"""The examples of docs/environments.md, as they stand there."""

from __future__ import annotations

import re
import tomllib
from array import array
from pathlib import Path

from penstock.config.run import EnvironmentConfig
from penstock.environments import Turn, load_environment
from penstock.sample import Finish, Prompt
from penstock.train.recipes import character_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_configurations_are_valid_and_name_what_is_there() -> None:
    tokenizer = character_tokenizer([])
    first, second = (EnvironmentConfig(**tomllib.loads(block)["environment"]) for block in blocks("toml"))
    load_environment(first.path, first.options, tokenizer)
    assert second.options["id"]
    for path in re.findall(r"\| `(penstock\.environments\.(?:calculator|attempts):\w+)` \|", PAGE):
        load_environment(path, {}, tokenizer)


async def test_the_example_environment_plays(tmp_path: Path) -> None:
    (tmp_path / "my_environment.py").write_text(blocks("python")[0])
    tokenizer = character_tokenizer([])
    environment = load_environment(f"{tmp_path}/my_environment.py:Mine", {"secret": 4}, tokenizer)
    state = await environment.reset(Prompt(0, "?", [1], {}, "test"), 1)

    def said(text: str, number: int) -> Turn:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return Turn(number, array("i", ids), Finish.STOP, 50, False)

    told = await environment.step(state, said("3", 0))
    assert tokenizer.decode(list(told.token_ids)) == "No. Guess again: "
    over = await environment.step(state, said("4", 1))
    assert (over.done, over.reward, over.parts) == (True, 1.0, {"guesses": 2})
