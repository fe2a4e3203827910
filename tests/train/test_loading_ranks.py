"""What two ranks hold of a model as they load it, by torchrun and FSDP2 as they are."""

from __future__ import annotations

import json
from typing import Any

import loading_scenes
import pytest
from test_ranks import torchrun

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank: what each load came to."""
    out = tmp_path_factory.mktemp("loading")
    loading_scenes.make_folders(out)
    torchrun(2, loading_scenes.__file__, str(out))
    return [json.loads((out / f"loading-{rank}.json").read_text()) for rank in range(2)]


def of_models(load: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {what: found for what, found in load.items() if what not in ("wrong", "resumed")}


def test_shards_have_the_weights_of_the_whole_model_to_the_last_bit(loads: list[dict[str, Any]]) -> None:
    """And its buffers, what is tied and frozen, and how it attends."""
    for load in loads:
        assert len(of_models(load)) == len(loading_scenes.FOLDERS) + len(loading_scenes.ROLES)
        assert {what: found["unlike"] for what, found in of_models(load).items() if found["unlike"]} == {}


def test_ranks_hold_their_shards_and_what_passes_need_and_nothing_else(loads: list[dict[str, Any]]) -> None:
    """But for experts that transformers fuses: those the leader loads, and nobody else."""
    for rank, load in enumerate(loads):
        for what, found in of_models(load).items():
            if rank or not what.startswith("experts"):
                assert found["most"] <= found["whole"] / 2 + found["passes"], (rank, what)
        deep = load["tied, actor"]
        assert deep["whole"] / 2 + deep["passes"] < 0.8 * deep["whole"]


def test_ranks_that_go_on_hold_their_shards_of_the_checkpoint(loads: list[dict[str, Any]]) -> None:
    """Of weights and both moments of Adam a half each."""
    for load in loads:
        found = load["resumed"]
        assert found["most"] <= 3 * found["whole"] / 2 + found["passes"]


def test_a_folder_that_lacks_weights_is_refused_by_all_ranks(loads: list[dict[str, Any]]) -> None:
    for load in loads:
        assert "wrong: weights are missing or of another shape: model.layers.1.input_layernorm" in load["wrong"]
