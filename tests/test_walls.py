"""The house's walls: who may import whom, what stays light, and that there are no circles."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "penstock"

FLOORS = [
    {"cli", "bench", "__main__"},
    {"train", "simulate"},
    {"rollout", "instance"},
    {"reward", "environments", "data", "config", "wire"},
    {"weights", "cluster", "observe", "sample", "tls", "collector", "errors", "__init__"},
]
OUTSIDE = {"integrations"}
"""May import any room; none imports them."""
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}

# Rooms on one floor that may know each other in this direction.
NEIGHBOURS = {
    ("cli", "bench"),
    ("__main__", "cli"),
    ("weights", "sample"),
    ("weights", "tls"),
    ("tls", "errors"),
    ("observe", "sample"),
    ("cluster", "sample"),
    *((room, "errors") for room in ("weights", "cluster", "observe", "sample")),
    *((room, "__init__") for room in ("weights", "cluster", "observe", "sample", "errors")),
    ("cluster", "observe"),
    ("cluster", "collector"),
    ("weights", "observe"),
}
HEAVY = {"torch", "transformers", "numpy", "ray", "rich", "pyarrow", "datasets", "reasoning_gym", "matplotlib"}
LIGHT_ROOMS = {
    "reward": {"torch", "ray", "transformers"},
    "rollout": {"torch", "ray", "transformers", "numpy"},
    "wire": HEAVY,
    "config": HEAVY,
    "sample": HEAVY,
    "errors": HEAVY,
}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "penstock":
                names |= {f"penstock.{alias.name}" for alias in node.names}
    return names


def rooms_imported(path: Path) -> set[str]:
    rooms = set()
    for name in imports(path):
        if name.startswith("penstock."):
            room = name.split(".")[1]
            rooms.add(room if room in FLOOR_OF or (SOURCE / room).exists() else "__init__")
    return rooms


def test_rooms_import_only_what_lies_below_them() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        if room in OUTSIDE:
            continue
        for other in rooms_imported(path) - {room}:
            below = FLOOR_OF.get(other, -1) > FLOOR_OF[room]
            if not below and (room, other) not in NEIGHBOURS:
                wrong.append(f"{path.relative_to(SOURCE)} imports penstock.{other}")
    assert not wrong


def test_light_rooms_never_import_heavy_packages() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        banned = LIGHT_ROOMS.get(room_of(path), set())
        for name in imports(path):
            if name.split(".")[0] in banned:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_every_file_is_in_a_room_of_the_plan() -> None:
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms <= FLOOR_OF.keys() | OUTSIDE


def test_nobody_imports_what_stands_outside() -> None:
    importers = {room_of(path) for path in SOURCE.rglob("*.py") if rooms_imported(path) & OUTSIDE}
    assert importers <= OUTSIDE


def test_no_pickle_in_the_house() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        assert not {"pickle", "cloudpickle", "dill"} & imports(path), path
