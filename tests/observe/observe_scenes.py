"""Short runs made up for the tests of views, summaries and plots."""

from __future__ import annotations

from penstock.observe import FleetSnapshot, InstanceRow, RunView, events

START = 1_700_000_000.0


def instance_changed(
    ts: float, number: int, before: str, after: str, cause: str = "", tokens: int = 0, orderly: bool = False
) -> events.InstanceChanged:
    return events.InstanceChanged(
        ts=ts,
        instance=f"i-{number}",
        name=f"engine-{number}",
        before=before,
        after=after,
        cause=cause,
        tokens_accepted=tokens,
        orderly=orderly,
    )


def step_metrics(step: int, steps: int) -> dict[str, float]:
    return {
        "reward_mean": 0.3 + 0.5 * step / steps,
        "step_s": 2.0,
        "trainer_wait_s": 0.5,
        "rollout_tokens_per_s": 3000.0,
    }


def run_events(steps: int = 8, kill_at: int = 4) -> list[events.Event]:
    """A run of two engines that loses engine-1 half way, evaluates every second step, and ends well."""
    log: list[events.Event] = [
        events.RunStarted(ts=START, run="tiny-001", version="0.1.0", config={"train": {"steps": steps}}),
        instance_changed(START + 1, 0, "loading", "ready"),
        instance_changed(START + 1, 1, "loading", "ready"),
    ]
    for step in range(steps):
        ts = START + 2 + 2 * step
        log.append(events.WeightsPublished(ts=ts, version=step, nbytes=1000, wall_s=0.01))
        log.append(events.StepStarted(ts=ts, step=step, weight_version=step, prompts=4, samples=16))
        log.append(events.BatchSubmitted(ts=ts, batch=f"train-{step}", version=step, samples=16))
        if step % 2 == 0:
            accuracy = 0.3 + 0.06 * step
            log.append(
                events.Evaluated(ts=ts, step=step, weight_version=step, accuracy=accuracy, questions=64, wall_s=1)
            )
        if step == kill_at:
            log.append(instance_changed(ts + 1, 1, "ready", "gone", "the connection broke off", tokens=900))
            log.append(events.SamplesMoved(ts=ts + 1, instance="i-1", samples=5, tokens_kept=42, cause="gone"))
        log.append(events.BatchEnded(ts=ts + 1.9, batch=f"train-{step}", samples=16, failed=0, tokens=160))
        log.append(events.StepFinished(ts=ts + 2, step=step, metrics=step_metrics(step, steps)))
    end = START + 2 + 2 * steps
    log.append(
        events.Evaluated(ts=end, step=steps, weight_version=steps, accuracy=0.9, questions=64, wall_s=1),
    )
    log.append(events.RunFinished(ts=end, wall_s=2.0 + 2 * steps, outcome="done"))
    return log


def run_metrics(steps: int = 8) -> list[dict[str, float | None]]:
    return [{"step": float(step), **step_metrics(step, steps)} for step in range(steps)]


def row(
    number: int, state: str = "ready", running: int = 10, rate: float = 1000.0, cause: str = "", orderly: bool = False
) -> InstanceRow:
    return InstanceRow(
        instance=f"i-{number}",
        name=f"engine-{number}",
        engine="builtin",
        state=state,
        version=4,
        running=running,
        pending=0,
        tokens_accepted=100,
        tokens_per_s=rate,
        age_s=10.0,
        cause=cause,
        orderly=orderly,
    )


def run_view(steps: int = 8, until: int = 5, instances: int = 2) -> RunView:
    """The state in mid-run, with the manager's report."""
    view = RunView()
    for event in run_events(steps):
        view.apply(event)
        if isinstance(event, events.StepFinished) and event.step + 1 == until:
            break
    rows = (*(row(number) for number in range(0, 2 * instances, 2)), row(1, "gone", 0, 0.0, "the connection broke off"))
    view.apply_fleet(
        FleetSnapshot(
            ts=view.now_ts, instances=rows, queued=3, running=20, finished=1234, failed=0, tokens_accepted=56789
        )
    )
    return view
