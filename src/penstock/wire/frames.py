"""Every frame of the protocol, as msgspec structs.

Agents and the trainer each open one WebSocket to the manager. A frame is one binary message: a msgpack map with
its `type`. Anything that grows with samples or tokens is a column: a flat little-endian buffer (`wire.columns`
gives the type codes, written here behind each field).

Wire versions: `PROTOCOL` in `wire.codec` is sent as the header `X-Penstock-Protocol` when the socket is opened,
and a peer of another version is refused before any frame is read.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must be between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")


class _Frame(msgspec.Struct, kw_only=True, tag_field="type"):
    pass


# ---- agent -> manager


class AgentHello(_Frame, tag="agent_hello"):
    """First frame of an agent."""

    name: str
    engine: str
    pid: int
    host: str
    max_running: int
    """Most sequences that the engine decodes at once."""
    max_context_tokens: int
    """As known by now: the welcome may ask for another, and a model has a limit. VersionReady has the last word."""
    device: str = ""
    reserved: bool = False
    """On one of the trainer's own devices: there for the whole run, at no further cost."""
    start_s: float = 0.0
    """Its first weights may take so much longer than later ones: an engine server is started on them."""
    process: str = ""
    """A random word of this agent's life, the same in each of its sessions: who comes back with it has not died."""


class VersionReady(_Frame, tag="version_ready"):
    """The engine now serves `version`, verified; it may be given work for it."""

    version: int
    vocab_size: int
    max_context_tokens: int
    load_s: float
    bytes_fetched: int
    max_running: int = 0
    """Most sequences decoded at once, now that the model's KV cache is known; 0: as in the hello."""
    way: str = ""
    """How the weights came, for people: codec and transport; with the cause where a faster one could not be had."""


class LoadFailed(_Frame, tag="load_failed"):
    version: int
    cause: str


class Heartbeat(_Frame, tag="heartbeat"):
    running: int
    waiting: int
    kv_tokens: int
    tokens_generated: int
    """Output tokens drawn by this engine since it started."""
    tokens_prefilled: int
    """Prompt and prefix tokens prefilled since it started."""
    tokens_per_s: float


class TokenFrame(_Frame, tag="tokens"):
    """New output tokens of all sequences of one instance, N rows, one weight version.

    Row k carries tokens `starts[k]` to `starts[k] + counts[k]` (exclusive) of the output of lease `leases[k]`.
    A row may be empty where only the finish changes. Failed rows have their cause in `causes`.
    """

    version: int
    leases: bytes  # Q[N]
    starts: bytes  # I[N]
    counts: bytes  # I[N]
    finishes: bytes  # B[N], see sample.Finish
    token_ids: bytes  # i[sum of counts]
    logprobs: bytes  # f[sum of counts]
    causes: dict[int, str] = {}


class Goodbye(_Frame, tag="goodbye"):
    """The agent leaves on its own accord; everything it had was sent before."""

    cause: str
    engine_failed: bool = False
    """Its engine broke: what ran there may be why, and the tokens of the last steps may be missing."""


class HandedOver(_Frame, tag="handed_over"):
    """Answers HandOver: every token drawn was sent before, and nothing runs here any more."""


# ---- manager -> agent


class Welcome(_Frame, tag="welcome"):
    instance: str
    heartbeat_s: float
    frame_steps: int
    """Decode steps gathered in one TokenFrame."""
    max_context_tokens: int = 0
    """Context (prompt and output of one sequence) that the run wants of an engine which may choose; 0: not said."""
    max_frame_bytes: int = 0
    """Larger frames are refused, whoever sends them; 0, and until this is known: `codec.MAX_FRAME_BYTES`."""
    hold_off_s: float = 0.0
    """It gets neither weights nor work for so long, since agents of its name came and went too quickly."""


class LoadWeights(_Frame, tag="load_weights"):
    """Pull `version` from `source` (host:port of a weight store), verify, swap, answer VersionReady."""

    version: int
    source: str


class StartFrame(_Frame, tag="start"):
    """Sequences to start, N rows. Generation goes on after `prefix`, which counts towards max_new_tokens."""

    version: int
    leases: bytes  # Q[N]
    seeds: bytes  # Q[N]
    prompt_ids: bytes  # i[sum of prompt_lengths]
    prompt_lengths: bytes  # I[N]
    prefix_ids: bytes  # i[sum of prefix_lengths]
    prefix_lengths: bytes  # I[N]
    samplings: tuple[Sampling, ...]
    sampling_of: bytes  # I[N], index into samplings


class StopFrame(_Frame, tag="stop"):
    leases: bytes  # Q[N]
    cause: str = ""
    """Where they were taken away for what the engine did with them, in words for the machine's own screen."""


class HandOver(_Frame, tag="hand_over"):
    """To a reserved instance: its device is wanted for training. It sends what it drew, ends every sequence (their
    leases are void from here on), frees what memory only sequences need, and answers HandedOver. It stays connected;
    the next StartFrame sets it to work again."""

    cause: str


class Drain(_Frame, tag="drain"):
    """No new work will come; flush, say goodbye and leave."""

    cause: str


# ---- trainer -> manager


class TrainerHello(_Frame, tag="trainer_hello"):
    """First frame of a trainer, each time that it connects.

    One that comes back says so by its `session`. Of the batches that the manager has from before, those that it names
    here are kept; of those that it submits again it is told what it lacks. With the others it has done.
    """

    name: str
    pid: int
    session: str = ""
    """Random, one for the life of a trainer's client."""
    open_batches: tuple[str, ...] = ()
    """Batches that this session has submitted and neither cancelled nor released."""


class SubmitBatch(_Frame, tag="submit_batch"):
    """A step's prompts in one frame: P prompts of `samples_per_prompt` samples each."""

    batch: str
    version: int
    """Weight version that may generate it."""
    samples_per_prompt: int
    run_seed: int
    sampling: Sampling
    prompt_indices: bytes  # I[P]
    prompt_ids: bytes  # i[sum of prompt_lengths]
    prompt_lengths: bytes  # I[P]
    deadline_s: float
    """Seconds without any progress after which waiting becomes an error."""
    taken_prompts: bytes = b""  # I[T]
    taken_replicas: bytes = b""  # I[T]
    """T samples that the trainer has already, from before its connection was lost; they are not sent again."""


class CancelBatch(_Frame, tag="cancel_batch"):
    batch: str
    cause: str


class ReleaseBatch(_Frame, tag="release_batch"):
    """The trainer has taken all of it; the manager may forget."""

    batch: str


class StepReport(_Frame, tag="step_report"):
    """How a step went, as only the trainer knows. All in seconds."""

    step: int
    step_s: float
    """From its submission to the next one's."""
    train_s: float
    """The trainer computed so long."""
    trainer_wait_s: float
    """It was ready and had nothing complete to train on."""


class VersionPublished(_Frame, tag="version_published"):
    version: int
    source: str
    """host:port of the weight store, as agents reach it."""
    digest: str = ""
    """Of the weights: what was drawn with a version of one digest is what the version of another trainer with the same
    digest would draw. Empty: equal to no other."""


class TrainerTurn(_Frame, tag="trainer_turn"):
    """Where the trainer stands in its step, for a run whose reserved engines take turns with it on its own devices.

    `state`: "begins" a step, and has nothing to train on; "wants" to train, and waits for TurnGranted; "waits" for
    samples, and has given the devices back; "trained" on all of the step's samples; "ended" the step, its weights
    published.
    """

    number: int
    """Grows with each frame of a trainer; the grant names the one that it answers."""
    batch: str
    """The step's."""
    version: int
    """Weight version that generates the step."""
    state: str
    granted: bool = False
    """Told again to a manager that is back: this was granted before, and the trainer may be training."""
    window_s: float = -1.0
    """The reserved engines generate for so long in each step; below 0: as long as is worked out to be best."""
    micro_batch_samples: int = 1
    tokens: int = 0
    """With "ended": prompt and output tokens that were trained on."""
    train_s: float = 0.0
    """With "ended": the passes and optimizer steps took."""
    rest_s: float = 0.0
    """With "ended": from the last optimizer step until the next weights were published."""
    ahead_token_s: float = 0.0
    """With "ended": passes over samples whose groups were not whole took so long for each of their tokens. 0: there
    were none in this step."""
    ahead_samples: int = 1
    """Such passes are made of so many samples at least."""


# ---- manager -> trainer


class TurnGranted(_Frame, tag="turn_granted"):
    """The reserved engines have handed over: the trainer's own devices are the trainer's until it gives them back."""

    number: int
    window_s: float
    """The reserved engines generated for so long in this step."""


class FinishedFrame(_Frame, tag="finished"):
    """Samples that are finished, N rows; sent as they finish. Failed ones come with a cause and are missing.

    `span_*` columns give the weight version spans: S rows in all, `span_counts` of them for each sample.
    """

    batch: str
    prompts: bytes  # I[N]
    replicas: bytes  # I[N]
    finishes: bytes  # B[N]
    lengths: bytes  # I[N]
    token_ids: bytes  # i[sum of lengths]
    logprobs: bytes  # f[sum of lengths]
    span_counts: bytes  # I[N]
    span_versions: bytes  # I[S]
    span_ends: bytes  # I[S]
    causes: dict[int, str] = {}
    """Row number to cause, for failed rows."""


class BatchDone(_Frame, tag="batch_done"):
    """Every sample of the batch has been sent."""

    batch: str
    samples: int
    failed: int
    tokens: int


class BatchFailed(_Frame, tag="batch_failed"):
    batch: str
    cause: str
    deadline: bool


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    name: str
    engine: str
    state: str
    """joining | loading | ready | draining | gone"""
    version: int
    running: int
    pending: int
    tokens_accepted: int
    tokens_per_s: float
    age_s: float
    cause: str = ""
    orderly: bool = False
    """Of one that is gone: it left in good order."""
    reserved: bool = False
    """On one of the trainer's own devices."""


class FleetStatus(_Frame, tag="fleet_status"):
    """For the live view, about twice a second."""

    instances: tuple[InstanceStatus, ...]
    queued: int
    running: int
    finished: int
    failed: int
    tokens_accepted: int
    waiting_for: str
    """Empty, or what the manager waits for, e.g. "an instance with weight version 12"."""
    window: str = ""
    """Whose turn it is on the trainer's own devices, and why; empty where they don't take turns."""


class EventFrame(_Frame, tag="events"):
    """Events of the manager for the run's log: msgpack of `observe.events.Event` structs."""

    events: tuple[bytes, ...]


FrameToManager = (
    AgentHello
    | VersionReady
    | LoadFailed
    | Heartbeat
    | TokenFrame
    | Goodbye
    | HandedOver
    | TrainerHello
    | TrainerTurn
    | SubmitBatch
    | CancelBatch
    | ReleaseBatch
    | StepReport
    | VersionPublished
)
FrameFromManager = (
    Welcome
    | LoadWeights
    | StartFrame
    | StopFrame
    | HandOver
    | Drain
    | TurnGranted
    | FinishedFrame
    | BatchDone
    | BatchFailed
    | FleetStatus
    | EventFrame
)
