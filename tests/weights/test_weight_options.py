"""What a run's configuration says of weights reaches its engines, and what makes no sense is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from penstock.cli import join
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
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
    assert joined(tmp_path, codec="delta").weights_codec == "delta"
    assert joined(tmp_path, keep_base=False).no_weights_base
    assert joined(tmp_path, relay=True).relay_port == 0
    assert joined(tmp_path, resume=True).weights_folder == str(tmp_path / "weights" / "engine-0")
    assert joined(tmp_path, connections=5).connections == 5


async def test_passing_weights_on_is_refused_where_the_run_speaks_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "tls_context", lambda _: object())
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    args = parser.parse_args(["--manager", "https://m:1", "--relay-port", "0"])
    with pytest.raises(ConfigError, match="without TLS"):
        await join._Machine(args, "token")._session()


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_relay_port_that_is_none_is_refused(port: str) -> None:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--manager", "http://m:1", "--relay-port", port])
