"""Runs a server that must not outlive whoever started it; a script of its own, so that it weighs little.

`keeper.py LOG BYTES COMMAND...`: leads a process group, starts the command in it, and ends the group when standard
input closes (whoever holds its other end has died, however) or SIGTERM comes: SIGTERM to all, SIGKILL soon after. A
command that ends takes the group with it at once. What the command prints is appended to LOG; a log of BYTES becomes
LOG.1, in the place of the one before. Imports nothing of Penstock.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL: a server of tokens has nothing to save."""
LAST_WORDS_S = 1.0
"""For what a dead server printed to be written, where a helper of it still holds its output open."""


class Log:
    """A file that is begun anew when it is full."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes

    def write(self, data: bytes) -> None:
        # What the disk does not take is dropped: a server must not stand still for its log.
        with contextlib.suppress(OSError):
            with open(self._path, "ab") as file:
                file.write(data)
                full = file.tell() >= self._limit
            if full:
                os.replace(self._path, f"{self._path}.1")


def kill(number: int = 0, frame: object = None) -> None:
    os.killpg(0, signal.SIGKILL)


def leave(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def copy(output: BinaryIO, log: Log) -> None:
    while data := os.read(output.fileno(), 65536):
        log.write(data)


def main(log_path: str, limit_bytes: str, *command: str) -> None:
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = Log(log_path, int(limit_bytes))
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        log.write(f"{command[0]} can't be started: {error.strerror or error}\n".encode())
        sys.exit(1)
    assert server.stdout is not None
    copying = threading.Thread(target=copy, args=(server.stdout, log), daemon=True)
    copying.start()
    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    copying.join(LAST_WORDS_S)
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    log.write(f"{command[0]} ended: {how}\n".encode())
    kill()  # Helpers that the server left behind.


if __name__ == "__main__":
    main(*sys.argv[1:])
