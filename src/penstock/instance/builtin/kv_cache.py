"""The preallocated KV cache: how many sequences fit a memory bound, and where each position lies.

Decides the number of slots from the bound and nothing else; which sequence has which slot is the core's business.
Legend: L layers, S slots, K key/value heads, P positions of a slot, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import EngineError
from penstock.instance.builtin.spec import ModelSpec

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`slots` sequences of `positions` tokens each, in `nbytes`."""

    slots: int
    positions: int
    nbytes: int


def plan_cache(
    spec: ModelSpec, item_bytes: int, max_running: int, max_context_tokens: int, kv_cache_mib: int
) -> CachePlan:
    """As many slots as are wanted and as fit `kv_cache_mib`; raises EngineError if not even one fits."""
    positions = min(max_context_tokens, spec.context_tokens)
    slot_bytes = spec.kv_bytes_per_token(item_bytes) * positions
    slots = min(max_running, kv_cache_mib * MIB // slot_bytes)
    if slots < 1:
        raise EngineError(
            f"one sequence of {positions} tokens needs {slot_bytes / MIB:.1f} MiB of KV cache and kv_cache_mib is "
            f"{kv_cache_mib}; raise it or lower max_context_tokens"
        )
    return CachePlan(slots=slots, positions=positions, nbytes=slots * slot_bytes)


class KVCache:
    """Keys and values of all slots: one tensor [L, S, 2K, P, D], the K key heads before the K value heads.

    Zeroed at the start: positions behind a sequence's end are masked, which makes their weight 0, and 0 times an
    uninitialised NaN would still be NaN.
    """

    def __init__(self, spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        heads = 2 * spec.kv_heads
        self._shape = (spec.layers, plan.slots, heads, plan.positions, spec.head_dim)
        self._dtype, self._device = dtype, device
        self.released = True
        self.allocate()
        first_rows = torch.arange(plan.slots * heads, device=device) * plan.positions
        self.first_row_SK = first_rows.view(plan.slots, heads)

    def allocate(self) -> None:
        """Takes the memory, zeroed, where it was given back."""
        if not self.released:
            return
        # No inference tensor, wherever this is called: sequences are also moved outside of steps.
        with torch.inference_mode(False):
            self.tensor_LSKPD = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self.layers_SKPD = tuple(self.tensor_LSKPD.unbind(0))
        self.layers_rows = tuple(layer.view(-1, self._shape[-1]) for layer in self.layers_SKPD)
        """Each layer as a list of D-vectors, so that a step's keys and values are written by one index."""
        self.released = False

    def release(self) -> None:
        """Gives the memory back to the device, for whoever else works there; what was in it is lost."""
        self.tensor_LSKPD = torch.empty(0, dtype=self._dtype, device=self._device)
        self.layers_SKPD = self.layers_rows = ()
        self.released = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` positions of a slot to another."""
        self.tensor_LSKPD[:, target, :, :tokens].copy_(self.tensor_LSKPD[:, source, :, :tokens])

    def wipe(self, slot: int) -> None:
        """Zeroes a slot that may hold NaN or infinity (see the class's docstring)."""
        self.tensor_LSKPD[:, slot].zero_()
