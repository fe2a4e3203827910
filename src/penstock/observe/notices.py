"""Events worth a sentence, as sentences; the last few of them.

Decides what a person is told and how. Pure: knows no terminal and no clock. What happens many times over in the same
way is one sentence with a count.
"""

from __future__ import annotations

import signal
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.observe import events
from penstock.observe.events import Event
from penstock.observe.instances import RUN_ENDED, is_end, is_loss, outcome_words

Mood = Literal["plain", "good", "trouble"]

KEPT = 50
NEWS = 0.1
"""A window that changed by a smaller share is not told of."""
NAMES_KEPT = 4096
CAUSES_TOLD = 3
"""Of samples without a score, in one sentence."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence, and how it is meant."""

    ts: float
    text: str
    mood: Mood = "plain"
    times: int = 1
    charted: bool = False
    """The picture shows it anyway, as a curve."""

    def __str__(self) -> str:
        return self.text if self.times == 1 else f"{self.text} (x {self.times})"


class Notices:
    """Turns events into sentences and keeps the last of them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept: deque[Notice] = deque(maxlen=kept)
        self._names: OrderedDict[str, str] = OrderedDict()
        self._joined: OrderedDict[str, None] = OrderedDict()
        self._exited: deque[str] = deque(maxlen=kept)
        self._given_up = False
        self.steps_done = False
        """All steps of the run are done, so whoever leaves now leaves because of that."""

    def __iter__(self) -> Iterator[Notice]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def last(self, count: int) -> list[Notice]:
        """The latest `count` that no curve shows, oldest first."""
        told = [notice for notice in self._kept if not notice.charted]
        return told[max(0, len(told) - count) :]

    def name_instance(self, instance: str, name: str) -> None:
        """From now on `instance` is called by its name."""
        self._names[instance] = name
        _trim(self._names)

    def take(self, event: Event) -> Notice | None:
        """The event's sentence, if it is worth one; a repeat is counted in the sentence before it."""
        said = self._say(event)
        if said is None:
            return None
        text, mood = printable(said[0]), said[1]
        if self._kept and self._kept[-1].text == text:
            before = self._kept.pop()
            notice = replace(before, ts=event.ts, times=before.times + 1)
        else:
            notice = Notice(event.ts, text, mood, charted=isinstance(event, events.Evaluated))
        self._kept.append(notice)
        return notice

    def _say(self, event: Event) -> tuple[str, Mood] | None:
        match event:
            case events.InstanceChanged():
                return self._say_changed(event)
            case events.EngineExited():
                return self._say_exited(event)
            case events.SamplesMoved(instance=instance, samples=samples, tokens_kept=kept):
                verb, whose = ("goes", "its") if samples == 1 else ("go", "their")
                text = (
                    f"{_count(samples, 'sample')} of {self._name(instance)} {verb} on elsewhere from {whose} last token"
                )
                return f"{text}, {_count(kept, 'token')} kept", "good"
            case events.WeightsFailed(instance=instance, version=version, cause=cause):
                return f"{self._name(instance)} could not load weights {version}: {cause}", "trouble"
            case events.RowsRefused(instance=instance, rows=rows, cause=cause):
                return f"{_count(rows, 'row')} of {self._name(instance)} refused: {cause}", "plain"
            case events.WaitingForInstances():
                self._given_up = False
                return _say_of_run(event)
            case events.WaitingOver() if self._given_up:
                # Nobody came: the wait ended because its batch was given up, which was told.
                return None
            case events.BatchEnded(cause=cause):
                self._given_up = self._given_up or bool(cause)
                return _say_of_samples(event)
            case events.RunFinished():
                return self._say_finished(event)
            case _:
                return _say_of_run(event) or _say_of_samples(event)

    def _say_changed(self, event: events.InstanceChanged) -> tuple[str, Mood] | None:
        """Its first readiness, its leaving and its end; that it loads weights each step is no news."""
        self.name_instance(event.instance, event.name)
        if event.after == "ready" and event.instance not in self._joined:
            self._joined[event.instance] = None
            _trim(self._joined)
            return f"{event.name} joined", "good"
        if event.after == "draining":
            return None if self.steps_done else (f"{event.name} is leaving{_because(event.cause)}", "plain")
        if is_end(event) and not is_loss(event):
            return self._say_left(event.name, RUN_ENDED if self.steps_done else event.cause)
        if is_end(event) and event.name not in self._exited:
            return f"{event.name} is gone{_because(event.cause)}", "trouble"
        return None

    def _say_left(self, name: str, cause: str) -> tuple[str, Mood]:
        self._exited.append(name)
        return (f"{name} left, {RUN_ENDED}" if cause == RUN_ENDED else f"{name} left{_because(cause)}"), "plain"

    def _say_finished(self, event: events.RunFinished) -> tuple[str, Mood]:
        """An error that was just told is named and not told again."""
        outcome = printable(event.outcome)
        message = outcome.partition(": ")[2]
        if message and any(message in notice.text for notice in self._kept):
            outcome = outcome_words(outcome).removeprefix("ended by ")
        return f"the run ended after {event.wall_s:.0f} s: {outcome}", "good" if outcome == "done" else "trouble"

    def _retract_gone(self, name: str) -> None:
        """How a process ended says more than that its connection did, and comes a moment later."""
        kept = [notice for notice in self._kept if not notice.text.startswith(f"{name} is gone")]
        self._kept = deque(kept, maxlen=self._kept.maxlen)

    def _say_exited(self, event: events.EngineExited) -> tuple[str, Mood] | None:
        """An orderly exit was told when the instance left. One that still started up when the run ended left too."""
        told = event.name in self._exited
        self._exited.append(event.name)
        if event.exit_code == 0:
            return None
        if event.exit_code == -signal.SIGTERM and event.cause == RUN_ENDED:
            return None if told else self._say_left(event.name, RUN_ENDED)
        self._retract_gone(event.name)
        if event.exit_code < 0:
            return f"{event.name} was killed ({_signal_name(-event.exit_code)}){_because(event.cause)}", "trouble"
        return f"{event.name} ended with exit code {event.exit_code}{_because(event.cause)}", "trouble"

    def _name(self, instance: str) -> str:
        return self._names.get(instance, instance)


def printable(text: str) -> str:
    """One line that can't steer a terminal: causes come from other machines."""
    return "".join(character if character.isprintable() else " " for character in text)


def _say_of_run(event: Event) -> tuple[str, Mood] | None:
    match event:
        case events.FleetSized(before=before, after=after, cause=cause):
            return f"{_count(after, 'machine')} wanted instead of {before:,}{_because(cause)}", "plain"
        case events.MachineChanged(machine=machine, after="failed", cause=cause, cost=cost):
            return f"machine {machine} failed{_because(cause)} ({cost:.2f} dollars)", "trouble"
        case events.MachineChanged(machine=machine, after="released", cause=cause, cost=cost):
            return f"machine {machine} was released{_because(cause)} ({cost:.2f} dollars)", "plain"
        case events.ProvisionerFailed(call=call, machine=machine, cause=cause):
            return f"the provisioner failed to {' '.join((call, machine)).strip()}: {cause}", "trouble"
        case events.EngineStarted(name=name, cause=cause):
            return f"{name} was started{_because(cause)}", "plain"
        case events.WindowChanged():
            return _say_window(event)
        case events.WaitingForInstances(waiting_for=what, samples=samples):
            return f"waiting for {what}; {_count(samples, 'sample')} to go", "trouble"
        case events.WaitingOver(waited_s=waited_s):
            return f"the wait is over after {waited_s:.1f} s", "good"
        case events.Evaluated():
            return _say_evaluated(event), "good"
        case events.ManagerChanged(state=state, cause=cause, wait_s=wait_s):
            if state == "back":
                return f"the manager is back after {wait_s:.1f} s", "good"
            return (
                f"the manager {'was started again' if state == 'restarted' else 'is lost'}{_because(cause)}",
                "trouble",
            )
        case events.ManagerRecovered(samples=samples, finished=finished, tokens=tokens):
            return (
                f"the manager took up {_count(samples, 'sample')} from its journal, {finished:,} of them finished, "
                f"{_count(tokens, 'token')} kept"
            ), "good"
        case events.CheckpointSaved(step=step, nbytes=nbytes, path=path):
            return f"checkpoint after {_count(step, 'step')}, {nbytes / 1e6:.1f} MB: {path}", "plain"
        case events.Noted(message=message):
            return message, "plain"
        case events.Warned(where=where, message=message):
            return f"{where}: {message}" if where else message, "trouble"
        case _:
            return None


def _say_window(event: events.WindowChanged) -> tuple[str, Mood] | None:
    """Another length than before, and an opening in mid-step; that each step has a window is no news."""
    remote = _count(event.fleet, "remote instance")
    if event.what in ("learned", "planned") and abs(event.window_s - event.before_s) > NEWS * abs(event.before_s):
        length = f"{event.window_s:.3g} s" if event.window_s >= 0 else "the whole rollout"
        return f"own engines generate for {length} with {remote}: {event.cause}", "plain"
    if event.what == "opened" and event.elapsed_s > 0:
        return f"own engines generate again: {event.cause}", "plain"
    return None


def _say_of_samples(event: Event) -> tuple[str, Mood] | None:
    match event:
        case events.SampleFailed(cause=cause):
            return f"a sample failed: {cause}", "trouble"
        case events.BatchEnded(batch=batch, failed=failed, cause=cause) if failed:
            return f"batch {batch}: {_count(failed, 'sample')} failed{_because(cause)}", "trouble"
        case events.BatchEnded(batch=batch, cause=cause) if cause:
            return (cause if cause.startswith(f"batch {batch} ") else f"batch {batch} was given up: {cause}"), "trouble"
        case events.BatchTakenUp(batch=batch, samples=samples, finished=finished, tokens=tokens):
            text = f"batch {batch} goes on: {finished:,} of {_count(samples, 'sample')} finished"
            return f"{text}, {_count(tokens, 'token')} kept", "good"
        case events.ConnectionRefused(peer=peer, cause=cause, times=times):
            again = f" ({times:,} so far)" if times > 1 else ""
            return f"a connection from {peer} was refused: {cause}{again}", "trouble"
        case events.FrameRefused(peer=peer, cause=cause):
            return f"a frame of {peer} was refused: {cause}", "trouble"
        case events.Unscorable(causes=causes, groups_dropped=dropped):
            text = f"{_count(sum(causes.values()), 'sample')} without a score ({_by_cause(causes)})"
            return (f"{text}; {_count(dropped, 'group')} left out" if dropped else text), "trouble"
        case _:
            return None


def _by_cause(causes: Mapping[str, int]) -> str:
    """`6 x the verifier process died: exit code 7`, the most frequent first."""
    ranked = sorted(causes.items(), key=lambda entry: (-entry[1], entry[0]))
    told = [f"{count:,} x {cause}" for cause, count in ranked[:CAUSES_TOLD]]
    others = sum(count for _, count in ranked[CAUSES_TOLD:])
    return "; ".join([*told, f"{others:,} x other causes"] if others else told)


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _trim(names: OrderedDict[str, Any]) -> None:
    while len(names) > NAMES_KEPT:
        names.popitem(last=False)


def _say_evaluated(event: events.Evaluated) -> str:
    said = f"held-out accuracy {event.accuracy:.3f} after {_count(event.step, 'step')}, {event.questions:,} questions"
    more = []
    if event.whole is not None:
        more += [f"pass@{k} {value:.3f}" for k, value in sorted(event.whole.pass_at.items()) if k > 1]
    if len(event.sets) > 1:
        more += [f"{name} {found.accuracy:.3f}" for name, found in event.sets.items()]
    if event.whole is not None and event.whole.unscored:
        more.append(f"{_count(event.whole.unscored, 'answer')} unscored")
    return f"{said} ({', '.join(more)})" if more else said
