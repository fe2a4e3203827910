"""Settings of the cluster and of rewards, under their own names and under those that users bring along."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError

LEAST = 'model.path = "m"\n[[data.train]]\nkind = "jsonl"\npath = "a.jsonl"\n'


@pytest.fixture
def load(tmp_path: Path) -> object:
    def load(*overrides: str, table: str = "") -> RunConfig:
        path = tmp_path / "run.toml"
        path.write_text(LEAST + table)
        return load_config([path], list(overrides))

    return load


@pytest.mark.parametrize(
    ("given", "execute_mode", "threads", "mode", "hint"),
    [
        ("--trainer.execute_mode=all_multithread", "all_multithread", 8, "inline", "called cluster.execute_mode here"),
        ("--trainer.execute_thread_pool_size=3", "all", 3, "inline", "called cluster.execute_threads here"),
        ("--reward_model.launch_reward_fn_async=true", "all", 8, "process", 'write reward.mode = "process"'),
        ("--reward.launch_reward_fn_sub_thread", "all", 8, "thread", 'write reward.mode = "thread"'),
        ("--reward.launch_reward_fn_async=false", "all", 8, "inline", "says nothing here"),
        ("--cluster.execute_mode=RANK_ZERO", "rank_zero", 8, "inline", ""),
        ("--cluster.execute_threads=5", "all", 5, "inline", ""),
        ("--reward.mode=sync", "all", 8, "sync", ""),
    ],
)
def test_names_of_elsewhere_are_taken_with_a_hint(  # type: ignore[no-untyped-def]
    load, caplog: pytest.LogCaptureFixture, given: str, execute_mode: str, threads: int, mode: str, hint: str
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(given)
    assert (config.cluster.execute_mode, config.cluster.execute_threads) == (execute_mode, threads)
    assert config.reward.mode == mode
    assert hint in caplog.text
    assert bool(caplog.text) == bool(hint)


def test_old_names_in_a_file_are_taken_too(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    assert load(table='[trainer]\nexecute_mode = "all_multithread"\n').cluster.execute_mode == "all_multithread"
    assert "trainer.execute_mode is called cluster.execute_mode here" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cluster.execute_mode=all_multi"], "no execute mode 'all_multi'; .*are: all, all_multithread, rank_zero"),
        (["--trainer.execute_mode=al"], "there are: all, all_multithread, rank_zero"),
        (["--trainer.execute_mode=all", "--cluster.execute_mode=all"], "are both given; cluster.execute_mode is the"),
        (
            ["--reward.launch_reward_fn_async", "--reward.launch_reward_fn_sub_thread"],
            "launch_reward_fn_async and reward.launch_reward_fn_sub_thread exclude each other; set reward.mode",
        ),
        (["--reward.launch_reward_fn_async=1"], "launch_reward_fn_async = 1: must be true or false"),
        (["--reward.launch_reward_fn_async", "--reward.mode=thread"], "and reward.mode are both given"),
        (["--trainer.steps=3"], "trainer = .*there is no such key"),
        (["--cluster.execute_threads=0"], "must be"),
    ],
)
def test_what_makes_no_sense_is_refused(load, given: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        load(*given)
