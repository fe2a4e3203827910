"""Ray's library in a process of its own, which does what it is asked by lines and ends with its standard input.

The library ends the process that it is in, without an exception, when the cluster's head has been gone for a minute; so
it is in none that has anything else to do. Each call is on a thread, since the library's calls block. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock.cli.provision.ray_lines import AddActors, Answer, Begin, Call, ListActors, ReleaseActor, Row
from penstock.errors import PenstockError, ProvisionError

__all__ = ["Actors", "death_words", "is_machine", "main"]

ANSWER_S = 2.0
"""For an actor to say how its agent is; one that has no place yet says nothing."""
CONNECT_S = 20.0
"""For a cluster to answer, until that is told; the library goes on trying for minutes."""
SHUT_DOWN_S = 3.0
MOST_CHARS = 400
NOT_INSTALLED = "penstock must be installed on Ray's nodes, for the Python that runs their workers"
_NUMBER = re.compile("[0-9a-f]{8}")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b.*")


def is_machine(name: str, stem: str) -> bool:
    """Whether an actor is called so by the run with this stem, and not by one whose name merely begins like it."""
    return name.startswith(stem) and _NUMBER.fullmatch(name[len(stem) :]) is not None


def death_words(told: str) -> str:
    """Why an actor is dead, from the many lines of Ray's error: where it could not start, the error at the bottom."""
    lines = [line for line in _COLOURS.sub("", told).splitlines() if line.strip(" ^")]
    if "creation task" in "".join(lines[:1]):
        root = next((line.strip() for line in reversed(lines) if _ERROR.fullmatch(line.strip())), lines[-1])
        hint = f"; {NOT_INSTALLED}" if root.startswith(("ModuleNotFoundError", "ImportError")) else ""
        return f"its actor could not start: {root[:MOST_CHARS]}{hint}"
    # Lines with a tab tell what the actor is called, over and over.
    words = " ".join(line.strip() for line in lines if not line.startswith("\t"))
    return f"its actor died: {words[:MOST_CHARS]}"


class Actors:
    """The run's actors. `ray`: the library."""

    def __init__(self, ray: Any, begin: Begin) -> None:
        self._ray = ray
        self._begin = begin
        self._made: dict[str, Any] = {}
        """Until they are released: an actor that dies loses its name, and Ray tells the cause to who has it alone."""
        self._unanswered: dict[str, Any] = {}
        self._connection: Future[None] | None = None
        self._connecting = threading.Lock()

    def answer(self, call: Call) -> Answer:
        """Never raises."""
        try:
            self._connect()
            match call.request:
                case AddActors(machines):
                    self._add(machines)
                case ReleaseActor(machine):
                    self._release(machine)
                case ListActors():
                    return Answer(call.number, rows=self._list())
        except PenstockError as error:
            return Answer(call.number, str(error))
        except Exception as error:  # noqa: BLE001 - whatever Ray raises is the call's failure, and told by the other end
            return Answer(call.number, f"{type(error).__name__}: {_COLOURS.sub('', str(error))[:MOST_CHARS]}")
        return Answer(call.number)

    def close(self) -> None:
        """Actors are detached: they stay."""
        self._ray.shutdown()

    def _connect(self) -> None:
        """Raises ProvisionError. One attempt is under way at most."""
        address = self._begin.address
        with self._connecting:
            if self._connection is None:
                self._connection = Future()
                threading.Thread(target=self._attempt, args=(self._connection,), daemon=True).start()
            connection = self._connection
        try:
            connection.result(CONNECT_S)
        except TimeoutError:
            raise ProvisionError(f"no Ray cluster answers at {address!r} within {CONNECT_S:g} s") from None
        except Exception as error:
            with self._connecting:
                if self._connection is connection:
                    self._connection = None
            raise ProvisionError(f"no Ray cluster at {address!r}: {error}") from error

    def _attempt(self, connection: Future[None]) -> None:
        begin = self._begin
        try:
            self._ray.init(
                address=begin.address, namespace=begin.namespace, log_to_driver=False, configure_logging=False
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            connection.set_exception(error)
        else:
            connection.set_result(None)

    def _add(self, machines: Mapping[str, Sequence[str]]) -> None:
        from penstock.cli.provision.ray_agent import AgentHost

        begin = self._begin
        for name, words in machines.items():
            actor = self._ray.remote(AgentHost).options(
                name=name, namespace=begin.namespace, lifetime="detached", max_restarts=0, **begin.placement
            )
            # The token goes by Ray's own transport, to this actor alone.
            self._made[name] = actor.remote(words, begin.environment)

    def _release(self, machine: str) -> None:
        actor = self._made.get(machine) or self._named(machine)
        if actor is None:
            return
        errors, leave_s = self._ray.exceptions, self._begin.leave_s
        # One that has no place yet, or is dying, has nothing to stop.
        with contextlib.suppress(errors.RayActorError, errors.GetTimeoutError):
            self._ray.get(actor.stop.remote(leave_s), timeout=leave_s + ANSWER_S)
        self._ray.kill(actor, no_restart=True)
        self._made.pop(machine, None)
        self._unanswered.pop(machine, None)

    def _named(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name, namespace=self._begin.namespace)
        except ValueError:
            return None

    def _list(self) -> list[Row]:
        begin = self._begin
        named = self._ray.util.list_named_actors(all_namespaces=True)
        names = {row["name"] for row in named if row["namespace"] == begin.namespace}
        actors = dict(self._made)
        for name in sorted(name for name in names if is_machine(name, begin.stem) and name not in actors):
            actor = self._named(name)
            # It may have died since it was listed.
            if actor is not None:
                actors[name] = actor
        asked = {name: self._unanswered.pop(name, None) or actor.ended.remote() for name, actor in actors.items()}
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        return [Row(name, self._cause(name, answer)) for name, answer in asked.items()]

    def _cause(self, name: str, answer: Any) -> str:
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=0)
        except errors.GetTimeoutError:
            if name in self._made:
                # It waits for a place, maybe for long: one question does.
                self._unanswered[name] = answer
            return ""
        except errors.ActorUnavailableError:
            return ""
        except errors.RayActorError as error:
            return death_words(str(error))


def main() -> None:
    """Serves until standard input ends."""
    # Whatever else is printed here must not be taken for an answer.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # The library's own patience with a head that is gone is as long as a call's.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(round(CONNECT_S)))
    from penstock.cluster.ray_actors import the_ray

    actors = Actors(the_ray(), msgspec.json.decode(calls.readline(), type=Begin))
    writing = threading.Lock()

    def serve(call: Call) -> None:
        line = msgspec.json.encode(actors.answer(call)) + b"\n"
        with writing, contextlib.suppress(BrokenPipeError):
            answers.write(line)
            answers.flush()

    decoder = msgspec.json.Decoder(Call)
    for line in calls:
        threading.Thread(target=serve, args=(decoder.decode(line),), daemon=True).start()
    end = threading.Timer(SHUT_DOWN_S, os._exit, (0,))
    end.daemon = True
    end.start()
    actors.close()
    os._exit(0)
