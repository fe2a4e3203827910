"""Checkpoints behind the run: the step goes on, one at a time, and what fails is told by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MakeRun, Run, weights

from penstock.config.train import TrainConfig
from penstock.errors import StorageError
from penstock.observe import events
from penstock.train.actor import Actor
from penstock.train.checkpoint import Checkpoints, Position, find_checkpoint, load_checkpoint
from penstock.train.saving import Saving
from penstock.train.writing import Part, Staged

PATIENCE_S = 60


class Held(Checkpoints):
    """Its checkpoints come to their end when the test says so, or fail as it says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 5)
        self.go = threading.Event()
        self.trouble: Exception | None = None

    def finish(self, unfinished: Path, staged: Staged, position: Position, parts: list[Part]) -> Any:
        assert self.go.wait(PATIENCE_S)
        if self.trouble is not None:
            raise self.trouble
        return super().finish(unfinished, staged, position, parts)


def saving_of(run: Run, **train: Any) -> Saving:
    config = run.trainer.config
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return Saving(config, run.trainer.learner, run.trainer.ports, 0)


def test_the_run_goes_on_while_a_checkpoint_is_written_and_it_is_of_its_own_moment(
    make_run: MakeRun, tmp_path: Path
) -> None:
    held = Held(tmp_path / "held")
    run = make_run(checkpoints=held, evaluate=False, steps=3)
    saving = saving_of(run)
    run.trainer.publish()
    run.trainer.train_step()
    at_one = weights(run)
    saving.begin(Position(1, 1, 0))
    run.trainer.train_step()
    saving.poll()
    assert not run.of(events.CheckpointSaved)
    assert any(not torch.equal(tensor, at_one[name]) for name, tensor in weights(run).items())
    held.go.set()
    saving.settle()
    (saved,) = run.of(events.CheckpointSaved)
    assert (saved.step, saving.saved_step) == (1, 1)
    load_checkpoint(Path(saved.path), run.trainer.learner.actor)
    assert all(torch.equal(tensor, at_one[name]) for name, tensor in weights(run).items())


def test_the_next_checkpoint_waits_for_the_one_before(make_run: MakeRun, tmp_path: Path) -> None:
    held = Held(tmp_path / "held")
    run = make_run(checkpoints=held, evaluate=False, watch=lambda: held.go.set() if saving.saved_step == 0 else None)
    saving = saving_of(run)
    saving.begin(Position(1, 1, 0))
    # The watch, which is called while it waits, lets the first one end.
    saving.begin(Position(2, 2, 0))
    assert saving.saved_step == 1
    saving.settle()
    assert [event.step for event in run.of(events.CheckpointSaved)] == [1, 2]
    assert sorted(path.name for path in held.folder.iterdir()) == ["step-000001", "step-000002"]


def test_one_that_hangs_is_told_after_its_deadline_and_no_other_is_begun_beside_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    held = Held(tmp_path / "held")
    run = make_run(checkpoints=held, evaluate=False)
    saving = saving_of(run, checkpoint_timeout_s=0.01)
    saving.begin(Position(1, 1, 0))
    saving.begin(Position(2, 2, 0))
    late, refused = [event.message for event in run.of(events.Warned)]
    assert "still being written" in late
    assert "no checkpoint after step 2: the one after step 1 is still being written" in refused
    with pytest.raises(StorageError, match="no checkpoint after step 3"):
        saving.last(Position(3, 3, 0))
    held.go.set()


def test_a_failure_behind_the_run_is_told_by_name_and_the_next_one_is_written(
    make_run: MakeRun, tmp_path: Path
) -> None:
    held = Held(tmp_path / "held")
    held.go.set()
    held.trouble = StorageError("the checkpoint step-000001 can't be written: No space left on device")
    run = make_run(checkpoints=held, evaluate=False)
    saving = saving_of(run)
    saving.begin(Position(1, 1, 0))
    saving.settle()
    (warning,) = run.of(events.Warned)
    assert "step-000001 can't be written: No space left on device" in warning.message
    assert saving.saved_step == 0
    held.trouble = None
    saving.begin(Position(2, 2, 0))
    saving.settle()
    assert saving.saved_step == 2


def test_what_is_no_disks_fault_is_not_a_warning(make_run: MakeRun, tmp_path: Path) -> None:
    held = Held(tmp_path / "held")
    held.go.set()
    held.trouble = ZeroDivisionError("a bug")
    saving = saving_of(make_run(checkpoints=held, evaluate=False))
    saving.begin(Position(1, 1, 0))
    with pytest.raises(ZeroDivisionError):
        saving.settle()


@pytest.mark.parametrize("flushes", [0, 1, 4])
def test_a_process_killed_in_the_middle_of_writing_leaves_the_older_one(
    model_folder: Path, tmp_path: Path, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor(model_folder, TrainConfig(device="cpu"), total_optimizer_steps=1, horizon_tokens=8)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(actor, Position(1, 1, 0))
    fsync, left = os.fsync, flushes

    def kill(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(os, "fsync", kill)
        checkpoints.save(actor, Position(2, 2, 0))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert load_checkpoint(find_checkpoint(tmp_path), actor).step == 1
    checkpoints.save(actor, Position(3, 3, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]
