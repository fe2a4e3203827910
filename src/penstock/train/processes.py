"""The processes of a run on one machine: one manager and its engines, started, watched and ended.

Decides nothing about samples: an engine that dies here is only a closed socket to the manager. Children lead their
own process groups (a Ctrl-C at the terminal reaches the trainer alone, which ends them in order) and leave by
themselves when the trainer dies, because their standard input then closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.config.run import EngineConfig, RunConfig
from penstock.errors import ConfigError, PenstockError, PortInUse
from penstock.instance.dialects import PROGRAMS
from penstock.observe.events import EngineExited, EngineStarted, Event, ManagerChanged
from penstock.observe.instances import RUN_ENDED
from penstock.rollout.doors import Role, Tokens, agents_environment, managers_environment

MANAGER_START_S = 30.0
TERMINATE_S = 3.0
KILL_S = 1.0
SETTLE_S = 0.5
FLEET_FILE = "fleet.json"
"""What the manager is told of the machines that it may ask for, where the run has any."""
READY_FILE = "manager.json"
"""Written by a manager once it listens, with its URL."""


@dataclass(slots=True)
class Child:
    """One process of the run. `process.returncode` is None while it lives."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_file: IO[bytes]
    progress_path: Path | None = None
    end_cause: str = ""
    """Set before this side ends it; an exit without a cause is an accident."""
    reported: bool = False

    def log_tail(self, lines: int = 15) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def tokens_generated(self) -> int | None:
        """Output tokens that this engine drew since it started; exact even after SIGKILL."""
        if self.progress_path is None:
            return None
        try:
            return int(struct.unpack("<Q", self.progress_path.read_bytes()[:8])[0])
        except (OSError, struct.error):
            return None


class LocalProcesses:
    """Starts and ends the manager and the engines of one run.

    `emit` gets EngineStarted and EngineExited events. Not thread-safe: one thread starts, polls and ends.
    """

    def __init__(self, config: RunConfig, folder: Path, token: str | Tokens, emit: Callable[[Event], None]) -> None:
        """`token`: one for all doors, or the doors' own; children get theirs in the environment.

        Raises ConfigError where the engines' program is not on this machine.
        """
        _check_program(config.rollout.engines)
        self._config = config
        self._folder = folder
        self._emit = emit
        self._tokens = token if isinstance(token, Tokens) else Tokens(shared=token)
        self._manager: Child | None = None
        self._manager_port = 0
        self._manager_restarts = 0
        self._engines: dict[str, Child] = {}
        self._engines_started = 0
        self._terminate_by: float | None = None
        self._closed = False
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def engines(self) -> dict[str, Child]:
        """All engines ever started, by name."""
        return dict(self._engines)

    def _spawn_manager(self, port: int) -> tuple[Child, Path]:
        manager, rollout = self._config.manager, self._config.rollout
        ready_path = self._folder / READY_FILE
        ready_path.unlink(missing_ok=True)
        child = self._spawn(
            "manager",
            ["manager", "--host", manager.host, "--port", str(port)]
            + ["--max-frame-mib", str(manager.max_frame_mib), "--ready-file", str(ready_path)]
            + ["--heartbeat-s", str(rollout.heartbeat_s), "--load-deadline-s", str(rollout.load_deadline_s)]
            + ["--stall-s", str(rollout.stall_s)]
            + ["--frame-steps", str(rollout.engines.frame_steps)]
            # For machines that join from outside, with nothing but the manager's address.
            + ["--max-context", str(rollout.engines.max_context_tokens)]
            + ["--max-pending", str(rollout.max_pending_per_instance)]
            + ["--balance", rollout.balance]
            + ["--trainer-grace-s", str(manager.trainer_grace_s)]
            + self._journal_options()
            + self._fleet_options()
            + self._tls_options(),
        )
        if self._manager is not None:
            self._manager.log_file.close()
        self._manager = child
        return child, ready_path

    def _journal_options(self) -> list[str]:
        manager = self._config.manager
        if manager.journal == "off":
            return []
        return ["--journal", str(self._folder / "journal"), "--journal-fsync", manager.journal] + [
            "--journal-max-mib",
            str(manager.journal_max_mib),
        ]

    def _fleet_options(self) -> list[str]:
        path = self._folder / FLEET_FILE
        return ["--fleet", str(path)] if self._config.fleet.wanted and path.exists() else []

    def _tls_options(self) -> list[str]:
        tls = self._config.tls
        own = {"agent-tls-ca": tls.ca, "agent-tls-cert": tls.own_cert, "agent-tls-key": tls.own_key}
        shown = {"tls-cert": tls.cert, "tls-key": tls.key, "tls-client-ca": tls.client_ca}
        return _file_options(shown | own)

    def start_manager(self) -> str:
        """Starts the manager and returns its URL. Raises PortInUse or PenstockError with the end of its log."""
        child, ready_path = self._spawn_manager(self._config.manager.port)
        deadline = time.monotonic() + MANAGER_START_S
        while not ready_path.exists():
            if child.process.poll() is not None:
                tail = child.log_tail()
                kind = PortInUse if "in use" in tail else PenstockError
                raise kind(f"the manager did not start (exit code {child.process.returncode}): {tail}")
            if time.monotonic() > deadline:
                raise PenstockError(f"the manager was not listening after {MANAGER_START_S:.0f} s: {child.log_tail()}")
            time.sleep(0.02)
        url = str(json.loads(ready_path.read_text())["url"])
        self._manager_port = int(url.rpartition(":")[2])
        return url

    def start_engine(self, manager_url: str, cause: str) -> Child:
        """Starts one more engine process; it joins the manager by itself, seconds later."""
        engines = self._config.rollout.engines
        name = f"engine-{self._engines_started}"
        self._engines_started += 1
        progress_path = self._folder / "logs" / f"{name}.progress"
        # An engine that dies before it gets there has drawn nothing.
        progress_path.write_bytes(bytes(8))
        paced = engines.tokens_per_s > 0
        arguments = ["join", "--manager", manager_url, "--name", name, "--engine", "paced" if paced else engines.kind]
        arguments += ["--device", engines.device, "--max-running", str(engines.max_running)]
        arguments += ["--max-context", str(engines.max_context_tokens), "--kv-cache-mib", str(engines.kv_cache_mib)]
        arguments += ["--threads", str(engines.threads), "--progress-file", str(progress_path)]
        arguments += self._weight_arguments(name)
        if engines.tensor_parallel > 1:
            option = "tensor_parallel" if engines.kind == "builtin" else "tensor-parallel-size"
            arguments.append(f"--engine.{option}={engines.tensor_parallel}")
        tls = self._config.tls
        arguments += _file_options({"tls-ca": tls.ca, "tls-cert": tls.own_cert, "tls-key": tls.own_key})
        # A notice that takes this machine takes its trainer along: no engine need leave before the run does.
        arguments += ["--preemption", "none", "--reserved"]
        if paced:
            arguments += ["--tokens-per-s", str(engines.tokens_per_s)]
        if engines.kind != "builtin":
            arguments += self._server_arguments(name)
        child = self._spawn(name, arguments)
        child.progress_path = progress_path
        self._engines[name] = child
        self._emit(EngineStarted(ts=time.time(), name=name, pid=child.process.pid, cause=cause))
        return child

    def _weight_arguments(self, name: str) -> list[str]:
        weights = self._config.weights
        arguments = ["--connections", str(weights.connections), "--weights-codec", weights.codec]
        arguments += ["--weights-ways", ",".join(weights.ways)]
        if not weights.keep_base:
            arguments.append("--no-weights-base")
        if weights.relay:
            arguments += ["--relay-port", "0"]
        if weights.resume:
            arguments += ["--weights-folder", str(self._folder / "weights" / name)]
        return arguments

    def _server_arguments(self, name: str) -> list[str]:
        """For an engine whose agent starts a server of its own."""
        engines = self._config.rollout.engines
        log_path = self._folder / "logs" / f"{name}.server.log"
        arguments = ["--engine-log", str(log_path), "--engine-start-s", str(self._config.rollout.load_deadline_s)]
        if engines.codes:
            arguments.append("--engine-codes")
        if engines.command:
            arguments += ["--engine-command", engines.command]
        for option, value in engines.options.items():
            if value is not False:
                arguments.append(f"--engine.{option}" if value is True else f"--engine.{option}={value}")
        return arguments

    def kill_engine(self, name: str, cause: str) -> None:
        """SIGKILL: no goodbye, no flush."""
        child = self._engines[name]
        child.end_cause = cause
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait(timeout=KILL_S * 5)
        self.poll()

    def poll(self) -> list[Child]:
        """Reports and returns the engines that exited since the last call.

        A manager that did is started again on its port, while there are tries left; then it raises PenstockError.
        """
        exited = self._report_exits()
        if self._manager_died and self._manager_restarts < self._config.manager.restarts:
            self._restart_manager()
        self.check_manager()
        return exited

    @property
    def _manager_died(self) -> bool:
        """It ended by accident."""
        manager = self._manager
        return manager is not None and manager.process.poll() is not None and not manager.end_cause

    def _restart_manager(self) -> None:
        """Starts it again where it was, and does not wait for it: agents and trainer dial it until it is there."""
        manager = self._manager
        if manager is None:
            return
        self._manager_restarts += 1
        self._emit(ManagerChanged(ts=time.time(), state="restarted", cause=_accident(manager)))
        self._spawn_manager(self._manager_port)

    def check_manager(self) -> None:
        """Raises PenstockError if the manager died by accident."""
        manager = self._manager
        if manager is not None and self._manager_died:
            raise PenstockError(f"the manager died ({_accident(manager)}); its log: {manager.log_path}")

    def settle_manager(self) -> None:
        """Waits a moment for a manager that may be dying: its socket closes before its process has ended.

        Without this its death would be taken for the ending that `close` asks for.
        """
        if self._manager is not None:
            _wait([self._manager], time.monotonic() + SETTLE_S)

    def stop_engines(self) -> None:
        """SIGTERM to every engine: they flush, say goodbye to the manager and leave. Waits for them, bounded."""
        engines = list(self._engines.values())
        for child in engines:
            _ask_to_leave(child)
        _wait(engines, time.monotonic() + TERMINATE_S)
        self.poll()

    def terminate(self) -> None:
        """SIGTERM to every child, at once and without waiting; `close` waits and comes later."""
        if self._terminate_by is None:
            self._terminate_by = time.monotonic() + TERMINATE_S
            for child in self._children():
                _ask_to_leave(child)

    def close(self) -> None:
        """Ends every child: SIGTERM, then SIGKILL to its process group; within five seconds of the first word."""
        if self._closed:
            return
        self._closed = True
        children = self._children()
        # The group of one that is long gone may be somebody else's by now.
        living = [child for child in children if not child.reported]
        self.terminate()
        _wait(living, self._terminate_by or 0.0)
        for child in living:
            # The leader may be gone while a helper of its group is not.
            _signal_group(child, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=KILL_S)
        for child in children:
            if child.process.stdin is not None:
                with contextlib.suppress(OSError):
                    child.process.stdin.close()
            child.log_file.close()
        self._report_exits()

    def _report_exits(self) -> list[Child]:
        exited = []
        for child in self._engines.values():
            if child.process.poll() is not None and not child.reported:
                child.reported = True
                exited.append(child)
                cause = child.end_cause or _accident(child)
                code = int(child.process.returncode)
                self._emit(
                    EngineExited(
                        ts=time.time(),
                        name=child.name,
                        pid=child.process.pid,
                        exit_code=code,
                        cause=cause,
                        tokens_drawn=child.tokens_generated(),
                    )
                )
        return exited

    def _children(self) -> list[Child]:
        return [*self._engines.values(), *([self._manager] if self._manager else [])]

    def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        log_path = self._folder / "logs" / f"{name}.log"
        log_file = log_path.open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=self._environment(name),
            start_new_session=True,
        )
        return Child(name=name, process=process, log_path=log_path, log_file=log_file)

    def _environment(self, name: str) -> dict[str, str]:
        """A child's tokens are nowhere else: every user of a machine can read its command lines."""
        doors = self._config.manager
        held = (doors.token_env, doors.agent_token_env, doors.trainer_token_env, doors.operator_token_env)
        if name == "manager":
            environment = managers_environment(os.environ, self._tokens, *held)
        else:
            environment = agents_environment(os.environ, self._tokens.of(Role.AGENT), *held)
        return environment | {"PYTHONUNBUFFERED": "1"}


def _file_options(files: Mapping[str, str]) -> list[str]:
    return [word for option, path in files.items() if path for word in (f"--{option}", path)]


def _check_program(engines: EngineConfig) -> None:
    program = PROGRAMS.get(engines.kind, "")
    if program and engines.count and not engines.command and shutil.which(program) is None:
        raise ConfigError(
            f'rollout.engines.kind = "{engines.kind}" needs the program {program} on PATH; install '
            "it as its own documentation says, or give its command line as rollout.engines.command"
        )


def _ask_to_leave(child: Child) -> None:
    if child.process.poll() is None:
        child.end_cause = child.end_cause or RUN_ENDED
        _signal_group(child, signal.SIGTERM)


def _wait(children: Sequence[Child], deadline: float) -> None:
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _accident(child: Child) -> str:
    code = child.process.returncode
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    else:
        how = f"exit code {code}"
    tail = child.log_tail(3)
    return f"{how}; last words: {tail}" if tail else how
