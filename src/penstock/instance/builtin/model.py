"""The decoder: Llama, Qwen2 and Qwen3 as few tensor operations as they take.

Computes logits and fills the KV cache; decides nothing about which sequences run. On a CPU with a small model the
number of operations is the cost, so projections that share an input are fused, keys and values of a step are written
by one index, and rotary embeddings are one complex multiplication in place: the rows of the query and key projections
are reordered at load so that the two halves of a rotated pair are neighbours, which leaves every q.k product the same.

Legend: B rows (sequences), T tokens of a row, C hidden size, H query heads, K key/value heads, G = H / K,
D head_dim, V vocabulary, L attended positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from penstock.instance.builtin.checkpoint import Tensors, check_tensors
from penstock.instance.builtin.kv_cache import KVCache
from penstock.instance.builtin.spec import ModelSpec, Rope

if TYPE_CHECKING:
    from penstock.instance.builtin.rank_group import RankGroup


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [in, out], as `addmm` takes them; absent biases and norms are None."""

    norm_in_C: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm_HD: torch.Tensor | None
    """Per-head norm weights of the H query heads, then the K key heads."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_post_C: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights of one version in the decoder's own layout; owns its memory."""

    embedding_VC: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_C: torch.Tensor
    head_CV: torch.Tensor
    """A view of the embedding where the two are tied."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once, in a fixed order."""
        yield self.embedding_VC
        for layer in self.layers:
            yield from (tensor for tensor in _slots(layer) if tensor is not None)
        yield self.norm_C
        if self.head_CV.data_ptr() != self.embedding_VC.data_ptr():
            yield self.head_CV

    def to(self, device: torch.device) -> DecoderWeights:
        """The same weights on `device`; these themselves if they are there already."""
        if self.embedding_VC.device == device:
            return self
        embedding = self.embedding_VC.to(device)
        tied = self.head_CV.data_ptr() == self.embedding_VC.data_ptr()
        layers = tuple(
            LayerWeights(*(None if tensor is None else tensor.to(device) for tensor in _slots(layer)))  # type: ignore[arg-type]
            for layer in self.layers
        )
        return DecoderWeights(
            embedding, layers, self.norm_C.to(device), embedding.t() if tied else self.head_CV.to(device)
        )


def _slots(layer: LayerWeights) -> list[torch.Tensor | None]:
    return [getattr(layer, item.name) for item in fields(layer)]


def build_weights(spec: ModelSpec, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Lays Hugging Face tensors out for the decoder; raises CheckpointError naming a tensor that does not fit."""
    check_tensors(spec, tensors)

    def take(name: str) -> torch.Tensor:
        return tensors[name].to(dtype)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, copy=True).contiguous()

    def layer(prefix: str) -> LayerWeights:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def qkv(kind: str) -> torch.Tensor:
            parts = [take(f"{attention}{name}_proj.{kind}") for name in "qkv"]
            return torch.cat([_pair(parts[0], spec), _pair(parts[1], spec), parts[2]])

        def gate_up(kind: str) -> torch.Tensor:
            return torch.cat([take(f"{mlp}gate_proj.{kind}"), take(f"{mlp}up_proj.{kind}")])

        qk_norm = None
        if spec.qk_norm:
            q_norm, k_norm = (_pair(take(f"{attention}{name}_norm.weight"), spec) for name in "qk")
            qk_norm = own(torch.cat([q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)]))
        return LayerWeights(
            norm_in_C=own(take(prefix + "input_layernorm.weight")),
            qkv=own(qkv("weight")).t(),
            qkv_bias=own(qkv("bias")) if spec.qkv_bias else None,
            qk_norm_HD=qk_norm,
            out=own(_group_major(take(attention + "o_proj.weight"), spec)).t(),
            out_bias=own(take(attention + "o_proj.bias")) if spec.out_bias else None,
            norm_post_C=own(take(prefix + "post_attention_layernorm.weight")),
            gate_up=own(gate_up("weight")).t(),
            gate_up_bias=own(gate_up("bias")) if spec.mlp_bias else None,
            down=own(take(mlp + "down_proj.weight")).t(),
            down_bias=own(take(mlp + "down_proj.bias")) if spec.mlp_bias else None,
        )

    embedding = own(take("model.embed_tokens.weight"))
    head = embedding if spec.tied_embeddings else own(take("lm_head.weight"))
    layers = tuple(layer(f"model.layers.{number}.") for number in range(spec.layers))
    return DecoderWeights(embedding, layers, own(take("model.norm.weight")), head.t())


def _pair(rows: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders each head's D rows from (first half, second half) to neighbouring pairs."""
    halves = rows.view(-1, 2, spec.head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _group_major(out_weight: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders the output projection's inputs from (kv head, group) to (group, kv head).

    Decoding attends with a kv head's G queries as the query axis, and the kernel's result is then group-major.
    """
    hidden, groups = out_weight.shape[0], spec.heads // spec.kv_heads
    split = out_weight.view(hidden, spec.kv_heads, groups, spec.head_dim)
    return split.transpose(1, 2).reshape(hidden, -1)


def rotation_table(rope: Rope, head_dim: int, positions: int) -> torch.Tensor:
    """Unit complex numbers [positions, D/2] by which neighbouring pairs are turned.

    Computed in float32 like the models' reference code, so that long positions round the same. Source: Su et al.,
    "RoFormer", 2021, equation 34; scalings `linear` and `llama3` as in transformers' modeling_rope_utils.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        context, low, high = rope.original_context_tokens, rope.low_freq_factor, rope.high_freq_factor
        blend = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin())


class Decoder:
    """Forward passes over the KV cache with the weights of one version at a time.

    With a group of ranks, `spec`, weights and cache are one rank's share of the model (`spec.share_of`), and all ranks
    make the same passes: what attention and MLP add to the residual is summed over the ranks, logits are joined.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache, group: RankGroup | None = None, vocab: int = 0
    ) -> None:
        """`vocab`: of the whole model, where a rank has a part of it."""
        self.spec = spec
        self._group = group
        self.vocab_size = vocab or spec.vocab_size
        """Of the logits."""
        self.weights = weights
        self.cache = cache
        self._device = weights.embedding_VC.device
        self._dtype = weights.embedding_VC.dtype
        self._turns_PD = rotation_table(spec.rope, spec.head_dim, cache.plan.positions).to(self._device)
        self._columns_P = torch.arange(cache.plan.positions, device=self._device)
        self._groups = spec.heads // spec.kv_heads
        self.work_done = 0
        """Parts of layers computed so far: three a layer. (On a GPU: given to it, which is ahead by a step at most.)"""

    def replace_weights(self, weights: DecoderWeights) -> None:
        """Serves `weights` from the next pass on: by reference on their own device, else copied in place."""
        if weights.embedding_VC.device == self._device:
            self.weights = weights
            return
        for held, given in zip(self.weights.tensors(), weights.tensors(), strict=True):
            held.copy_(given, non_blocking=True)

    def prefill(
        self,
        ids_BT: torch.Tensor,
        lengths_B: torch.Tensor,
        first_slot: int,
        row_of_slot: torch.Tensor | None,
        slots: int,
    ) -> torch.Tensor:
        """Runs B right-padded prompts from position 0; fills slots `first_slot` and on; returns logits [slots, V].

        Slot `first_slot + s` gets row `row_of_slot[s]`, so that equal prompts are run once; None is one row a slot.
        Padding lies behind a row's tokens, so the causal mask hides it; the keys it leaves in the cache lie behind the
        sequence's end, where they are masked until they are overwritten.
        """
        spec, cache = self.spec, self.cache
        rows, tokens = ids_BT.shape
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        turns = self._turns_PD[:tokens].unsqueeze(1)
        x_NC = self._embedded(ids_BT.reshape(-1))
        for layer, cache_SKPD in zip(self.weights.layers, cache.layers_SKPD):
            qkv = self._qkv(layer, x_NC).view(rows, tokens, heads + 2 * kv_heads, dim)
            self._turn(layer, qkv[:, :, : heads + kv_heads], turns)
            q_BHTD, kv_BKTD = qkv[:, :, :heads].transpose(1, 2), qkv[:, :, heads:].transpose(1, 2)
            target = cache_SKPD[first_slot : first_slot + slots, :, :tokens]
            target.copy_(kv_BKTD if row_of_slot is None else kv_BKTD.index_select(0, row_of_slot))
            attended = F.scaled_dot_product_attention(
                q_BHTD, kv_BKTD[:, :kv_heads], kv_BKTD[:, kv_heads:], is_causal=True, enable_gqa=self._groups > 1
            )
            grouped = attended.view(rows, kv_heads, self._groups, tokens, dim).permute(0, 3, 2, 1, 4)
            x_NC = self._rest(layer, x_NC, grouped.reshape(rows * tokens, heads * dim))
        last = torch.arange(rows, device=self._device) * tokens + lengths_B - 1
        logits = self._logits(x_NC.index_select(0, last))
        return logits if row_of_slot is None else logits.index_select(0, row_of_slot)

    def decode(self, ids_B: torch.Tensor, positions_B: torch.Tensor, attended: int) -> torch.Tensor:
        """Runs one token of each of slots 0 to B at its own position; returns logits [B, V].

        `attended` is at least the largest position plus 1; positions behind a sequence's own are masked.
        """
        spec, cache = self.spec, self.cache
        rows = ids_B.shape[0]
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        position_B1 = positions_B.unsqueeze(1)
        targets_BK = cache.first_row_SK[:rows] + position_B1
        turns = self._turns_PD.index_select(0, positions_B).unsqueeze(1)
        hidden_BL = self._columns_P[:attended] > position_B1
        mask = torch.zeros(hidden_BL.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden_BL, -math.inf).view(rows, 1, 1, attended)
        x_BC = self._embedded(ids_B)
        for layer, cache_SKPD, cache_rows in zip(self.weights.layers, cache.layers_SKPD, cache.layers_rows):
            qkv = self._qkv(layer, x_BC).view(rows, heads + 2 * kv_heads, dim)
            self._turn(layer, qkv[:, : heads + kv_heads], turns)
            cache_rows.index_put_((targets_BK,), qkv[:, heads:])
            attended_BKGD = F.scaled_dot_product_attention(
                qkv[:, :heads].view(rows, kv_heads, self._groups, dim),
                cache_SKPD[:rows, :kv_heads, :attended],
                cache_SKPD[:rows, kv_heads:, :attended],
                attn_mask=mask,
            )
            x_BC = self._rest(layer, x_BC, attended_BKGD.transpose(1, 2).reshape(rows, heads * dim))
        return self._logits(x_BC)

    def extend(self, ids_T: torch.Tensor, slot: int, start: int) -> torch.Tensor:
        """Runs T more tokens of one sequence whose first `start` tokens are in its slot; logits [1, V] of the last."""
        spec, (tokens,) = self.spec, ids_T.shape
        heads, kv_heads, dim, end = spec.heads, spec.kv_heads, spec.head_dim, start + tokens
        turns = self._turns_PD[start:end].unsqueeze(1)
        hidden_TP = self._columns_P[:end] > self._columns_P[start:end].unsqueeze(1)
        mask = torch.zeros(hidden_TP.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden_TP, -math.inf)
        mask = mask.repeat(self._groups, 1)
        x_TC = self._embedded(ids_T)
        for layer, cache_SKPD in zip(self.weights.layers, self.cache.layers_SKPD):
            qkv = self._qkv(layer, x_TC).view(tokens, heads + 2 * kv_heads, dim)
            self._turn(layer, qkv[:, : heads + kv_heads], turns)
            cache_SKPD[slot, :, start:end].copy_(qkv[:, heads:].transpose(0, 1))
            # A key/value head's queries of all its groups are one query axis, as in `decode`.
            q_KQD = qkv[:, :heads].transpose(0, 1).reshape(1, kv_heads, self._groups * tokens, dim)
            held_KPD = cache_SKPD[slot : slot + 1, :, :end]
            attended = F.scaled_dot_product_attention(
                q_KQD, held_KPD[:, :kv_heads], held_KPD[:, kv_heads:], attn_mask=mask
            )
            grouped = attended.view(kv_heads, self._groups, tokens, dim).permute(2, 1, 0, 3)
            x_TC = self._rest(layer, x_TC, grouped.reshape(tokens, heads * dim))
        return self._logits(x_TC[-1:])

    @contextlib.contextmanager
    def ahead(self, version: int = -1, weights: DecoderWeights | None = None) -> Iterator[None]:
        """Passes within are made with `weights`, which do not serve yet; without any, with those that do."""
        held = self.weights
        self.weights = weights or held
        try:
            yield
        finally:
            self.weights = held

    def _qkv(self, layer: LayerWeights, x_NC: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x_NC, (self.spec.hidden_size,), layer.norm_in_C, self.spec.norm_eps)
        qkv = _affine(normed, layer.qkv, layer.qkv_bias)
        self.work_done += 1
        return qkv

    def _turn(self, layer: LayerWeights, qk: torch.Tensor, turns: torch.Tensor) -> None:
        """Applies per-head norms, where the model has them, and the rotary embedding to `qk` [..., H + K, D]."""
        normed = qk
        if layer.qk_norm_HD is not None:
            normed = F.rms_norm(qk, (self.spec.head_dim,), None, self.spec.norm_eps) * layer.qk_norm_HD
        if normed is qk and qk.dtype == torch.float32:
            torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turns)
            return
        pairs = torch.view_as_complex(normed.float().unflatten(-1, (-1, 2)))
        qk.copy_(torch.view_as_real(pairs * turns).flatten(-2))

    def _rest(self, layer: LayerWeights, x_NC: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer behind its attention: output projection, norm, gated MLP, both with their residuals."""
        self.work_done += 1
        x_NC = self._added(x_NC, attended, layer.out, layer.out_bias)
        normed = F.rms_norm(x_NC, (self.spec.hidden_size,), layer.norm_post_C, self.spec.norm_eps)
        gate, up = _affine(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        x_NC = self._added(x_NC, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        self.work_done += 1
        return x_NC

    def _logits(self, x_BC: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x_BC, (self.spec.hidden_size,), self.weights.norm_C, self.spec.norm_eps)
        logits = torch.mm(normed, self.weights.head_CV).float()
        return logits if self._group is None else self._group.join(logits)[:, : self.vocab_size]

    def _embedded(self, ids_N: torch.Tensor) -> torch.Tensor:
        """[N, C]. A rank has rows of the vocabulary: each token's comes from the one that has it, zeros from others."""
        if self._group is None:
            return F.embedding(ids_N, self.weights.embedding_VC)
        own = ids_N - self._group.rank * self.spec.vocab_size
        elsewhere = (own < 0) | (own >= self.spec.vocab_size)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weights.embedding_VC)
        return self._group.add(rows.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _added(
        self, residual: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`residual` and what x adds to it. Of several ranks one brings the residual and the bias into the sum."""
        if self._group is None:
            return _residual(residual, x, matrix, bias)
        return self._group.add(_residual(residual, x, matrix, bias) if self._group.leads else torch.mm(x, matrix))


def _affine(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _residual(residual: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    summed = torch.addmm(residual, x, matrix)
    return summed if bias is None else summed.add_(bias)
