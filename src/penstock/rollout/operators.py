"""What operators see of a manager: instances, samples by state, Prometheus metrics. Reads, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.errors import WireError
from penstock.rollout.fleet import State
from penstock.rollout.manager import Manager

__all__ = ["Adoption", "fleet", "health", "instances", "metrics", "read_adoption", "samples", "status"]

PAGES = """\
A rollout manager of Penstock.

GET  /status     the run at a glance, and what samples wait for
GET  /instances  who is there, and who left last and why
GET  /samples    samples by state, of each open batch and in all
GET  /fleet      machines that were asked for, and what they cost
GET  /metrics    for Prometheus
GET  /healthz    whether it works; needs no token
POST /instances  {"url": "http://127.0.0.1:8000", "engine": "vllm"} takes a server that has no agent
POST /fleet/release  releases every machine
"""
ADOPTION_BYTES = 4096

SAMPLE_STATES = ("queued", "placed", "running", "moving", "finished", "failed")


class Adoption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server without an agent, for which one is to be started."""

    url: str
    engine: str


def read_adoption(body: bytes) -> Adoption:
    """Raises WireError for what is none."""
    if len(body) > ADOPTION_BYTES:
        raise WireError(f"the request is over {ADOPTION_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=Adoption)
    except msgspec.DecodeError as error:
        raise WireError(f'expected {{"url": "http://host:port", "engine": "vllm"}}: {error}') from error


def health(manager: Manager, journal: str) -> dict[str, Any]:
    """Whether the manager works and what it has; the only answer that needs no token, so it names nobody.

    `journal`: "off", "running", or why it does not run.
    """
    return {
        "status": "ok",
        "instances_ready": manager.fleet.count(State.READY),
        "trainer_connected": manager.trainer_connected,
        "waiting": bool(manager.waiting.waiting_for),
        "journal": journal,
    }


def instances(manager: Manager, now: float) -> list[dict[str, Any]]:
    """Living instances, then those gone last."""
    living = {instance.id: instance for instance in manager.fleet}
    rows = []
    for status in manager.status(now).instances:
        row = msgspec.to_builtins(status)
        instance = living.get(status.instance)
        if instance is not None:
            row |= {
                "host": instance.host,
                "pid": instance.pid,
                "device": instance.device,
                "max_running": instance.max_running,
                "max_context_tokens": instance.max_context_tokens,
                "target_version": instance.target,
                "rows_refused": instance.rows_refused,
                "load": msgspec.to_builtins(instance.beat) if instance.beat is not None else None,
            }
        rows.append(row)
    return rows


def status(manager: Manager, now: float) -> dict[str, Any]:
    """The run at a glance, and whose turn it is on the trainer's own devices, and why."""
    told = manager.status(now)
    return {
        "queued": told.queued,
        "running": told.running,
        "finished": told.finished,
        "failed": told.failed,
        "tokens_accepted": told.tokens_accepted,
        "waiting_for": told.waiting_for,
        "instances": {state.value: manager.fleet.count(state) for state in State},
        "weight_version": manager.versions.latest,
        "window": manager.windows.state(now),
    }


def fleet(manager: Manager, now: float) -> dict[str, Any] | None:
    """Machines that were asked for, what they cost, and how many are wanted; None where nobody adds any."""
    return manager.provisioning.report(now) if manager.provisioning is not None else None


def samples(manager: Manager, now: float) -> dict[str, Any]:
    """Samples by state: of each open batch, of batches that ended lately, and in all."""
    open_batches: list[dict[str, Any]] = []
    for batch in manager.tracker.batches():
        open_batches.append(
            {
                "batch": batch.name,
                "version": batch.version,
                "samples": batch.samples,
                "tokens": batch.tokens,
                "context_tokens": batch.context_tokens,
                "age_s": round(now - batch.submitted_at, 3),
                "since_progress_s": round(now - manager.tracker.progress_at(batch), 3),
                "states": manager.tracker.state_counts(batch),
            }
        )
    totals = dict.fromkeys(SAMPLE_STATES, 0)
    for row in open_batches:
        for state, count in row["states"].items():
            totals[state] += count
    ended = [{"batch": name, "states": states} for name, states in manager.ended_batches.items()]
    return {"waiting_for": manager.waiting.waiting_for, "states": totals, "open": open_batches, "ended": ended}


def metrics(manager: Manager, now: float) -> str:
    """The Prometheus text format, version 0.0.4."""
    tracker, counts = manager.tracker, manager.counts
    states = samples(manager, now)["states"]
    statuses = [row for row in manager.status(now).instances if row.state != State.GONE.value]
    lines: list[str] = []

    def family(name: str, kind: str, text: str, rows: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP penstock_{name} {text}")
        lines.append(f"# TYPE penstock_{name} {kind}")
        for labels, value in rows:
            inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"penstock_{name}{{{inside}}} {value:.17g}" if inside else f"penstock_{name} {value:.17g}")

    def single(name: str, kind: str, text: str, value: float) -> None:
        family(name, kind, text, [({}, value)])

    single("tokens_accepted_total", "counter", "Output tokens accepted from instances.", tracker.tokens_accepted)
    single("samples_finished_total", "counter", "Samples finished.", tracker.samples_finished)
    single("samples_failed_total", "counter", "Samples set aside as failed.", tracker.samples_failed)
    single("samples_moved_total", "counter", "Samples that went on elsewhere.", counts.samples_moved)
    single("tokens_moved_total", "counter", "Tokens that moved samples kept as prefix.", counts.tokens_moved)
    family("samples", "gauge", "Samples of open batches by state.", [({"state": s}, n) for s, n in states.items()])
    by_state = [({"state": state.value}, float(manager.fleet.count(state))) for state in State if state != State.GONE]
    family("instances", "gauge", "Living instances by state.", by_state)
    reserved = sum(instance.reserved for instance in manager.fleet)
    single("instances_reserved", "gauge", "Living instances on the trainer's own devices.", reserved)
    single("instances_gone_total", "counter", "Instances that left or were given up.", manager.fleet.gone_count)
    family(
        "instance_tokens_accepted_total",
        "counter",
        "Output tokens accepted from one instance.",
        [({"instance": row.instance}, row.tokens_accepted) for row in statuses],
    )
    family(
        "instance_samples",
        "gauge",
        "Samples with one instance.",
        [({"instance": row.instance, "state": "running"}, row.running) for row in statuses]
        + [({"instance": row.instance, "state": "pending"}, row.pending) for row in statuses],
    )
    single("frames_refused_total", "counter", "Frames refused, from agents and trainers.", counts.frames_refused)
    single("rows_refused_total", "counter", "Rows of token frames refused.", counts.rows_refused)
    family(
        "batches_total",
        "counter",
        "Batches that ended, by outcome.",
        [
            ({"outcome": "done"}, counts.batches_done),
            ({"outcome": "failed"}, counts.batches_failed),
            ({"outcome": "cancelled"}, counts.batches_cancelled),
        ],
    )
    single("waits_total", "counter", "Times that samples waited for an instance to take them.", manager.waiting.waits)
    single("waited_seconds_total", "counter", "Time spent so, ended waits only.", manager.waiting.waited_s)
    single(
        "waiting",
        "gauge",
        "1 while samples wait for an instance to take them.",
        float(bool(manager.waiting.waiting_for)),
    )
    single("weight_version", "gauge", "Weight version published last; -1 before the first.", manager.versions.latest)
    single("trainer_connected", "gauge", "1 while a trainer is connected.", float(manager.trainer_connected))
    single("events_dropped_total", "counter", "Events dropped while no trainer was there.", counts.events_dropped)
    if manager.provisioning is not None:
        provisioning = manager.provisioning
        machines = provisioning.machines
        single("machines_wanted", "gauge", "Machines that are worth having.", machines.wanted)
        rows = [({"state": state}, float(count)) for state, count in provisioning.by_state().items()]
        family("machines", "gauge", "Machines that were asked for and may cost something, by state.", rows)
        outcomes = ("released", "failed", "lost", "never_joined")
        rows = [({"outcome": outcome}, float(machines.counts[outcome])) for outcome in outcomes]
        family("machines_ended_total", "counter", "Machines that ended; some are both lost and failed.", rows)
        rows = [({"call": call}, float(machines.counts[f"{call}_failed"])) for call in ("add", "release", "list")]
        family("provisioner_failures_total", "counter", "Calls of the provisioner that failed.", rows)
        single("machines_spent_dollars_total", "counter", "Spent on machines in this run.", machines.purse.spent)
        single("machine_start_seconds", "gauge", "From asking for a machine to its readiness.", machines.start_s)
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
