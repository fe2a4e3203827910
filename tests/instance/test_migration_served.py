"""What the benchmark of preempted machines says of its figures, and where it says none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.bench import migration_served as bench
from penstock.bench.migration_served import FRAME_STEPS, Cost


def test_a_kind_is_measured_only_where_its_environment_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ENGINES", raising=False)
    assert bench.missing("builtin", quick=False) == bench.missing("builtin", quick=True) == ""
    assert "PENSTOCK_ENGINES" in bench.missing("vllm", quick=False)
    monkeypatch.setenv("PENSTOCK_ENGINES", str(tmp_path))
    assert str(tmp_path) in bench.missing("sglang", quick=False)
    program = tmp_path / "sglang" / "bin" / "sglang"
    program.parent.mkdir(parents=True)
    program.touch()
    assert bench.missing("sglang", quick=False) == ""
    assert "quick" in bench.missing("sglang", quick=True)
    before = os.environ["PATH"]
    with bench.on_path("sglang"):
        assert os.environ["PATH"].startswith(str(program.parent))
    assert os.environ["PATH"] == before


@pytest.mark.parametrize(
    ("kind", "prefilled", "twice", "met"),
    [
        ("vllm", 1000, 8.0 * FRAME_STEPS, [True, True, True]),
        ("vllm", 1001, 8.0 * FRAME_STEPS + 1, [True, False, False]),
        ("sglang", 999, 0.0, [True, True, True]),
    ],
)
def test_more_than_one_prefill_or_one_frame_is_a_miss(
    kind: str, prefilled: float, twice: float, met: list[bool]
) -> None:
    cost = Cost(samples_moved=8, context_moved=1000, prefilled=prefilled, drawn_twice=twice, next_token_s=0.5, lost=0)
    found = bench.rows(kind, cost)
    assert [row.met for row in found if row.target] == met
    assert found[-1].value == 0.5


def test_prompts_share_no_beginning() -> None:
    firsts = [prompt.token_ids[0] for apart in (0, 1) for prompt in bench.asked(bench.SAMPLES, apart)]
    assert len(set(firsts)) == 2 * bench.SAMPLES
