"""Servers that hold quantized weights, and those that hold floats, are given their own kind and no other."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from stand_in_server import VOCAB, StandIn
from test_served_engine import engine_at, weights

from penstock.errors import EngineError
from penstock.instance.weight_folder import WeightFolders
from penstock.weights.manifest import StagedWeights, TensorEntry
from penstock.weights.quantization import quantized_entries, with_quantization

MATRIX = TensorEntry(name="model.layers.0.mlp.up_proj.weight", dtype="F32", shape=(4, 2), nbytes=32, xxh3=0)


def quantized(version: int, scheme: str) -> StagedWeights:
    plain = weights(version)
    tensors = (*plain.manifest.tensors, *quantized_entries([MATRIX], scheme))
    manifest = msgspec.structs.replace(
        plain.manifest, tensors=tensors, config_json=with_quantization(plain.manifest.config_json, scheme)
    )
    return StagedWeights(manifest, {entry.name: memoryview(bytes(entry.nbytes)) for entry in tensors})


def model(folder: Path, scheme: str) -> Path:
    config = json.dumps({"model_type": "llama", "vocab_size": VOCAB})
    (folder / "config.json").write_text(with_quantization(config, scheme) if scheme else config)
    return folder


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("codes", [False, True])
async def test_a_server_takes_version_after_version_of_its_kind(tmp_path: Path, place: Path, codes: bool) -> None:
    async with StandIn(model(tmp_path, "fp8" if codes else "")) as server:
        engine = engine_at(server.url, place, folders=WeightFolders([place], codes=codes))
        configs = []
        server.load_fails = lambda folder: configs.append(json.loads((Path(folder) / "config.json").read_text()))
        for version in range(3):
            await engine.update_weights(quantized(version, "fp8"))
        await engine.close()
    assert ["quantization_config" in config for config in configs] == [codes] * 3


@pytest.mark.parametrize(("held", "codes"), [("", True), ("int8", True), ("fp8", False), ("int8", False)])
async def test_a_server_that_holds_another_kind_is_refused_by_name(
    tmp_path: Path, place: Path, held: str, codes: bool
) -> None:
    async with StandIn(model(tmp_path, held)) as server:
        engine = engine_at(server.url, place, folders=WeightFolders([place], codes=codes))
        kinds = {"": "floats", "int8": "compressed-tensors int-quantized", "fp8": "compressed-tensors float-quantized"}
        expected = f"as {kinds[held]} and is to be given {kinds['fp8' if codes else '']}"
        with pytest.raises(EngineError, match=expected):
            await engine.update_weights(quantized(0, "fp8"))
        await engine.close()
        assert server.folders == []


async def test_a_server_on_somebody_elses_quantization_is_not_given_floats(tmp_path: Path, place: Path) -> None:
    config = {"model_type": "llama", "vocab_size": VOCAB, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with StandIn(tmp_path) as server:
        engine = engine_at(server.url, place)
        with pytest.raises(EngineError, match="as awq and is to be given floats"):
            await engine.update_weights(weights(0))
        await engine.close()


async def test_int8_codes_on_a_cpu_are_refused_by_vllm(tmp_path: Path, place: Path) -> None:
    async with StandIn(model(tmp_path, "int8")) as server:
        server.device, server.chunked_prefill = "cpu", False
        engine = engine_at(server.url, place, folders=WeightFolders([place], codes=True))
        with pytest.raises(EngineError, match="NaN after the next"):
            await engine.update_weights(quantized(0, "int8"))
        await engine.close()
