"""The decoder against transformers' own forward pass, and what is refused before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builtin_models import COMMON, VOCAB, core_for, fresh_logprobs, run_to_end, staged, start, tiny_model

from penstock.errors import CheckpointError, EngineError
from penstock.instance.builtin.checkpoint import read_folder, serving_dtype, stage_folder, tensors_of_staged
from penstock.instance.builtin.core import BuiltinCore, CoreOptions
from penstock.instance.builtin.kv_cache import KVCache, plan_cache
from penstock.instance.builtin.model import Decoder, build_weights
from penstock.instance.builtin.spec import ModelSpec, parse_model_spec
from penstock.weights.manifest import StagedWeights
from penstock.wire import Sampling

CPU = torch.device("cpu")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied, no groups": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama one kv head, odd head_dim": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 10},
    "llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 tied, biases": {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
}


def decoder_for(model: Any, slots: int = 4, dtype: torch.dtype = torch.float32) -> Decoder:
    weights = staged(model)
    spec = parse_model_spec(weights.manifest.config_json)
    cache = KVCache(spec, plan_cache(spec, dtype.itemsize, slots, 96, 64), dtype, CPU)
    return Decoder(spec, build_weights(spec, tensors_of_staged(weights), dtype, CPU), cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_give_the_logits_of_transformers(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    decoder = decoder_for(model)
    torch.manual_seed(1)
    rows = [torch.randint(0, VOCAB, (length,)).tolist() for length in (70, 3, 41)]
    prompt_lengths = [60, 1, 29]
    padded = torch.tensor([row[:n] + [0] * (60 - n) for row, n in zip(rows, prompt_lengths, strict=True)])
    with torch.inference_mode():
        expected = [model(torch.tensor([row])).logits[0] for row in rows]
        logits = decoder.prefill(padded, torch.tensor(prompt_lengths), 0, None, 3)
        for row, length in enumerate(prompt_lengths):
            torch.testing.assert_close(logits[row], expected[row][length - 1], atol=2e-4, rtol=1e-4)
        for step in range(2):
            positions = torch.tensor(prompt_lengths) + step
            ids = torch.tensor([row[n + step] for row, n in zip(rows, prompt_lengths, strict=True)])
            logits = decoder.decode(ids, positions, 64)
            for row, position in enumerate(positions.tolist()):
                torch.testing.assert_close(logits[row], expected[row][position], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_is_that_of_transformers_generate(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3], [50]]
    starts = [start(i, prompt, Sampling(max_new_tokens=40, temperature=0)) for i, prompt in enumerate(prompts)]
    outputs = run_to_end(core_for(model), starts)
    for lease, prompt in enumerate(prompts):
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert outputs.tokens[lease] == generated[0, len(prompt) :].tolist()
        fresh = fresh_logprobs(model, prompt, outputs.tokens[lease])
        torch.testing.assert_close(torch.tensor(outputs.logprobs[lease]), fresh, atol=1e-4, rtol=0)


def test_bfloat16_stays_near_the_float32_model() -> None:
    model = tiny_model("qwen3", initializer_range=0.05)
    core = core_for(model, dtype=torch.bfloat16)
    outputs = run_to_end(core, [start(0, [5, 6, 7], Sampling(max_new_tokens=24))])
    assert core.dtype is torch.bfloat16
    fresh = fresh_logprobs(model, [5, 6, 7], outputs.tokens[0])
    torch.testing.assert_close(torch.tensor(outputs.logprobs[0]), fresh, atol=0.1, rtol=0)


def test_weights_in_bfloat16_are_served_in_bfloat16_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    model = tiny_model("qwen2").to(torch.bfloat16)
    assert core_for(model).dtype is torch.bfloat16
    assert core_for(model, dtype=torch.float32).dtype is torch.float32
    assert core_for(model.to(torch.float16)).dtype is torch.float32


@pytest.mark.parametrize(
    ("processor", "capability", "dtype"),
    [
        ("x86_64", "AVX2", torch.float32),
        ("x86_64", "DEFAULT", torch.float32),
        ("x86_64", "AVX512", torch.bfloat16),
        ("aarch64", "DEFAULT", torch.bfloat16),
    ],
)
def test_a_processor_that_is_slow_in_bfloat16_serves_such_weights_in_float32(
    monkeypatch: pytest.MonkeyPatch, processor: str, capability: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    model = tiny_model("qwen2").to(torch.bfloat16)
    core = core_for(model)
    assert core.dtype is dtype
    assert core_for(model, dtype=torch.bfloat16).dtype is torch.bfloat16
    outputs = run_to_end(core, [start(0, [5, 6, 7], Sampling(max_new_tokens=16))])
    # The same weights in a model that never was in bfloat16, whose rotary frequencies are whole.
    whole = tiny_model("qwen2")
    whole.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    fresh = fresh_logprobs(whole, [5, 6, 7], outputs.tokens[0])
    allowed = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(torch.tensor(outputs.logprobs[0]), fresh, atol=allowed, rtol=0)
    tensors = model.state_dict().values()
    assert serving_dtype(tensors, torch.device("cuda"), True) is torch.bfloat16
    # A cache with room for one sequence in bfloat16 alone.
    tight = {"max_context_tokens": 96, "max_running": 1}
    one = plan_cache(core.spec, 2, 1, 96, 1024).nbytes if core.spec else 0
    monkeypatch.setattr("penstock.instance.builtin.kv_cache.MIB", one)
    assert core_for(model, kv_cache_mib=1, **tight).dtype is torch.bfloat16
    assert core_for(model, kv_cache_mib=2, **tight).dtype is dtype


def spec_of(**options: Any) -> ModelSpec:
    return parse_model_spec(json.dumps({"model_type": "llama"} | COMMON | options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": "yarn"}, "not an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        spec_of(**options)


@pytest.mark.parametrize("text", ["not json", "[1, 2]"])
def test_a_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        parse_model_spec(text)


def test_rope_is_read_from_the_old_and_the_new_form_of_a_config() -> None:
    old = spec_of(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = spec_of(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0})
    assert old.rope == new.rope
    assert spec_of(rope_theta=500.0).rope == spec_of(rope_parameters={"rope_theta": 500.0}).rope


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_serves_the_same_as_the_version_it_was_saved_from(tmp_path: Path, shards: int) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="1GB" if shards == 1 else "60KB")
    assert (tmp_path / "model.safetensors").exists() is (shards == 1)
    spec, tensors = read_folder(tmp_path)
    weights = tensors_of_staged(staged(model))
    assert spec == parse_model_spec(model.config.to_json_string())
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    core = BuiltinCore(CoreOptions(device=CPU, max_context_tokens=96))
    core.swap(core.prepare(stage_folder(tmp_path, 7)))
    job = start(0, [1, 2, 3], Sampling(max_new_tokens=8))
    assert core.version == 7
    assert run_to_end(core, [job]).tokens == run_to_end(core_for(model), [job]).tokens


def test_a_folder_with_missing_or_broken_files_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        read_folder(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_folder(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_folder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "shard-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors is missing"):
        read_folder(tmp_path)
    (tmp_path / "shard-1.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"model.other.weight": "shard-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.other\.weight"):
        read_folder(tmp_path)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    model = tiny_model("llama")
    weights = staged(model)
    spec = parse_model_spec(weights.manifest.config_json)
    name = "model.layers.1.mlp.up_proj.weight"

    def build(change: dict[str, torch.Tensor | None]) -> None:
        tensors = tensors_of_staged(weights) | change
        build_weights(spec, {key: value for key, value in tensors.items() if value is not None}, torch.float32, CPU)

    build({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        build({name: None})
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[3, 5\]"):
        build({name: torch.ones(3, 5)})
    with pytest.raises(CheckpointError, match=f"tensor {name} is torch.int8"):
        build({name: torch.ones(80, 48, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias has no place"):
        build({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)})


def test_a_version_with_bytes_missing_or_cut_is_refused_by_tensor() -> None:
    weights = staged(tiny_model("llama"))
    name = "model.norm.weight"
    cut = dict(weights.tensors) | {name: weights.tensors[name][:-4]}
    with pytest.raises(CheckpointError, match=rf"tensor {name} has 188 bytes; F32 of shape \[48\] takes 192"):
        tensors_of_staged(StagedWeights(weights.manifest, cut))
    missing = {key: value for key, value in weights.tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"lacks the bytes of tensor {name}"):
        tensors_of_staged(StagedWeights(weights.manifest, missing))
