"""Machines by the user's own script, called as `SCRIPT add N`, `SCRIPT release ID` and `SCRIPT list`.

`add` prints an id a line. `list` prints a machine a line: its id, then `price=DOLLARS` an hour where that is known, and
`ended=CAUSE` (the rest of the line) where it has ended by itself. `release` ends one, and one that is gone already is
no error. An exit code other than 0 is a failure, with what was printed as its cause. What is printed is believed only
where it looks like that.

Decides nothing. A script that is cut off at its deadline is killed with its process group; processes that it leaves
behind otherwise are its own affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from penstock.errors import ConfigError, ProvisionError
from penstock.rollout.doors import agents_environment
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["CommandProvisioner"]

MOST_BYTES = 1 << 20
"""Of a script's output; one that prints more has lost its way."""
TAIL_CHARS = 300
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")


class CommandProvisioner:
    """`command`: the script with its first words, as a line or a list. `environment`: further variables for it.

    The script has PENSTOCK_RUN, PENSTOCK_MANAGER, PENSTOCK_TOKEN, and PENSTOCK_JOIN: what a machine is to run, but for
    `--name ID`. All output is kept in `provisioner.log` beside the run's other logs.
    """

    def __init__(
        self, join: JoinOrder, *, command: str | Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._words = _words_of(command)
        self._log = Path(join.folder) / "provisioner.log" if join.folder else None
        self._environment = {
            **agents_environment(os.environ, join.token),
            "PENSTOCK_RUN": join.run,
            "PENSTOCK_MANAGER": join.manager_url,
            "PENSTOCK_JOIN": shlex.join(["penstock", *join.words()]),
            **_variables(environment),
        }
        self._check_script()

    def _check_script(self) -> None:
        """Raises ConfigError for one that can't be called: told once now, and not at every call of a run."""
        name = self._words[0]
        if shutil.which(name, path=self._environment.get("PATH")) is None:
            there = Path(name).is_file()
            how = "is not executable (chmod +x)" if there else "is not there"
            raise ConfigError(f"fleet.options.command: {name} {how}")

    async def add(self, count: int) -> Sequence[str]:
        lines = await self._run("add", str(count))
        return [_id_of(line, "add") for line in lines]

    async def release(self, machine: str) -> None:
        await self._run("release", machine)

    async def list(self) -> Sequence[Seen]:
        return [_seen(line) for line in await self._run("list")]

    async def close(self) -> None:
        """The script's machines are the script's."""

    async def _run(self, *words: str) -> Sequence[str]:
        """The lines that it printed. Raises ProvisionError."""
        began = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            # Files and not pipes: a machine that the script leaves running in the background may hold them.
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*self._words, *words),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ProvisionError(
                    f"{self._words[0]} can't be run: {error.strerror}; fleet.options.command"
                ) from error
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                self._keep(words, f"killed after {time.monotonic() - began:.1f} s", _text(out), _text(err))
                raise
            printed, said = _text(out), _text(err)
        self._keep(words, f"exit code {code} after {time.monotonic() - began:.1f} s", printed, said)
        called = shlex.join([Path(self._words[0]).name, *self._words[1:], *words])
        if code:
            told = (said.strip() or printed.strip())[-TAIL_CHARS:]
            raise ProvisionError(f"`{called}` ended with exit code {code}: {told or 'it printed nothing'}")
        if len(printed) > MOST_BYTES:
            raise ProvisionError(f"`{called}` printed over {MOST_BYTES} bytes")
        return [line.strip() for line in printed.splitlines() if line.strip()]

    def _keep(self, words: Sequence[str], outcome: str, printed: str, said: str) -> None:
        if self._log is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        text = "".join(f"  {line}\n" for line in (printed[:TAIL_CHARS] + "\n" + said).splitlines() if line.strip())
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.write(f"{stamp} {shlex.join(words)}: {outcome}\n{text}")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_BYTES + 1).decode(errors="replace")


def _words_of(command: object) -> list[str]:
    """Raises ConfigError that names the key for what no program can be called by."""
    key = "fleet.options.command"
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{key}: give a line, or a list of texts")
    if not words:
        raise ConfigError(f"{key} is empty; give the script that adds, releases and lists machines")
    if any("\0" in word for word in words):
        raise ConfigError(f"{key} has a NUL, which no program can be given")
    return list(words)


def _variables(environment: object) -> dict[str, str]:
    """Raises ConfigError that names the key for what can't be a variable. Values may be secret, and are not shown."""
    key = "fleet.options.environment"
    if environment is None:
        return {}
    if not isinstance(environment, Mapping):
        raise ConfigError(f"{key}: give a table of variables, each a text")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"{key}: {name!r} is no name of a variable")
        if not isinstance(value, str):
            raise ConfigError(
                f"{key}.{name}: a variable is a text, and this is {type(value).__name__}; put it in quotes"
            )
        if "\0" in value:
            raise ConfigError(f"{key}.{name} has a NUL, which no variable can have")
    return dict(environment)


def _id_of(text: str, verb: str) -> str:
    if not _ID.fullmatch(text):
        raise ProvisionError(f"`{verb}` printed {text[:80]!r}, which is no machine's id")
    return text


def _seen(line: str) -> Seen:
    head, ended, cause = line.partition(" ended")
    name, *words = head.split()
    price: float | None = None
    for word in words:
        key, _, value = word.partition("=")
        try:
            price = float(value) if key == "price" else None
        except ValueError:
            price = None
        if price is None or not 0 <= price < float("inf"):
            raise ProvisionError(f"`list` printed {line[:80]!r}: a line is ID [price=DOLLARS] [ended=CAUSE]")
    if ended and cause and not cause.startswith("="):
        raise ProvisionError(f"`list` printed {line[:80]!r}: a line is ID [price=DOLLARS] [ended=CAUSE]")
    return Seen(_id_of(name, "list"), not ended, cause.removeprefix("=") or ("it ended" if ended else ""), price)
