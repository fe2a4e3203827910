"""Samples behind one another: each is seen by the model alone, and only attention is ever padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.batching import collate
from penstock.train.forward import refuse_other_heads, score_tokens
from penstock.train.loading import load_causal_lm
from penstock.train.packing import IMPLEMENTATION, SMALL, WASTE, Layout, _buckets, hidden_states, use_packing


def alone(model: Any, ids: list[int]) -> torch.Tensor:
    """One sample by itself, through transformers' own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        hidden: torch.Tensor = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    finally:
        model.set_attn_implementation(before)
    return hidden


def made(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**sizes, **heads, **options})
    return AutoModelForCausalLM.from_config(config).eval()


SAMPLES = [[3, 4, 5, 6, 7, 8, 9], [11, 12], [13], [14, 15, 16, 17, 18]]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("small", [0, 10_000])
def test_each_packed_sample_is_seen_alone(kind: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.packing.SMALL", small)
    model = made(kind)
    assert use_packing(model)
    layout = Layout.of([len(ids) for ids in SAMPLES])
    assert len(layout.buckets) == (1 if small else 3)
    found = hidden_states(model.base_model, torch.tensor([id for ids in SAMPLES for id in ids]), layout)
    expected = torch.cat([alone(model, ids) for ids in SAMPLES])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), [("mistral", {"sliding_window": 4}), ("gpt_neox", {})])
def test_models_that_attend_in_their_own_way_are_padded_and_see_the_same(kind: str, options: dict[str, Any]) -> None:
    model = made(kind, **options)
    packed = use_packing(model)
    assert packed == (kind == "gpt_neox")
    layout = Layout.of([len(ids) for ids in SAMPLES])
    found = hidden_states(model.base_model, torch.tensor([id for ids in SAMPLES for id in ids]), layout)
    expected = torch.cat([alone(model, ids) for ids in SAMPLES])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (IMPLEMENTATION, {}),
    "qwen2": (IMPLEMENTATION, {}),
    "qwen3": (IMPLEMENTATION, {"head_dim": 8}),
    "mistral": ("sdpa", {"sliding_window": 4}),
    "mixtral": (IMPLEMENTATION, {"num_local_experts": 4, "sliding_window": None}),
    "gpt2": (IMPLEMENTATION, {}),
    "gemma": (IMPLEMENTATION, {"head_dim": 8}),
    "gemma2": ("eager", {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("sdpa", GEMMA),
    "phi": (IMPLEMENTATION, {}),
    "cohere": (IMPLEMENTATION, {"logit_scale": 0.25}),
    "granite": (IMPLEMENTATION, {"logits_scaling": 4.0, "attention_multiplier": 0.5}),
    "nemotron": ("sdpa", {}),
    "bloom": ("eager", {"n_layer": 2, "n_head": 4}),
    "gpt_oss": ("eager", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
"""How each attends here (nemotron's backbone keeps from its layers where samples lie), and what makes it special."""


def saved(kind: str, folder: Path, **options: Any) -> Any:
    """A small model with weights large enough to tell, and norms and biases that are not those they begin with."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    model = made(kind, **{**special, **options})
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_causal_lm_says_of_packed_samples_what_it_says_of_each_alone(kind: str, tmp_path: Path) -> None:
    attends, options = ARCHITECTURES[kind]
    own = saved(kind, tmp_path, **options)
    ours = load_causal_lm(tmp_path)
    assert ours.config._attn_implementation == attends
    prompts, outputs = [[3, 4, 5], [6], [7, 8, 9, 10]], [[11, 12], [13, 14, 15, 16, 17, 18, 19], [20]]
    scores = score_tokens(ours, collate(prompts, outputs))
    scores.logprobs_BT.sum().backward()
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits = own(torch.tensor([prompt + output]), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1][torch.arange(len(output)), torch.tensor(output)]
        torch.testing.assert_close(scores.logprobs_BT[row, : len(output)], expected, rtol=1e-4, atol=1e-5)
        expected.sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), own.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_a_model_whose_logits_are_made_in_a_way_of_its_own_is_refused(model_folder: Path) -> None:
    model = load_causal_lm(model_folder)
    model.lm_head.register_forward_hook(lambda module, given, logits: logits + 0.1 * logits.roll(1, dims=-1))
    with pytest.raises(ValueError, match="LlamaForCausalLM makes its logits in a way that is not known here"):
        refuse_other_heads(model)


def test_gradients_are_those_of_the_samples_alone(model_folder: Path) -> None:
    packed, plain = load_causal_lm(model_folder), load_causal_lm(model_folder)
    assert packed.config._attn_implementation == IMPLEMENTATION
    prompts, outputs = [[5, 6, 7], [8], [9, 10]], [[11, 12], [13, 14, 15, 16], [17]]
    (score_tokens(packed, collate(prompts, outputs)).logprobs_BT.sum()).backward()
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = plain(torch.tensor([prompt + output]), use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        logprobs[torch.arange(len(output)), torch.tensor(output)].sum().backward()
    for mine, other in zip(packed.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=30))
def test_attention_wastes_little_however_lengths_differ(lengths: list[int]) -> None:
    buckets = _buckets(lengths)
    assert sorted(row for rows in buckets for row in rows) == list(range(len(lengths)))
    for rows in buckets:
        padded = len(rows) * max(lengths[row] for row in rows)
        assert padded <= max(SMALL, WASTE * sum(lengths[row] for row in rows))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_layout_has_each_token_once(lengths: list[int]) -> None:
    layout = Layout.of(lengths)
    places = [index[there] if there is not None else index.flatten() for index, there in layout.buckets]
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))
    assert layout.row_F.tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    assert layout.position_F.tolist() == [k for length in lengths for k in range(length)]
