"""Every instance's life: joining, loading(version), ready, draining, gone.

Decides which instances may take work for a weight version and a length of context, which weights each is to load, and
which are given up for dead: a silent one, one that does not say hello, one that takes too long to load or to leave.
Refuses to know what runs on them.
One that is gone never comes back: its machine joins again through the front door, as another instance.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.errors import WireError
from penstock.observe.events import ConnectionRefused, Event, InstanceChanged, WeightsFailed, WeightsLoaded
from penstock.rollout.flapping import FlapConfig, Flapping
from penstock.wire import AgentHello, Heartbeat, InstanceStatus, LoadFailed, VersionReady

__all__ = ["NO_VERSION", "Fleet", "FleetConfig", "Instance", "State"]

NO_VERSION = -1
GONE_REMEMBERED = 32
"""Gone instances still shown to people; older ones are forgotten."""
NAMES_REMEMBERED = 4096
"""Agents' names whose number of uses is known; of the others only the greatest such number is."""
SENSELESS_WEIGHT = 8
DISTRUST_LIMIT = 32
SENSELESS_FRAMES = 2
"""Four senseless rows, with fewer than eight sound ones for each in between, are the engine's fault: each of them costs
its sample a strike, so that an engine that only draws nonsense must go before it has struck the samples out. So are two
frames in a row of nothing else: an engine with one sample alone would strike that one out."""
MAX_RUNNING_LIMIT = 1 << 20
RETRY_FIRST_S = 0.5
"""Wait before the first new try of a failed load; doubles up to RETRY_MOST_S."""
RETRY_MOST_S = 15.0
START_MOST_S = 3600.0
"""No engine is believed to take longer to start."""
RATE_MEMORY_S = 3.0
"""Time constant of an instance's smoothed token rate."""

INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")


class State(enum.Enum):
    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """All deadlines in seconds."""

    heartbeat_s: float = 2.0
    heartbeats_missed: int = 3
    """An instance that says nothing for so many heartbeats is given up for dead."""
    hello_s: float = 10.0
    """From the connection to the hello."""
    load_deadline_s: float = 120.0
    """From the first request to load a version until it is held, tries that failed included; an instance's first
    version may take longer by what its engine takes to start, which its hello says."""
    drain_s: float = 30.0
    """From the request to leave until it is gone."""
    flapping: FlapConfig = field(default_factory=FlapConfig)


@dataclass(slots=True)
class Instance:
    """One agent's connection. `version` is what its engine serves, `target` what it was last told to load."""

    id: str
    peer: str
    connected_at: float
    heard_at: float
    state: State = State.JOINING
    state_since: float = 0.0
    name: str = ""
    engine: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""
    """A word of its agent's life; empty where it gave none, and where its end is known to be no mere cut."""
    device: str = ""
    reserved: bool = False
    """On one of the trainer's own devices; remote otherwise."""
    start_s: float = 0.0
    """Added to the deadline of its first load."""
    max_running: int = 1
    max_context_tokens: int = 0
    """Prompt and output of one sequence; settled once a version is held, since a model has a limit of its own."""
    vocab_size: int = 0
    version: int = NO_VERSION
    target: int = NO_VERSION
    cordoned: bool = False
    """Gets no more work, since its machine is about to be released."""
    price_per_h: float | None = None
    """Of its machine; 0 for one that nobody here has asked for, None where that is not known."""
    machine: str = ""
    """The one of those that were asked for on which it is; empty for none."""
    of_machine: int = 1
    """Instances that this machine has had lately."""
    turning: bool = False
    """Gets no more work until it has loaded what the oldest samples that wait need, and nobody else has."""
    before: int = NO_VERSION
    """What it served before `version`; tokens of it may still be on their way."""
    load_tries: int = 0
    load_cause: str = ""
    retry_at: float | None = None
    """When a failed load is tried again."""
    hold_off_s: float = 0.0
    """How long it waits, after its hello, for weights and work."""
    tokens_accepted: int = 0
    tokens_per_s: float = 0.0
    """Accepted from it, smoothed."""
    rows_refused: int = 0
    distrust: int = 0
    """Grows with rows that make no sense, shrinks with those that do."""
    senseless_frames: int = 0
    """In a row: frames with rows that make no sense and none that does."""
    frames_refused: int = 0
    beat: Heartbeat | None = None
    cause: str = ""
    orderly: bool = False
    """Once gone: it left in good order."""
    _hello_at: float = 0.0
    _flap_key: str = ""
    _rate_at: float = 0.0
    _rate_tokens: int = 0

    @property
    def versions(self) -> set[int]:
        """Weight versions that its tokens may be of: around a swap, tokens and the word of it may cross."""
        return {self.before, self.version, self.target} - {NO_VERSION}

    def holds(self, version: int) -> bool:
        """It serves `version` and takes work for it, whatever fits its context."""
        return self.state is State.READY and self.version == version

    def takes(self, version: int, context_tokens: int) -> bool:
        """It may be given work for a weight version, of so many tokens of context or fewer."""
        return self.holds(version) and self.max_context_tokens >= context_tokens and not self.cordoned

    def knows(self, token: int) -> bool:
        """Its vocabulary has such a token, as far as the vocabulary is known."""
        return not self.vocab_size or token < self.vocab_size

    def held_off(self, now: float) -> bool:
        """It has to wait before it gets weights and work."""
        return now < self._hello_at + self.hold_off_s

    def measure_rate(self, now: float) -> None:
        """Updates `tokens_per_s` from what was accepted since the last call."""
        passed = now - self._rate_at
        if passed <= 0:
            return
        rate = (self.tokens_accepted - self._rate_tokens) / passed
        weight = min(1.0, passed / RATE_MEMORY_S)
        self.tokens_per_s += weight * (rate - self.tokens_per_s)
        self._rate_at, self._rate_tokens = now, self.tokens_accepted


@dataclass(slots=True)
class Fleet:
    """All instances. `emit` gets an event for every transition; `wall_offset_s` turns `now` into seconds since 1970."""

    config: FleetConfig
    emit: Callable[[Event], None]
    wall_offset_s: float = 0.0
    _living: dict[str, Instance] = field(default_factory=dict)
    _gone: deque[Instance] = field(default_factory=lambda: deque(maxlen=GONE_REMEMBERED))
    _names_used: dict[str, int] = field(default_factory=dict)
    """How often each name was given out; used last comes last."""
    _uses_forgotten: int = 0
    """No forgotten name was given out more often."""
    _peers: dict[str, str] = field(default_factory=dict)
    _flapping: Flapping = field(init=False)
    gone_count: int = 0

    def __post_init__(self) -> None:
        self._flapping = Flapping(self.config.flapping)

    # ---- who there is

    def __iter__(self) -> Iterator[Instance]:
        """Living instances, in the order in which they connected."""
        return iter(self._living.values())

    def __len__(self) -> int:
        return len(self._living)

    def get(self, peer: str) -> Instance | None:
        return self._living.get(peer)

    def by_id(self, instance_id: str) -> Instance | None:
        """A living instance by its name."""
        return self._living.get(self._peers.get(instance_id, ""))

    def peer_of(self, instance_id: str) -> str:
        """The peer behind a living instance's name."""
        return self._peers[instance_id]

    def ready_for(self, version: int, context_tokens: int) -> Iterator[Instance]:
        """Instances that may take work for a weight version and have a context of so many tokens or more."""
        for instance in self._living.values():
            if instance.takes(version, context_tokens):
                yield instance

    def any_ready_for(self, version: int, context_tokens: int) -> bool:
        return next(self.ready_for(version, context_tokens), None) is not None

    def count(self, state: State) -> int:
        if state is State.GONE:
            return self.gone_count
        return sum(instance.state is state for instance in self._living.values())

    @property
    def last_gone(self) -> Instance | None:
        return self._gone[-1] if self._gone else None

    def sessions_before(self, instance: Instance) -> Iterator[Instance]:
        """Gone ones of the same agent, which was only cut off or silent for a while."""
        for gone in self._gone:
            if instance.process and gone.process == instance.process:
                yield gone

    # ---- what happens to them

    def connect(self, peer: str, now: float) -> Instance:
        instance = Instance(id=peer, peer=peer, connected_at=now, heard_at=now, state_since=now)
        self._living[peer] = instance
        return instance

    def hello(self, instance: Instance, frame: AgentHello, now: float) -> None:
        """Raises WireError where the hello makes no sense or is not the first."""
        if instance.name:
            raise WireError("a second hello on one connection")
        if not INSTANCE_NAME.fullmatch(frame.name):
            raise WireError(f"an instance's name of {frame.name[:80]!r}; use 1 to 64 letters, digits and any of ._:@-")
        if not 0 < frame.max_running <= MAX_RUNNING_LIMIT or frame.max_context_tokens < 1:
            raise WireError(
                f"max_running = {frame.max_running} and max_context_tokens = {frame.max_context_tokens}; "
                f"1 to {MAX_RUNNING_LIMIT}, and at least 1"
            )
        if not frame.start_s >= 0:
            raise WireError(f"start_s = {frame.start_s}; at least 0")
        instance.id = self._id_for(frame.name)
        self._peers[instance.id] = instance.peer
        instance.name, instance.engine = frame.name, frame.engine[:80]
        instance.host, instance.pid, instance.device = frame.host[:200], frame.pid, frame.device[:80]
        instance.process = frame.process[:80]
        instance.max_running, instance.max_context_tokens = frame.max_running, frame.max_context_tokens
        instance.reserved, instance.start_s = frame.reserved, min(frame.start_s, START_MOST_S)
        instance._rate_at = instance._hello_at = now
        # Where no name was chosen it ends in the process's id, which a machine that comes back has another of.
        instance._flap_key = frame.name.removesuffix(f"-{frame.pid}")
        instance.hold_off_s = self._flapping.hold_off_s(instance._flap_key, now)
        cause = "said hello"
        if instance.hold_off_s:
            ends = self._flapping.quick_ends(instance._flap_key, now)
            cause += f"; waits {instance.hold_off_s:g} s for work, since it came and was lost quickly {ends} times"
        self._enter(instance, State.JOINING, cause, now, before="")

    def told_to_load(self, instance: Instance, version: int, now: float, cause: str) -> None:
        """It was sent LoadWeights. The load deadline runs from the first time for this version."""
        again = instance.target == version and instance.state is State.LOADING
        instance.target, instance.retry_at = version, None
        if not again:
            instance.load_tries, instance.load_cause = 0, ""
            self._enter(instance, State.LOADING, cause, now)

    def version_ready(self, instance: Instance, frame: VersionReady, now: float) -> None:
        """Raises WireError where its figures make no sense.

        A version other than the one asked for last changes nothing: its load was superseded by a later request.
        """
        if instance.state is State.DRAINING or frame.version != instance.target:
            return
        if frame.vocab_size < 0 or frame.max_context_tokens < 1 or not 0 <= frame.max_running <= MAX_RUNNING_LIMIT:
            raise WireError(
                f"vocab_size = {frame.vocab_size}, max_context_tokens = {frame.max_context_tokens}, "
                f"max_running = {frame.max_running}"
            )
        if frame.version != instance.version:
            instance.before = instance.version
        instance.version, instance.vocab_size = frame.version, frame.vocab_size
        instance.max_context_tokens = frame.max_context_tokens
        instance.max_running = frame.max_running or instance.max_running
        instance.retry_at, instance.start_s = None, 0.0
        self.emit(
            WeightsLoaded(
                ts=now + self.wall_offset_s,
                instance=instance.id,
                version=frame.version,
                nbytes=frame.bytes_fetched,
                wall_s=frame.load_s,
                way=frame.way,
            )
        )
        if instance.state is State.LOADING:
            self._enter(instance, State.READY, f"holds weight version {frame.version}", now)

    def load_failed(self, instance: Instance, frame: LoadFailed, now: float) -> None:
        """The load is tried again after a pause, until its deadline."""
        cause = frame.cause[:500]
        self.emit(WeightsFailed(ts=now + self.wall_offset_s, instance=instance.id, version=frame.version, cause=cause))
        if instance.state is not State.LOADING or frame.version != instance.target:
            return
        instance.load_cause = cause
        instance.retry_at = now + min(RETRY_FIRST_S * 2**instance.load_tries, RETRY_MOST_S)
        instance.load_tries += 1

    def drain(self, instance: Instance, cause: str, now: float) -> None:
        if instance.state is not State.DRAINING:
            self._enter(instance, State.DRAINING, cause, now)

    def lose(self, instance: Instance, cause: str, now: float, orderly: bool) -> None:
        """It is gone, for whatever cause. `orderly`: it said goodbye or was asked to leave, with its engine well."""
        del self._living[instance.peer]
        self._peers.pop(instance.id, None)
        instance.tokens_per_s = 0.0
        self.gone_count += 1
        instance.orderly = orderly
        if instance.name:
            if not orderly:
                self._flapping.lost(instance._flap_key, instance._hello_at, instance.hold_off_s, now)
            self._gone.append(instance)
        else:
            ts = now + self.wall_offset_s
            self.emit(ConnectionRefused(ts=ts, peer=instance.peer, door="agent", cause=cause))
        self._enter(instance, State.GONE, cause, now)

    def distrusted(self, instance: Instance, senseless: int, sound: int) -> bool:
        """Takes note of a frame's rows; True where the engine is broken rather than one of its samples."""
        instance.distrust = max(0, instance.distrust + SENSELESS_WEIGHT * senseless - sound)
        if sound:
            instance.senseless_frames = 0
        elif senseless:
            instance.senseless_frames += 1
        return instance.distrust >= DISTRUST_LIMIT or instance.senseless_frames >= SENSELESS_FRAMES

    def forget_versions(self, cause: str, now: float, only: int | None = None) -> None:
        """Weight versions of another trainer mean nothing: instances that have one (`only`: that one) load anew."""
        for instance in self._living.values():
            if only is not None and only not in (instance.version, instance.target):
                continue
            if instance.version != NO_VERSION:
                instance.before = instance.version
            instance.version = instance.target = NO_VERSION
            if instance.state in (State.LOADING, State.READY):
                self._enter(instance, State.JOINING, cause, now)

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody was listened to for so long: no instance's silence, and none of its deadlines, ran meanwhile."""
        for instance in self._living.values():
            instance.heard_at = min(now, instance.heard_at + seconds)
            instance.state_since = min(now, instance.state_since + seconds)

    def overdue(self, now: float) -> list[tuple[Instance, str]]:
        """Instances to be given up for dead, with the cause."""
        config = self.config
        silence_s = config.heartbeat_s * config.heartbeats_missed
        found = []
        for instance in self._living.values():
            silent_s, in_state_s = now - instance.heard_at, now - instance.state_since
            if not instance.name:
                if silent_s > config.hello_s:
                    found.append((instance, f"no hello for {silent_s:.1f} s after connecting"))
            elif silent_s > silence_s:
                found.append((instance, f"silent for {silent_s:.1f} s: {config.heartbeats_missed} heartbeats missed"))
            elif instance.state is State.LOADING and in_state_s > config.load_deadline_s + instance.start_s:
                last = f"; the last try: {instance.load_cause}" if instance.load_cause else ""
                found.append(
                    (instance, f"weight version {instance.target} was not loaded after {in_state_s:.1f} s{last}")
                )
            elif instance.state is State.DRAINING and in_state_s > config.drain_s:
                found.append((instance, f"asked to leave and still there after {in_state_s:.1f} s"))
        return found

    # ---- for people

    def statuses(self, pending: Callable[[Instance], tuple[int, int]], now: float) -> tuple[InstanceStatus, ...]:
        """Living instances, then those gone last. `pending` gives running and pending samples of one."""
        rows = []
        for instance in (*self._living.values(), *self._gone):
            if not instance.name:
                # It has connected and not said who it is.
                continue
            running, waiting = pending(instance) if instance.state is not State.GONE else (0, 0)
            rows.append(
                InstanceStatus(
                    instance=instance.id,
                    name=instance.name,
                    engine=instance.engine,
                    state=instance.state.value,
                    version=instance.version,
                    running=running,
                    pending=waiting,
                    tokens_accepted=instance.tokens_accepted,
                    tokens_per_s=round(instance.tokens_per_s, 1),
                    age_s=round(now - instance.connected_at, 1),
                    cause=instance.cause,
                    orderly=instance.orderly,
                    reserved=instance.reserved,
                )
            )
        return tuple(rows)

    # ---- within

    def _id_for(self, name: str) -> str:
        """The name itself for its first use, `name~N` after; no id is ever given twice.

        A name that was forgotten counts on from where any forgotten one may have been, so N grows for every name.
        """
        uses = self._names_used.pop(name, self._uses_forgotten) + 1
        self._names_used[name] = uses
        if len(self._names_used) > NAMES_REMEMBERED:
            self._uses_forgotten = max(self._uses_forgotten, self._names_used.pop(next(iter(self._names_used))))
        return name if uses == 1 else f"{name}~{uses}"

    def _enter(self, instance: Instance, state: State, cause: str, now: float, before: str | None = None) -> None:
        before = instance.state.value if before is None else before
        instance.state, instance.state_since, instance.cause = state, now, cause
        if not instance.name:
            return
        self.emit(
            InstanceChanged(
                ts=now + self.wall_offset_s,
                instance=instance.id,
                name=instance.name,
                before=before,
                after=state.value,
                cause=cause,
                tokens_accepted=instance.tokens_accepted,
                orderly=instance.orderly,
            )
        )
