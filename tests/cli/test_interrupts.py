"""Signals to this very process, and when they are heard."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from penstock.cli.interrupts import Interrupt, interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_interrupts_once(number: signal.Signals) -> None:
    with interruptible() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            tell(number)
        assert interrupt.at is not None
        for further in SIGNALS:
            tell(further)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_held_is_done_first(number: signal.Signals) -> None:
    done = []

    def held() -> None:
        with interrupt.held():
            tell(number)
            done.append("what it was at")
            tell(number)
            assert interrupt.at is not None

    with interruptible() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            held()
        assert done
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with interrupt.held():
            pass


def test_nothing_is_held_for_longer_than_so_long() -> None:
    slept = []

    def held() -> None:
        with interrupt.held():
            tell(signal.SIGINT)
            time.sleep(30)
            slept.append("to the end")

    with interruptible(hold_s=0.05) as interrupt:
        with pytest.raises(KeyboardInterrupt):
            held()
        assert not slept


def test_an_error_within_ends_the_run_as_told_and_is_kept_as_the_cause() -> None:
    def held() -> None:
        with interrupt.held():
            tell(signal.SIGTERM)
            raise ValueError("its own")

    with interruptible() as interrupt:
        with pytest.raises(KeyboardInterrupt) as found:
            held()
        assert isinstance(found.value.__cause__, ValueError)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_a_signal_nothing_happens() -> None:
    with interruptible(hold_s=0.01) as interrupt:
        with interrupt.held():
            time.sleep(0.05)
        assert interrupt.at is None


def test_signals_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)]
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)] == before


def test_another_thread_has_no_signals_to_hold() -> None:
    found: list[Interrupt] = []

    def run() -> None:
        with interruptible() as interrupt, interrupt.held():
            found.append(interrupt)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert found
    assert found[0].at is None
