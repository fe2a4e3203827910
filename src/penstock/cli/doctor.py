"""`penstock doctor`: what is installed, what hardware there is, and what will and will not work here, and why.

Looks and judges apart: `gather` looks (and changes nothing), `judge` is pure. Exit code 0 where the quickstart can
run, 1 where it can't.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.bench.common import cpu_model, memory_bytes, usable_cores
from penstock.errors import PenstockError
from penstock.instance.dialects import PROGRAMS
from penstock.reward.sandbox import available_isolation

HELP = "Say what is installed, what hardware there is, and what will and will not work here."

QUICKSTART_MEMORY_GIB = 2.0
"""PyTorch takes 0.22 GiB in each of three engines, the trainer's libraries 0.36 GiB; the rest is for their work."""
QUICKSTART_DISK_GIB = 0.5
LEAST_OPEN_FILES = 256
MANY_OPEN_FILES = 4096
"""A socket for each instance, and a few for each that pulls weights."""
UNDECIDED = ("dev",)
EXTRAS = {
    "datasets": "Hugging Face data sets",
    "lora": "LoRA adapters",
    "fast": "differences of weights, compiled",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "verifiers": "environments of verifiers",
    "math": "math_answer",
    "json": "json_schema",
    "ray": "workers on Ray",
    "kubernetes": "machines on Kubernetes",
    "prometheus": "Prometheus collector",
    "otel": "OpenTelemetry traces",
    "tls": "weights relayed over TLS",
    "mooncake": "weights by Mooncake",
}
"""What each extra is for, by its name; those that are left out have verdicts of their own."""
ON_TORCH = ("tensorboard", "lora")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*?\bextra == ['\"]([^'\"]+)['\"])?")


@dataclass(frozen=True, slots=True)
class Package:
    """One dependency. `extra` is empty for those that always come along."""

    name: str
    extra: str
    wanted: str
    """As declared, e.g. ">=2.6"."""
    installed: str | None

    @property
    def usable(self) -> bool:
        return self.installed is not None and not is_older(self.installed, self.wanted)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. Sizes in GiB."""

    packages: tuple[Package, ...]
    python: str
    system: str
    cpu: str
    cores: int
    memory_gib: float
    memory_available_gib: float
    disk_free_gib: float
    shared_memory_gib: float | None
    open_files: int
    loopback: str
    """Empty, or why two processes of this machine can't talk over it."""
    unwritable: tuple[str, ...]
    """Folders that the run needs and can't write, with the cause."""
    terminal: str
    """Empty, or why pictures can't be drawn on it."""
    torch_trouble: str = ""
    """Empty, or why PyTorch can't be imported."""
    torch_cuda_build: str | None = None
    gpus: tuple[str, ...] = ()
    """As PyTorch sees them."""
    nvidia_driver: bool = False
    sandbox: str = "none"
    """How the programs of `code_tests` are isolated: `namespaces`, `landlock`, `seccomp` or `none`."""
    sandbox_refused: tuple[str, ...] = ()
    """Why each stronger isolation than that doesn't work."""
    servers: Mapping[str, str | None] = field(default_factory=dict)
    """Where on PATH the program of each engine server is, None where it is not; the agent starts it from there."""


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    works: bool
    why: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def main(args: argparse.Namespace) -> int:
    facts = gather()
    verdicts = judge(facts)
    if args.json:
        packages = [{**asdict(package), "usable": package.usable} for package in facts.packages]
        found = {**asdict(facts), "packages": packages}
        print(json.dumps({"penstock": __version__, "facts": found, "verdicts": [asdict(v) for v in verdicts]}))
    else:
        print("\n".join(report(facts, verdicts)))
    return 0 if verdicts[0].works else 1


def judge(facts: Facts) -> list[Verdict]:
    """What will and will not work, the quickstart first."""
    return [
        _quickstart(facts),
        _needs(facts, "built-in engine on CPU", "engine", also=facts.torch_trouble),
        _cuda(facts),
        _needs(facts, "training", "train", also=facts.torch_trouble),
        _needs(facts, "live view", "train", only=("rich",), also=facts.terminal),
        _needs(facts, "curves.png", "train", only=("matplotlib",)),
        _needs(facts, "Parquet prompts", "train", only=("pyarrow",)),
        _needs(facts, "reasoning-gym tasks", "train", only=("reasoning-gym",)),
        *(
            _needs(facts, what, extra, also=facts.torch_trouble if extra in ON_TORCH else "")
            for extra, what in EXTRAS.items()
        ),
        _sandbox(facts),
        _many_instances(facts),
        *(_server(name, path) for name, path in facts.servers.items()),
    ]


def report(facts: Facts, verdicts: Sequence[Verdict]) -> list[str]:
    """The lines that a person reads."""
    lines = [f"Penstock {__version__}, Python {facts.python}, {facts.system}", "", "hardware"]
    lines.append(f"  processor       {facts.cpu}, {facts.cores} usable core{'s' if facts.cores != 1 else ''}")
    lines.append(f"  memory          {facts.memory_gib:.1f} GiB, {facts.memory_available_gib:.1f} available")
    lines.append(f"  disk            {facts.disk_free_gib:.1f} GiB free here")
    shared = "none" if facts.shared_memory_gib is None else f"{facts.shared_memory_gib:.1f} GiB free"
    lines.append(f"  shared memory   {shared}")
    lines.append(f"  open files      {facts.open_files:,} at most")
    lines.append(f"  GPUs            {', '.join(facts.gpus) or 'none that PyTorch can use'}")
    lines += ["", "installed"]
    told: set[str] = set()
    for extra in sorted({package.extra for package in facts.packages}, key=_extra_order):
        packages = [package for package in facts.packages if package.extra == extra and package.name not in told]
        told |= {package.name for package in packages}
        lines.append(f"  {extra or 'core':<14}  {', '.join(map(_package_words, packages))}")
    lines += ["", "what works here"]
    width = max(len(verdict.what) for verdict in verdicts)
    lines += [
        f"  {'yes' if verdict.works else 'NO ':<3}  {verdict.what:<{width}}  {verdict.why}".rstrip()
        for verdict in verdicts
    ]
    return lines


def gather() -> Facts:
    """Looks around; the slowest part is importing PyTorch."""
    try:
        packages = find_packages(importlib.metadata.requires("penstock") or ())
    except importlib.metadata.PackageNotFoundError:
        raise PenstockError("penstock itself is not installed here; pip install -e '.[train]' in its folder") from None
    torch_facts = _look_at_torch() if any(p.name == "torch" and p.installed for p in packages) else {}
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    isolation, refused = available_isolation()
    return Facts(
        packages=packages,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpu=cpu_model(),
        cores=usable_cores(),
        memory_gib=memory_bytes() / 2**30,
        memory_available_gib=memory_available_bytes() / 2**30,
        disk_free_gib=shutil.disk_usage(".").free / 2**30,
        shared_memory_gib=_shared_memory_gib(),
        open_files=limit if limit != resource.RLIM_INFINITY else sys.maxsize,
        loopback=loopback_trouble(),
        unwritable=tuple(filter(None, (unwritable(Path(name)) for name in ("runs", ".cache", tempfile.gettempdir())))),
        terminal=_terminal_trouble(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        servers=find_servers(),
        sandbox=isolation,
        sandbox_refused=tuple(refused.values()),
        **torch_facts,
    )


def find_packages(requirements: Sequence[str]) -> tuple[Package, ...]:
    """From the project's own declared requirements, as `importlib.metadata` gives them."""
    packages = []
    for line in requirements:
        match = _REQUIREMENT.match(line)
        if match is None or match.group(1) == "penstock" or (match.group(3) or "") in UNDECIDED:
            continue
        name, wanted, extra = match.group(1), match.group(2).strip(), match.group(3) or ""
        packages.append(Package(name=name, extra=extra, wanted=wanted, installed=_version(name)))
    return tuple(packages)


def find_servers() -> dict[str, str | None]:
    """Programs of engine servers, and where on PATH they are."""
    return {program: shutil.which(program) for program in PROGRAMS.values()}


def is_older(installed: str, wanted: str) -> bool:
    """Whether a version is below the `>=` bound of a requirement; local parts (`+cpu`) don't count."""
    bound = re.search(r">=\s*([0-9.]+)", wanted)
    return bound is not None and _numbers(installed) < _numbers(bound.group(1))


def memory_available_bytes() -> int:
    """What is free for new processes: the machine's, or what is left of this container's limit if that is less."""
    available = memory_bytes()
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def loopback_trouble() -> str:
    """Sends a byte over 127.0.0.1. Empty, or what went wrong."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(5)
                    client.sendall(b"p")
                    return "" if accepted.recv(1) == b"p" else "a byte sent over 127.0.0.1 did not arrive"
    except OSError as error:
        return f"127.0.0.1 can't be used: {error}"


def unwritable(folder: Path) -> str:
    """Empty, or why files can't be made in a folder (or, while it isn't there, in the nearest one above)."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{folder} ({error.strerror})"


def _quickstart(facts: Facts) -> Verdict:
    engine = {package.name for package in facts.packages if package.extra == "engine"}
    train_alone = [p.name for p in facts.packages if p.extra == "train" and p.name not in engine]
    reasons = [
        _missing(facts, ""),
        _missing(facts, "engine"),
        _missing(facts, "train", train_alone) if train_alone else "",
    ]
    reasons += [facts.torch_trouble, facts.loopback]
    if facts.unwritable:
        reasons.append(f"can't write {', '.join(facts.unwritable)}")
    if facts.memory_available_gib < QUICKSTART_MEMORY_GIB:
        reasons.append(
            f"needs {QUICKSTART_MEMORY_GIB:.0f} GiB of memory, {facts.memory_available_gib:.1f} are available"
        )
    if facts.disk_free_gib < QUICKSTART_DISK_GIB:
        reasons.append(f"needs {QUICKSTART_DISK_GIB} GiB of disk, {facts.disk_free_gib:.1f} are free")
    if facts.open_files < LEAST_OPEN_FILES:
        reasons.append(f"needs {LEAST_OPEN_FILES} open files, the limit is {facts.open_files} (ulimit -n)")
    why = _joined(reasons)
    if not why and facts.cores < 2:
        return Verdict("quickstart", True, "on one core it takes about twice its two minutes")
    return Verdict("quickstart", not why, why or "penstock train configs/quickstart.toml")


def _needs(facts: Facts, what: str, extra: str, only: Sequence[str] = (), also: str = "") -> Verdict:
    why = _joined([_missing(facts, extra, only), also])
    return Verdict(what, not why, why)


def _cuda(facts: Facts) -> Verdict:
    what = "built-in engine and training on CUDA"
    if facts.gpus:
        return Verdict(what, True, ", ".join(facts.gpus))
    missing = _joined([_missing(facts, "engine"), facts.torch_trouble])
    if missing:
        return Verdict(what, False, missing)
    if facts.torch_cuda_build is None:
        gpu = "there is an NVIDIA driver, but " if facts.nvidia_driver else ""
        return Verdict(what, False, f"{gpu}this PyTorch has no CUDA build")
    return Verdict(what, False, f"PyTorch is built for CUDA {facts.torch_cuda_build} and sees no GPU")


def _sandbox(facts: Facts) -> Verdict:
    what = "code sandbox"
    refused = "; ".join(facts.sandbox_refused)
    if facts.sandbox == "namespaces":
        return Verdict(what, True, "namespaces: no network, no other process, one folder of its own")
    if facts.sandbox == "landlock":
        return Verdict(
            what, True, f"landlock: no network, one folder of its own; sees this user's processes ({refused})"
        )
    if facts.sandbox == "seccomp":
        return Verdict(what, True, f"seccomp: no network, but this user's files can be read and written ({refused})")
    return Verdict(what, False, f"{refused}; only with network = 'allow'")


def _many_instances(facts: Facts) -> Verdict:
    what = "hundreds of instances"
    if facts.loopback:
        return Verdict(what, False, facts.loopback)
    if facts.open_files < MANY_OPEN_FILES:
        return Verdict(what, False, f"at most {facts.open_files:,} open files; ulimit -n {MANY_OPEN_FILES}")
    return Verdict(what, True, "")


def _server(program: str, path: str | None) -> Verdict:
    what = f"{program} engine"
    if path is None:
        return Verdict(what, False, f"{program} is not on PATH; --engine-command or --engine-url name one elsewhere")
    return Verdict(what, True, path)


def _missing(facts: Facts, extra: str, only: Sequence[str] = ()) -> str:
    """What an extra lacks, with the command that installs it. `train` comes with all of `engine`."""
    extras = ("engine", "train") if extra == "train" and not only else (extra,)
    wanted = [package for package in facts.packages if package.extra in extras and (not only or package.name in only)]
    lacking = [package for package in wanted if not package.usable]
    if not lacking:
        return ""
    names = _joined([_lack_words(package) for package in lacking]).replace("; ", ", ")
    target = f"penstock[{extra}]" if extra else "penstock"
    return f"{names}; pip install '{target}'"


def _extra_order(extra: str) -> tuple[int, str]:
    """What comes along first, then what most people install, so that a package is told where it first belongs."""
    known = ("", "engine", "train")
    return (known.index(extra) if extra in known else len(known), extra)


def _lack_words(package: Package) -> str:
    if package.installed is None:
        return f"{package.name} is not installed"
    return f"{package.name} is {package.installed} and must be {package.wanted}"


def _package_words(package: Package) -> str:
    if package.installed is None:
        return f"{package.name} MISSING"
    return f"{package.name} {package.installed}" + ("" if package.usable else f" (TOO OLD, {package.wanted})")


def _joined(reasons: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _look_at_torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        # OSError: its libraries are there and can't be loaded.
        return {"torch_trouble": f"PyTorch can't be imported: {error}"}
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append(f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    return {"torch_cuda_build": torch.version.cuda, "gpus": tuple(gpus)}


def _shared_memory_gib() -> float | None:
    try:
        return shutil.disk_usage("/dev/shm").free / 2**30
    except OSError:
        return None


def _terminal_trouble() -> str:
    encoding = sys.stdout.encoding or "unknown"
    if encoding.lower().replace("-", "") != "utf8":
        return f"the terminal's encoding is {encoding}, not UTF-8; a line is printed for each step instead"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
