from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.train import TrainConfig
from penstock.errors import CheckpointError, StorageError
from penstock.train import checkpoint as checkpoint_module
from penstock.train.actor import Actor
from penstock.train.batching import collate
from penstock.train.checkpoint import Checkpoints, Position, find_checkpoint, load_checkpoint, write_safetensors
from penstock.train.writing import Part, stage


def make_actor(folder: Path, **train: Any) -> Actor:
    config = TrainConfig.model_validate({"lr": 1e-3, "device": "cpu", "weight_decay": 0.1, "warmup_steps": 3, **train})
    return Actor(folder, config, total_optimizer_steps=4, horizon_tokens=8)


def train(actor: Actor, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        prompts = torch.randint(5, 60, (4, 3), generator=generator).tolist()
        outputs = torch.randint(5, 60, (4, 5), generator=generator).tolist()
        logprobs = [[-4.0] * 5] * 4
        actor.begin_step()
        actor.accumulate(collate(prompts, outputs, logprobs, torch.randn(4, generator=generator).tolist()))
        actor.accumulate(collate(prompts, outputs, logprobs, [random.random(), float(torch.rand(())), 0.5, -0.5]))
        assert actor.optimizer_step(step).applied


def state_of(actor: Actor) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in actor.named_weights()}
    for name, parameter in actor.model.named_parameters():
        for key, value in actor.optimizer.state[parameter].items():
            state[f"{key}/{name}"] = value.clone()
    return state


def seed_everything() -> None:
    torch.manual_seed(3)
    random.seed(3)


def test_two_steps_a_resume_and_two_steps_are_four_steps_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    seed_everything()
    straight = make_actor(model_folder)
    train(straight, range(4))
    seed_everything()
    first = make_actor(model_folder)
    train(first, range(2))
    saved = Checkpoints(tmp_path, 2).save(first, Position(2, 2, 11))
    torch.manual_seed(99)
    random.seed(99)
    second = make_actor(model_folder)
    position = load_checkpoint(find_checkpoint(tmp_path), second)
    assert position == Position(step=2, weight_version=2, run_seed=11)
    assert saved.nbytes > 0
    train(second, range(position.step, 4))
    expected, found = state_of(straight), state_of(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_the_reference_stays_the_model_at_the_runs_start(model_folder: Path, tmp_path: Path) -> None:
    first = make_actor(model_folder, kl_coef=0.1)
    train(first, range(2))
    Checkpoints(tmp_path, 2).save(first, Position(2, 2, 0))
    second = make_actor(model_folder, kl_coef=0.1)
    load_checkpoint(find_checkpoint(tmp_path), second)
    for one, other in zip(first.reference.parameters(), second.reference.parameters(), strict=True):
        assert torch.equal(one, other)


def test_transformers_loads_a_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor = make_actor(model_folder)
    train(actor, range(1))
    path = Checkpoints(tmp_path, 2).save(actor, Position(1, 1, 0)).path
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    ids = torch.tensor([[1, 8, 9, 10]])
    torch.testing.assert_close(model(ids).logits, actor.model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("Say: sun"), skip_special_tokens=True) == "Say: sun"


def test_the_last_checkpoints_are_kept(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path / "new" / "folder", 2)
    for step in (5, 10, 1_000_000, 15):
        checkpoints.save(actor, Position(step, step, 0))
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000015", "step-1000000"]
    assert find_checkpoint(checkpoints.folder).name == "step-1000000"


def test_saving_a_step_again_replaces_it(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(actor, Position(1, 1, 0))
    checkpoints.save(actor, Position(1, 1, 77))
    assert load_checkpoint(find_checkpoint(tmp_path), actor).run_seed == 77


def test_what_a_killed_run_left_half_written_is_ignored_and_removed(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(actor, Position(1, 1, 0))
    half = tmp_path / ".writing-abc"
    shutil.copytree(tmp_path / "step-000001", half)
    assert find_checkpoint(tmp_path).name == "step-000001"
    checkpoints.save(actor, Position(2, 2, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


class Crash(BaseException):
    """A process that ends here, whatever it would have done next."""


def test_a_crash_while_a_checkpoint_is_replaced_leaves_one_to_go_on_from(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        checkpoints.save(actor, Position(step, step, 11))
    replace = os.replace
    renames_left = 0

    def crash(*paths: Path) -> None:
        nonlocal renames_left
        if not renames_left:
            raise Crash
        renames_left -= 1
        replace(*paths)

    monkeypatch.setattr(checkpoint_module.os, "replace", crash)
    for renames in (0, 1):
        renames_left = renames
        with pytest.raises(Crash):
            checkpoints.save(actor, Position(2, 2, 22))
        assert load_checkpoint(find_checkpoint(tmp_path), actor) == Position(2, 2, 11)
    renames_left = 2
    checkpoints.save(actor, Position(2, 2, 33))
    assert load_checkpoint(find_checkpoint(tmp_path), actor).run_seed == 33
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_checkpoint_that_cannot_take_its_place_leaves_the_one_that_has_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(actor, Position(1, 1, 11))
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".writing-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(checkpoint_module.os, "replace", refuse)
    with pytest.raises(StorageError, match="Input/output error; older ones are intact"):
        checkpoints.save(actor, Position(1, 1, 22))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_checkpoint(find_checkpoint(tmp_path), actor).run_seed == 11


def test_old_checkpoints_that_cannot_be_removed_are_told_and_the_new_one_is_in_place(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.save(actor, Position(1, 1, 0)).left == ""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", refuse)
    saved = checkpoints.save(actor, Position(2, 2, 0))
    assert saved.left == f"can't be removed: {tmp_path / 'step-000001'} (Permission denied)"
    assert find_checkpoint(tmp_path) == saved.path == tmp_path / "step-000002"


@contextmanager
def files_bounded_to(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond this, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_leaves_older_checkpoints_intact(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(actor, Position(1, 1, 0))
    with files_bounded_to(20_000):
        with pytest.raises(StorageError, match=r"step-000002 can't be written: File too large"):
            checkpoints.save(actor, Position(2, 2, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_checkpoint(find_checkpoint(tmp_path), actor).step == 1


def test_a_full_disk_is_named(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_module.os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"No space left on device$"):
        Checkpoints(tmp_path, 1).save(make_actor(model_folder), Position(1, 1, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_checkpoint_is_named_with_the_one_before_it(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 5)
    checkpoints.save(actor, Position(1, 1, 0))
    path = checkpoints.save(actor, Position(2, 2, 0)).path
    for name in ("model.safetensors", "trainer.safetensors", "trainer.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(
            CheckpointError, match=rf"step-000002/{name} is missing or broken.*before it is .*step-000001"
        ):
            load_checkpoint(find_checkpoint(tmp_path), actor)
        (path / name).write_bytes(whole)
    assert load_checkpoint(path, actor).step == 2


def test_a_checkpoint_of_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    path = Checkpoints(tmp_path, 1).save(actor, Position(1, 1, 0)).path
    tensors = dict(actor.named_weights())
    name, tensor = next(iter(tensors.items()))
    write_safetensors(path / "model.safetensors", {**tensors, "extra": tensor}.items(), {})
    with pytest.raises(CheckpointError, match="does not fit the model: it has extra"):
        load_checkpoint(path, actor)
    write_safetensors(path / "model.safetensors", {**tensors, name: tensor[:3]}.items(), {})
    with pytest.raises(CheckpointError, match=rf"{name} is torch.float32 \(3, 32\); the model needs"):
        load_checkpoint(path, actor)


def test_a_checkpoint_of_another_format_is_refused(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    path = Checkpoints(tmp_path, 1).save(actor, Position(1, 1, 0)).path
    described = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**described, "format": 3}))
    with pytest.raises(CheckpointError, match="is of format 3; this version reads 1 and 2"):
        load_checkpoint(path, actor)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is no checkpoint and holds none"):
        find_checkpoint(tmp_path / "nothing")


def test_a_runs_folder_leads_to_its_latest_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "checkpoints", 1).save(make_actor(model_folder), Position(3, 3, 0)).path
    assert find_checkpoint(tmp_path) == find_checkpoint(path) == path


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "b": torch.tensor(2.5, dtype=torch.bfloat16),
        "c": torch.tensor([], dtype=torch.int64),
        "d": torch.tensor([True, False]),
    }
    write_safetensors(tmp_path / "some.safetensors", tensors.items(), {"format": "pt"})
    found = load_file(tmp_path / "some.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "some.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_checkpoint_of_an_earlier_version_goes_on_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    seed_everything()
    straight = make_actor(model_folder)
    train(straight, range(2))
    path = Checkpoints(tmp_path, 2).save(straight, Position(2, 2, 11)).path
    described = json.loads((path / "trainer.json").read_text())
    earlier = {**described, "format": 1, "python_random": described["python_random"][0]}
    del earlier["ranks"]
    (path / "trainer.json").write_text(json.dumps(earlier))
    train(straight, range(2, 4))
    torch.manual_seed(99)
    random.seed(99)
    resumed = make_actor(model_folder)
    load_checkpoint(path, resumed)
    train(resumed, range(2, 4))
    expected, found = state_of(straight), state_of(resumed)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_nothing_in_a_checkpoint_can_be_executed(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    train(actor, range(1))
    path = Checkpoints(tmp_path, 2).save(actor, Position(1, 1, 0)).path
    assert {file.suffix for file in path.iterdir()} <= {".safetensors", ".json", ".jinja"}
    for file in path.glob("*.safetensors"):
        # What pickle's protocol 2 and later, and zip files of torch.save, begin with.
        assert file.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")


def test_a_rank_whose_disk_refuses_is_named_and_the_older_checkpoint_stays(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(actor, Position(1, 1, 0))
    folder = checkpoints.prepare()
    parts = [Part(5, None), Part(0, None, "No space left on device")]
    with pytest.raises(StorageError, match=r"step-000002 can't be written: rank 1: No space left on device; older"):
        checkpoints.finish(folder, stage(actor, None), Position(2, 2, 0), parts)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_run_without_a_disk_to_begin_on_says_so(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"no checkpoint can be written in .*file/checkpoints: Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", 1).prepare()
