"""A rank of a tensor-parallel engine beside the leading one: a process that does what it is told until that one ends.

Decides nothing. It ends when the leader's sockets close, however that came; signals meant for the whole group of
processes, such as Ctrl-C, are the leader's to answer. Started with the numbers of two descriptors: steps, weights.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading

import torch

from penstock.errors import PenstockError
from penstock.instance.builtin.checkpoint import tensors_of_staged
from penstock.instance.builtin.kv_cache import CachePlan, KVCache
from penstock.instance.builtin.model import Decoder, DecoderWeights, build_weights
from penstock.instance.builtin.rank_group import RankGroup, RankLost
from penstock.instance.builtin.rank_messages import (
    Allocate,
    Channel,
    ChannelClosed,
    Decode,
    Done,
    Extend,
    Forget,
    Join,
    Move,
    Prefill,
    Prepare,
    Release,
    Swap,
    ToRank,
    Wipe,
)
from penstock.instance.builtin.rank_weights import staged_share
from penstock.instance.builtin.spec import ModelSpec, parse_model_spec

__all__ = ["Rank", "main"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank:
    """This rank's share of the model. Steps are called from one thread, `prepare` and `forget` from another."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.group: RankGroup | None = None
        """Before the first swap."""
        self._prepared: dict[int, tuple[ModelSpec, DecoderWeights]] = {}
        self._decoder: Decoder | None = None

    def prepare(self, order: Prepare, memory: memoryview) -> None:
        """Raises WeightError for bytes that do not verify, CheckpointError for tensors that do not fit."""
        spec = parse_model_spec(order.config_json).share_of(self.ranks)
        staged = staged_share(order.version, order.config_json, order.tensors, memory, verify=True)
        dtype = DTYPES[order.dtype]
        self._prepared[order.version] = spec, build_weights(spec, tensors_of_staged(staged), dtype, torch.device("cpu"))

    def forget(self, version: int) -> None:
        self._prepared.pop(version, None)

    def swap(self, order: Swap) -> None:
        spec, weights = self._prepared.pop(order.version)
        if self._decoder is not None:
            self._decoder.replace_weights(weights)
            return
        device, dtype = weights.embedding_VC.device, weights.embedding_VC.dtype
        nbytes = spec.kv_bytes_per_token(dtype.itemsize) * order.positions * order.slots
        cache = KVCache(spec, CachePlan(order.slots, order.positions, nbytes), dtype, device)
        self._decoder = Decoder(spec, weights, cache, self.group)

    @torch.inference_mode()
    def step(self, order: ToRank) -> None:
        decoder = self._decoder
        if decoder is None:
            return  # The leader's first cache is made after this one's.
        match order:
            case Prefill():
                lengths = torch.tensor(order.lengths_B)
                ids = _ids(order.ids_BT).view(len(lengths), -1)
                rows = None if order.row_of_slot is None else torch.tensor(order.row_of_slot)
                decoder.prefill(ids, lengths, order.first_slot, rows, order.slots)
            case Decode():
                decoder.decode(_ids(order.ids_B), _ids(order.positions_B), order.attended)
            case Extend():
                ahead = (order.ahead, self._prepared[order.ahead][1]) if order.ahead >= 0 else ()
                with decoder.ahead(*ahead):
                    decoder.extend(_ids(order.ids_T), order.slot, order.start)
            case Move():
                decoder.cache.move(order.source, order.target, order.tokens)
            case Wipe():
                decoder.cache.wipe(order.slot)
            case Allocate():
                decoder.cache.allocate()
            case Release():
                decoder.cache.release()
            case _:
                raise TypeError(f"{type(order).__name__} is no part of a step")


def _ids(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64)


def _take_weights(rank: Rank, channel: Channel) -> None:
    """Until the leader is gone, which ends the process, whatever its other thread waits for."""
    try:
        while True:
            order, descriptor = channel.order()
            if isinstance(order, Forget):
                rank.forget(order.version)
            elif isinstance(order, Prepare) and descriptor is not None:
                channel.send(Done(_prepared(rank, order, descriptor)))
    except ChannelClosed:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a rank that lacks a thread must not live on
        print(f"rank {rank.rank}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def _prepared(rank: Rank, order: Prepare, descriptor: int) -> str:
    """Why it was not done; empty where it was."""
    try:
        # Copied by whoever lays it out, so that it is read where it is and then unmapped.
        mapped = mmap.mmap(descriptor, 0)
        rank.prepare(order, memoryview(mapped)[: sum(entry.nbytes for entry in order.tensors)])
    except (PenstockError, OSError, MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.close(descriptor)
    return ""


def _take_steps(rank: Rank, channel: Channel) -> None:
    while True:
        order, _ = channel.order()
        if not isinstance(order, Swap):
            rank.step(order)
            continue
        try:
            rank.swap(order)
        except (KeyError, MemoryError, RuntimeError) as error:
            channel.send(Done(f"{type(error).__name__}: {error}"))
        else:
            channel.send(Done())


def main(descriptors: list[str]) -> int:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    steps, weights = (Channel(socket.socket(fileno=int(descriptor))) for descriptor in descriptors)
    with contextlib.suppress(ChannelClosed):
        order, _ = steps.order()
        if not isinstance(order, Join):
            raise TypeError(f"a rank is joined first, and was told {type(order).__name__}")
        torch.set_num_threads(order.threads)
        rank = Rank(order.rank, order.ranks)
        steps.send(Done())
        # Before the ranks meet: it is this thread that sees the leader end, whatever the other one waits for.
        threading.Thread(target=_take_weights, args=(rank, weights), name="penstock-rank-weights").start()
        try:
            rank.group = RankGroup(order.store_path, order.rank, order.ranks, order.wait_s)
            _take_steps(rank, steps)
        except RankLost as error:
            print(f"rank {order.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
