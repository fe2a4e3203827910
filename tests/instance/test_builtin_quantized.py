"""The built-in engine serves a quantized version as the numbers that its codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from builtin_models import core_for, run_to_end, staged, start, tiny_model
from safetensors.torch import load_file

from penstock.errors import CheckpointError
from penstock.instance.builtin.checkpoint import tensors_of_staged
from penstock.instance.builtin.core import BuiltinCore, CoreOptions
from penstock.instance.weight_folder import WeightFolders
from penstock.weights.manifest import StagedWeights
from penstock.weights.plan import split_tensors
from penstock.weights.quantization import quantize
from penstock.wire import Sampling

MODEL = tiny_model("qwen3", tie_word_embeddings=False)


def quantized(scheme: str, dtype: torch.dtype = torch.float32) -> StagedWeights:
    weights = staged(MODEL.to(dtype))
    stream = b"".join(bytes(weights.tensors[entry.name]) for entry in weights.manifest.tensors)
    manifest, codes = quantize(weights.manifest, memoryview(stream), scheme)
    MODEL.float()
    return StagedWeights(manifest=manifest, tensors=split_tensors(manifest, codes))


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


@pytest.mark.parametrize(("scheme", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_server_gets_a_folder_of_codes_and_scales_that_says_what_they_are(
    tmp_path: Path, scheme: str, dtype: torch.dtype
) -> None:
    folders = WeightFolders([tmp_path])
    try:
        folder = folders.write(quantized(scheme, torch.bfloat16))
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
    finally:
        folders.close()
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert (tensors[matrix].dtype, tensors[matrix + "_scale"].shape) == (dtype, (80, 1))
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["dtype"] == "bfloat16"


def test_codes_without_their_scales_are_refused_by_name() -> None:
    weights = quantized("int8")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    entries = tuple(entry for entry in weights.manifest.tensors if entry.name != name)
    lacking = StagedWeights(msgspec.structs.replace(weights.manifest, tensors=entries), weights.tensors)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is quantized and comes without"):
        tensors_of_staged(lacking)
