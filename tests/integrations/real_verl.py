"""Penstock's rewards in verl itself, loaded by verl's own code from a configuration that verl composed.

Run by `make test-verl`, in an environment that has verl; `make test` doesn't collect it.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import tiny
import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker, migrate_legacy_reward_impl
from verl.trainer.config import config as verl_config
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import extract_reward, load_reward_manager

from penstock.errors import PenstockError
from penstock.integrations.verl_manager import PenstockRewardManager

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "integrations.md"
FUNCTIONS = HERE / "rewards_for_frameworks.py"
FUNCTION = "reward.custom_reward_function.path=pkg://penstock.integrations.verl"
MANAGER = [
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=PenstockRewardManager",
    "reward.reward_manager.module.path=pkg://penstock.integrations.verl_manager",
]
LENGTH = 4


def kwargs(**given: Any) -> list[str]:
    return [f"+reward.custom_reward_function.reward_kwargs.{name}={value}" for name, value in given.items()]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def configure(model_folder: Path) -> Any:
    """verl's own configuration with overrides as a user writes them on its command line."""

    def configured(*overrides: str) -> Any:
        folder = str(Path(verl_config.__file__).parent)
        with initialize_config_dir(config_dir=folder, version_base=None):
            config = compose("ppo_trainer", [f"actor_rollout_ref.model.path={model_folder}", *overrides])
        return migrate_legacy_reward_impl(config)

    return configured


def batch(*rows: dict[str, Any]) -> DataProto:
    """Rows with `response`, `truth` and extra info, as verl's rollout leaves them."""
    tokens = tiny.tokenizer()
    prompts = torch.tensor([tokens.encode("<pad> what is 1")] * len(rows))
    padded, masks = [], []
    for row in rows:
        ids = tokens.encode(row["response"])[:LENGTH]
        padded.append(ids + [0] * (LENGTH - len(ids)))
        masks.append([0, 1, 1, 1] + [1] * len(ids) + [0] * (LENGTH - len(ids)))
    columns = TensorDict(
        {
            "prompts": prompts,
            "responses": torch.tensor(padded),
            "attention_mask": torch.tensor(masks),
            "rollout_log_probs": torch.full((len(rows), LENGTH), -0.5),
        },
        batch_size=len(rows),
    )
    fields = {
        "data_source": ["sums"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": row["truth"]} for row in rows],
        "extra_info": [{"index": np.int64(n), **row.get("extra", {})} for n, row in enumerate(rows)],
        "uid": [f"u{n}" for n in range(len(rows))],
        "raw_prompt": [[{"role": "user", "content": "what is 1"}]] * len(rows),
    }
    arrays = {}
    for name, values in fields.items():
        arrays[name] = np.empty(len(rows), dtype=object)
        arrays[name][:] = values
    return DataProto(batch=columns, non_tensor_batch=arrays)


ROWS = (
    {"response": "2 <eos>", "truth": "2"},
    {"response": "3 <eos>", "truth": "2"},
    {"response": "2 <eos>", "truth": "2", "extra": {"broken": True}},
)


def score(config: Any, data: DataProto) -> list[dict[str, Any]]:
    """As verl's reward worker scores: its own class, in this process."""

    async def scored() -> list[dict[str, Any]]:
        return await RewardLoopWorker(config).compute_score_batch(data)

    return asyncio.run(scored())


@pytest.mark.parametrize("roads", [[FUNCTION], MANAGER, [FUNCTION, *MANAGER]], ids=["function", "manager", "both"])
@pytest.mark.parametrize("name", ["right", "right_later", "judge"])
def test_verls_worker_scores_and_an_unscored_sample_gets_what_was_declared(
    configure: Any, roads: list[str], name: str
) -> None:
    config = configure(*roads, *kwargs(function=f"{FUNCTIONS}:{name}", unscored_value=-1.0, parts="[characters]"))
    outputs = score(config, batch(*ROWS))
    assert [output["reward_score"] for output in outputs] == [1.0, 0.0, -1.0]
    infos = [output["reward_extra_info"] for output in outputs]
    assert [info["unscored"] for info in infos] == [0.0, 0.0, 1.0]
    assert "no judge for this one" in infos[2]["unscored_cause"]
    assert infos[0]["reward/characters"] == 1.0
    assert np.isnan(infos[2]["reward/characters"])
    assert len({tuple(info) for info in infos}) == 1, "verl reads the keys from the first sample only"


@pytest.mark.parametrize("roads", [[FUNCTION], MANAGER], ids=["function", "manager"])
def test_options_and_process_mode_reach_the_function(configure: Any, roads: list[str]) -> None:
    options = [*kwargs(function=f"{FUNCTIONS}:scaled", unscored_value=0), *kwargs(**{"options.by": 2.5})]
    assert [output["reward_score"] for output in score(configure(*roads, *options), batch(*ROWS[:2]))] == [2.5, 0.0]
    inline = kwargs(function=f"{FUNCTIONS}:where", unscored_value=-1, timeout_s=60)
    assert score(configure(*roads, *inline), batch(ROWS[0]))[0]["reward_score"] == 0.0
    apart = [*inline, *kwargs(mode="process", processes=1)]
    assert score(configure(*roads, *apart), batch(ROWS[0]))[0]["reward_score"] == 1.0


def test_the_manager_shows_prompt_tokens_log_probabilities_and_a_cut_off_end(configure: Any) -> None:
    given = kwargs(function=f"{FUNCTIONS}:about_prompt", unscored_value=-1, parts="[prompt,tokens,logprob]")
    whole, cut = score(
        configure(*MANAGER, *given),
        batch({"response": "1 2 <eos>", "truth": "2"}, {"response": "1 2 3 4 5", "truth": "2"}),
    )
    assert (whole["reward_score"], cut["reward_score"]) == (0.0, 1.0)
    info = whole["reward_extra_info"]
    assert (info["reward/prompt"], info["reward/tokens"], info["reward/logprob"]) == (3.0, 3.0, -1.5)


def test_what_is_not_said_is_refused_by_name_before_the_first_sample(configure: Any) -> None:
    for given, wrong in (
        (kwargs(function=f"{FUNCTIONS}:right"), "unscored_value"),
        (kwargs(unscored_value=0), "no reward function is named"),
        (kwargs(function=f"{FUNCTIONS}:none", unscored_value=0), "none"),
        (kwargs(function=f"{FUNCTIONS}:right", unscored_value="nan"), "unscored_value"),
        (kwargs(function=f"{FUNCTIONS}:right", unscored_value=0, mood="calm"), "mood"),
    ):
        with pytest.raises(PenstockError, match=wrong):
            load_reward_manager(configure(*MANAGER, *given), tiny.tokenizer())
    manager = load_reward_manager(
        configure(*MANAGER, *kwargs(function=f"{FUNCTIONS}:right", unscored_value=0)), tiny.tokenizer()
    )
    assert isinstance(manager, PenstockRewardManager)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this machine, once for all tests: its start is slow. Its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", folder)  # Ray writes a token file there
            ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
            yield
            ray.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("roads", [[FUNCTION], MANAGER], ids=["function", "manager"])
def test_verls_reward_loop_on_ray_gives_its_trainer_scores_and_extra_infos(
    configure: Any, cluster: None, roads: list[str]
) -> None:
    given = kwargs(function=f"{FUNCTIONS}:right", unscored_value=-1.0, parts="[characters]")
    data = batch(*ROWS)
    scored = RewardLoopManager(configure(*roads, *given, "reward.num_workers=2")).compute_rm_score(data)
    data = data.union(scored)
    rewards, infos = extract_reward(data)
    assert rewards.sum(dim=1).tolist() == [1.0, 0.0, -1.0]
    assert rewards[:, 1].tolist() == [1.0, 0.0, -1.0], "at the last token of the answer"
    assert infos["unscored"].tolist() == [0.0, 0.0, 1.0]
    metrics = process_validation_metrics(
        ["sums"] * 3, ["u0", "u1", "u2"], {name: values.tolist() for name, values in infos.items()}
    )
    assert metrics["sums"]["unscored"]["mean@1"] == pytest.approx(1 / 3)


def test_the_command_lines_of_the_page_are_verls_own(configure: Any) -> None:
    blocks = re.findall(r"```bash\n(python -m verl.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        config = configure(*re.findall(r"^  (\+?reward\.\S+)", block, re.M))
        data = batch({"response": "2", "truth": "2"}, {"response": "3", "truth": "2"})
        assert [output["reward_score"] for output in score(config, data)] == [1.0, 0.0]


@pytest.mark.timeout(300)
def test_the_example_runs_with_a_judge_behind_a_rate_limit() -> None:
    example = HERE.parents[1] / "examples" / "verl_reward.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-4:]
    assert [line.split()[:4] for line in lines] == [
        ["5", "1.0", "unscored", "0"],
        ["6", "0.0", "unscored", "0"],
        ["?", "0.0", "unscored", "1"],
        ["5", "1.0", "unscored", "0"],
    ]
