"""Machines are marked as one run's alone, and whoever goes on with that run finds them."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from penstock.cli.provision.ray_child import is_machine
from penstock.cli.provision.wiring import provisioner_of
from penstock.cli.run_fleet import fleet_file
from penstock.cli.run_folder import ACCOUNT_FILE, MARK_FILE, fleet_mark, make_folder
from penstock.config.run import RunConfig
from penstock.errors import StorageError

SCRIPT = """#!/bin/sh
# Tags, as a cloud has them: whose a machine is stands in a file of its name.
cd "$(dirname "$0")/cloud"
case "$1" in
add) for n in $(seq "$2"); do name="box-$(ls | wc -l)"; echo "$PENSTOCK_RUN" > "$name"; echo "$name"; done ;;
release) rm "$2" ;;
list) grep -lFx "$PENSTOCK_RUN" * || true ;;
esac
"""


def config_for(folder: Path, provisioner: str = "command") -> RunConfig:
    fleet = {"provisioner": provisioner, "options": {"command": str(folder / "cloud.sh")}}
    data = {"train": [{"kind": "jsonl", "path": "q"}]}
    reward = {"function": "a:b"}
    return RunConfig.model_validate({"model": {"path": "m"}, "data": data, "reward": reward, "fleet": fleet})


async def test_two_runs_of_default_names_at_one_cloud_have_machines_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "cloud.sh"
    script.write_text(SCRIPT)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "cloud").mkdir()
    config = config_for(tmp_path)
    folders = [make_folder(config.model_copy(update={"output_dir": str(tmp_path / user)})) for user in ("ann", "bo")]
    assert {folder.name for folder in folders} == {"run-001"}
    ann, bo = (provisioner_of(fleet_file(config, folder), "http://127.0.0.1:9", "t", ()) for folder in folders)
    made = await ann.add(2)
    assert await bo.list() == []
    other = await bo.add(1)
    assert [seen.id for seen in await ann.list()] == made
    assert [seen.id for seen in await bo.list()] == other
    await ann.close()

    # Its folder has moved meanwhile.
    moved = folders[0].rename(tmp_path / "my old run")
    again = provisioner_of(fleet_file(config, moved), "http://127.0.0.1:9", "t", ())
    assert [seen.id for seen in await again.list()] == made


def test_a_run_from_before_marks_keeps_the_name_that_its_machines_have(tmp_path: Path) -> None:
    folder = tmp_path / "run-001"
    folder.mkdir()
    (folder / ACCOUNT_FILE).write_text("{}")
    assert fleet_mark(folder) == "run-001"
    assert fleet_mark(folder.rename(tmp_path / "moved")) == "run-001"


def test_a_copy_has_a_mark_of_its_own_and_none_of_the_original_s_machines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, copy = tmp_path / "run-001", tmp_path / "run-002"
    folder.mkdir()
    mark = fleet_mark(folder)
    saved = {"spent": 5.0, "wanted": 1, "machines": ["a"], "unbilled": {"a": 1.0}, "at": 2.0}
    (folder / ACCOUNT_FILE).write_text(json.dumps(saved))
    shutil.copytree(folder, copy)
    other = fleet_mark(copy)
    assert other.startswith("run-002-")
    assert f"{copy} is a copy of {folder}" in caplog.text
    assert json.loads((copy / ACCOUNT_FILE).read_text()) == {**saved, "machines": [], "unbilled": {}}
    assert json.loads((folder / ACCOUNT_FILE).read_text()) == saved
    link = tmp_path / "latest"
    link.symlink_to(folder)
    assert fleet_mark(folder) == fleet_mark(link) == mark
    assert fleet_mark(copy) == other
    # With another in its old place it is still the one that moved.
    moved = folder.rename(tmp_path / "moved")
    copy.rename(folder)
    assert (fleet_mark(moved), fleet_mark(folder)) == (mark, other)


def test_a_run_without_machines_has_no_mark_and_one_that_is_lost_is_told(tmp_path: Path) -> None:
    fleet_file(config_for(tmp_path, "none"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / MARK_FILE).write_text("")
    with pytest.raises(StorageError, match="is empty"):
        fleet_file(config_for(tmp_path), tmp_path)


def test_an_actor_is_its_run_s_by_its_whole_name() -> None:
    assert is_machine("penstock-exp-001-0a1b2c3d", "penstock-exp-001-")
    for other in ("penstock-exp-001-001-0a1b2c3d", "penstock-exp-001-", "penstock-exp-00-0a1b2c3d", "x"):
        assert not is_machine(other, "penstock-exp-001-")
