"""The process of one local worker: takes calls from its socket, one after another, and answers them.

Makes one object for each role and calls its methods in the order in which they come. Knows nothing of other workers.
It ends with its controller: the kernel kills its process group when the controller's end of a pipe closes, even while
native code holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from penstock import collector
from penstock.cluster import frames
from penstock.cluster.payload import Packed, pack, unpack
from penstock.cluster.segment import SegmentPool
from penstock.cluster.workers import keep_what_is_there


def main(socket_fd: int, life_fd: int) -> None:
    """Runs until the controller closes the socket."""
    collector.spare()
    _end_with_controller(life_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to act on
    sock = socket.socket(fileno=socket_fd)
    try:
        _serve(sock)
    except (EOFError, ConnectionError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of a user's class must not keep the process


def _serve(sock: socket.socket) -> None:
    body, _ = frames.receive(sock)
    hello = frames.decode_to_worker(body)
    assert isinstance(hello, frames.Hello)
    body, fds = frames.receive(sock)
    first = frames.decode_to_worker(body)
    assert isinstance(first, frames.Call)
    try:
        arguments = _unpacked(first, fds)
        objects = {role: load_class(path)(**arguments.get(role, {})) for role, path in hello.roles.items()}
    except BaseException as error:  # noqa: BLE001  # told to the controller, which ends the group
        frames.send(sock, frames.encode(_fault(0, error)))
        return
    keep_what_is_there()
    collector.settle()
    frames.send(sock, frames.encode(frames.Ready(os.getpid())))
    segments = SegmentPool()
    while True:
        body, fds = frames.receive(sock)
        call = frames.decode_to_worker(body)
        assert isinstance(call, frames.Call)
        answer = _answered(objects, call, fds, segments)
        # The arguments are let go of by now, so that the next call finds their memory free.
        if isinstance(answer, frames.Fault):
            frames.send(sock, frames.encode(answer))
        else:
            frames.send(sock, frames.encode(frames.Answer(call.number, answer.body)), answer.fds)
        del answer


def _answered(
    objects: dict[str, Any], call: frames.Call, fds: list[int], segments: SegmentPool
) -> Packed | frames.Fault:
    try:
        args, kwargs = _unpacked(call, fds)
        value = getattr(objects[call.role], call.method)(*args, **kwargs)
        return pack(value if call.answer else None, segments)
    except Exception as error:  # noqa: BLE001  # the controller names it
        return _fault(call.number, error)


def _unpacked(call: frames.Call, fds: list[int]) -> Any:
    try:
        return unpack(call.body, fds)
    finally:
        for fd in fds:
            os.close(fd)


def _fault(number: int, error: BaseException) -> frames.Fault:
    told = "".join(traceback.format_exception(error))
    return frames.Fault(number, f"{type(error).__name__}: {error}", told)


def load_class(path: str) -> type:
    """The class at `package.module:Name`. Raises ImportError, AttributeError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _end_with_controller(life_fd: int) -> None:
    """Linux: SIGKILL from the kernel when the pipe's other end closes; elsewhere a thread waits for that."""
    if sys.platform == "linux":
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, 10, signal.SIGKILL)  # F_SETSIG, which the module has no name for
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(life_fd, 1):
                pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="controller-watch", daemon=True).start()
