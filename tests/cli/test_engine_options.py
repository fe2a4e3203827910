"""tensor_parallel reaches the engine in its own words; so does what a server is to make of quantized weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.cli import join
from penstock.cli.engine_server import check_server_arguments
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.processes import LocalProcesses


def config(weights: dict[str, Any], **engines: Any) -> RunConfig:
    data = {"train": [{"kind": "jsonl", "path": "q"}]}
    rollout = {"engines": engines}
    return RunConfig.model_validate({"model": {"path": "m"}, "data": data, "rollout": rollout, "weights": weights})


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, weights: dict[str, Any], **engines: Any) -> list[str]:
    """The command line of an engine of this machine."""
    seen: list[list[str]] = []

    def spawn(self: LocalProcesses, name: str, arguments: list[str]) -> Any:
        seen.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(LocalProcesses, "_spawn", spawn)
    monkeypatch.setattr("penstock.train.processes._check_program", lambda _: None)
    with pytest.raises(InterruptedError):
        LocalProcesses(config(weights, **engines), folder, "token", lambda _: None).start_engine("http://m:1", "start")
    return seen[0]


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    return parser.parse_args(join.take_words(arguments, parser))


@pytest.mark.parametrize(
    ("engines", "option"),
    [
        ({"tensor_parallel": 2}, "--engine.tensor_parallel=2"),
        ({"tensor_parallel": 4, "kind": "vllm"}, "--engine.tensor-parallel-size=4"),
        ({"tensor_parallel": 2, "kind": "sglang"}, "--engine.tensor-parallel-size=2"),
    ],
)
def test_the_runs_own_engines_are_told_in_their_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: dict[str, Any], option: str
) -> None:
    arguments = started(monkeypatch, tmp_path, {}, **engines)
    assert option in arguments
    check_server_arguments(parsed(arguments[1:]))
    assert not [word for word in started(monkeypatch, tmp_path, {}) if "tensor" in word]


def test_the_built_in_engine_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # Put back afterwards: the engine sets them.
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr("penstock.instance.builtin.engine.BuiltinEngine", lambda **options: made.update(options))
    join.build_engine(parsed(["--manager", "http://m:1", "--threads", "2", "--engine.tensor_parallel=2"]), None)
    assert made["tensor_parallel"] == 2


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["vllm", "--engine.tensor-parallel-size=4"], 4),
        (["vllm", "--engine.tensor_parallel_size=4"], 4),
        (["sglang", "--engine.tp-size=2"], 2),
        (["sglang", "--engine.tp=2"], 2),
        (["vllm", "--engine.tensor-parallel-size=two"], 1),
        (["vllm"], 1),
    ],
)
def test_the_engine_of_a_server_knows_what_ranks_it_is_told_to_have(
    monkeypatch: pytest.MonkeyPatch, options: list[str], ranks: int
) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "penstock.instance.served.ServedEngine", lambda *_, tensor_parallel, **__: made.append(tensor_parallel)
    )
    command = "--engine-command=true {model} {host} {port}"
    join.build_engine(parsed(["--manager", "http://m:1", "--threads", "2", command, "--engine", *options]), None)
    assert made == [ranks]


@pytest.mark.parametrize("value", ["0", "two", ""])
def test_a_number_of_ranks_that_is_none_is_refused(value: str) -> None:
    args = parsed(["--manager", "http://m:1", f"--engine.tensor_parallel={value}"])
    with pytest.raises(ConfigError, match="no number of processes"):
        check_server_arguments(args)


def test_a_paced_engine_has_no_ranks() -> None:
    with pytest.raises(ValidationError, match="no tensor_parallel"):
        config({}, tensor_parallel=2, tokens_per_s=10)
    args = parsed(["--manager", "http://m:1", "--engine", "paced", "--engine.tensor_parallel=2"])
    with pytest.raises(ConfigError, match="for an engine server"):
        check_server_arguments(args)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("codes", [False, True])
def test_a_server_gets_quantized_weights_in_full_or_as_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, codec: str, codes: bool
) -> None:
    arguments = started(monkeypatch, tmp_path, {"codec": codec}, kind=kind, codes=codes)
    assert arguments[arguments.index("--weights-codec") + 1] == codec
    args = parsed([*arguments[1:], f"--engine-folder={tmp_path}", "--engine-command=true {model} {host} {port}"])
    check_server_arguments(args)
    made: list[bool] = []
    monkeypatch.setattr("penstock.instance.weight_folder.WeightFolders", lambda *_, codes, **__: made.append(codes))
    monkeypatch.setattr("penstock.instance.served.ServedEngine", lambda *_, **__: None)
    join.build_engine(args, None)
    assert made == [codes]


@pytest.mark.parametrize(("kind", "codec"), [("builtin", "int8"), ("vllm", "auto"), ("sglang", "delta")])
def test_codes_are_refused_where_there_are_none_to_compute_with(kind: str, codec: str) -> None:
    args = parsed(["--manager", "http://m:1", "--engine", kind, "--weights-codec", codec, "--engine-codes"])
    with pytest.raises(ConfigError, match="--engine-codes is for an engine server with quantized weights"):
        check_server_arguments(args)
    with pytest.raises(ValidationError, match="no codes to compute with"):
        config({"codec": codec}, kind=kind, codes=True)
