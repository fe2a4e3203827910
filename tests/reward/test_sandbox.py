"""The sandbox against programs that try to get out, with every isolation that this machine has."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from reward_support import PATIENCE_S

from penstock.reward.sandbox import Abort, End, Isolation, Limits, Run, Sandbox, SandboxError, available_isolation


def interpreter(kind: Isolation) -> str | None:
    """The one that works with this isolation: under root, all but `namespaces` need one that others may read."""
    for python in ("", "/usr/bin/python3"):
        try:
            if Sandbox(isolation=kind, python=python).run("print(1)").stdout == "1\n":
                return python
        except SandboxError:
            continue
    return None


ALL: tuple[Isolation, ...] = ("namespaces", "landlock", "seccomp")
PYTHON = {kind: python for kind in ALL if (python := interpreter(kind)) is not None}
KINDS = list(PYTHON)
HIDING = [kind for kind in KINDS if kind != "seccomp"]
"""Those that keep files from a program."""
MARK = f"penstock-test-{os.getpid()}"

pytestmark = pytest.mark.skipif(not KINDS, reason="there is no isolation here: " + str(available_isolation()[1]))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Isolation:
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No run of this file leaves a process or a file, however it ended. `tmp_path` is there before folders move."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    folder.chmod(0o755)  # under root, programs are somebody else's
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = psutil.Process().children()
    yield
    folder.rmdir()
    assert [child for child in psutil.Process().children() if child not in before] == []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            assert MARK not in process.cmdline()


def run(kind: Isolation, code: str, stdin: str = "", **limits: float) -> Run:
    bounds = Limits(**{"wall_s": PATIENCE_S, "cpu_s": 20, **limits})  # type: ignore[arg-type]
    return Sandbox(bounds, isolation=kind, python=PYTHON[kind]).run(code, stdin)


def test_a_program_reads_its_input_and_writes_its_output(kind: Isolation) -> None:
    code = "import sys\nprint(input()[::-1])\nprint('then', file=sys.stderr)"
    result = run(kind, code, "stressed\n")
    assert (result.end, result.code, result.stdout, result.stderr) == (End.EXITED, 0, "desserts\n", "then\n")


def test_a_program_that_fails_has_crashed(kind: Isolation) -> None:
    assert run(kind, "1 / 0").end is End.CRASHED
    assert run(kind, "raise SystemExit(3)").code == 3
    assert run(kind, "import os; os.abort()").end is End.CRASHED
    assert run(kind, "x = ").end is End.CRASHED


def test_an_endless_loop_ends_at_the_processors_limit(kind: Isolation) -> None:
    result = run(kind, "while True: pass", cpu_s=1)
    assert result.end is End.TIME_OUT
    assert result.cpu_s > 0.5


def test_one_that_sleeps_for_ever_ends_at_the_wall_limit(kind: Isolation) -> None:
    result = run(kind, "import time\ntime.sleep(1e6)", wall_s=0.5)
    assert (result.end, result.code) == (End.TIME_OUT, None)


def test_endless_output_is_cut_off(kind: Isolation) -> None:
    result = run(kind, "while True: print('x' * 1000)", output_bytes=50_000)
    assert result.end is End.OUTPUT
    assert len(result.stdout) == 50_000
    assert run(kind, "import os\nwhile True: os.write(2, b'x')", output_bytes=5000).end is End.OUTPUT


def test_memory_is_bounded(kind: Isolation) -> None:
    assert run(kind, "x = bytearray(3 * 10 ** 8)", memory_mb=128).end is End.MEMORY
    assert run(kind, "x = bytearray(3 * 10 ** 8)", memory_mb=1024).end is End.EXITED


def test_files_are_bounded(kind: Isolation) -> None:
    code = "with open('big', 'wb') as f:\n  for _ in range(40): f.write(bytes(10 ** 6))"
    assert run(kind, code, disk_mb=8).end is End.CRASHED
    assert run(kind, code, disk_mb=64).end is End.EXITED


def test_open_files_are_bounded(kind: Isolation) -> None:
    code = "files = [open('/dev/null') for _ in range(100)]"
    assert "Too many open files" in run(kind, code, open_files=32).stderr
    assert run(kind, code, open_files=256).end is End.EXITED


FORKS = f"""
import os, sys, time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(600)", "{MARK}"])
        made += 1
except OSError:
    pass
print(made)
"""


def test_a_fork_bomb_is_bounded_and_nothing_of_it_outlives_the_run(kind: Isolation) -> None:
    result = run(kind, FORKS, processes=12)
    assert result.end is End.EXITED
    assert int(result.stdout) < 100, "where a user's processes are counted together, others' ends make room"
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run(kind, bomb, processes=12, wall_s=0.5).end is End.TIME_OUT


CHILD = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)", "{MARK}"], start_new_session=%s)
print("done")
"""


def test_a_child_in_the_background_does_not_outlive_its_run(kind: Isolation) -> None:
    result = run(kind, CHILD % False)
    assert (result.end, result.stdout) == (End.EXITED, "done\n")
    own_session = run(kind, CHILD % True)
    assert own_session.end is (End.EXITED if kind == "namespaces" else End.CRASHED)


def test_no_network_is_to_be_had(kind: Isolation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket\nsocket.create_connection({address!r}, 5)\nprint('in')"
        result = run(kind, code)
        assert result.end is End.CRASHED
        assert result.stdout == ""
        allowed = Sandbox(Limits(wall_s=PATIENCE_S), "allow", isolation=kind, python=PYTHON[kind]).run(code)
        assert allowed.stdout == "in\n"


def test_the_callers_environment_is_not_there(kind: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "sesame")
    code = "import os, pathlib\nprint(dict(os.environ))\npathlib.Path('/proc/%d/environ').read_text()"
    result = run(kind, code % os.getpid())
    assert "HOME" in result.stdout
    assert "sesame" not in result.stdout
    if kind in HIDING:
        assert result.end is End.CRASHED, "there is no such process, or its files are closed"


@pytest.mark.parametrize("kind", HIDING)
def test_only_a_folder_of_its_own_can_be_written_and_the_callers_files_are_not_there(
    kind: Isolation,
) -> None:
    outside = Path(tempfile.mkdtemp())
    (outside / "secret").write_text("sesame")
    outside.chmod(0o777)
    code = f"""
import os, pathlib
assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
pathlib.Path("mine").write_text("x")
for path in ("{outside}/new", "{outside}/secret", "/usr/new", "/new", "/etc/new"):
    try:
        pathlib.Path(path).write_text("x")
        print("wrote", path)
    except OSError:
        pass
try:
    print(open("{outside}/secret").read())
except OSError:
    pass
try:
    print([name for name in os.listdir("/proc") if name == "{os.getpid()}"])
except OSError:
    print([])
"""
    result = run(kind, code)
    assert (result.end, result.stdout, result.stderr) == (End.EXITED, "[]\n", "")
    assert (outside / "secret").read_text() == "sesame"
    reading = Sandbox(read_only=[str(outside)], isolation=kind, python=PYTHON[kind])
    assert reading.run(f"print(open('{outside}/secret').read())").stdout == "sesame\n"
    assert reading.run(f"open('{outside}/secret', 'w')").end is End.CRASHED
    (outside / "secret").unlink()
    outside.rmdir()


def test_privileges_cannot_be_had_again(kind: Isolation) -> None:
    no_new_privileges = 39
    code = f"import ctypes\nprint(ctypes.CDLL(None).prctl({no_new_privileges}, 0, 0, 0, 0))"
    assert run(kind, code).stdout == "1\n"
    assert run(kind, "import os\nos.setuid(0) if os.getuid() else 1 / 0").end is End.CRASHED


def test_a_program_that_takes_its_own_folders_rights_away_leaves_nothing_all_the_same(kind: Isolation) -> None:
    code = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
    assert run(kind, code).end is End.EXITED


def test_a_run_can_be_ended_from_another_thread(kind: Isolation) -> None:
    abort = Abort()
    timer = threading.Timer(0.3, abort.set)
    timer.start()
    with pytest.raises(SandboxError, match="aborted"):
        Sandbox(Limits(wall_s=600), isolation=kind, python=PYTHON[kind]).run(
            "import time\ntime.sleep(600)", abort=abort
        )
    timer.join()
    abort.close()


def test_an_interpreter_that_is_not_there_is_the_sandboxs_error_and_not_the_programs(kind: Isolation) -> None:
    with pytest.raises(SandboxError, match=r"could not run the program: FileNotFoundError"):
        Sandbox(python="/usr/bin/no-such-python", isolation=kind).run("print(1)")


def test_without_any_isolation_it_refuses_unless_the_network_is_allowed() -> None:
    with pytest.raises(SandboxError, match=r"network = 'allow'"):
        Sandbox(isolation="none")
    if os.geteuid() != 0:  # root gives its rights up, and its interpreter may be closed to others
        bare = Sandbox(Limits(wall_s=PATIENCE_S), network="allow", isolation="none")
        assert bare.run(CHILD % True).stdout == "done\n"


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_mb", "processes", "output_bytes"])
def test_a_limit_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(SandboxError, match=f"limit {name} is 0"):
        Limits(**{name: 0})
    with pytest.raises(SandboxError, match="must be deny or allow"):
        Sandbox(network="some")  # type: ignore[arg-type]
