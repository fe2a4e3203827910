"""Continuous batching, synchronously: sequences in, one step at a time, token deltas out.

Decides which sequences run (first come, first served, into a compact prefix of the cache's slots), when prompts are
prefilled (at most `prefill_tokens_per_step` padded tokens a step, so that decoding is not starved), and when a
sequence ends. Owns no thread and reads no clock; `BuiltinEngine` runs it. A sequence that is running when the weights
change is prefilled again, because keys and values of older weights are not reused: in parts, with decode steps between
them, the shortest sequence first. That one is prefilled with the new weights while others still decode with the old
ones, where both are at hand, and the weights change when it is ready: generation does not pause for it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.errors import EngineError
from penstock.instance.builtin.checkpoint import serving_dtype, tensors_of_staged
from penstock.instance.builtin.draw import DrawRows, draw, draw_rows
from penstock.instance.builtin.kv_cache import CachePlan, KVCache, plan_cache
from penstock.instance.builtin.model import Decoder, DecoderWeights, build_weights
from penstock.instance.builtin.rank_weights import share_of_staged
from penstock.instance.builtin.ranks import LeadCache, LeadDecoder, Ranks
from penstock.instance.builtin.running import Rows, RunningSequence, begun
from penstock.instance.builtin.spec import ModelSpec, parse_model_spec
from penstock.instance.engine import SequenceStart, TokenDelta
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights

_ATTENDED_MULTIPLE = 16
"""Attended length is rounded up to this many positions, so that a GPU sees few different shapes."""


@dataclass(frozen=True, slots=True)
class CoreOptions:
    device: torch.device
    dtype: torch.dtype | None = None
    """None takes the first weights' own dtype, or float32: see `serving_dtype`."""
    max_running: int = 64
    max_context_tokens: int = 2048
    """Prompt and output of one sequence; the model's own limit holds where it is lower."""
    kv_cache_mib: int = 1024
    """Bound on the KV cache. Each slot is `max_context_tokens` long; where fewer than `max_running` slots fit, fewer
    sequences run at once."""
    prefill_tokens_per_step: int = 4096
    """Most padded tokens prefilled before the next decode step; one longer prompt is taken alone."""
    renew_tokens_per_step: int = 0
    """The same for sequences that were running when the weights changed, and longer ones are taken in parts: no token
    comes meanwhile. 0 is 32 on a CPU, and 2048 on a GPU, where a small pass takes as long."""


Told = Callable[[EngineError | None], None]
"""Hears once that weights serve, or why they don't."""


@dataclass(slots=True)
class _Partial:
    """A sequence that is prefilled in parts; its first `done` tokens are in `slot`, behind those that run."""

    sequence: RunningSequence
    slot: int
    done: int = 0


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """A version laid out for the decoder, not yet serving."""

    version: int
    spec: ModelSpec
    dtype: torch.dtype
    weights: DecoderWeights


class BuiltinCore:
    """The engine without its thread. Not thread-safe, except `prepare`, which only reads."""

    def __init__(self, options: CoreOptions, progress: memoryview | None = None, ranks: Ranks | None = None) -> None:
        """`progress`: 8 bytes that hold the number of output tokens drawn (uint64) after every step.

        With other `ranks`, this one leads: it has a share of the model, decides what runs and draws the tokens.
        """
        if progress is not None and (progress.nbytes != 8 or progress.readonly):
            raise EngineError(f"progress needs 8 writable bytes and has {progress.nbytes}")
        self.options = options
        self.version = -1
        self.spec: ModelSpec | None = None
        self.plan: CachePlan | None = None
        self.dtype: torch.dtype | None = options.dtype
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self._progress = progress
        self._ranks = ranks
        self._decoder: Decoder | None = None
        self._waiting: deque[RunningSequence] = deque()
        self._active: list[RunningSequence] = []
        """Sequence in slot i at place i."""
        self._ended: list[RunningSequence] = []
        """Ended and not yet in a delta."""
        self._by_lease: dict[int, RunningSequence] = {}
        self._deltas: list[TokenDelta] = []
        """Cut at a weight swap and not yet taken."""
        self._rows: Rows | None = None
        self._partial: _Partial | None = None
        """Of the first that waits; nobody else is admitted before it is whole."""
        self._soon: tuple[PreparedWeights, Told] | None = None
        """Weights that serve once the first sequence is prefilled with them."""

    # ---- what it holds

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        return sum(sequence.tokens for sequence in self._active)

    @property
    def work_done(self) -> int:
        """Grows within a step, layer by layer; may be read from another thread."""
        return self._decoder.work_done if self._decoder else 0

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self._active or self._waiting)

    @property
    def swapping(self) -> bool:
        """True while weights wait for the first sequence to be prefilled with them; `swap_now` waits no longer."""
        return self._soon is not None

    @property
    def max_running(self) -> int:
        return self.plan.slots if self.plan else self.options.max_running

    @property
    def max_context_tokens(self) -> int:
        return self.plan.positions if self.plan else self.options.max_context_tokens

    # ---- weights

    def fit_context(self, max_context_tokens: int) -> None:
        """Changes `CoreOptions.max_context_tokens`; nothing where a KV cache is there already."""
        if self.plan is None:
            self.options = replace(self.options, max_context_tokens=max_context_tokens)

    def prepare(self, staged: StagedWeights) -> PreparedWeights:
        """Lays out a version's weights beside those that serve, on all ranks or on none.

        Raises EngineError or CheckpointError.
        """
        spec = parse_model_spec(staged.manifest.config_json)
        if self.spec is not None and spec != self.spec:
            changed = [name for name in ModelSpec.__slots__ if getattr(spec, name) != getattr(self.spec, name)]
            raise EngineError(
                f"weight version {staged.version} is of another model ({', '.join(changed)} changed); "
                "an engine serves one model for its life"
            )
        share, ranks = spec, self._ranks
        own = staged
        if ranks is not None:
            share = spec.share_of(ranks.count)
            own = share_of_staged(staged, spec, 0, ranks.count)
        tensors = tensors_of_staged(own)
        dtype = self.dtype or serving_dtype(tensors.values(), self.options.device, self._fits(share, torch.float32))
        # Prepared in host memory where the device is another: the swap then copies in place, and the device never
        # holds two versions.
        weights = build_weights(share, tensors, dtype, torch.device("cpu"))
        if ranks is not None:
            ranks.prepare(staged, spec, dtype)
        return PreparedWeights(staged.version, spec, dtype, weights)

    def swap(self, prepared: PreparedWeights) -> None:
        """Serves `prepared` from the next step on; running sequences are prefilled again. Raises EngineError."""
        if self._decoder is None:
            self._decoder = self._first_decoder(prepared)
            self.spec, self.plan, self.dtype = prepared.spec, self._decoder.cache.plan, prepared.dtype
        else:
            if self._ranks is not None:
                self._ranks.swap(prepared.version, self._decoder.cache.plan)
            self._cut_delta()
            self._renew()
            self._rows = None
            self._decoder.replace_weights(prepared.weights)
        self.version = prepared.version

    def swap_soon(self, prepared: PreparedWeights, told: Told) -> None:
        """Serves `prepared` as soon as one sequence is prefilled with it, in the steps to come; `told` hears of it.

        Until then the others go on with the weights that serve; that one draws nothing with them any more.
        """
        self.swap_now()
        self._soon = (prepared, told)
        ahead = prepared.weights.embedding_VC.device == self.options.device
        if self._decoder is None or not ahead or len(self._active) < 2 or self._partial is not None:
            self.swap_now()
            return
        slot = min(range(len(self._active)), key=lambda slot: self._active[slot].tokens)
        first = self._active[slot]
        self._vacate([slot])
        first.renews = True
        self._waiting.appendleft(first)
        self._partial = _Partial(first, len(self._active))

    def swap_now(self) -> None:
        """Serves what `swap_soon` was given, if that is not done yet."""
        if self._soon is None:
            return
        (prepared, told), self._soon = self._soon, None
        self._drop_partial()
        try:
            self.swap(prepared)
        except EngineError as error:
            told(error)
        else:
            told(None)

    def _renew(self) -> None:
        """Every running sequence waits for a prefill of its own, before those that have not begun."""
        again = [sequence for sequence in self._waiting if sequence.renews] + self._active
        fresh = [sequence for sequence in self._waiting if not sequence.renews]
        for sequence in again:
            sequence.renews = True
        self._drop_partial()
        again.sort(key=lambda sequence: sequence.tokens)
        self._waiting = deque(again + fresh)
        self._active.clear()

    def _fits(self, share: ModelSpec, dtype: torch.dtype) -> bool:
        """Whether one sequence at least has its place in the KV cache."""
        try:
            self._plan(share, dtype)
        except EngineError:
            return False
        return True

    def _plan(self, share: ModelSpec, dtype: torch.dtype) -> CachePlan:
        options, count = self.options, 1 if self._ranks is None else self._ranks.count
        kv_cache_mib = max(1, options.kv_cache_mib // count)
        return plan_cache(share, dtype.itemsize, options.max_running, options.max_context_tokens, kv_cache_mib)

    def _first_decoder(self, prepared: PreparedWeights) -> Decoder:
        options, ranks = self.options, self._ranks
        count = 1 if ranks is None else ranks.count
        spec = prepared.spec if ranks is None else prepared.spec.share_of(count)
        plan = self._plan(spec, prepared.dtype)
        weights = prepared.weights.to(options.device)
        if ranks is None:
            return Decoder(spec, weights, KVCache(spec, plan, prepared.dtype, options.device))
        ranks.swap(prepared.version, plan)
        cache = LeadCache(spec, plan, prepared.dtype, options.device, ranks)
        return LeadDecoder(spec, weights, cache, ranks, prepared.spec.vocab_size)

    # ---- sequences

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        """Queues sequences; those that can't be generated end as Finish.FAILED in the next delta, with the cause.

        Raises EngineError if a lease is in use: leases are never given twice.
        """
        for start in sequences:
            if start.lease in self._by_lease:
                raise EngineError(f"lease {start.lease} is already in use")
            sequence = begun(start, self.spec, self.max_context_tokens)
            self._by_lease[start.lease] = sequence
            if sequence.finish is Finish.RUNNING:
                self._waiting.append(sequence)
            else:
                self._ended.append(sequence)

    def stop(self, leases: Sequence[int]) -> None:
        """Forgets sequences, with tokens that no delta has carried yet; unknown leases are ignored."""
        stopped = [self._by_lease.pop(lease) for lease in leases if lease in self._by_lease]
        gone = {sequence.lease for sequence in stopped}
        if not gone:
            return
        self._waiting = deque(sequence for sequence in self._waiting if sequence.lease not in gone)
        self._ended = [sequence for sequence in self._ended if sequence.lease not in gone]
        self._vacate([slot for slot, sequence in enumerate(self._active) if sequence.lease in gone])
        if self._partial is not None and self._partial.sequence.lease in gone:
            self._drop_partial()
            self.swap_now()

    def rest(self, release_memory: bool) -> None:
        """Forgets every sequence, and gives the KV cache's memory back until the next one is admitted."""
        self.stop(list(self._by_lease))
        if release_memory and self._decoder is not None:
            self._decoder.cache.release()

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, then decodes one token of every running sequence. Does nothing without work."""
        decoder = self._decoder
        if decoder is None:
            return
        self._admit(decoder)
        if self._active:
            self._decode(decoder)
        if self._progress is not None:
            struct.pack_into("<Q", self._progress, 0, self.tokens_generated)

    def take_delta(self) -> TokenDelta | None:
        """All that happened since the last one, of one weight version; None if nothing did. Call until None."""
        if not self._deltas:
            self._cut_delta()
        return self._deltas.pop(0) if self._deltas else None

    def _admit(self, decoder: Decoder) -> None:
        free = self.max_running - len(self._active)
        if not free or not self._waiting:
            return
        decoder.cache.allocate()
        row_of: dict[tuple[int, ...], int] = {}
        admitted: list[RunningSequence] = []
        longest = 0
        renews = self._waiting[0].renews
        most = self._renew_tokens if renews else self.options.prefill_tokens_per_step
        if self._partial is not None or (renews and self._waiting[0].tokens > most):
            self._prefill_part(decoder, most)
            return
        while self._waiting and len(admitted) < free and self._waiting[0].renews == renews:
            sequence = self._waiting[0]
            ids = (*sequence.prompt_ids, *sequence.output_ids)
            widest = max(longest, len(ids))
            if ids not in row_of:
                if row_of and widest * (len(row_of) + 1) > most:
                    break
                row_of[ids] = len(row_of)
                longest = widest
            sequence.renews = False
            admitted.append(self._waiting.popleft())
        self._prefill(decoder, admitted, row_of, longest)

    def _prefill(
        self, decoder: Decoder, admitted: list[RunningSequence], row_of: dict[tuple[int, ...], int], longest: int
    ) -> None:
        device = self.options.device
        # Padded with tokens of its own, a row is finite or not on its own account.
        padded = torch.tensor([ids + ids[:1] * (longest - len(ids)) for ids in row_of])
        lengths = torch.tensor([len(ids) for ids in row_of], device=device)
        rows = [row_of[(*sequence.prompt_ids, *sequence.output_ids)] for sequence in admitted]
        row_of_slot = None if len(rows) == len(row_of) else torch.tensor(rows, device=device)
        first_slot = len(self._active)
        logits = decoder.prefill(padded.to(device), lengths, first_slot, row_of_slot, len(admitted))
        self.tokens_prefilled += sum(map(len, row_of))
        self._active.extend(admitted)
        drawing = draw_rows([sequence.sampling for sequence in admitted], logits.shape[1], device)
        ids_B, logprobs_B = draw(logits, drawing, self._uniforms(admitted, drawing))
        self._rows = None
        self._take_drawn(admitted, ids_B, logprobs_B, first_slot)

    @property
    def _renew_tokens(self) -> int:
        return self.options.renew_tokens_per_step or (32 if self.options.device.type == "cpu" else 2048)

    def _prefill_part(self, decoder: Decoder, most: int) -> None:
        """The next tokens of the first sequence that waits; with the last of them it runs."""
        device, slot = self.options.device, len(self._active)
        partial = self._partial = self._partial or _Partial(self._waiting[0], slot)
        sequence, start = partial.sequence, partial.done
        if partial.slot != slot and start:
            # Those before it have become fewer.
            decoder.cache.move(partial.slot, slot, start)
        partial.slot = slot
        ids = [*sequence.prompt_ids, *sequence.output_ids]
        part = torch.tensor(ids[start : start + most], device=device)
        ahead = self._soon[0] if self._soon is not None else None
        with decoder.ahead(*((ahead.version, ahead.weights) if ahead is not None else ())):
            logits = decoder.extend(part, slot, start)
        partial.done += len(part)
        self.tokens_prefilled += len(part)
        if partial.done < len(ids):
            return
        self._partial = None
        if self._soon is None or self._swap_for(decoder, sequence, slot):
            self._run_one(sequence, logits)

    def _swap_for(self, decoder: Decoder, sequence: RunningSequence, slot: int) -> bool:
        """The weights that `sequence` is prefilled with serve now, and it is the first to run; False if they don't."""
        assert self._soon is not None
        (prepared, told), self._soon = self._soon, None
        try:
            self.swap(prepared)
        except EngineError as error:
            told(error)
            return False
        if slot:
            decoder.cache.move(slot, 0, sequence.tokens)
        told(None)
        return True

    def _run_one(self, sequence: RunningSequence, logits: torch.Tensor) -> None:
        sequence.renews = False
        self._waiting = deque(other for other in self._waiting if other is not sequence)
        slot = len(self._active)
        self._active.append(sequence)
        self._rows = None
        drawing = draw_rows([sequence.sampling], logits.shape[1], self.options.device)
        ids_B, logprobs_B = draw(logits, drawing, self._uniforms([sequence], drawing))
        self._take_drawn([sequence], ids_B, logprobs_B, slot)

    def _drop_partial(self) -> None:
        partial, self._partial = self._partial, None
        if partial is not None and partial.done and self._decoder is not None:
            # It may hold what is not finite, and is behind the end of whoever has the slot next.
            self._decoder.cache.wipe(partial.slot)

    def _decode(self, decoder: Decoder) -> None:
        rows = self._rows
        if rows is None:
            rows = self._rows = Rows.of(self._active, decoder.vocab_size, self.options.device)
        attended = min(-(-rows.longest // _ATTENDED_MULTIPLE) * _ATTENDED_MULTIPLE, self.max_context_tokens)
        logits = decoder.decode(rows.ids_B, rows.positions_B, attended)
        ids_B, logprobs_B = draw(logits, rows.drawing, self._uniforms(self._active, rows.drawing))
        rows.advance(ids_B)
        self._take_drawn(self._active, ids_B, logprobs_B, 0)

    def _uniforms(self, sequences: list[RunningSequence], drawing: DrawRows) -> torch.Tensor | None:
        if drawing.all_greedy:
            return None
        numbers = [sequence.next_uniform() for sequence in sequences]
        return torch.tensor(numbers, dtype=torch.float64).to(self.options.device, non_blocking=True)

    def _take_drawn(
        self, sequences: list[RunningSequence], ids_B: torch.Tensor, logprobs_B: torch.Tensor, first_slot: int
    ) -> None:
        """Appends one drawn token to each sequence and ends those that are done."""
        ids, logprobs = torch.stack((ids_B.double(), logprobs_B.double())).tolist()
        drawn, vacated = 0, []
        for index, sequence in enumerate(sequences):
            token, logprob = int(ids[index]), logprobs[index]
            if not math.isfinite(logprob):
                sequence.finish = Finish.FAILED
                sequence.cause = (
                    f"the model's logits for output token {len(sequence.output_ids)} are not finite "
                    f"(weight version {self.version})"
                )
            else:
                drawn += 1
                sequence.output_ids.append(token)
                sequence.logprobs.append(logprob)
                if token in sequence.stop_ids:
                    sequence.finish = Finish.STOP
                elif len(sequence.output_ids) >= sequence.length_limit:
                    sequence.finish = Finish.LENGTH
                else:
                    continue
            self._ended.append(sequence)
            vacated.append(first_slot + index)
        self.tokens_generated += drawn
        self._vacate(vacated)

    def _vacate(self, slots: list[int]) -> None:
        """Frees slots and closes the gaps with the last running sequences. `slots` ascend."""
        assert self._decoder is not None or not slots
        for slot in reversed(slots):
            assert self._decoder is not None
            cache, last = self._decoder.cache, len(self._active) - 1
            gone = self._active[slot]
            if gone.finish is Finish.FAILED:
                cache.wipe(slot)
            if slot != last:
                mover = self._active[slot] = self._active[last]
                cache.move(last, slot, mover.tokens)
            self._active.pop()
            self._rows = None

    def _cut_delta(self) -> None:
        """Puts what happened since the last delta into one of the present weight version."""
        delta = TokenDelta(version=self.version)
        for sequence in (*self._ended, *self._active, *self._waiting):
            count = len(sequence.logprobs)
            if not count and sequence.finish is Finish.RUNNING:
                continue
            delta.leases.append(sequence.lease)
            delta.starts.append(sequence.taken)
            delta.counts.append(count)
            delta.finishes.append(sequence.finish)
            if count:
                delta.token_ids.extend(sequence.output_ids[sequence.taken :])
                delta.logprobs.extend(sequence.logprobs)
                sequence.taken += count
                sequence.logprobs = array("f")
            if sequence.cause:
                delta.causes[sequence.lease] = sequence.cause
        for sequence in self._ended:
            del self._by_lease[sequence.lease]
        self._ended.clear()
        if delta.leases:
            self._deltas.append(delta)
