"""Every published form of a trace becomes the same kind of series."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.simulate.traces import Trace, from_counts, read_trace, static_trace

BAMBOO = "0,add,node1\n0,add,node2\n60000,remove,node1\n120000,add,node3\n"
GCLOUD = "2021-12-11, 11:00:00, 2\n2021-12-11, 11:02:00, 2\n2021-12-11, 11:01:00, 1\n"
SKYPILOT = '{"metadata": {"gap_seconds": 60}, "data": [2, 1, 2]}'


@pytest.mark.parametrize("text", [BAMBOO, GCLOUD, SKYPILOT])
def test_every_form_gives_the_same_counts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert read_trace(path).counts() == [(0.0, 2), (60.0, 1), (120.0, 2)]


@pytest.mark.parametrize(("text", "ends_s"), [(BAMBOO, 120.0), (GCLOUD, 120.0), (SKYPILOT, 180.0)])
def test_a_trace_ends_with_its_last_line_and_counts_at_a_gap_with_the_last_gap(
    tmp_path: Path, text: str, ends_s: float
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert read_trace(path).duration_s == ends_s


def test_of_several_counts_of_one_moment_the_last_line_s_holds(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(GCLOUD + "2021-12-11, 11:01:00, 5\n2021-12-11, 11:00:00, 3\n")
    assert read_trace(path).counts() == [(0.0, 3), (60.0, 5), (120.0, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "2021-12-11, 11:00:00, 20\n2021-12-11, 11:01:00, 10\n",
        '{"metadata": {"gap_seconds": 60}, "data": [20, 10]}',
    ],
)
def test_where_machines_have_no_names_chance_says_who_goes_the_same_for_a_seed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    stayed = [read_trace(path, seed).available(60.0) for seed in (1, 1, 2)]
    assert stayed[0] == stayed[1] != stayed[2]
    # Neither those who came last nor those who came first.
    names = [{f"node{k}" for k in numbers} for numbers in (range(1, 11), range(11, 21))]
    assert all(who not in names for who in stayed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "is empty; a trace has"),
        ("1,2\n", "trace:1: '1,2' is no line"),
        ("0,add,a\nsoon,add,b\n", "trace:2: 'soon' is no time"),
        ("0,add,a\n5,add,a\n", "trace:2: 'add' of 'a', which is there"),
        ("0,add,a\n5,remove,b\n", "trace:2: 'remove' of 'b', which is not there"),
        ("5,add,a\n0,add,b\n", "trace:2: goes back"),
        ("2021-12-11, noon, 3\n", "trace:1"),
        ('{"data": [1]}', "SkyPilot"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=names):
        read_trace(path)


def test_a_window_begins_with_what_is_there() -> None:
    trace = from_counts([(0.0, 3), (100.0, 1), (200.0, 4)], 300.0)
    window = trace.window(150.0, 100.0)
    assert window.counts() == [(0.0, 1), (50.0, 4)]
    assert window.duration_s == 100.0


@pytest.mark.parametrize(("last", "count"), [("60000,add,b", 2), ("60000,remove,a", 0)])
def test_the_last_line_of_a_trace_happens(tmp_path: Path, last: str, count: int) -> None:
    path = tmp_path / "trace"
    path.write_text(f"0,add,a\n30000,add,c\n40000,remove,c\n{last}\n")
    trace = read_trace(path)
    for window in (trace.window(0.0, 60.0), trace.window(20.0, 1e6)):
        assert window.counts()[-1] == (window.duration_s, count)
    assert trace.window(0.0, 40.0).counts()[-1] == (30.0, 2), "the end of a part is the next one's"


def test_sampling_keeps_whole_machines_and_is_repeatable() -> None:
    trace = from_counts([(0.0, 400), (10.0, 0)], 20.0)
    half = trace.sampled(0.5, seed=3)
    assert 150 < half.counts()[0][1] < 250
    assert half.counts()[-1][1] == 0
    assert half == trace.sampled(0.5, seed=3) != trace.sampled(0.5, seed=4)


def test_the_densest_windows_do_not_overlap() -> None:
    quiet = [(float(at), 1 + at % 2) for at in range(0, 6000, 600)]
    busy = [(6000.0 + at, 1 + at % 2) for at in range(0, 1000, 11)]
    trace = from_counts([*quiet, *busy], 12_000.0)
    first, second = trace.densest(2, 1800.0)
    assert 4200 < first <= 6000
    assert abs(first - second) >= 1800.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 5))
def test_counts_become_machines_that_come_once_and_go_once(counts: list[int], seed: int) -> None:
    trace = from_counts([(float(k), count) for k, count in enumerate(counts)], float(len(counts)), seed)
    there: set[str] = set()
    ever: set[str] = set()
    for change in trace.changes:
        if change.there:
            assert change.node not in ever
            there.add(change.node)
            ever.add(change.node)
        else:
            there.remove(change.node)
    assert len(there) == counts[-1]
    for k, count in enumerate(counts):
        assert len(trace.available(float(k))) == count


def test_a_static_trace_never_changes() -> None:
    trace = static_trace(3, 100.0)
    assert isinstance(trace, Trace)
    assert trace.counts() == [(0.0, 3)]
    assert len(trace.available(99.0)) == 3
