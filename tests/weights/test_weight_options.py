"""What a run's configuration says of weights reaches its engines, and what makes no sense is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from penstock.cli import join
from penstock.config.run import RunConfig
from penstock.train.processes import LocalProcesses


def joined(folder: Path, **weights: object) -> argparse.Namespace:
    """The options that an engine of this machine is started with."""
    data = {"train": [{"kind": "jsonl", "path": "q"}]}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": data, "weights": weights})
    arguments = LocalProcesses(config, folder, "token", lambda _: None)._weight_arguments("engine-0")
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    return parser.parse_args(["--manager", "http://m:1", *arguments])


def test_an_engine_of_a_run_that_says_nothing_measures_keeps_its_base_and_passes_nothing_on(tmp_path: Path) -> None:
    args = joined(tmp_path)
    assert (args.weights_codec, args.no_weights_base, args.relay_port, args.weights_folder) == (
        "auto",
        False,
        None,
        None,
    )


def test_each_option_of_the_weights_section_reaches_the_engines(tmp_path: Path) -> None:
    for codec in ("delta", "zipnn", "int8", "fp8"):
        assert joined(tmp_path, codec=codec).weights_codec == codec
    assert joined(tmp_path, keep_base=False).no_weights_base
    assert joined(tmp_path, relay=True).relay_port == 0
    assert joined(tmp_path, resume=True).weights_folder == str(tmp_path / "weights" / "engine-0")
    assert joined(tmp_path, connections=5).connections == 5
    assert joined(tmp_path).weights_ways == ("shm",)
    assert joined(tmp_path, ways=["mooncake", "shm"]).weights_ways == ("mooncake", "shm")
    assert joined(tmp_path, ways=[]).weights_ways == ()


def test_a_way_that_nobody_knows_is_refused() -> None:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--manager", "http://m:1", "--weights-ways", "pigeon"])


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_relay_port_that_is_none_is_refused(port: str) -> None:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--manager", "http://m:1", "--relay-port", port])
