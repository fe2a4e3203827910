"""What the trainer adds to a plain PyTorch loop over the same packed passes: throughput, on this machine's processor.

Both take one optimizer step over the same samples with the same model, turn by turn. The trainer gets whole groups and
does all that a run does: advantages, packing, log-probabilities, entropy, clip fractions, the metrics. The plain loop
gets passes that are laid out, and does what a gradient needs: forward, clipped loss, backward, clipping, AdamW.
"""

from __future__ import annotations

import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bench.common import Result, at_least, median, random_llama
from penstock.config.run import RunConfig
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score
from penstock.train.batching import PassBatch, collate_samples, split_passes
from penstock.train.learner import Learner
from penstock.train.loading import load_causal_lm
from penstock.train.packing import hidden_states
from penstock.train.ranks import Ranks
from penstock.train.start import make_learner
from penstock.train.tally import Tally

DESCRIPTION = "tokens/s of the trainer against a plain PyTorch loop over the same packed passes"

TARGET = 0.97
GROUPS, REPLICAS, PROMPT_TOKENS = 16, 8, 24
TOKENS_PER_PASS = 8192
SHAPES = {"1 M parameters, 8 to 64 tokens": (128, 4, 384, 8, 64), "7 M parameters, 32 to 384": (320, 6, 960, 32, 384)}
"""Hidden size, layers, feed-forward size, shortest and longest answer."""


def run(quick: bool) -> list[Result]:
    results = []
    for what, (hidden, layers, inner, shortest, longest) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder)
            _make_model(model, hidden, layers, inner, longest + PROMPT_TOKENS)
            groups = _groups(GROUPS // 2 if quick else GROUPS, shortest, longest)
            ours, bare, tokens = _turns(model, groups, longest, 3 if quick else 9)
        note = f"{tokens / ours:,.0f} against {tokens / bare:,.0f} tokens/s, medians of turns"
        results.append(at_least(f"trainer / plain loop, {what}", bare / ours, TARGET, "ratio", note=note))
    return results


def _turns(model: Path, groups: list[Group], longest: int, turns: int) -> tuple[float, float, int]:
    """Median seconds of a step of the trainer and of the plain loop, and the tokens of one."""
    config = _config(model, longest)
    learner, _ = make_learner(config, model, None, Ranks())
    plain = load_causal_lm(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.train.lr, weight_decay=0.0, fused=True)
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples]
    passes = [
        collate_samples([samples[k] for k in rows], [float(k % 3 - 1) for k in rows])
        for rows in split_passes(lengths, config.train.tokens_per_micro_batch)
    ]
    ours, bare = [], []
    for turn in range(turns + 1):
        first = _seconds(_trainer_step, learner, groups, turn), _seconds(_plain_step, plain, optimizer, passes)
        if turn:
            ours.append(first[0])
            bare.append(first[1])
    return median(ours), median(bare), sum(lengths)


def _trainer_step(learner: Learner, groups: list[Group], step: int) -> None:
    learner.begin_step(step)
    [done] = learner.learn(groups, Tally(step), {}, 0)
    assert done.actor is not None
    assert done.actor.applied, done.actor.cause
    learner.metrics()


def _plain_step(model: Any, optimizer: torch.optim.Optimizer, passes: list[PassBatch]) -> None:
    tokens = sum(int(batch.mask_BT.sum()) for batch in passes)
    for batch in passes:
        hidden_ND = hidden_states(model.base_model, batch.input_ids_F, batch.layout)[batch.at_N]
        logprobs_NV = torch.log_softmax(model.lm_head(hidden_ND).float(), dim=-1)
        logprob_N = logprobs_NV.gather(1, batch.output_ids_N.unsqueeze(1)).squeeze(1)
        (_clipped(logprob_N, batch).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _clipped(logprob_N: Tensor, batch: PassBatch) -> Tensor:
    ratio_N = (logprob_N - batch.rollout_logprobs_BT[batch.mask_BT]).exp()
    advantage_N = batch.advantages_BT[batch.mask_BT]
    return -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(0.8, 1.2) * advantage_N)


def _seconds(what: Any, *arguments: Any) -> float:
    began = time.perf_counter()
    what(*arguments)
    return time.perf_counter() - began


def _config(model: Path, longest: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [{"kind": "jsonl", "path": "none"}], "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {"sampling": {"max_new_tokens": longest}},
            "train": {"device": "cpu", "lr": 1e-5, "tokens_per_micro_batch": TOKENS_PER_PASS},
        }
    )


def _make_model(folder: Path, hidden: int, layers: int, inner: int, positions: int) -> None:
    model = random_llama(
        0,
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)


def _groups(count: int, shortest: int, longest: int) -> list[Group]:
    """Whole groups of random answers; every group has a signal."""
    chance = random.Random(5)
    made = []
    for index in range(count):
        prompt = Prompt(index, "", [chance.randrange(1024) for _ in range(PROMPT_TOKENS)], {}, "")
        samples = []
        for replica in range(REPLICAS):
            size = chance.randint(shortest, longest)
            ids = array("i", [chance.randrange(1024) for _ in range(size)])
            logprobs = array("f", [-6.93] * size)
            score = Score(float(replica % 2))
            samples.append(Sample(SampleId("b", index, replica), prompt, ids, logprobs, (), Finish.STOP, "", score))
        made.append(Group("b", prompt, samples))
    return made
