"""Machines that were asked for, in the live view's sentences and in the summary."""

from __future__ import annotations

from penstock.observe.events import FleetSized, MachineChanged, ProvisionerFailed
from penstock.observe.notices import Notices
from penstock.observe.summary import summarise, summary_rows


def changed(after: str, spent: float, cause: str = "") -> MachineChanged:
    return MachineChanged(ts=1.0, machine="m-1", before="", after=after, cause=cause, cost=spent, spent=spent)


def test_the_summary_says_what_machines_cost_and_none_where_nobody_adds_any() -> None:
    log = [
        changed("asked", 0.0),
        changed("joined", 0.5),
        changed("failed", 1.25, "it vanished"),
        changed("asked", 1.25),
    ]
    summary = summarise(log, [])
    assert (summary.machines_asked, summary.machines_failed, summary.machines_spent) == (2, 1, 1.25)
    assert ("machines", "2 asked for, 1 failed; 1.25 dollars") in summary_rows(summary)
    assert summarise([], []).machines_spent is None
    assert "machines" not in dict(summary_rows(summarise([], [])))


def test_what_a_person_hears_of_machines_is_the_number_and_the_ends() -> None:
    notices = Notices()
    told = [
        notices.take(FleetSized(ts=1.0, before=1, after=2, cause="a step costs less")),
        notices.take(changed("starting", 0.0)),
        notices.take(changed("failed", 1.0, "it did not join")),
        notices.take(changed("released", 2.0, "1 machines are enough")),
        notices.take(ProvisionerFailed(ts=1.0, call="release", machine="m-1", cause="HTTP 500")),
    ]
    assert [str(notice) for notice in told if notice] == [
        "2 machines wanted instead of 1: a step costs less",
        "machine m-1 failed: it did not join (1.00 dollars)",
        "machine m-1 was released: 1 machines are enough (2.00 dollars)",
        "the provisioner failed to release m-1: HTTP 500",
    ]
