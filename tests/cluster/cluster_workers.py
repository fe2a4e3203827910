"""Workers that the cluster's tests start in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from penstock.cluster import Batch, Mesh, Method, Shares, dispatch, from_tensors, register_dispatch, to_tensors


def of_even_ranks(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
    """A dispatch of one's own: every other rank is called, and their answers are added up."""
    called = range(0, mesh.size, 2)
    return Shares([(args, kwargs)] * mesh.size, called, sum, only=called)


register_dispatch("of_even_ranks", of_even_ranks)


class Worker:
    def __init__(self, greeting: str = "hello") -> None:
        self.rank = int(os.environ["RANK"])
        self.greeting = greeting
        self.seen: list[Any] = []

    @dispatch("one_to_all")
    def note(self, value: Any) -> int:
        self.seen.append(value)
        return len(self.seen)

    @dispatch("one_to_all")
    def all_seen(self) -> list[Any]:
        return self.seen

    @dispatch("rank_zero")
    def who(self) -> Any:
        return [self.rank, self.greeting]

    @dispatch("one_to_all", execute="all_multithread")
    def echo(self, value: Any) -> Any:
        return value

    @dispatch("all_to_all")
    def plus_rank(self, value: int) -> int:
        return value + self.rank

    @dispatch("of_even_ranks")
    def times_rank(self, value: int) -> int:
        return value * self.rank

    @dispatch("data_parallel")
    def doubled(self, batch: Batch, scale: int = 2) -> Batch:
        return from_tensors({"x": to_tensors(batch)["x"] * scale})

    @dispatch("data_parallel")
    def summed(self, batch: Batch) -> Any:
        return [self.rank, len(batch), sum(batch.column("x").data.cast("q"))]

    @dispatch("one_to_all")
    def fail_on(self, rank: int) -> int:
        if rank == self.rank:
            raise ValueError(f"rank {rank} was asked to fail")
        return self.rank

    @dispatch("one_to_all")
    def die_on(self, rank: int) -> int:
        if rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    @dispatch("one_to_all")
    def spoil(self, batch: Batch) -> int:
        """Writes to what it was given."""
        to_tensors(batch)["x"].zero_()
        return int(to_tensors(batch)["x"].sum())

    @dispatch("rank_zero")
    def unanswerable(self) -> Any:
        return lambda: None

    @dispatch("one_to_all")
    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @dispatch("one_to_all")
    def hold_the_interpreter(self) -> None:
        """Never returns and lets no other thread of this process run."""
        print("holding", flush=True)
        sys.setswitchinterval(1e9)
        while True:
            pass

    @dispatch("one_to_all")
    def hold_or_fail(self) -> None:
        """Rank 0 goes on for a minute, the others raise."""
        if self.rank:
            raise ValueError(f"rank {self.rank} does not hold")
        time.sleep(60)

    def plain(self, value: int) -> int:
        return value


class Other:
    def __init__(self, name: str) -> None:
        self.name = name

    def told(self) -> str:
        return f"{self.name} in {os.getpid()}"


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no model here")
