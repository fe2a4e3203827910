"""Replacing engines that died: so many times, each after a longer wait."""

from __future__ import annotations

from penstock.cli.restarts import FIRST_WAIT_S, Restarts


def test_each_replacement_waits_longer_and_is_asked_for_once() -> None:
    restarts = Restarts(2)
    assert not restarts.due(0.0)
    assert restarts.died(10.0) == FIRST_WAIT_S
    assert not restarts.due(10.0)
    assert restarts.due(10.0 + FIRST_WAIT_S)
    assert not restarts.due(100.0)
    assert restarts.died(200.0) == 2 * FIRST_WAIT_S
    assert restarts.due(200.0 + 2 * FIRST_WAIT_S)
    assert restarts.died(300.0) is None
    assert not restarts.due(1000.0)


def test_none_are_replaced_where_none_may_be() -> None:
    assert Restarts(0).died(0.0) is None
