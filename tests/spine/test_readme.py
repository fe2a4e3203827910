"""The README's examples work as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config.run import WarmStartConfig
from penstock.train.recipes import spell_backward

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every `penstock` command of the README, without its comment."""
    text = "".join(blocks("bash")).replace("\\\n", " ")
    lines = (line.partition("  #")[0].strip() for line in text.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("penstock ")]


def block_named(language: str, name: str) -> str:
    (found,) = [block for block in blocks(language) if block.startswith(f"# {name}\n")]
    return found


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the README has a user write."""
    (tmp_path / "my-run.toml").write_text(block_named("toml", "my-run.toml"))
    (tmp_path / "my_reward.py").write_text(block_named("python", "my_reward.py"))
    (tmp_path / "my-machine.toml").write_text("[rollout.engines]\ncount = 2\n")
    rows = [{"prompt": f"word{number}", "answer": f"{number}drow"} for number in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_the_commands_that_this_test_is_about() -> None:
    assert {words[0] for words in commands()} >= {"doctor", "train", "bench", "join"}


@pytest.mark.parametrize("words", [words for words in commands() if words[0] == "train"], ids=" ".join)
def test_each_train_command_resolves(user_folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "--help-config" not in words:
        words = [*words, "--dry-run"]
    assert main(words) == 0
    assert "rollout" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["bench"], ["doctor"], ["join", "--help"]], ids=" ".join)
def test_each_other_command_answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in {found[0] for found in commands()}
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
def test_ones_own_model_questions_and_reward_train(user_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = user_folder / "models" / "my-model"
    model.mkdir(parents=True)
    config = WarmStartConfig(hidden_size=16, layers=1, heads=2, intermediate_size=32, steps=1, batch_size=4)
    spell_backward(config, model, (), lambda step, steps, loss: None)
    words = ["--rollout.prompts_per_step=4", "--rollout.samples_per_prompt=2", "--rollout.sampling.max_new_tokens=8"]
    words += ["--train.steps=2", "--train.threads=1", "--data.max_prompt_tokens=64"]
    code = main(["train", "my-run.toml", *words, "--observe.view=lines"])
    assert code == 0, capfd.readouterr()
    summary = json.loads((user_folder / "runs" / "run-001" / "summary.json").read_text())
    assert summary["samples_finished"] == 16
    assert summary["samples_unscored"] == 0
