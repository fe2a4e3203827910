"""Typed events: what happened in a run, in the order it was noticed.

`events.jsonl`, the live view, the metrics and the simulator's fitting read the same structs. `ts` is
seconds since the epoch at the place that noticed.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Event(msgspec.Struct, kw_only=True, tag_field="event"):
    ts: float


class RunStarted(_Event, tag="run_started"):
    run: str
    version: str
    """Of Penstock."""
    config: dict[str, Any]


class RunFinished(_Event, tag="run_finished"):
    wall_s: float
    outcome: str
    """"done", "interrupted", or the error."""


class StepStarted(_Event, tag="step_started"):
    step: int
    weight_version: int
    prompts: int
    samples: int


class StepFinished(_Event, tag="step_finished"):
    step: int
    metrics: dict[str, float]


class EvaluatedSet(msgspec.Struct, kw_only=True, frozen=True):
    """What the answers to a set of held-out questions came to. Answers without a score are left out and counted."""

    accuracy: float
    """Mean over questions of the share of a question's answers that are right."""
    questions: int
    """With at least one answer that has a score."""
    asked: int
    unscored: int
    """Answers."""
    pass_at: dict[int, float] = {}
    """k to the mean of pass@k over the questions with at least k answers that have a score."""
    short: dict[int, int] = {}
    """k to the number of questions that had fewer."""


class Evaluated(_Event, tag="evaluated"):
    step: int
    weight_version: int
    accuracy: float
    questions: int
    wall_s: float
    whole: EvaluatedSet | None = None
    sets: dict[str, EvaluatedSet] = {}
    """The same of each set that has a name."""


class InstanceChanged(_Event, tag="instance_changed"):
    """One transition of an instance's life."""

    instance: str
    name: str
    before: str
    after: str
    cause: str
    tokens_accepted: int = 0
    orderly: bool = False
    """Of an end: it said goodbye or was asked to leave, with its engine well. False: it was lost."""


class SamplesMoved(_Event, tag="samples_moved"):
    """Samples taken from one instance to be continued from their last token."""

    instance: str
    samples: int
    tokens_kept: int
    cause: str


class SampleFailed(_Event, tag="sample_failed"):
    sample: str
    cause: str


class ConnectionRefused(_Event, tag="connection_refused"):
    """A connection that was not let in; repeats of a cause are told at the 1st, 2nd, 4th, 8th time."""

    peer: str
    """Its address, as far as that is known."""
    door: str
    """agent, trainer, operator or weights; any, where that is not said yet."""
    cause: str
    times: int = 1
    """Refused for this cause so far."""


class FrameRefused(_Event, tag="frame_refused"):
    peer: str
    cause: str


class RowsRefused(_Event, tag="rows_refused"):
    """Rows of token frames that no longer have a lease (late frames of a machine given up for dead), counted."""

    instance: str
    rows: int
    cause: str


class BatchSubmitted(_Event, tag="batch_submitted"):
    batch: str
    version: int
    samples: int


CANCELLED = "cancelled: "
"""What the cause of a batch begins with that its trainer gave up; it does so when it ends, and only then."""


class BatchEnded(_Event, tag="batch_ended"):
    batch: str
    samples: int
    failed: int
    tokens: int
    cause: str = ""


class BatchTakenUp(_Event, tag="batch_taken_up"):
    """A trainer came back for a batch, and it goes on from what was there."""

    batch: str
    version: int
    samples: int
    finished: int
    """Samples that had ended already."""
    tokens: int
    """Output tokens that were there."""


class ManagerChanged(_Event, tag="manager_changed"):
    """The trainer lost the manager, found it again, or started it again."""

    state: str
    """"lost", "back", or "restarted" (its process had ended by accident)."""
    cause: str
    wait_s: float = 0.0
    """With "back": since it was lost."""


class ManagerRecovered(_Event, tag="manager_recovered"):
    """A manager took up from its journal where an earlier one ended."""

    batches: int
    samples: int
    finished: int
    tokens: int
    cut_bytes: int
    """At the journal's end, of a record that was not written whole."""
    accepted: dict[str, int] = {}
    """Output tokens that managers before this one took, by the name of the instance that drew them."""


class Work(msgspec.Struct, kw_only=True, frozen=True):
    """What an instance did while its batch was about one size: sums, so that times stay linear in them."""

    wall_s: float
    steps: float
    """Decode steps."""
    tokens: int
    """Drawn."""
    context_steps: float
    """Over its decode steps, the sum of all running sequences' context."""
    prefilled: int
    most_context: int
    """Largest sum of context seen."""
    full: bool = False
    """Samples waited though places were free, and none was let in between two heartbeats: its memory was full."""


class InstanceWorked(_Event, tag="instance_worked"):
    """An instance's work since its last such event: at most one row for each power of two of its batch size."""

    instance: str
    name: str
    reserved: bool
    max_running: int
    work: list[Work]


class AnswersEnded(_Event, tag="answers_ended"):
    """Lengths of a batch's answers, in output tokens."""

    batch: str
    prompts: int
    samples: int
    prompt_tokens: float
    """Mean."""
    quantiles: list[float]
    """At 0, 1/20, ... 1."""
    prompt_share: float
    """Of the variance of the lengths' logarithm, what is the prompts'."""


class WindowChanged(_Event, tag="window_changed"):
    """The time in which the trainer's own engines generate: opened, closed, or another length than before, and why."""

    batch: str
    what: str
    """"opened", "closed", "planned" (another length, the fleet having changed) or "learned" (from the step's waits)."""
    fleet: int
    """Remote instances that work on the step."""
    elapsed_s: float
    """Since the step began."""
    cause: str
    window_s: float
    """Planned length for this fleet; below 0: to the end of the step, or not known yet."""
    before_s: float = -1.0
    """With "planned" and "learned": the length until now."""
    trainer_wait_s: float = 0.0
    """With "learned": the trainer was ready and had nothing to train on, its devices idle."""
    remote_wait_s: float = 0.0
    """With "learned": remote instances had nothing to do, mean over them."""


class FleetSized(_Event, tag="fleet_sized"):
    """Another number of machines is worth having from now on."""

    before: int
    after: int
    cause: str


class MachineChanged(_Event, tag="machine_changed"):
    """One transition of a machine that the manager has asked its provisioner for."""

    machine: str
    """The provisioner's name for it; before there is one, `ask-N`."""
    before: str
    after: str
    """asked, starting, joined, draining, releasing, released or failed."""
    cause: str
    price_per_h: float = 0.0
    """Dollars."""
    cost: float = 0.0
    """Of this machine so far, in dollars."""
    spent: float = 0.0
    """On all machines of the run so far."""


class ProvisionerFailed(_Event, tag="provisioner_failed"):
    """A call of the provisioner failed, or did not come back."""

    call: str
    """add, release or list."""
    cause: str
    machine: str = ""
    """With release."""
    retry_s: float = 0.0
    """Until the next try."""


class WaitingForInstances(_Event, tag="waiting_for_instances"):
    waiting_for: str
    samples: int


class WaitingOver(_Event, tag="waiting_over"):
    waited_s: float


class WeightsPublished(_Event, tag="weights_published"):
    version: int
    nbytes: int
    wall_s: float


class WeightsLoaded(_Event, tag="weights_loaded"):
    instance: str
    version: int
    nbytes: int
    wall_s: float
    way: str = ""
    """How they came: codec and transport; with the cause where a faster transport could not be had."""


class WeightsFailed(_Event, tag="weights_failed"):
    instance: str
    version: int
    cause: str


class EngineStarted(_Event, tag="engine_started"):
    name: str
    pid: int
    cause: str


class EngineExited(_Event, tag="engine_exited"):
    name: str
    pid: int
    exit_code: int
    cause: str
    tokens_drawn: int | None = None
    """Output tokens that it drew in its life, exact even after SIGKILL; None where it kept no count."""


class Unscorable(_Event, tag="unscored"):
    """Samples of a step without a score, by cause; and what became of their groups."""

    step: int
    causes: dict[str, int]
    groups_dropped: int


class CheckpointSaved(_Event, tag="checkpoint_saved"):
    step: int
    path: str
    nbytes: int
    wall_s: float


class Noted(_Event, tag="note"):
    """Something a person wants to know and nothing is computed from."""

    message: str


class Warned(_Event, tag="warning"):
    where: str
    message: str


Event = (
    RunStarted
    | RunFinished
    | StepStarted
    | StepFinished
    | Evaluated
    | InstanceChanged
    | SamplesMoved
    | SampleFailed
    | ConnectionRefused
    | FrameRefused
    | RowsRefused
    | BatchSubmitted
    | BatchEnded
    | BatchTakenUp
    | InstanceWorked
    | AnswersEnded
    | ManagerChanged
    | ManagerRecovered
    | WindowChanged
    | FleetSized
    | MachineChanged
    | ProvisionerFailed
    | WaitingForInstances
    | WaitingOver
    | WeightsPublished
    | WeightsLoaded
    | WeightsFailed
    | EngineStarted
    | EngineExited
    | Unscorable
    | CheckpointSaved
    | Noted
    | Warned
)

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
