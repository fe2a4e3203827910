"""One rank of a set that torchrun starts, or of one alone: learns from the same groups, and writes what came of it.

Usage: rank_scenes.py MODEL OUT
"""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import torch

from penstock.config.run import RunConfig
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score
from penstock.train.checkpoint import Checkpoints, Position
from penstock.train.learner import Learner
from penstock.train.ranks import Ranks
from penstock.train.start import follow, make_learner
from penstock.train.tally import Tally

SCENES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sequences": {"aggregation": "seq-mean-token-mean", "tokens_per_micro_batch": 4096},
    "sums": {"aggregation": "token-sum", "entropy_coef": 0.01},
    "critic": {"advantage": "gae", "epochs": 2, "critic": {"lr": 1e-3}, "kl_coef": 0.1, "kl_in": "reward"},
    "snapshot": {"old_logprobs": "recompute", "mini_batches_per_step": 2, "kl_coef": 0.1},
    "memory": {"activation_checkpointing": True},
    "adapters": {"lora": {"rank": 4}, "kl_coef": 0.1},
}


def config_of(model: Path, **train: Any) -> RunConfig:
    plain = {"lr": 1e-3, "device": "cpu", "tokens_per_micro_batch": 64, "max_grad_norm": 1e9}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [{"kind": "jsonl", "path": "words"}], "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 8}},
            "train": {**plain, **train},
        }
    )


def groups() -> list[Group]:
    chance = random.Random(3)

    def ids(longest: int) -> array[int]:
        return array("i", [chance.randrange(5, 60) for _ in range(chance.randint(1, longest))])

    made = []
    for index in range(6):
        prompt = Prompt(index, "", ids(6), {}, "")
        samples = []
        for replica in range(4):
            token_ids = ids(9)
            logprobs = array("f", [-4.0 - chance.random() for _ in token_ids])
            score = Score(float(chance.random() < 0.5))
            samples.append(
                Sample(SampleId("b", index, replica), prompt, token_ids, logprobs, (), Finish.STOP, "", score)
            )
        made.append(Group("b", prompt, samples))
    return made


def learn(learner: Learner) -> dict[str, torch.Tensor]:
    """Two steps, each streamed in three parts; what the run stands at behind them, by name."""
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        learner.begin_step(step)
        mini_batches = learner.config.train.mini_batches_per_step
        first, second, third = groups()[:2], groups()[2:3], groups()[3:]
        learner.learn(first, Tally(0), {}, None)
        learner.learn(second, Tally(0), {}, 0 if mini_batches == 2 else None)
        learner.learn(third, Tally(0), {}, mini_batches - 1)
    for name, mean in learner.metrics().items():
        found[f"metrics/{name}"] = torch.tensor(mean)
    weights = {name: bytes(data) for name, _, _, data in learner.weights()}
    state = learner.state()
    assert weights == {name: tensor.numpy().tobytes() for name, tensor in state.weights}
    for name, tensor in [*state.weights, *state.trainer, *state.critic]:
        if not name.startswith("random"):
            found[name] = tensor.clone()
    return found


def gradient(learner: Learner) -> dict[str, torch.Tensor]:
    """Of the first step: Adam's first moment after it is (1 - beta1) times that."""
    learner.begin_step(0)
    learner.learn(groups()[:2], Tally(0), {}, None)
    learner.learn(groups()[2:], Tally(0), {}, 0)
    prefix = "optimizer/exp_avg/"
    moments = {name.removeprefix(prefix): moment for name, moment in learner.state().trainer if prefix in name}
    return {name: moment / (1 - learner.config.train.betas[0]) for name, moment in moments.items()}


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with contextlib.closing(Ranks.from_environment()) as ranks:
        for name, train in SCENES.items():
            config = config_of(model, **train)
            if not ranks.leads:
                for _ in range(2 if name == "grpo" else 1):
                    follow(config, ranks)
                continue
            learner, _ = make_learner(config, model, None, ranks)
            if name == "grpo":
                torch.save(gradient(learner), out / f"gradient-{ranks.size}.pt")
                learner.end()
                learner, _ = make_learner(config, model, None, ranks)
            torch.save(learn(learner), out / f"{name}-{ranks.size}.pt")
            if name == "critic":
                folder = Checkpoints(out / f"checkpoints-{ranks.size}", 1)
                folder.save(learner.actor, Position(2, 2, 0), learner.state())
            learner.end()
        # And on from what one rank has written.
        config = config_of(model, **SCENES["critic"])
        if not ranks.leads:
            follow(config, ranks)
            return
        saved = out / "checkpoints-1" / "step-000002"
        learner, step = make_learner(config, model, saved, ranks)
        assert step == 2
        torch.save(learn(learner), out / f"resumed-{ranks.size}.pt")
        learner.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
