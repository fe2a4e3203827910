"""How many threads a machine, or a container on it, has processor time for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.weights import memory
from penstock.weights.memory import usable_cores


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/pods/one\n", {"pods/one/cpu.max": "150000 100000\n", "pods/cpu.max": "max 100000\n"}, 1.5),
        ("0::/pods/one\n", {"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/seen/by/the/host\n", {"cpu.max": "200000 100000\n"}, 2.0),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "1000\n", "cpu/a/cpu.cfs_period_us": "10000\n"},
            0.1,
        ),
        ("5:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, math.inf),
        ("4:memory:/a\n", {"cpu/a/cpu.cfs_quota_us": "1000\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "no number\n"}, math.inf),
        ("0::/../../elsewhere\n", {}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_the_least_quota_on_the_way_to_a_group_counts(
    tmp_path: Path, groups: str, files: dict[str, str], cores: float
) -> None:
    said = tmp_path / "cgroup"
    said.write_text(groups)
    assert memory._quota(said, written(tmp_path / "fs", files)) == cores
    assert memory._quota(tmp_path / "none", tmp_path / "fs") == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(0.1, 1), (1.0, 1), (1.5, 2), (3.0, 3), (64.0, 4), (math.inf, 4)])
def test_a_machine_has_the_cores_that_its_quota_fills(
    monkeypatch: pytest.MonkeyPatch, quota: float, cores: int
) -> None:
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.setattr(memory, "_quota", lambda groups, root: quota)
    assert usable_cores() == cores
