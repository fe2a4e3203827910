"""Checkpoints, of one rank and of two, become model folders that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import MakeRun

from penstock.cli import main
from penstock.errors import CheckpointError
from penstock.train.checkpoint import Checkpoints, Position, files_of, find_checkpoint
from penstock.train.export import export_model
from penstock.train.shards import Shard, read_whole, shard_file, write_shards


def halves(checkpoint: Path) -> None:
    """Makes one rank's checkpoint one of two ranks, each with half the rows."""
    for kind in ("model", "trainer"):
        whole = read_whole(files_of(checkpoint, kind))
        (checkpoint / f"{kind}.safetensors").unlink()
        for rank in range(2):
            parts = []
            for name, tensor in whole.items():
                first, second = (tensor.chunk(2), (0, -(-len(tensor) // 2))) if tensor.dim() else ((tensor,), (0, 0))
                if rank < len(first):
                    parts.append(Shard(name, first[rank], (second[rank], *[0] * (tensor.dim() - 1))[: tensor.dim()]))
            write_shards(checkpoint / shard_file(kind, rank, 2), parts, whole=False)
    described = json.loads((checkpoint / "trainer.json").read_text())
    (checkpoint / "trainer.json").write_text(json.dumps({**described, "ranks": 2}))


@pytest.fixture
def checkpoint(make_run: MakeRun) -> Path:
    run = make_run(steps=1, evaluate=False)
    run.trainer.run()
    return find_checkpoint(run.trainer.ports.checkpoints.folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_loads_what_is_exported(checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = read_whole(files_of(checkpoint, "model"))
    if ranks == 2:
        halves(checkpoint)
    assert main(["export", str(checkpoint.parent), str(tmp_path / "out")]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    found = model.state_dict()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Say: sun")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2


def test_large_models_are_cut_into_files_with_an_index_and_other_types(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = read_whole(files_of(checkpoint, "model"))
    halves(checkpoint)
    out = export_model(checkpoint, tmp_path / "out", "bfloat16", file_bytes=20_000)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, tensor in whole.items():
        assert torch.equal(model.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_a_checkpoint_with_a_ranks_file_missing_is_named_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    halves(checkpoint)
    (checkpoint / shard_file("model", 1, 2)).unlink()
    with pytest.raises(CheckpointError, match=r"model-rank-00002-of-00002\.safetensors is missing or broken"):
        export_model(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_exported_outlives_its_checkpoint(model_folder: Path, make_run: MakeRun, tmp_path: Path) -> None:
    actor = make_run(evaluate=False).trainer.learner.actor
    checkpoints = Checkpoints(tmp_path / "kept", 1)
    out = export_model(checkpoints.save(actor, Position(1, 1, 0)).path, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    checkpoints.save(actor, Position(2, 2, 0))
    assert (out / "model.safetensors").read_bytes() == before
