"""What a Hugging Face config.json asks for, and which tensors it must come with.

Decides whether the built-in engine can run a model: `llama`, `qwen2` and `qwen3` decoders, and of those only options
that the decoder computes. Anything else is refused by name, because an option that is ignored gives a model that
runs and is wrong. Knows nothing of tensors' contents, devices or folders, and imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import EngineError, WeightError
from penstock.weights.quantization import scheme_of

MODEL_TYPES = ("llama", "qwen2", "qwen3")

_ROPE_TYPES = ("default", "linear", "llama3")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base `theta` and how its frequencies are scaled."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one decoder. `heads` are query heads; each of `kv_heads` serves `heads // kv_heads` of them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    context_tokens: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Keys and values of one position in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * item_bytes

    def share_of(self, ranks: int) -> ModelSpec:
        """What one of `ranks` tensor-parallel ranks computes: the same model with fewer heads, neurons and tokens.

        With fewer key/value heads than ranks, each rank has one, which others have too. The vocabulary is rounded up.
        Raises EngineError for a model that can't be split so.
        """
        if self.heads % ranks or self.intermediate_size % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise EngineError(
                f"a model with {self.heads} heads, {self.kv_heads} key/value heads and an intermediate size of "
                f"{self.intermediate_size} can't be split on tensor_parallel={ranks} ranks"
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            intermediate_size=self.intermediate_size // ranks,
            vocab_size=-(-self.vocab_size // ranks),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold, by its Hugging Face name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (width, hidden)
                if self.qkv_bias:
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_width)
            if self.out_bias:
                shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def is_redundant(self, name: str) -> bool:
        """True for tensors that some checkpoints hold and this model does not need."""
        return (name == "lm_head.weight" and self.tied_embeddings) or name.endswith(_IGNORED_SUFFIXES)


def parse_model_spec(config_json: str) -> ModelSpec:
    """Reads a Hugging Face config.json; raises EngineError naming the model, key or option that can't be run."""
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise EngineError(f"the model's config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"the model's config.json holds a {type(config).__name__}; expected an object")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise EngineError(f"model_type {model_type!r} is not one the built-in engine runs: {', '.join(MODEL_TYPES)}")
    _refuse_unsupported(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise EngineError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    head_dim = _count(config, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise EngineError(f"head_dim={head_dim} is odd; rotary embeddings turn pairs")
    context_tokens = _count(config, "max_position_embeddings", 2048 if model_type == "llama" else 32768)
    attention_bias = bool(config.get("attention_bias", False)) and model_type != "qwen2"
    return ModelSpec(
        model_type=model_type,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        context_tokens=context_tokens,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        rope=_rope(config, context_tokens),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise EngineError(f"hidden_act={activation!r} is not supported; the built-in engine computes 'silu'")
    layer_types = config.get("layer_types") or []
    strange = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if strange or (config.get("use_sliding_window") and not layer_types):
        what = f"layer_types holds {', '.join(strange)}" if strange else "use_sliding_window is on"
        raise EngineError(f"sliding-window attention is not supported by the built-in engine: {what}")
    value = config.get("partial_rotary_factor")
    if value is not None and value != 1.0:
        raise EngineError(f"partial_rotary_factor={value!r} is not supported by the built-in engine")
    try:
        scheme_of(config)
    except WeightError as error:
        raise EngineError(f"quantization_config is not supported by the built-in engine: {error}") from error


def _rope(config: Mapping[str, Any], context_tokens: int) -> Rope:
    """Reads `rope_theta` with `rope_scaling`, or the `rope_parameters` that transformers 5 writes for both."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise EngineError(f"rope_scaling={scaling!r} is not an object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise EngineError(f"rope type {kind!r} is not one the built-in engine computes: {', '.join(_ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"partial_rotary_factor={scaling['partial_rotary_factor']!r} is not supported")
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta=theta)
    factor = _number(scaling, "factor")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise EngineError(f"rope type llama3 has high_freq_factor={high} not above low_freq_factor={low}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=_count(scaling, "original_max_position_embeddings", context_tokens),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"config.json: {key} is {value!r}; expected a whole number above 0")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise EngineError(f"config.json: {key} is {value!r}; expected a number above 0")
    return float(value)
