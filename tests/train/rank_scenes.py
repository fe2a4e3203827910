"""One rank of a set that torchrun starts, or of one alone: learns from the same groups, and writes what came of it.

Usage: rank_scenes.py MODEL OUT [FROM]

With FROM, a checkpoint, it only writes what it has read of that.
"""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
from fakes import written

from penstock import collector
from penstock.config.run import RunConfig
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score
from penstock.train.checkpoint import Checkpoints, Position, files_of
from penstock.train.learner import Learner
from penstock.train.ranks import Ranks
from penstock.train.shards import read_whole
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
    "offload": {"cpu_offload": True, "advantage": "gae", "epochs": 2, "critic": {"lr": 1e-3}, "kl_coef": 0.1},
    "reference": {"kl_coef": 0.1, "reference": {"offload": True}},
}


def config_of(model: Path, dtype: str = "float32", **train: Any) -> RunConfig:
    plain = {"lr": 1e-3, "device": "cpu", "tokens_per_micro_batch": 64, "max_grad_norm": 1e9}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
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


def whole_state(checkpoint: Path, random_too: bool = False) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps, put together, by name."""
    kinds = ["model", "trainer", *(["critic"] if any(checkpoint.glob("critic*")) else [])]
    found = [item for kind in kinds for item in read_whole(files_of(checkpoint, kind)).items()]
    return {name: tensor for name, tensor in found if random_too or not name.startswith("random")}


def save(learner: Learner, folder: Path) -> Path:
    saved: Path = learner.begin_save(Checkpoints(folder, 1), Position(2, 2, 0)).result(60).path
    return saved


def learn(learner: Learner, out: Path) -> dict[str, torch.Tensor]:
    """Two steps, each streamed in three parts; what the run stands at behind them, by name."""
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        learner.begin_step(step)
        mini_batches = learner.config.train.mini_batches_per_step
        made = groups()
        first, second, third = made[:2], made[2:3], made[3:]
        learner.learn(first, Tally(0), {}, None)
        if learner.looks_ahead:
            learner.look([sample for group in made[2:5] for sample in group.samples[:3]])
        learner.learn(second, Tally(0), {}, 0 if mini_batches == 2 else None)
        if learner.looks_ahead:
            learner.look(made[5].samples[:2])
        learner.learn(third, Tally(0), {}, mini_batches - 1)
    for name, mean in learner.metrics().items():
        found[f"metrics/{name}"] = torch.tensor(mean)
    weights = written(learner.weights())
    assert [name for name, _, _ in learner.actor.named_shapes()] == list(weights)
    checkpoint = save(learner, out / f"learned-{learner.ranks.size}")
    kept = read_whole(files_of(checkpoint, "model"))
    assert weights == {name: tensor.numpy().tobytes() for name, tensor in kept.items()}
    return found | whole_state(checkpoint)


def gradient(learner: Learner, out: Path) -> dict[str, torch.Tensor]:
    """Of the first step: Adam's first moment after it is (1 - beta1) times that."""
    learner.begin_step(0)
    learner.learn(groups()[:2], Tally(0), {}, None)
    learner.learn(groups()[2:], Tally(0), {}, 0)
    prefix = "optimizer/exp_avg/"
    kept = whole_state(save(learner, out / f"gradient-{learner.ranks.size}"))
    moments = {name.removeprefix(prefix): moment for name, moment in kept.items() if prefix in name}
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
                torch.save(gradient(learner, out), out / f"gradient-{ranks.size}.pt")
                learner.end()
                learner, _ = make_learner(config, model, None, ranks)
            torch.save(learn(learner, out), out / f"{name}-{ranks.size}.pt")
            if name == "critic":
                save(learner, out / f"checkpoints-{ranks.size}")
            learner.end()
        # Computed in half precision, kept in full.
        config = config_of(model, "bfloat16", activation_checkpointing=True)
        if ranks.leads:
            learner, _ = make_learner(config, model, None, ranks)
            found = gradient(learner, out / "half")
            assert {dtype for _, dtype, _, _ in learner.weights()} == {"BF16"}
            torch.save(found, out / f"gradient-bfloat16-{ranks.size}.pt")
            learner.end()
        else:
            follow(config, ranks)
        # And on from what as many ranks and what one rank has written.
        config = config_of(model, **SCENES["critic"])
        if not ranks.leads:
            for _ in range(2):
                follow(config, ranks)
            return
        learner, _ = make_learner(config, model, out / f"checkpoints-{ranks.size}" / "step-000002", ranks)
        save(learner, out / f"same-{ranks.size}")
        learner.end()
        saved = out / "checkpoints-1" / "step-000002"
        learner, step = make_learner(config, model, saved, ranks)
        assert step == 2
        save(learner, out / f"again-1-to-{ranks.size}")
        torch.save(learn(learner, out), out / f"resumed-{ranks.size}.pt")
        learner.end()


def restore(model: Path, out: Path, checkpoint: Path) -> None:
    """Reads a checkpoint and writes it again."""
    torch.set_num_threads(1)
    config = config_of(model, **SCENES["critic"])
    with contextlib.closing(Ranks.from_environment()) as ranks:
        if not ranks.leads:
            follow(config, ranks)
            return
        learner, _ = make_learner(config, model, checkpoint, ranks)
        save(learner, out)
        learner.end()


if __name__ == "__main__":
    collector.spare()
    if len(sys.argv) > 3:
        restore(*map(Path, sys.argv[1:4]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
