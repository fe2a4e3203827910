"""The other ranks of a tensor-parallel engine, as the leading one sees them: processes of this machine.

Decides how they are started, told and ended, and that a version is laid out by all of them or by none. What they
compute is the decoder's business. A rank that dies takes the engine with it: `on_death` is called with the cause, from
a thread of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from penstock.errors import EngineError, PenstockError
from penstock.instance.builtin.kv_cache import CachePlan, KVCache
from penstock.instance.builtin.model import Decoder, DecoderWeights
from penstock.instance.builtin.rank_group import RankGroup, RankLost
from penstock.instance.builtin.rank_messages import (
    Allocate,
    Channel,
    ChannelClosed,
    Decode,
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
from penstock.instance.builtin.rank_weights import plan_share, share_bytes, write_share
from penstock.instance.builtin.spec import ModelSpec
from penstock.weights.manifest import StagedWeights
from penstock.weights.memory import check_room

__all__ = ["LeadCache", "LeadDecoder", "RankDied", "Ranks"]

START_S = 120.0
"""For all ranks to be there: each imports PyTorch."""
STEP_S = 120.0
"""A rank that is behind by so long in a step is given up."""
PREPARE_S = 600.0
END_S = 5.0
CAUSE_S = 2.0
"""That a sum which broke off waits for the death behind it to be known."""


class RankDied(PenstockError):
    """A rank is gone: it ends the engine, so it is no EngineError, which would be the asker's alone."""


class Ranks:
    """Ranks 1 and up. Started at once, joined by the first `prepare`. `close` ends them, however they are."""

    def __init__(self, ranks: int, threads: int, on_death: Callable[[RankDied], None]) -> None:
        if ranks < 2:
            raise EngineError(f"tensor_parallel={ranks} has no other ranks")
        self.count = ranks
        self._group: RankGroup | None = None
        self._on_death = on_death
        self._death = ""
        self._dead = threading.Event()
        self._closing = False
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._members: list[_Member] = []
        try:
            for rank in range(1, ranks):
                self._members.append(_Member(rank))
            for member in self._members:
                # One that is gone already is for its watcher to report, with how it ended.
                with contextlib.suppress(ChannelClosed):
                    member.steps.send(Join(member.rank, ranks, str(self._folder / "store"), threads, STEP_S))
        except BaseException:
            self.close()
            raise
        for member in self._members:
            threading.Thread(target=self._watch, args=(member,), name="penstock-rank-watch", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    @property
    def group(self) -> RankGroup:
        """Raises RankDied where a rank did not come."""
        if self._group is None:
            try:
                # One that can't begin is noticed here at once, and not by ranks that wait for it.
                for member in self._members:
                    self._answer(member, member.steps, START_S)
                self._group = RankGroup(str(self._folder / "store"), 0, self.count, START_S)
            except RankLost as error:
                raise self.died(error) from error
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._group

    def prepare(self, staged: StagedWeights, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Every other rank lays out its share of a version and verifies it; all of them, or none.

        Raises EngineError with the cause, RankDied where one is gone.
        """
        _ = self.group
        told: list[_Member] = []
        failed: list[str] = []
        for member in self._members:
            try:
                member.prepare(staged, spec, self.count, dtype)
                told.append(member)
            except ChannelClosed as error:
                raise self.died(error) from error
            except (PenstockError, OSError, MemoryError) as error:
                failed.append(f"rank {member.rank}: {error}")
        # Also where one could not be told: an answer left unread would be taken for that to the next version.
        for member in told:
            if cause := self._answer(member, member.weights, PREPARE_S):
                failed.append(f"rank {member.rank}: {cause}")
        if failed:
            self.forget(staged.version)
            raise EngineError(f"weight version {staged.version} is not laid out by all ranks: {'; '.join(failed)}")

    def forget(self, version: int) -> None:
        """A prepared version will not serve."""
        for member in self._members:
            with contextlib.suppress(ChannelClosed):
                member.weights.send(Forget(version))

    def swap(self, version: int, plan: CachePlan) -> None:
        """Every other rank serves a prepared version from the next step on.

        Raises RankDied where one does not: others may serve it already, so there is no way back.
        """
        self.tell(Swap(version, plan.slots, plan.positions))
        causes = [(member.rank, self._answer(member, member.steps, STEP_S)) for member in self._members]
        failed = [f"rank {rank}: {cause}" for rank, cause in causes if cause]
        if failed:
            raise RankDied(f"weight version {version} does not serve on all ranks: {'; '.join(failed)}")

    def tell(self, message: ToRank) -> None:
        """All other ranks do what is said. Raises RankDied."""
        try:
            for member in self._members:
                member.steps.send(message)
        except ChannelClosed as error:
            raise self.died(error) from error

    def died(self, error: Exception, who: str = "a tensor-parallel rank") -> RankDied:
        """The death that is behind a broken sum or channel."""
        self._dead.wait(CAUSE_S)
        return RankDied(self._death or f"{who} does not answer: {error}")

    def close(self) -> None:
        """Ends them; a second call does nothing."""
        self._closing = True
        for member in self._members:
            member.close()
        deadline = time.monotonic() + END_S
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, member: _Member, channel: Channel, wait_s: float) -> str:
        """Why a rank did not do what it was told; empty where it did.

        Raises RankDied where no answer comes in time: the rank may do it yet, and nobody would know.
        """
        try:
            return channel.answer(wait_s).cause
        except EngineError as error:
            raise self.died(error, f"tensor-parallel rank {member.rank}") from error

    def _watch(self, member: _Member) -> None:
        code = member.process.wait()
        if self._closing:
            return
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._death = self._death or f"tensor-parallel rank {member.rank} died ({how})"
        self._dead.set()
        self._on_death(RankDied(self._death))


class _Member:
    """One other rank: its process, and a channel each for steps and for weights, which come meanwhile."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "penstock.instance.builtin.rank_process",
                    *(str(end.fileno()) for end in theirs),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[end.fileno() for end in theirs],
            )
        finally:
            for end in theirs:
                end.close()
        self.steps, self.weights = (Channel(end) for end in ours)

    def prepare(self, staged: StagedWeights, spec: ModelSpec, ranks: int, dtype: torch.dtype) -> None:
        """Sends the rank's byte ranges of a version, in memory that it maps too and that nobody else can name."""
        plan = plan_share(staged, spec, self.rank, ranks)
        # What is sent, and the tensors that the rank makes of it.
        check_room(2 * share_bytes(plan))
        try:
            descriptor = os.memfd_create(f"penstock-rank-{self.rank}")
        except OSError as error:
            raise EngineError(f"no memory for rank {self.rank}'s weights: {error}") from error
        try:
            nbytes = max(1, share_bytes(plan))
            os.ftruncate(descriptor, nbytes)
            with mmap.mmap(descriptor, nbytes) as mapped, memoryview(mapped) as into:
                entries = write_share(plan, staged.tensors, into)
            name = str(dtype).removeprefix("torch.")
            message = Prepare(staged.version, staged.manifest.config_json, name, entries)
            self.weights.send(message, descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.steps.close()
        self.weights.close()


class LeadCache(KVCache):
    """The leading rank's cache: what is moved in it is moved in all of them."""

    def __init__(
        self, spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        super().__init__(spec, plan, dtype, device)

    def allocate(self) -> None:
        if self.released:
            self._ranks.tell(Allocate())
        super().allocate()

    def release(self) -> None:
        self._ranks.tell(Release())
        super().release()

    def move(self, source: int, target: int, tokens: int) -> None:
        self._ranks.tell(Move(source, target, tokens))
        super().move(source, target, tokens)

    def wipe(self, slot: int) -> None:
        self._ranks.tell(Wipe(slot))
        super().wipe(slot)


class LeadDecoder(Decoder):
    """The leading rank's decoder: tells the others of each pass and makes its own share of it. Raises RankDied."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache, ranks: Ranks, vocab: int) -> None:
        super().__init__(spec, weights, cache, ranks.group, vocab)
        self._ranks = ranks
        self._ahead = -1
        """Version that passes are made with before it serves; -1 for the one that does."""

    def prefill(
        self,
        ids_BT: torch.Tensor,
        lengths_B: torch.Tensor,
        first_slot: int,
        row_of_slot: torch.Tensor | None,
        slots: int,
    ) -> torch.Tensor:
        rows = None if row_of_slot is None else tuple(row_of_slot.tolist())
        self._ranks.tell(Prefill(_raw(ids_BT), tuple(lengths_B.tolist()), first_slot, rows, slots))
        try:
            return super().prefill(ids_BT, lengths_B, first_slot, row_of_slot, slots)
        except RankLost as error:
            raise self._ranks.died(error) from error

    def decode(self, ids_B: torch.Tensor, positions_B: torch.Tensor, attended: int) -> torch.Tensor:
        self._ranks.tell(Decode(_raw(ids_B), _raw(positions_B), attended))
        try:
            return super().decode(ids_B, positions_B, attended)
        except RankLost as error:
            raise self._ranks.died(error) from error

    def extend(self, ids_T: torch.Tensor, slot: int, start: int) -> torch.Tensor:
        self._ranks.tell(Extend(_raw(ids_T), slot, start, self._ahead))
        try:
            return super().extend(ids_T, slot, start)
        except RankLost as error:
            raise self._ranks.died(error) from error

    @contextlib.contextmanager
    def ahead(self, version: int = -1, weights: DecoderWeights | None = None) -> Iterator[None]:
        self._ahead = version
        try:
            with super().ahead(version, weights):
                yield
        finally:
            self._ahead = -1


def _raw(ids: torch.Tensor) -> bytes:
    return ids.to(torch.int64).contiguous().numpy().tobytes()
