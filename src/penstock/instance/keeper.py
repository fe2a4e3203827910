"""Runs a server that must not outlive whoever started it; a script of its own, so that it weighs little.

`keeper.py COMMAND...`: leads a process group, starts the command in it, and ends the group when standard input closes
(whoever holds its other end has died, however) or SIGTERM comes: SIGTERM to all, SIGKILL soon after. A command that
ends takes the group with it at once. Imports nothing of Penstock.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL: a server of tokens has nothing to save."""


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


def main(command: list[str]) -> None:
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror or error}")
    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    print(f"{command[0]} ended: " + (f"killed by signal {-code}" if code < 0 else f"exit code {code}"), flush=True)
    kill()  # Helpers that the server left behind.


if __name__ == "__main__":
    main(sys.argv[1:])
