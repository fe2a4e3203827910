"""The policy on the page about balance runs, and is asked by a manager that was given its path."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from penstock.rollout.balance import InstanceLoad, Queue
from penstock.rollout.manager import Manager, ManagerConfig

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"


def test_the_example_policy_is_used_by_a_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "policy_on_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "policy_on_the_page", raising=False)
    manager = Manager(ManagerConfig(balance="policy_on_the_page:FastestFirst", max_pending_per_instance=0))
    loads = [InstanceLoad("slow", 0, 8, tokens_per_s=10.0), InstanceLoad("fast", 0, 8, tokens_per_s=70.0)]
    picks = manager.policy.assign(Queue(8), loads)
    assert picks.count(1) == 7
