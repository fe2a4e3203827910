"""Whole tensors out of FSDP2's shards, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.errors import WeightError
from penstock.weights.gather import gathered, hf_name

DEADLINE_S = 60


def test_uneven_shards_of_a_real_fsdp_model_become_whole_tensors_on_the_rank_that_wants_them(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("gather_rank.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), "2", str(tmp_path)], env=environment) for rank in (0, 1)
    ]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["right"] == [True, True, True]
    assert second["none"] == 3 * len(second["held"])
    # What a device holds whole at once: the bucket, or its largest tensor (5 rows of 6 float32, padded to 6 rows).
    assert first["largest"][:2] == second["largest"][:2] == [6 * 6 * 4] * 2
    assert first["largest"][2] > 6 * 6 * 4
    assert (first["held"]["one.weight"], second["held"]["one.weight"]) == ([3, 6], [2, 6])
    assert second["held"]["two.weight"][0] == 0


def test_plain_tensors_are_copied_to_the_host() -> None:
    weight = torch.arange(6.0).view(2, 3)
    ((name, came),) = gathered([("module._orig_mod.a.weight", weight.t())])
    assert name == "a.weight"
    assert came is not None
    assert came.is_contiguous()
    assert torch.equal(came, weight.t())
    weight.zero_()
    assert came.any()


def test_names_lose_what_wrappers_put_into_them_and_nothing_else() -> None:
    assert (
        hf_name("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    )
    assert hf_name("model.submodule.weight") == "model.submodule.weight"


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(WeightError, match="bucket_bytes=0"):
        list(gathered([], bucket_bytes=0))
