"""The processes that learn together: one leads and tells the others what comes next, all add up.

Decides how an order and the samples that go with it reach every rank: as msgpack, in one broadcast over gloo. Refuses
to know what is done with them. One process alone is a set of ranks too, and then nothing is sent anywhere.
"""

from __future__ import annotations

import datetime
import os
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score, VersionSpan

__all__ = [
    "BeginStep",
    "Collect",
    "End",
    "Learn",
    "Look",
    "Order",
    "PackedGroup",
    "Ranks",
    "Save",
    "Start",
    "pack",
    "unpack",
]

PATIENCE = datetime.timedelta(hours=12)
"""For the next order: as long as a step's rollouts may take. A leader that dies closes its sockets, which is noticed at
once."""


class PackedSample(msgspec.Struct, array_like=True, frozen=True):
    replica: int
    token_ids: bytes
    """int32."""
    logprobs: bytes
    """float32."""
    spans: list[tuple[int, int, int]]
    finish: int
    value: float
    parts: dict[str, float]
    learned: bytes | None = None
    """int8; None: every token is the model's own."""
    reference_logprobs: bytes | None = None
    """float32."""
    old_logprobs: bytes | None = None
    """float32."""
    values: bytes | None = None
    """float32."""


class PackedGroup(msgspec.Struct, array_like=True, frozen=True):
    """A group as ranks send it: what learning needs of it, and neither texts nor rows."""

    batch: str
    prompt: int
    prompt_ids: bytes
    samples: list[PackedSample]


class Start(msgspec.Struct, tag=True, frozen=True):
    """The run begins with this model folder and, where it goes on, this checkpoint."""

    folder: str
    checkpoint: str


class BeginStep(msgspec.Struct, tag=True, frozen=True):
    step: int
    kl_coef: float


class Learn(msgspec.Struct, tag=True, frozen=True):
    groups: list[PackedGroup]
    baselines: dict[int, float]
    mini_batch: int
    """The one that ends with these groups, or -1."""


class Look(msgspec.Struct, tag=True, frozen=True):
    """Passes that need no whole group, over samples of groups that are not whole."""

    groups: list[PackedGroup]


class Collect(msgspec.Struct, tag=True, frozen=True):
    """Every rank gives its part of `what`: weights or metrics."""

    what: str


class Save(msgspec.Struct, tag=True, frozen=True):
    """Every rank copies what a checkpoint keeps of it, and writes it to this folder behind what follows."""

    folder: str


class End(msgspec.Struct, tag=True, frozen=True):
    """The run is over."""


Order = Start | BeginStep | Learn | Look | Collect | Save | End

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class Ranks:
    """The ranks of a run, of which this process is `rank`. The leader is rank 0."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._words: Any = None
        """The group that orders and samples go through: gloo, whatever gradients use."""
        self._behind: Any = None
        """Another one, for the threads that write checkpoints."""

    @classmethod
    def from_environment(cls) -> Ranks:
        """The ranks that torchrun started, which meet here; a process that it did not start is alone.

        Raises ConfigError for an environment that says half of it.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls()
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise ConfigError(f"WORLD_SIZE is set, and RANK is not a number ({error}); torchrun sets both") from error
        if size == 1:
            return cls()
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(backend, timeout=PATIENCE)
        ranks = cls(rank, size)
        ranks._words = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        ranks._behind = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        return ranks

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, order: Order) -> None:
        """Has every other rank do its part. Only the leader tells; from others it is nothing."""
        if self.leads and self.size > 1:
            data = _ENCODER.encode(order)
            torch.distributed.broadcast(torch.tensor([len(data)]), 0, group=self._words)
            torch.distributed.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._words)

    def heard(self) -> Order:
        """The leader's next order; waits for it."""
        length = torch.zeros(1, dtype=torch.int64)
        torch.distributed.broadcast(length, 0, group=self._words)
        data = torch.empty(int(length), dtype=torch.uint8)
        torch.distributed.broadcast(data, 0, group=self._words)
        return _DECODER.decode(data.numpy().tobytes())

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def collect(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank; of use to the leader."""
        return self._collect(data, self._words)

    def collect_behind(self, data: bytes) -> list[bytes]:
        """As `collect`, beside whatever else the ranks do; one thread of each rank calls it at a time.

        Raises RuntimeError where a rank is gone.
        """
        return self._collect(data, self._behind)

    def _collect(self, data: bytes, group: Any) -> list[bytes]:
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        torch.distributed.all_gather(lengths, torch.tensor([len(data)]), group=group)
        longest = max(int(length) for length in lengths)
        own = torch.zeros(max(1, longest), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        given = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(given, own, group=group)
        return [bytes(tensor.numpy()[: int(length)]) for tensor, length in zip(given, lengths, strict=True)]

    def close(self) -> None:
        """Ends the set. Ranks that wait for an order are to be told of the end before."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def pack(groups: Sequence[Group]) -> list[PackedGroup]:
    """Groups of scored samples as they are sent."""
    return [
        PackedGroup(
            group.batch,
            group.prompt.index,
            array("i", group.prompt.token_ids).tobytes(),
            [_pack_sample(sample) for sample in group.samples],
        )
        for group in groups
    ]


def _pack_sample(sample: Sample) -> PackedSample:
    assert isinstance(sample.score, Score), sample.id
    return PackedSample(
        sample.id.replica,
        sample.token_ids.tobytes(),
        sample.logprobs.tobytes(),
        [(span.version, span.start, span.end) for span in sample.version_spans],
        int(sample.finish),
        sample.score.value,
        dict(sample.score.parts),
        None if sample.learned is None else sample.learned.tobytes(),
        _bytes(sample.reference_logprobs),
        _bytes(sample.old_logprobs),
        _bytes(sample.values),
    )


def unpack(groups: Sequence[PackedGroup]) -> list[Group]:
    """The same groups, of prompts without text and row."""
    unpacked = []
    for group in groups:
        prompt = Prompt(group.prompt, "", _column("i", group.prompt_ids), {}, "")
        samples = [_unpack_sample(group.batch, prompt, sample) for sample in group.samples]
        unpacked.append(Group(group.batch, prompt, samples))
    return unpacked


def _unpack_sample(batch: str, prompt: Prompt, sample: PackedSample) -> Sample:
    return Sample(
        id=SampleId(batch, prompt.index, sample.replica),
        prompt=prompt,
        token_ids=_column("i", sample.token_ids),
        logprobs=_column("f", sample.logprobs),
        version_spans=tuple(VersionSpan(*span) for span in sample.spans),
        finish=Finish(sample.finish),
        score=Score(sample.value, sample.parts),
        learned=None if sample.learned is None else _column("b", sample.learned),
        reference_logprobs=None if sample.reference_logprobs is None else _column("f", sample.reference_logprobs),
        old_logprobs=None if sample.old_logprobs is None else _column("f", sample.old_logprobs),
        values=None if sample.values is None else _column("f", sample.values),
    )


def _bytes(column: array[float] | None) -> bytes | None:
    return None if column is None else column.tobytes()


def _column(code: str, data: bytes) -> Any:
    column: array[Any] = array(code)
    column.frombytes(data)
    return column
