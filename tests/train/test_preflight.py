from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.names import ADVANTAGES, LOSSES
from penstock.config.run import RunConfig
from penstock.config.train import TrainConfig
from penstock.errors import ConfigError, MissingExtra
from penstock.train.actor import Actor
from penstock.train.advantages import _REGISTRY as ADVANTAGE_REGISTRY
from penstock.train.advantages import get_advantage, grpo
from penstock.train.batching import collate
from penstock.train.policy_losses import _REGISTRY as LOSS_REGISTRY
from penstock.train.policy_losses import get_loss
from penstock.train.preflight import check

OWN = """
import torch
from penstock.train.policy_losses import TokenLoss

NUMBER = 3

def twice_reinforce(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, config):
    loss_BT = -2 * advantages_BT * logprobs_BT
    return TokenLoss(loss_BT, torch.ones_like(mask_BT, dtype=torch.float32), torch.zeros_like(mask_BT))

def raw_reward(rewards_B, group_B):
    return rewards_B
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`own_functions` and `broken_functions` in the working directory, as a user has them."""
    (tmp_path / "own_functions.py").write_text(OWN)
    (tmp_path / "broken_functions.py").write_text("raise RuntimeError('half written')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_functions", None)


def config(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": [{"kind": "jsonl", "path": "a"}]}, "train": train}
    )


def test_what_can_begin_passes() -> None:
    check(config())
    check(config(advantage="rloo", loss="ppo_clip", device="cpu"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"loss": "ppo_clip:"}, r"train.loss='ppo_clip:' is not of the form 'package.module:function'"),
        ({"loss": "no_such_module:f"}, r"train.loss=.*can't import no_such_module"),
        ({"loss": "broken_functions:f"}, r"can't import broken_functions: RuntimeError: half written"),
        ({"advantage": "own_functions:nothing"}, r"train.advantage=.*own_functions has no function 'nothing'"),
        ({"advantage": "own_functions:NUMBER"}, r"own_functions has no function 'NUMBER'"),
        ({"device": "gpu"}, r"train.device='gpu' is not a device; allowed: auto, cpu, cuda"),
        ({"device": "meta"}, r"train.device='meta' is not supported; allowed: auto, cpu, cuda"),
        ({"device": "cuda:99"}, r"train.device='cuda:99': this machine has \d+ CUDA devices"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_what_cannot_begin_is_named_with_its_value_and_what_is_allowed(train: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(**train))


@pytest.mark.usefixtures("own_module")
def test_functions_of_ones_own_are_named_by_import_path(model_folder: Path) -> None:
    check(config(advantage="own_functions:raw_reward", loss="own_functions:twice_reinforce"))
    rewards = torch.tensor([1.0, 3.0])
    assert get_advantage("own_functions:raw_reward").function(rewards, torch.zeros(2)) is rewards
    assert get_advantage("grpo").function is grpo
    assert get_loss("own_functions:twice_reinforce").__name__ == "twice_reinforce"
    batch = collate([[5, 6], [7]], [[8, 9], [10, 11]], [[-4.0] * 2] * 2, [1.0, -0.5])
    gradients = {}
    for loss in ("ppo_clip", "own_functions:twice_reinforce"):
        train = TrainConfig(loss=loss, device="cpu", old_logprobs="recompute")
        actor = Actor(model_folder, train, total_optimizer_steps=1, horizon_tokens=8)
        actor.begin_step()
        actor.accumulate(batch)
        gradients[loss] = torch.cat([parameter.grad.flatten() for parameter in actor.model.parameters()])
    # At a ratio of 1 the clipped loss has the gradient of REINFORCE.
    torch.testing.assert_close(gradients["own_functions:twice_reinforce"], 2 * gradients["ppo_clip"])


def test_the_configuration_knows_the_names_that_are_registered() -> None:
    get_advantage("grpo")
    assert {name for name in ADVANTAGE_REGISTRY.names if not name.startswith("test_")} == set(ADVANTAGES)
    assert set(LOSS_REGISTRY.names) == set(LOSSES)


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("advantage", "gro", "train.advantage='gro' is unknown; did you mean grpo"),
        ("loss", "dppo", "train.loss='dppo' is unknown; did you mean"),
        ("loss", "here:loss", "train.loss='here:loss': can't import here"),
    ],
)
def test_a_wrong_name_is_told_before_pytorch_is_imported(tmp_path: Path, key: str, name: str, message: str) -> None:
    program = """
import sys
from penstock.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
raise SystemExit(code)
"""
    words = ["train", f"--train.{key}={name}", "--model.path=m", '--data.train=[{kind="jsonl", path="a"}]']
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.train.actor")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"'torch', which is not installed.*penstock\[train\]"):
        check(config())
