"""The inside of a sandbox's start: shuts itself in, runs one program there, and tells how that ended.

Run as a script by `sandbox`, with the base interpreter and nothing of Penstock imported. Standard input brings one line
of JSON (what to run, where, with what limits) and stays open: when it closes, everything here is killed. Three
processes: this one, which watches that line; `init`, the first process of the new namespaces, whose end takes all
others with it; and the program. Decides nothing about what limits mean; a step that fails is told, never skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import traceback
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
SYS_MOUNT_SETATTR = 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RULE_PATH_BENEATH, LANDLOCK_VERSION = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Landlock's version to the number of rights over files that it knows; later ones know as many."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38

DEVICES = ("null", "zero", "full", "random", "urandom")
NETWORK_CALLS = ("socket", "io_uring_setup")
"""io_uring opens sockets without the call that the filter sees."""
MACHINES: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "pivot_root": 155, "socket": 41, "io_uring_setup": 425, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "kill": 62, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_getfd": 438,
        "setsid": 112, "setpgid": 109,
    },
    "aarch64": {
        "audit": 0xC00000B7, "pivot_root": 41, "socket": 198, "io_uring_setup": 425, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424, "pidfd_getfd": 438,
        "setsid": 157, "setpgid": 154,
    },
}  # fmt: skip
"""System calls by number. Without namespaces a program must neither signal others nor leave its process group."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """A C function that returns a negative number where it fails. Raises OSError that names it."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = getattr(libc, name)(*values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())


def set_read_only(path: str, recursive: bool) -> None:
    """Adds flags and takes none away, which an unprivileged namespace may not do."""
    attributes = struct.pack("<QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def main() -> int:
    spec = json.loads(sys.stdin.buffer.readline())
    status: int = spec["status_fd"]
    try:
        program_in = os.memfd_create("stdin")
        with open(os.dup(program_in), "wb") as file:
            file.write(spec["stdin"].encode())
        os.lseek(program_in, 0, os.SEEK_SET)
        uid = own_uid()
        if spec["isolation"] == "namespaces":
            unshare(spec["network"] == "allow")
        else:
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        init = os.fork()
        if init == 0:
            run_init(spec, program_in, uid)
        watch(init, spec["isolation"] == "namespaces")
    except Exception:  # noqa: BLE001 - whatever it is, the one who waits is told
        tell(status, {"error": last_line()})
    return 0


def watch(init: int, namespaces: bool) -> None:
    """Waits for the end of `init`, or for that of the line to whoever wants the result; then nothing here lives."""
    ended = os.pidfd_open(init)
    ready, _, _ = select.select([ended, 0], [], [])
    if ended not in ready:
        os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)  # with the first process of a namespace, all others there have ended
    if not namespaces:
        end_orphans()


def tell(status: int, message: dict[str, Any]) -> None:
    os.write(status, json.dumps(message).encode()[:4000] + b"\n")


def last_line() -> str:
    return traceback.format_exc().strip().splitlines()[-1][:500]


def own_uid() -> int:
    """Whom the program runs as: this user, or for root somebody who is nobody else, so that limits count it alone."""
    if os.geteuid() != 0:
        return os.geteuid()
    wanted = 0x40000000 + os.getpid()
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return wanted if any(first <= wanted < first + size for first, _, size in ranges) else 65534


def unshare(network: bool) -> None:
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | (0 if network else CLONE_NEWNET)
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        call("unshare", flags)
        return
    call("unshare", flags | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def run_init(spec: dict[str, Any], program_in: int, uid: int) -> NoReturn:
    """Builds what the program sees, starts it, waits for its end and ends all that it left behind."""
    status: int = spec["status_fd"]
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        namespaces = spec["isolation"] == "namespaces"
        if namespaces:
            build_root(spec, uid)
        else:
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            fill(spec["files"], spec["folder"], uid)
        program = os.fork()
        if program == 0:
            run_program(spec, program_in, uid, "/box" if namespaces else spec["folder"])
        tell(status, {"started": True})
        while (ended := first_ended()) != program:
            os.waitpid(ended, 0)
        if not namespaces:
            end_group(program)
        _, wait_status, usage = os.wait4(program, 0)
        if not namespaces:
            end_orphans()
        code = os.waitstatus_to_exitcode(wait_status)
        tell(status, {"code": code, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_kb": usage.ru_maxrss})
    except BaseException:  # noqa: BLE001 - as above; this process is a copy and must never return
        tell(status, {"error": last_line()})
    os._exit(0)


def first_ended() -> int:
    """A child that has ended, not collected yet, so that its number is still its own."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None, "there is a child, and no WNOHANG"
    return ended.si_pid


def end_group(leader: int) -> None:
    """All of a process group at one stroke: none of it can start another meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no group, or none but ended ones
        os.killpg(leader, signal.SIGKILL)


def end_orphans() -> None:
    """Kills what the program started and left, which falls to this process, until nothing is left."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            end_group(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait4(-1, 0)
        except ChildProcessError:
            return


def build_root(spec: dict[str, Any], uid: int) -> None:
    """A file system of the interpreter and its libraries, read-only, and of one small folder that can be written."""
    root: str = spec["folder"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    for path in spec["read_only"]:
        show(path, root)
    os.mkdir(f"{root}/dev")
    for name in DEVICES:
        show(f"/dev/{name}", root, read_only=False)
    os.mkdir(f"{root}/proc")
    # Where the machine's own /proc is partly covered, the kernel shows no other; the folder stays empty then.
    with contextlib.suppress(OSError):
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{root}/box")
    owner = f",uid={uid},gid={uid}" if os.geteuid() == 0 else ""
    size = spec["limits"]["disk_bytes"]
    mount("tmpfs", f"{root}/box", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=4096,mode=700{owner}")
    for link in ("tmp", "dev/shm"):
        if not os.path.lexists(f"{root}/{link}"):  # there where something below it is shown
            os.symlink("/box", f"{root}/{link}")
    fill(spec["files"], f"{root}/box", uid)
    os.chdir(root)
    call("syscall", MACHINES[os.uname().machine]["pivot_root"], b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    set_read_only("/", recursive=False)


def show(path: str, root: str, read_only: bool = True) -> None:
    """The same path inside as outside: a link stays a link."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    mount(path, target, None, MS_BIND | MS_REC)
    if read_only:
        set_read_only(target, recursive=True)


def fill(files: dict[str, str], folder: str, uid: int) -> None:
    for name, text in files.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(text.encode())
        os.chmod(os.path.join(folder, name), 0o644)
    if os.geteuid() == 0:
        os.chown(folder, uid, uid)


def run_program(spec: dict[str, Any], program_in: int, uid: int, folder: str) -> NoReturn:
    """Gives up everything but three descriptors and a folder, then becomes the program."""
    status: int = spec["status_fd"]
    try:
        os.setpgid(0, 0)
        os.dup2(program_in, 0)
        os.chdir(folder)
        set_limits(spec, uid)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which forgets it
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if spec["isolation"] == "landlock":
            hide_files(spec["read_only"], folder)
        if spec["filter"]:
            filter_calls(spec["network"] == "allow")
        os.set_inheritable(status, False)
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [word.replace("{folder}", folder) for word in spec["command"]]
        os.execve(command[0], command, environment)
    except BaseException:  # noqa: BLE001 - as above
        tell(status, {"error": last_line()})
    os._exit(127)


def set_limits(spec: dict[str, Any], uid: int) -> None:
    limits = spec["limits"]
    processes = limits["processes"]
    if os.geteuid() != 0:
        # The kernel counts a user's processes: in a namespace of its own `init` is one more, elsewhere all are.
        processes += 1 if spec["isolation"] == "namespaces" else tasks_of(uid)
    seconds = limits["cpu_s"]
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"], limits["disk_bytes"]),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, allowed = resource.getrlimit(kind)
        bounds = [value if allowed == resource.RLIM_INFINITY else min(value, allowed) for value in (soft, hard)]
        resource.setrlimit(kind, (bounds[0], bounds[1]))


def tasks_of(uid: int) -> int:
    """Processes and threads of one user."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def hide_files(read_only: list[str], folder: str) -> None:
    """Landlock: all files but these are closed, `/proc` too. Raises OSError where the kernel has none."""
    version = call("syscall", LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    known = (1 << RIGHTS_BY_VERSION.get(version, 16)) - 1
    attributes = struct.pack("<Q", known)
    rules = call("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    for_file = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
    rights = dict.fromkeys(read_only, EXECUTE | READ_FILE | READ_DIR)
    rights |= {f"/dev/{name}": READ_FILE | WRITE_FILE for name in DEVICES}
    rights[folder] = known
    for path, allowed in rights.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed &= known if os.path.isdir(path) else known & for_file
        rule = struct.pack("<Qi", allowed, fd)
        call("syscall", LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(fd)
    call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def filter_calls(network: bool) -> None:
    """A seccomp filter: the calls of `MACHINES` fail with EPERM. Raises OSError or KeyError where there is none."""
    numbers = {name: number for name, number in MACHINES[os.uname().machine].items() if name != "pivot_root"}
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, numbers.pop("audit")), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the x32 numbers of the same calls
    for name, number in numbers.items():
        if not (network and name in NETWORK_CALLS):
            code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code.append((give, 0, 0, allow))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(packed)))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0)


if __name__ == "__main__":
    sys.exit(main())
