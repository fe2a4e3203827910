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
import time

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL: a server of tokens has nothing to save."""


def end_group() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: end_group())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror or error}")
    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    print(f"{command[0]} ended: " + (f"killed by signal {-code}" if code < 0 else f"exit code {code}"), flush=True)
    # Helpers that the server left behind end with it.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
