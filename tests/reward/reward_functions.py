"""Reward functions of every temper, for the tests to name by path. Each gets its orders from the sample's row."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time

from penstock.reward import Sample, Score, Unscored

in_flight = 0
most_in_flight = 0
released = threading.Event()


def right(sample: Sample) -> float:
    return float(sample.response == sample.row["answer"])


async def right_later(sample: Sample) -> Score:
    await asyncio.sleep(0)
    return Score(right(sample), {"length": len(sample.token_ids)})


def right_by_coroutine(sample: Sample):
    return right_later(sample)


def obey(sample: Sample):
    """Does what the row's `do` says."""
    match sample.row.get("do"):
        case "raise":
            raise ValueError("no such\n  answer")
        case "exit":
            sys.exit(4)
        case "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os._exit(7)
        case "die":
            os._exit(9)
        case "hang":
            time.sleep(600)
        case "hold the lock":
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        case "print":
            print("hello on stdout")
            os.write(1, b"\x01\x02raw bytes")
            subprocess.run(["echo", "hello from a child"], check=True)
            return float(sys.stdin.read() == "")
        case "spawn and hang":
            child = subprocess.Popen(["sleep", "600"])
            with open(sample.row["pid_file"], "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "fork and crash":
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            with open(sample.row["pid_file"], "w") as file:
                file.write(str(pid))
            os._exit(9)
        case "alarm":
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(600)
        case "pid":
            return os.getpid()
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case "unscored":
            return Unscored("undecidable")
        case "whole sample":
            return Score(1.0, {describe(sample): 1.0})
    return right(sample)


async def obey_async(sample: Sample):
    match sample.row.get("do"):
        case "hang":
            await asyncio.sleep(600)
        case "ignore cancellation":
            while not released.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    continue
        case "cancel itself":
            raise asyncio.CancelledError
        case "wait for release":
            await asyncio.to_thread(released.wait, 30)
    return obey(sample)


async def counted(sample: Sample) -> float:
    global in_flight, most_in_flight
    in_flight += 1
    most_in_flight = max(most_in_flight, in_flight)
    await asyncio.sleep(0.01)
    in_flight -= 1
    return 1.0


def until_released(sample: Sample) -> float:
    released.wait(30)
    return 1.0


def late_coroutine(sample: Sample):
    released.wait(30)
    return right_later(sample)


def describe(sample: Sample) -> str:
    prompt = sample.prompt
    return (
        f"{sample.id} {prompt.index} {prompt.text} {list(prompt.token_ids)} {prompt.source} {dict(sample.row)} "
        f"{sample.token_ids} {sample.logprobs} {sample.version_spans} {sample.finish!r} {sample.response}"
    )


class Judge:
    async def __call__(self, sample: Sample) -> float:
        return right(sample)

    def method(self, sample: Sample) -> float:
        return right(sample)

    @staticmethod
    def two(sample: Sample, other: object) -> float:
        return 0.0


judge = Judge()
a_number = 3


def no_parameters() -> float:
    return 0.0


def on_alarm(*_: object) -> None:
    raise TimeoutError("by alarm")
