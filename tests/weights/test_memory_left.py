"""What memory a machine, or a container on it, has left for a version, and what becomes of one that has no room."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cores import written

from penstock.errors import WeightError
from penstock.instance import weight_folder
from penstock.weights import WeightStore, memory, pull, quantization
from penstock.weights.memory import NoMemory, host_buffer, memory_left
from penstock.weights.shm import SharedLender

STAT = "anon 500\nfile 300\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\n"
OLD_STAT = "cache 900\ninactive_file 7\ntotal_cache 900\ntotal_inactive_file 200\ntotal_active_file 40\n"


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/pods/one\n", {"pods/one/memory.max": "1000\n", "pods/one/memory.current": "800\n"}, math.inf),
        ("0::/one\n", {"one/memory.max": "1000\n", "one/memory.current": "800\n", "one/memory.stat": STAT}, 323),
        ("0::/one\n", {"one/memory.max": "max\n", "one/memory.current": "800\n", "one/memory.stat": STAT}, math.inf),
        (
            "0::/pods/one\n",
            {
                "pods/one/memory.max": "2000\n",
                "pods/one/memory.current": "800\n",
                "pods/one/memory.stat": "anon 800\n",
                "pods/memory.max": "5000\n",
                "pods/memory.current": "4500\n",
                "pods/memory.stat": "anon 4500\n",
            },
            500,
        ),
        ("0::/of/the/host\n", {"memory.max": "900\n", "memory.current": "500\n", "memory.stat": "anon 1\n"}, 400),
        ("0::/\n", {"memory.max": "900\n", "memory.current": "950\n", "memory.stat": "anon 950\n"}, 0),
        (
            "5:cpu:/b\n4:memory:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "1000\n",
                "memory/a/memory.usage_in_bytes": "900\n",
                "memory/a/memory.stat": OLD_STAT,
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "10000\n",
                "memory/memory.stat": OLD_STAT,
            },
            340,
        ),
        (
            "5:cpu:/b\n",
            {
                "memory/b/memory.limit_in_bytes": "1000\n",
                "memory/b/memory.usage_in_bytes": "900\n",
                "memory/b/memory.stat": OLD_STAT,
            },
            math.inf,
        ),
        ("", {}, math.inf),
    ],
)
def test_the_least_that_a_limit_leaves_on_the_way_to_a_group_counts(
    tmp_path: Path, groups: str, files: dict[str, str], left: float
) -> None:
    said = tmp_path / "cgroup"
    said.write_text(groups)
    assert memory._allowed(said, written(tmp_path / "fs", files)) == left
    assert memory._allowed(tmp_path / "none", tmp_path / "fs") == math.inf


def test_the_machine_itself_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    3 kB\n")
    assert memory._available(meminfo) == 3 * 1024
    assert memory._available(tmp_path / "none") == math.inf
    monkeypatch.setattr(memory, "_allowed", lambda groups, root: 10.0)
    assert memory_left() == 10
    monkeypatch.setattr(memory, "_available", lambda meminfo: 5.0)
    assert memory_left() == 5


def test_what_has_no_room_is_refused_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda: 2 * 4096.0)
    assert len(host_buffer(4096)) == 4096
    with pytest.raises(NoMemory, match="no room in the 0 MiB that are left here"):
        host_buffer(4097)
    lender = SharedLender(tmp_path)
    assert lender.buffer(4097) is None
    assert lender.buffer(4096) is not None
    lender.close()
    monkeypatch.setattr(memory, "memory_left", lambda: float(3 << 30))
    host_buffer(2 << 30).release()
    monkeypatch.setattr(weight_folder, "lies_in_memory", lambda folder: folder == tmp_path)
    monkeypatch.setattr(weight_folder, "memory_left", lambda: 4096.0)
    assert weight_folder._room(tmp_path) == 2048


def test_a_folder_lies_in_memory_where_its_mount_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder often does, and its file system says that half of all memory is free, whoever has it."""
    device = tmp_path.stat().st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr(memory, "MOUNTS", tmp_path / "mountinfo")
    assert not memory.lies_in_memory(tmp_path)
    for kind, optional, inside in (("tmpfs", "", True), ("tmpfs", "shared:7 master:1 ", True), ("ext4", "", False)):
        rows = [f"27 1 {here} / /x rw,relatime {optional}- {kind} none rw", "22 27 9999:1 / /dev/shm rw - tmpfs shm rw"]
        memory.MOUNTS.write_text("\n".join(rows) + "\n")
        assert memory.lies_in_memory(tmp_path) is inside
    with pytest.raises(OSError, match="gone"):
        memory.lies_in_memory(tmp_path / "gone")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_shared_memory_lies_in_memory() -> None:
    assert memory.lies_in_memory(Path("/dev/shm"))


# A container with a limit

VERSION_BYTES = 128 << 20
AGENT = """
import asyncio, gc, sys
from pathlib import Path
from penstock.instance.loading import WeightLoader
from penstock.weights.memory import NoMemory, _left_of
address, group, limit, held = sys.argv[1:]

async def main():
    loader = WeightLoader("t", codec="auto")
    serving = await loader.pull(address, 0, 60)
    loader.serves(serving)
    first = bytes(serving.tensors["w"][:8])
    # Too little for another version, and enough once the base is given up.
    Path(group, limit).write_text(str(1 << 40))
    used = (1 << 40) - _left_of(Path(group))
    Path(group, limit).write_text(str(used + serving.stream.nbytes * 3 // 4))
    if held == "no":
        del serving
    try:
        serving = await loader.pull(address, 1, 60)
    except NoMemory as error:
        assert bytes(serving.tensors["w"][:8]) == first
        print("NoMemory", loader.base is None)
    else:
        print("came", serving.version, loader.base is None)

asyncio.run(main())
"""


def made_group() -> tuple[Path, str] | None:
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        made = Path("/sys/fs/cgroup", root, f"penstock-test-{os.getpid()}")
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / limit).exists():
            return made, limit
        made.rmdir()
    return None


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """A memory cgroup of its own, and the name of its limit."""
    made = made_group()
    if made is None:
        pytest.skip("no memory cgroup can be made here")
    yield made
    made[0].rmdir()


@pytest.mark.parametrize(("held", "says"), [("yes", "NoMemory True"), ("no", "came 1 True")])
def test_an_agent_whose_container_has_no_room_gives_up_its_base_and_is_not_killed(
    group: tuple[Path, str], held: str, says: str
) -> None:
    folder, limit = group
    store = WeightStore("run", "127.0.0.1", 0, "t")
    try:
        address = store.start()
        for version in (0, 1):
            data = os.urandom(1 << 20) * (VERSION_BYTES >> 20)
            store.publish(version, [("w", "U8", (len(data),), data)], "{}")
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", AGENT, address, str(folder), limit, held]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    finally:
        store.close()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == says, ended.stderr


def test_a_version_that_has_no_room_is_refused_by_name_where_it_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore("run", "127.0.0.1", 0, "token")
    store.publish(0, [("w", "U8", (1000,), bytes(1000))], "{}")
    monkeypatch.setattr(memory, "memory_left", lambda: 1500)
    with pytest.raises(NoMemory, match="has no room"):
        store.publish(1, [("w", "U8", (1000,), bytes(1000))], "{}")
    assert store.versions() == [0]


async def test_a_store_without_room_to_quantize_says_so_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore("run", "127.0.0.1", 0, "token")
    address = store.start()
    try:
        store.publish(0, [("w", "BF16", (64, 64), bytes(8192))], "{}")
        monkeypatch.setattr(quantization, "host_buffer", without_room)
        with pytest.raises(WeightError, match="can't be quantized to int8: a version has no room"):
            await pull(address, 0, "token", deadline_s=2.0, codec="int8")
        assert "bad_messages" not in store.counters()
    finally:
        store.close()


def without_room(nbytes: int) -> memoryview:
    raise NoMemory("a version has no room")
