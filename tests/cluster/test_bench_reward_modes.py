"""What `penstock bench reward-modes` says of steps that it has seen, and the rewards that it measures with."""

from __future__ import annotations

import time
from array import array

from penstock.bench import reward_modes
from penstock.bench.reward_modes import FULL, Seen
from penstock.bench.reward_modes_functions import asking, computing
from penstock.sample import Finish, Prompt, Sample, SampleId


def sample(replica: int) -> Sample:
    prompt = Prompt(0, "q", [1], {}, "here:1")
    return Sample(SampleId("b", 0, replica), prompt, array("i", [1]), array("f", [-1.0]), (), Finish.STOP, "a")


def test_what_a_mode_adds_is_judged_beside_instant_steps() -> None:
    instant = Seen([10.0, 10.2, 10.1], [1.0, 1.1, 1.0])
    seen = {("instant", "thread"): instant, ("computes", "process"): Seen([10.3, 10.35], [1.2, 1.2])}
    added, slower = reward_modes._rows("computes", "process", seen, FULL)
    assert (round(added.value or 0, 3), added.met, slower.value) == (0.225, True, 1.2)
    seen["computes", "thread"] = Seen([14.0], [2.5])
    assert reward_modes._rows("computes", "thread", seen, FULL)[0].met is None, "the issue asks nothing of it"
    seen["waits", "thread"] = Seen([14.0], [1.0])
    assert reward_modes._rows("waits", "thread", seen, FULL)[0].met is False


def test_the_measured_rewards_take_a_processor_or_wait_for_a_server() -> None:
    began = time.thread_time()
    assert (computing(sample(0), seconds=0.02), computing(sample(3), seconds=0.0)) == (0.0, 1.0)
    assert time.thread_time() - began >= 0.02
    with reward_modes._server(0.001) as url:
        assert [asking(sample(k), url=url) for k in range(3)] == [0.0, 1.0, 0.0]
