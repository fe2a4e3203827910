"""A machine in closed form against one that draws token by token, and what it counts against counting anew."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import MACHINE

from penstock.simulate.machine import GROWTH_TOKENS, Machine, SimSample
from penstock.simulate.profiles import MachineProfile

SHARING = MACHINE.model_copy(update={"shared_prompts": True, "prefill_s_per_token": 1e-3})


def siblings(prompts: int, per: int, prompt_tokens: int, rng: random.Random) -> list[SimSample]:
    return [
        SimSample(prompt * per + k, prompt, prompt_tokens + prompt, rng.randrange(1, 400))
        for prompt in range(prompts)
        for k in range(per)
    ]


def drained(machine: Machine) -> list[tuple[float, int]]:
    """(when, which) of every end."""
    ends = []
    while (due := machine.next_at()) is not None:
        ends += [(due, sample.number) for sample in machine.advance(due)]
        machine.settle(due)
        recounted(machine)
    return ends


def recounted(machine: Machine) -> None:
    """What it counts as it goes is what there is."""
    rows = list(machine.running.values())
    done = sum(machine.progress(sample) for sample in rows)
    prompts = {sample.prompt: sample.prompt_tokens for sample in rows}
    assert machine.context == pytest.approx(done + sum(sample.prompt_tokens for sample in rows), abs=1e-3)
    once = sum(prompts.values()) if machine.profile.shared_prompts else sum(row.prompt_tokens for row in rows)
    assert machine.held == pytest.approx(done + once, abs=1e-3)
    assert len(rows) < 2 or machine.held <= machine.profile.kv_tokens + 1


class TokenByToken:
    """The same machine, one decode step at a time. Times of ends, by sample; memory is counted anew at each."""

    def __init__(self, profile: MachineProfile, samples: list[SimSample]) -> None:
        self.profile, self.clock, self.prefilled = profile, 0.0, 0
        self.waiting = deque(samples)
        self.running: list[tuple[SimSample, int]] = []
        self.ends: dict[int, float] = {}

    def run(self) -> dict[int, float]:
        while self.waiting or self.running:
            while self.waiting and self.fits(self.waiting[0]):
                sample = self.waiting.popleft()
                tokens = 0 if self.there(sample) else sample.prompt_tokens
                self.prefilled += tokens
                self.clock += tokens * self.profile.prefill_s_per_token
                self.running.append((sample, 0))
            self.clock += self.profile.step_s(
                len(self.running), sum(sample.prompt_tokens + done for sample, done in self.running)
            )
            self.running = [(sample, done + 1) for sample, done in self.running]
            self.ends |= {sample.number: self.clock for sample, done in self.running if done == sample.length}
            self.running = [row for row in self.running if row[1] < row[0].length]
        return self.ends

    def there(self, sample: SimSample) -> bool:
        return self.profile.shared_prompts and any(other.prompt == sample.prompt for other, _ in self.running)

    def fits(self, sample: SimSample) -> bool:
        if not self.running or len(self.running) >= self.profile.max_running:
            return not self.running
        rows = [row for row, _ in self.running]
        if not self.there(sample):
            rows.append(sample)
        kept = {row.prompt if self.profile.shared_prompts else row.number: row.prompt_tokens for row in rows}
        tokens = sum(kept.values()) + sum(done for _, done in self.running)
        return tokens + GROWTH_TOKENS * (len(self.running) + 1) <= self.profile.kv_tokens


@settings(max_examples=60, deadline=None)
@given(
    shared=st.booleans(),
    places=st.sampled_from([1, 3, 5, 32]),
    kv_tokens=st.sampled_from([6_000, 1_000_000]),
    prompts=st.integers(1, 6),
    per=st.integers(1, 5),
    prompt_tokens=st.sampled_from([1, 60, 700]),
    mixed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_ends_each_sample_when_a_machine_that_draws_token_by_token_does(
    shared: bool,
    places: int,
    kv_tokens: int,
    prompts: int,
    per: int,
    prompt_tokens: int,
    mixed: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    # Room that is kept for growth is more than an answer's length: nobody is put back.
    samples = [
        SimSample(row.number, row.prompt, row.prompt_tokens, 1 + row.length % GROWTH_TOKENS)
        for row in siblings(prompts, per, prompt_tokens, rng)
    ]
    if mixed:
        rng.shuffle(samples)
    profile = SHARING.model_copy(
        update={"shared_prompts": shared, "max_running": places, "kv_tokens": kv_tokens, "context_s": 1e-5}
    )
    slow = TokenByToken(profile, samples)
    expected = slow.run()
    machine = Machine("m", profile, True)
    for sample in samples:
        machine.give(sample)
    machine.settle(0.0)
    ends = {number: at for at, number in drained(machine)}
    assert ends.keys() == expected.keys()
    assert machine.retracted == 0
    assert machine.prefilled == slow.prefilled
    # Half a token of context for each sequence and step is what the closed form is off by.
    for number, at in ends.items():
        assert at == pytest.approx(expected[number], rel=1e-2)


@settings(max_examples=150, deadline=None)
@given(
    shared=st.booleans(),
    kv_tokens=st.sampled_from([900, 2_000, 20_000]),
    prompt_tokens=st.sampled_from([1, 60, 700]),
    acts=st.lists(
        st.tuples(st.sampled_from(["give", "wait", "event", "remove", "move", "take_all"]), st.integers(0, 10**6)),
        max_size=40,
    ),
)
def test_whatever_comes_and_goes_what_it_counts_is_what_there_is(
    shared: bool, kv_tokens: int, prompt_tokens: int, acts: list[tuple[str, int]]
) -> None:
    profile = SHARING.model_copy(update={"shared_prompts": shared, "kv_tokens": kv_tokens, "max_running": 6})
    machines = [Machine(name, profile, True) for name in "ab"]
    samples, outside = siblings(8, 3, prompt_tokens, random.Random(1)), deque[SimSample]()
    outside.extend(samples)
    finished: list[SimSample] = []
    now = 0.0
    for act, number in acts:
        machine, other = machines if number % 2 else machines[::-1]
        held = [*machine.running.values(), *machine.pending]
        match act:
            case "give" if outside:
                machine.give(outside.popleft())
            case "wait":
                now += number % 1000 / 300
            case "event":
                now = max(now, machine.next_at() or now)
            case "remove" | "move" if held:
                sample = held[number % len(held)]
                machine.remove(sample)
                (other.give if act == "move" else outside.append)(sample)
            case "take_all":
                outside.extend(machine.take_all())
        for each in machines:
            while (due := each.next_at()) is not None and due <= now:
                finished += each.advance(due)
                each.settle(due)
            finished += each.advance(now)
            each.settle(now)
            recounted(each)
    for each in machines:
        for sample in outside if each is machines[0] else ():
            each.give(sample)
        each.settle(now)
        while (due := each.next_at()) is not None:
            finished += each.advance(due)
            each.settle(due)
            recounted(each)
        assert (each.context, each.spared, each._siblings) == (0.0, 0.0, {})
    assert sorted(sample.number for sample in finished) == list(range(24))


def test_a_shared_prompt_makes_room_and_reports_tell_what_an_engine_s_adapter_sees() -> None:
    profile = SHARING.model_copy(update={"kv_tokens": 700 + 4 * (1 + GROWTH_TOKENS)})
    shared, apart = (Machine("m", p, True) for p in (profile, profile.model_copy(update={"shared_prompts": False})))
    for machine in (shared, apart):
        for sample in (SimSample(number, 0, 700, 200) for number in range(4)):
            machine.give(sample)
        machine.settle(0.0)
    assert (len(shared.running), len(apart.running)) == (4, 1)
    assert (shared.prefilled, shared.at_s) == (700, pytest.approx(0.7))
    shared.advance(shared.at_s + 1.0)
    report = shared.report()
    assert report is not None
    assert report.prefilled == 2800
    assert report.context_tokens > 1.4 * 1000


def test_who_is_put_back_prefills_its_own_tokens_where_a_sibling_goes_on() -> None:
    machine = Machine("m", SHARING.model_copy(update={"kv_tokens": 2_300}), True)
    for number, length in enumerate((1_000, 600, 600)):
        machine.give(SimSample(number, 0, 600, length))
    machine.settle(0.0)
    drained(machine)
    assert machine.retracted == 1
    # Full once each has a third of what the prompt leaves; there is room again once another one has ended.
    assert machine.prefilled == 600 + (2_300 - 600) // 3
