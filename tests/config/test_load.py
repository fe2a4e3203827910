from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RunConfig, describe, dump_toml, load_config, split_overrides
from penstock.config.describe import allowed, keys, place_at
from penstock.config.run import (
    DataConfig,
    DrillConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
)
from penstock.config.toml import parse_value, write_toml
from penstock.config.train import TrainConfig
from penstock.errors import ConfigError

LEAST = """
model.path = "models/m"
[[data.train]]
kind = "jsonl"
path = "a.jsonl"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(LEAST)
    return path


def layer(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(files: list[Path], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value)


# ---- layers


def test_the_least_configuration_has_the_models_defaults(base: Path) -> None:
    config = load_config([base])
    assert config == RunConfig(
        model=ModelConfig(path="models/m"), data=DataConfig(train=[SourceConfig(kind="jsonl", path="a.jsonl")])
    )


def test_the_last_file_wins_and_tables_are_merged(base: Path, tmp_path: Path) -> None:
    first = layer(tmp_path / "1.toml", "[train]\nsteps = 5\nlr = 1e-5\n")
    second = layer(tmp_path / "2.toml", "[train]\nlr = 2e-5\n")
    config = load_config([base, first, second])
    assert (config.train.steps, config.train.lr) == (5, 2e-5)


def test_lists_are_replaced(base: Path, tmp_path: Path) -> None:
    other = layer(tmp_path / "1.toml", '[[data.train]]\nkind = "parquet"\npath = "b"\n')
    assert [source.path for source in load_config([base, other]).data.train] == ["b"]


def test_overrides_win_over_files(base: Path, tmp_path: Path) -> None:
    last = layer(tmp_path / "1.toml", "[train]\nsteps = 5\n")
    assert load_config([base, last], ["--train.steps=7"]).train.steps == 7


def test_a_file_extends_another_relative_to_itself(base: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    middle = layer(tmp_path / "inner" / "middle.toml", 'extends = "../base.toml"\nseed = 3\n[train]\nsteps = 5\n')
    top = layer(tmp_path / "top.toml", 'extends = "inner/middle.toml"\n[train]\nsteps = 6\n')
    config = load_config([top])
    assert (config.model.path, config.seed, config.train.steps) == ("models/m", 3, 6)
    assert middle.exists()


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    layer(tmp_path / "a.toml", 'extends = "b.toml"')
    layer(tmp_path / "b.toml", 'extends = "a.toml"')
    assert "extends itself" in refusal([tmp_path / "a.toml"])


def test_extends_must_be_a_path(tmp_path: Path) -> None:
    assert "must be the path of one TOML file" in refusal([layer(tmp_path / "a.toml", "extends = 3")])


def test_every_configuration_that_comes_along_loads() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    assert files
    for file in files:
        load_config([file])


# ---- overrides


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--train.lr=1e-5"], "train.lr", 1e-5),
        (["--train.lr", "1e-5"], "train.lr", 1e-5),
        (["--train.lr=1"], "train.lr", 1.0),
        (["--train.streaming=false"], "train.streaming", False),
        (["--train.streaming", "False"], "train.streaming", False),
        (["--train.streaming"], "train.streaming", True),
        (["--train.streaming", "--seed=3"], "train.streaming", True),
        (["--seed=3"], "seed", 3),
        (["--seed", "3"], "seed", 3),
        (["--name=007"], "name", "007"),
        (["--name=true"], "name", "true"),
        (['--name="quoted"'], "name", "quoted"),
        (["--model.path=a=b"], "model.path", "a=b"),
        (["--reward.eval_function="], "reward.eval_function", ""),
        (["--observe.view=lines"], "observe.view", "lines"),
        (["--train.betas=[0.9, 0.95]"], "train.betas", (0.9, 0.95)),
        (["--rollout.sampling.stop_token_ids=[1, 2]"], "rollout.sampling.stop_token_ids", [1, 2]),
        (["--data.train.0.size=10"], "data.train.0.size", 10),
        (["--data.train.0.options.words=[1]"], "data.train.0.options", {"words": [1]}),
        (["--data.eval.0.kind=hf", "--data.eval.0.path=d"], "data.eval.0.path", "d"),
        (["--drill.kill_at=0.5", "--drill.kill_at=none"], "drill.kill_at", None),
        (["--rollout.eval_sampling.top_p=0.5", "--rollout.eval_sampling.max_new_tokens=8"], "seed", 0),
    ],
)
def test_overrides_are_read_as_the_key_wants_them(base: Path, words: list[str], key: str, value: Any) -> None:
    found: Any = load_config([base], words)
    for part in key.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_none_unsets_a_value_of_an_earlier_layer(base: Path, tmp_path: Path) -> None:
    drill = layer(tmp_path / "1.toml", "[drill]\nkill_at = 0.5\n")
    off = layer(tmp_path / "2.toml", '[drill]\nkill_at = "none"\n')
    assert load_config([base, drill, off]).drill.kill_at is None


def test_overrides_are_told_from_other_words() -> None:
    words = ["a.toml", "--train.lr", "1e-5", "--dry-run", "--train.streaming", "b.toml", "--seed=3", "--resume", "x"]
    others, overrides = split_overrides(words)
    assert others == ["a.toml", "--dry-run", "b.toml", "--resume", "x"]
    assert overrides == ["--train.lr", "1e-5", "--train.streaming", "--seed=3"]


def test_after_two_dashes_nothing_is_an_override() -> None:
    assert split_overrides(["--seed=1", "--", "--seed=2"]) == (["--", "--seed=2"], ["--seed=1"])


def test_a_word_that_is_no_override_is_refused(base: Path) -> None:
    assert "'train.lr=3' is not an override; write --section.key=value" in refusal([base], "train.lr=3")


# ---- refusals


def test_an_unknown_key_is_refused_with_its_value_what_is_close_and_what_there_is(base: Path) -> None:
    text = refusal([base], "--rollout.prompts_per_stepp=3")
    assert "rollout.prompts_per_stepp = 3 (from --rollout.prompts_per_stepp=3): there is no such key" in text
    assert "did you mean rollout.prompts_per_step?" in text
    assert "; did you mean rollout.prompts_per_step? --help-config lists all" in text


def test_an_unknown_key_of_a_file_names_the_file(base: Path, tmp_path: Path) -> None:
    wrong = layer(tmp_path / "wrong.toml", "[train]\nlearning_rate = 3\n[trian]\nx = 1\n")
    text = refusal([base, wrong])
    assert f"train.learning_rate = 3 (from {wrong}): there is no such key" in text
    assert f'trian = {{"x": 1}} (from {wrong}): there is no such key; did you mean train?' in text
    assert "there is no such key; did you mean train?" in text


def test_an_unknown_key_lists_a_few_keys_and_says_where_the_others_are(base: Path) -> None:
    text = refusal([base], "--train.wibble=3")
    listed = text.partition("train has: ")[2].split(" and ")[0].split(", ")
    assert len(listed) == 8
    assert "more, which --help-config lists" in text
    assert "drill has: " in refusal([base], "--drill.wibble=3"), "a short section is told whole"


def test_the_help_calls_a_table_of_many_types_a_table() -> None:
    lines = describe(RunConfig).splitlines()
    options = lines.index("  data.train.N.options")
    assert lines[options + 1].strip() == "A table. Default: {}."


def test_dashes_for_underscores_are_understood_in_the_suggestion(base: Path) -> None:
    assert "did you mean train.old_logprobs?" in refusal([base], "--train.old-logprobs=rollout")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("--train.lr=0", "train.lr = 0 (from --train.lr=0): must be a number above 0"),
        ("--train.steps=0", "train.steps = 0 (from --train.steps=0): must be an integer of at least 1"),
        ("--train.steps=1.5", "train.steps = 1.5 (from --train.steps=1.5): must be an integer of at least 1"),
        ("--train.steps=ten", 'train.steps = "ten" (from --train.steps=ten): must be an integer of at least 1'),
        ("--train.steps=true", "train.steps = true (from --train.steps=true): must be an integer of at least 1"),
        ("--manager.port=70000", "must be an integer of at least 0 and at most 65535"),
        ("--train.clip_low=1", "must be a number of at least 0 and below 1"),
        ("--observe.view=blue", 'observe.view = "blue" (from --observe.view=blue): must be one of auto, live, lines'),
        ("--train.streaming=maybe", 'train.streaming = "maybe" (from --train.streaming=maybe): must be true or false'),
        ("--train.betas=[0.9]", "train.betas.1 is missing (from --train.betas=[0.9]); must be a number"),
        ("--train.lr=nan", "train.lr = nan (from --train.lr=nan): must be a finite number"),
        ("--train.lr=inf", "train.lr = inf (from --train.lr=inf): must be a finite number"),
        ("--train.lr.x=3", 'train.lr = {"x": 3} (from --train.lr.x=3): must be a number above 0'),
        ("--train.lr", "--train.lr: needs a value: train.lr must be a number above 0"),
        ("--train=3", "train = 3 (from --train=3): must be a section with the keys steps, lr"),
        ("--data.train.7.size=3", "--data.train.7.size=3: data.train is a list of 1; it has no entry 7"),
        ("--data.train.x=3", "--data.train.x=3: data.train is a list of 1; it has no entry 'x'"),
        ("--data.train.0.size=0", "must be an integer of at least 1, or none"),
        ("--data.train=[]", "must be a list, each entry a section with the keys kind, path"),
    ],
)
def test_an_impossible_value_is_refused_with_what_is_allowed(base: Path, override: str, sentence: str) -> None:
    assert sentence in refusal([base], override)


def test_a_value_in_the_way_of_a_key_is_named(base: Path, tmp_path: Path) -> None:
    scalar = layer(tmp_path / "1.toml", "[train]\nlr = 1e-5\n")
    assert "--train.lr.x=3: train.lr is the value 1e-05 and has no keys" in refusal([base, scalar], "--train.lr.x=3")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    text = refusal([layer(tmp_path / "a.toml", "seed = 1")])
    assert "model is missing; must be a section with the keys path, warm_start, dtype" in text
    assert "data is missing" in text


def test_a_rule_between_keys_names_who_set_them(base: Path, tmp_path: Path) -> None:
    other = layer(tmp_path / "1.toml", "[train]\nmini_batches_per_step = 3\n")
    text = refusal([base, other], "--rollout.prompts_per_step=32")
    assert "rollout.prompts_per_step=32 is not divisible by train.mini_batches_per_step=3" in text
    assert "rollout.prompts_per_step (from --rollout.prompts_per_step=32)" in text
    assert f"train.mini_batches_per_step (from {other})" in text


def test_greedy_training_samples_are_refused_and_greedy_evaluation_is_not(base: Path) -> None:
    text = refusal([base], "--rollout.sampling.temperature=0")
    assert "rollout.sampling.temperature=0: greedy answers" in text
    assert "must be above 0" in text
    assert load_config([base], ["--rollout.eval_sampling.temperature=0"]).rollout.eval_sampling is not None


def test_the_engines_logprobs_are_refused_at_another_temperature_than_theirs(base: Path) -> None:
    rollout = "--train.old_logprobs=rollout"
    text = refusal([base], rollout, "--rollout.sampling.temperature=0.7")
    assert 'train.old_logprobs="rollout" can\'t be used with rollout.sampling.temperature=0.7' in text
    assert f"train.old_logprobs (from {rollout})" in text
    assert load_config([base], [rollout]).train.old_logprobs == "rollout"
    assert load_config([base], ["--rollout.sampling.temperature=0.7"]).train.old_logprobs == "auto"


def test_all_problems_are_told_at_once(base: Path) -> None:
    text = refusal([base], "--train.lr=0", "--seed=-1", "--nonsense.x=1", "--train.steps")
    assert text.startswith("the configuration has 4 problems:\n")
    for key in ("train.lr = 0", "seed = -1", "nonsense", "--train.steps: needs a value"):
        assert key in text


def test_the_layer_that_won_is_blamed_and_not_the_one_below(base: Path, tmp_path: Path) -> None:
    below = layer(tmp_path / "below.toml", "[train]\nlr = -1\n")
    above = layer(tmp_path / "above.toml", "[train]\nlr = -2\n")
    text = refusal([base, below, above])
    assert f"train.lr = -2 (from {above})" in text
    assert "below.toml" not in text


def test_a_long_value_is_cut(base: Path) -> None:
    assert len(refusal([base], f"--observe.view={'x' * 5000}")) < 400


def test_toml_that_is_none_is_refused_with_file_line_and_column(tmp_path: Path) -> None:
    wrong = layer(tmp_path / "a.toml", "seed = 1\n[train\nsteps = 2\n")
    assert f"{wrong}:2:7: not TOML: " in refusal([wrong])
    cut_off = layer(tmp_path / "b.toml", 'seed = 1\nname = "x')
    assert f"{cut_off}:2:" in refusal([cut_off])


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    assert "gone.toml: there is no such file" in refusal([tmp_path / "gone.toml"])
    assert "is a folder" in refusal([tmp_path])
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    assert "is not UTF-8 text (byte 8)" in refusal([tmp_path / "latin.toml"])


def test_nothing_at_all_is_refused(tmp_path: Path) -> None:
    assert "the configuration is empty" in refusal([layer(tmp_path / "a.toml", "")])


def test_a_date_is_no_value_of_any_key(base: Path) -> None:
    assert "must be an integer" in refusal([base], "--train.steps=1979-05-27")


# ---- help


def test_help_lists_every_key_with_its_default_and_meaning() -> None:
    text = describe(RunConfig)
    for key, place in keys(RunConfig):
        assert f"  {key}\n" in text
        assert place.field is not None
        if place.field.description:
            assert place.field.description.split("\n")[0] in text
    assert "  train.lr\n      A number above 0. Default: 1e-06.\n" in text
    assert "  data.train.N.kind\n      One of jsonl, parquet, hf, reasoning_gym. Required.\n" in text


def test_every_key_of_the_help_can_be_found_again() -> None:
    for key, place in keys(RunConfig):
        path = tuple(0 if part == "N" else part for part in key.split("."))
        found = place_at(RunConfig, path)
        assert found is not None
        assert allowed(found) == allowed(place)


def test_there_is_nothing_at_an_unknown_place() -> None:
    for key in ("x", "train.x", "train.lr.x", "data.train.x", "data.train.0.x"):
        assert place_at(RunConfig, tuple(int(p) if p.isdecimal() else p for p in key.split("."))) is None


# ---- there and back


def sources() -> st.SearchStrategy[SourceConfig]:
    values = st.one_of(
        st.text(max_size=8),
        st.booleans(),
        st.integers(-(2**40), 2**40),
        st.floats(allow_nan=False, allow_infinity=False),
        st.lists(st.integers(-9, 9), max_size=3),
        st.lists(st.text(max_size=3), min_size=1, max_size=3),
    )
    return st.builds(
        SourceConfig,
        kind=st.sampled_from(["jsonl", "hf"]),
        path=st.text(max_size=20),
        size=st.none() | st.integers(1, 10**9),
        options=st.dictionaries(st.text(max_size=8), values, max_size=3),
    )


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,19}", fullmatch=True),
    output_dir=st.text(max_size=20),
    train=st.lists(sources(), min_size=1, max_size=3),
    held_out=st.lists(sources(), max_size=2),
    lr=st.floats(1e-300, 1e300),
    kill_at=st.none() | st.floats(0.01, 0.99),
    eval_sampling=st.none() | st.builds(SamplingConfig, max_new_tokens=st.integers(1, 99)),
    stop_ids=st.lists(st.integers(0, 99), max_size=3),
)
def test_what_is_dumped_loads_back_to_the_same(
    name: str,
    output_dir: str,
    train: list[SourceConfig],
    held_out: list[SourceConfig],
    lr: float,
    kill_at: float | None,
    eval_sampling: SamplingConfig | None,
    stop_ids: list[int],
) -> None:
    config = RunConfig(
        name=name,
        output_dir=output_dir,
        model=ModelConfig(path="m"),
        data=DataConfig(train=train, eval=held_out),
        train=TrainConfig(lr=lr),
        drill=DrillConfig(kill_at=kill_at),
        rollout=RolloutConfig(
            sampling=SamplingConfig(stop_token_ids=stop_ids), eval_sampling=eval_sampling, engines=EngineConfig(count=2)
        ),
    )
    table = tomllib.loads(dump_toml(config))
    assert RunConfig.model_validate(table) == config


def test_a_dumped_configuration_is_loaded_from_its_file(base: Path, tmp_path: Path) -> None:
    config = load_config([base], ["--drill.kill_at=0.5", "--data.train.0.options.a=1"])
    assert load_config([layer(tmp_path / "dumped.toml", dump_toml(config))]) == config


scalars = st.one_of(
    st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False), st.lists(st.integers() | st.text(), max_size=4)
)
tables = st.recursive(
    st.dictionaries(st.text(), scalars, max_size=4),
    lambda inner: st.dictionaries(st.text(), scalars | inner | st.lists(inner, min_size=1, max_size=3), max_size=4),
    max_leaves=12,
)


@given(tables)
def test_any_table_is_written_as_toml_that_reads_the_same(table: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(table)) == table


@given(st.floats(allow_nan=True) | st.text(alphabet="0123456789.eE+-_\n\r\"'[]{}=# abc", max_size=20))
def test_any_text_is_some_value(text: float | str) -> None:
    value = parse_value(str(text))
    assert value is not None
    if isinstance(text, float):
        assert value == text or math.isnan(value)


def test_what_toml_has_no_word_for_is_refused() -> None:
    with pytest.raises(TypeError, match="a set can't be written as TOML"):
        write_toml({"a": {1, 2}})
