"""Engines serve a quantized version as the numbers that its codes stand for, or servers as codes where told so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from builtin_models import core_for, run_to_end, staged, start, tiny_model
from safetensors.torch import load_file

from penstock.errors import CheckpointError, EngineError
from penstock.instance import weight_folder
from penstock.instance.builtin.checkpoint import tensors_of_staged
from penstock.instance.builtin.core import BuiltinCore, CoreOptions
from penstock.instance.weight_folder import WeightFolders
from penstock.weights.manifest import StagedWeights
from penstock.weights.plan import split_tensors
from penstock.weights.quantization import quantize
from penstock.wire import Sampling

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MODEL = tiny_model("qwen3", tie_word_embeddings=False)


def quantized(scheme: str, dtype: torch.dtype = torch.float32) -> StagedWeights:
    weights = staged(MODEL.to(dtype))
    stream = b"".join(bytes(weights.tensors[entry.name]) for entry in weights.manifest.tensors)
    manifest, codes = quantize(weights.manifest, memoryview(stream), scheme)
    MODEL.float()
    return StagedWeights(manifest=manifest, tensors=split_tensors(manifest, codes))


def written(parent: Path, weights: StagedWeights, codes: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors and the config.json of the folder that a server is given."""
    folders = WeightFolders([parent], codes=codes)
    try:
        folder = folders.write(weights)
        return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    finally:
        folders.close()


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_an_engine_serves_what_the_codes_stand_for(scheme: str) -> None:
    weights = quantized(scheme)
    core = BuiltinCore(CoreOptions(device=torch.device("cpu"), max_context_tokens=96))
    core.swap(core.prepare(weights))
    jobs = [start(0, [5, 6, 7], Sampling(max_new_tokens=12, temperature=0.0))]
    came = run_to_end(core, jobs)
    twin = tiny_model("qwen3", tie_word_embeddings=False)
    twin.load_state_dict(tensors_of_staged(weights))
    assert came.tokens == run_to_end(core_for(twin), jobs).tokens
    original = twin.state_dict()["lm_head.weight"]
    assert torch.equal(original, MODEL.state_dict()["lm_head.weight"])
    matrix = "model.layers.0.mlp.up_proj.weight"
    off = (twin.state_dict()[matrix] - MODEL.state_dict()[matrix]).abs().max()
    assert 0 < off < MODEL.state_dict()[matrix].abs().max() / 14


def test_a_quantized_bfloat16_model_is_served_in_bfloat16() -> None:
    tensors = tensors_of_staged(quantized("int8", torch.bfloat16))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_server_gets_a_folder_of_the_numbers_that_the_codes_stand_for(
    tmp_path: Path, scheme: str, dtype: torch.dtype
) -> None:
    weights = quantized(scheme, dtype)
    tensors, config = written(tmp_path, weights)
    served = tensors_of_staged(weights)
    assert tensors.keys() == served.keys() == MODEL.state_dict().keys()
    assert all(torch.equal(tensors[name], served[name]) for name in served)
    # As PyTorch rounds them.
    name = "model.layers.0.mlp.up_proj.weight"
    codes = torch.frombuffer(bytearray(weights.tensors[name]), dtype=CODES[scheme]).view(80, 48).float()
    scales = torch.frombuffer(bytearray(weights.tensors[name + "_scale"]), dtype=torch.float32)
    assert torch.equal(tensors[name], (codes * scales[:, None]).to(dtype))
    assert "quantization_config" not in config
    assert config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_server_that_computes_with_codes_gets_a_folder_of_codes_and_scales_that_says_what_they_are(
    tmp_path: Path, scheme: str
) -> None:
    tensors, config = written(tmp_path, quantized(scheme, torch.bfloat16), codes=True)
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert (tensors[matrix].dtype, tensors[matrix + "_scale"].shape) == (CODES[scheme], (80, 1))
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["dtype"] == "bfloat16"


def test_there_must_be_room_for_the_numbers_and_not_for_the_codes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = quantized("int8")
    monkeypatch.setattr(weight_folder, "_room", lambda parent: int(weights.manifest.raw_nbytes * 1.5))
    with pytest.raises(EngineError, match="MiB left"):
        written(tmp_path, weights)
    written(tmp_path, weights, codes=True)


def test_codes_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    weights = quantized("int8")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    entries = tuple(entry for entry in weights.manifest.tensors if entry.name != name)
    lacking = StagedWeights(msgspec.structs.replace(weights.manifest, tensors=entries), weights.tensors)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is quantized and comes without"):
        tensors_of_staged(lacking)
    with pytest.raises(EngineError, match=r"up_proj.weight is quantized and comes without"):
        written(tmp_path, lacking)
