"""The examples of docs/data.md, run as they stand there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from data_support import Characters

from penstock.config.run import DataConfig
from penstock.data import load_prompts, load_train_and_eval
from penstock.errors import DataError

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_example_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = blocks("json")
    (tmp_path / "questions.jsonl").write_text(rows)
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "What is 6 times 9?"}\n')
    monkeypatch.chdir(tmp_path)
    config = DataConfig(**tomllib.loads(blocks("toml")[0])["data"])
    train, held_out = load_train_and_eval(config, Characters("a template"))
    assert [prompt.row["answer"] for prompt in train.prompts] == ["42", "48"]
    assert len(held_out) == 1


def test_the_example_error_is_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = blocks("json")
    (tmp_path / "questions.jsonl").write_text(rows + '{"question": "?"}\n')
    monkeypatch.chdir(tmp_path)
    config = DataConfig(**tomllib.loads(blocks("toml")[0])["data"])
    (message,) = re.findall(r"```\n(questions\.jsonl:3: .*)\n```", PAGE)
    with pytest.raises(DataError) as caught:
        load_prompts(config.train, config, Characters("a template"))
    assert str(caught.value) == message


def test_the_example_task_is_made() -> None:
    config = DataConfig(**tomllib.loads(blocks("toml")[1])["data"])
    few = config.model_copy(update={"train": [config.train[0].model_copy(update={"size": 8})]})
    train, held_out = load_train_and_eval(few, Characters())
    assert 0 < len(train) <= 8
    assert len(held_out) + held_out.skipped["asked twice"] == 512
