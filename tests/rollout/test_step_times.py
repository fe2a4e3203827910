"""How a step's seconds are added up, before anything is learned from them."""

from __future__ import annotations

from penstock.rollout.step_times import StepAccount


def test_seconds_of_each_kind_add_up_and_remote_ones_are_a_mean_over_those_that_were_there() -> None:
    account = StepAccount(10.0, 10.0)
    apart = {"window": False, "training": False, "waiting": False}
    account.pass_time(12.0, **{**apart, "window": True}, fleet=3, idle=[], busy=2)
    account.seen |= {"a", "b"}
    account.pass_time(15.0, **{**apart, "training": True}, fleet=2, idle=["a"], busy=1)
    account.pass_time(16.0, **{**apart, "waiting": True}, fleet=2, idle=["a", "b"], busy=0)
    times = account.times(2.9)
    assert (times.step_s, times.window_s, times.train_s, times.trainer_wait_s) == (6.0, 2.0, 2.9, 1.0)
    assert times.fleet == (2 * 3 + 3 * 2 + 2) / 6
    assert times.remote_busy_s == 2 * 2 + 3
    assert times.remote_wait_s == (3 + 2) / 2, "five seconds of two machines"
