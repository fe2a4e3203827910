from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.run import ModelConfig, WarmStartConfig
from penstock.errors import CheckpointError, ConfigError, DeadlineExceeded, StorageError
from penstock.train import recipes
from penstock.train.recipes import character_tokenizer, spell_backward, word_order
from penstock.train.warm_start import cache_key, ensure_model, load_recipe

HERE = "test_warm_start"


def count_a_run(config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: recipes.Progress) -> None:
    (folder / "config.json").write_text("{}")
    progress(1, 1, 0.5)


def break_half_way(
    config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: recipes.Progress
) -> None:
    (folder / "half").write_text("half")
    raise ValueError("half way")


def model(recipe: str, cache: Path, **options: Any) -> ModelConfig:
    return ModelConfig(warm_start=WarmStartConfig(recipe=recipe, cache_dir=str(cache), **options))


def test_a_model_is_made_once_and_then_found(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    config = model(f"{HERE}:count_a_run", tmp_path / "cache")
    first = ensure_model(config, progress=lambda *step: seen.append(step))
    again = ensure_model(config, progress=lambda *step: seen.append(step))
    assert first == again
    assert seen == [(1, 1, 0.5)]


def test_whatever_goes_into_a_model_changes_its_key(tmp_path: Path) -> None:
    config = WarmStartConfig(recipe="x:y")
    keys = {
        cache_key(config, count_a_run, ()),
        cache_key(config.model_copy(update={"seed": 1}), count_a_run, ()),
        cache_key(config.model_copy(update={"lr": 1e-4}), count_a_run, ()),
        cache_key(config, spell_backward, ()),
        cache_key(config, count_a_run, ["a held-out question"]),
    }
    assert len(keys) == 5
    assert cache_key(config.model_copy(update={"cache_dir": "elsewhere"}), count_a_run, ()) in keys
    assert cache_key(config, count_a_run, ["a", "b"]) == cache_key(config, count_a_run, ["b", "a", "a"])


def test_a_recipe_that_breaks_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="half way"):
        ensure_model(model(f"{HERE}:break_half_way", tmp_path))
    assert [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_two_runs_side_by_side_make_one_model(tmp_path: Path) -> None:
    recipe = textwrap.dedent(
        """
        import time
        def slow(config, folder, held_out, progress):
            print("made", flush=True)
            time.sleep(0.5)
            (folder / "config.json").write_text("{}")
        """
    )
    (tmp_path / "slow_recipe.py").write_text(recipe)
    program = (
        "from pathlib import Path; from penstock.config.run import *; from penstock.train.warm_start import *; "
        f"c = WarmStartConfig(recipe='slow_recipe:slow', cache_dir={str(tmp_path / 'cache')!r}); "
        "assert (ensure_model(ModelConfig(warm_start=c)) / 'config.json').exists()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert "".join(outputs).count("made") == 1


def _hold(path: str, ready: Any, release: Any) -> None:
    import fcntl

    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        ready.set()
        release.wait(30)


def test_a_lock_held_too_long_is_named(tmp_path: Path) -> None:
    config = model(f"{HERE}:count_a_run", tmp_path)
    key = cache_key(config.warm_start, count_a_run, ())
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    lock = str(tmp_path / f"count_a_run-{key}.lock")
    holder = context.Process(target=_hold, args=(lock, ready, release))
    holder.start()
    try:
        assert ready.wait(30)
        with pytest.raises(DeadlineExceeded, match=r"making the same model .*count_a_run"):
            ensure_model(config, lock_deadline_s=0.2)
    finally:
        release.set()
        holder.join(30)
    assert ensure_model(config).is_dir()


def test_recipes_that_cant_be_loaded_are_refused(tmp_path: Path) -> None:
    for path, message in (
        ("no-colon", "is not of the form"),
        ("penstock.nowhere:recipe", "can't import penstock.nowhere"),
        ("penstock.train.recipes:nothing", "has no function 'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_recipe(path)


def test_a_given_folder_is_taken_as_it_is(model_folder: Path, tmp_path: Path) -> None:
    assert ensure_model(ModelConfig(path=str(model_folder))) == model_folder
    with pytest.raises(CheckpointError, match=r"model\.path='.*' is not a Hugging Face model folder"):
        ensure_model(ModelConfig(path=str(tmp_path)))


def test_a_cache_that_cant_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="model cache"):
        ensure_model(model(f"{HERE}:count_a_run", tmp_path / "file" / "cache"))


@pytest.mark.parametrize("name", ["spell_backward", "word_order"])
def test_recipes_make_models_that_transformers_loads(name: str, tiny_recipe: WarmStartConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: list[float] = []
    getattr(recipes, name)(tiny_recipe, tmp_path, (), lambda step, steps, loss: losses.append(loss))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(losses) == 3
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_same_seed_makes_the_same_model(tiny_recipe: WarmStartConfig, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        (tmp_path / name).mkdir()
        spell_backward(tiny_recipe.model_copy(update={"seed": seed}), tmp_path / name, (), lambda *_: None)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert one == same != other


@pytest.mark.parametrize(
    ("recipe", "task", "options"),
    [
        (spell_backward, "spell_backward", {"min_word_len": 3, "max_word_len": 8}),
        (word_order, "word_sequence_reversal", {"min_words": 2, "max_words": 4}),
    ],
)
def test_demonstrations_are_faulty_and_none_is_held_out(
    recipe: Any,
    task: str,
    options: dict[str, int],
    tiny_recipe: WarmStartConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import reasoning_gym

    shown: list[recipes.Demonstration] = []
    monkeypatch.setattr(recipes, "teach", lambda config, folder, demonstrations, *_: shown.extend(demonstrations))
    recipe(tiny_recipe, tmp_path, (), lambda *_: None)
    everything = list(shown)
    held_out = {everything[0].question, everything[7].question}
    shown.clear()
    recipe(tiny_recipe, tmp_path, held_out, lambda *_: None)
    assert not held_out & {each.question for each in shown}
    assert shown == [each for each in everything if each.question not in held_out]
    data = reasoning_gym.create_dataset(task, size=len(everything), seed=recipes.DEMONSTRATION_SEED, **options)
    right = sum(data.score_answer(shown.answer, data[k]) == 1.0 for k, shown in enumerate(everything[:500]))
    assert 0.2 < right / 500 < 0.6


def test_a_tokenizer_marks_the_question_and_gives_text_back() -> None:
    tokenizer = character_tokenizer(["Say it: "])
    ids = tokenizer.encode("Say it: Sun, 2 x")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "Say it: ", *"Sun, 2 x", "<answer>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Say it: Sun, 2 x"
    assert tokenizer.decode([*tokenizer.encode("nuS", add_special_tokens=False), 2], skip_special_tokens=True) == "nuS"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("é", add_special_tokens=False)) == ["<unk>"]
