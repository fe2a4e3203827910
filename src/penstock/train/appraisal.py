"""Complete groups into passes: rewards, KL penalty, values and advantages, then the samples cut by token budget.

Decides what is computed before advantages are, and which samples are learned from. Refuses to know when groups come
and when the optimizer steps. Shape suffixes: `_B`, B samples of whole groups; `_BT`, the same with their output tokens
right-padded to T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.sample import Group, Sample, Score
from penstock.train.actor import Actor
from penstock.train.advantages import Outcomes, Valued, get_advantage, has_signal
from penstock.train.batching import PassBatch, collate_samples, idle_pass, own_tokens, split_passes
from penstock.train.critic import Critic
from penstock.train.ranks import Ranks
from penstock.train.tally import Tally, value_of

__all__ = ["Appraiser"]


class _Known(NamedTuple):
    """What forward passes told of all samples, where anything asks for it; on the CPU."""

    old_logprobs_BT: Tensor | None
    kl_BT: Tensor | None
    values_BT: Tensor | None


class Appraiser:
    """Makes passes for `actor` and, where the advantage asks for values, `critic`."""

    def __init__(self, config: TrainConfig, actor: Actor, critic: Critic | None, ranks: Ranks) -> None:
        self.config = config
        self._ranks = ranks
        self.estimator = get_advantage(config.advantage)
        self._actor = actor
        self._critic = critic
        if self.estimator.has_critic and critic is None:
            raise ValueError(f"train.advantage={config.advantage!r} needs a critic")
        # The KL and the entropy term and the critic learn from every group, whatever its rewards.
        learns_anyway = config.kl_coef or config.entropy_coef or critic is not None
        self._skips_without_signal = config.skip_groups_without_signal and not learns_anyway

    def passes(
        self, groups: Sequence[Group], tally: Tally, baselines: Mapping[int, float], watch: Callable[[], None]
    ) -> list[PassBatch]:
        """This rank's passes of whole groups. `baselines`: greedy answers' rewards by prompt."""
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return []
        group_B = torch.tensor([k for k, group in enumerate(groups) for _ in group.samples])
        known = self._look(samples, watch)
        valued = self.estimator(self._outcomes(samples, group_B, known, baselines))
        signal = has_signal(valued.advantages_BT, group_B).tolist()
        tally.take_in(groups, signal)
        chosen = [k for k in range(len(samples)) if signal[k] or not self._skips_without_signal]
        parts = self._split([samples[k] for k in chosen])
        tally.passes += len(parts)
        batches = []
        for part in self._own(parts):
            rows = [chosen[k] for k in part] or [chosen[0]]
            batch = collate_samples([samples[k] for k in rows]) if part else idle_pass(samples[chosen[0]])
            batches.append(_with(batch, rows, valued, known))
        return batches

    def _split(self, samples: Sequence[Sample]) -> list[list[int]]:
        lengths = [len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples]
        return split_passes(lengths, self.config.tokens_per_micro_batch, self._ranks.size)

    def _own(self, parts: list[list[int]]) -> list[list[int]]:
        """This rank's passes: each has as many, since all have to compute at the same time."""
        return parts[self._ranks.rank :: self._ranks.size]

    def _look(self, samples: Sequence[Sample], watch: Callable[[], None]) -> _Known:
        """The forward passes that have to come before advantages are known, or before weights move."""
        penalised = self.config.kl_in == "reward" and self.config.kl_coef > 0
        wants_old = penalised or self.config.epochs > 1
        if not wants_old and self._critic is None:
            return _Known(None, None, None)
        longest = max(len(sample.token_ids) for sample in samples)
        old_BT, kl_BT, values_BT = (torch.zeros(len(samples), longest) for _ in range(3))
        for part in self._own(self._split(samples)):
            rows = part or [0]
            batch = collate_samples([samples[k] for k in rows]) if part else idle_pass(samples[0])
            mask_BT, width = batch.mask_BT, batch.mask_BT.shape[1]
            if wants_old:
                batch = self._actor.with_old_logprobs(batch)
                assert batch.old_logprobs_BT is not None
                old_BT[rows, :width] += batch.old_logprobs_BT.cpu() * mask_BT
            if penalised:
                kl = self._actor.kl_to_reference(batch)
                self._actor.sums.add("kl", kl, mask_BT.to(kl.device, torch.float32))
                kl_BT[rows, :width] += kl.cpu() * mask_BT
            if self._critic is not None:
                batch = self._critic.with_values(batch)
                assert batch.values_BT is not None
                values_BT[rows, :width] += batch.values_BT.cpu() * mask_BT
            watch()
        if self._ranks.size > 1:
            self._ranks.add_up(together := torch.stack([old_BT, kl_BT, values_BT]))
            old_BT, kl_BT, values_BT = together.unbind()
        return _Known(
            old_BT if wants_old else None,
            kl_BT if penalised else None,
            values_BT if self._critic is not None else None,
        )

    def _outcomes(
        self, samples: Sequence[Sample], group_B: Tensor, known: _Known, baselines: Mapping[int, float]
    ) -> Outcomes:
        lengths_B = torch.tensor([len(sample.token_ids) for sample in samples])
        there_BT = torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)
        mask_BT = there_BT.clone()
        mask_BT[there_BT] = torch.tensor([own for sample in samples for own in own_tokens(sample)], dtype=torch.bool)
        token_rewards_BT = torch.zeros(mask_BT.shape)
        values = torch.tensor([value_of(sample) for sample in samples], dtype=torch.float32)
        token_rewards_BT[torch.arange(len(samples)), lengths_B - 1] = values
        if known.kl_BT is not None:
            penalty_BT = self._actor.kl_coef * known.kl_BT
            token_rewards_BT -= penalty_BT
            values = values - penalty_BT.sum(dim=1)
        wanted = self.estimator.has_baselines
        return Outcomes(
            rewards_B=values,
            group_B=group_B,
            config=self.config,
            lengths_B=mask_BT.sum(dim=1, dtype=torch.float32),
            mask_BT=mask_BT,
            parts=_parts(samples) if "parts" in self.estimator.needs else {},
            token_rewards_BT=token_rewards_BT,
            values_BT=known.values_BT,
            baselines_B=torch.tensor([baselines[sample.id.prompt] for sample in samples]) if wanted else None,
        )


def _with(batch: PassBatch, rows: Sequence[int], valued: Valued, known: _Known) -> PassBatch:
    width = batch.mask_BT.shape[1]

    def cut(tensor_BT: Tensor | None) -> Tensor | None:
        return None if tensor_BT is None else tensor_BT[rows, :width]

    return replace(
        batch,
        advantages_BT=valued.advantages_BT[rows, :width],
        old_logprobs_BT=cut(known.old_logprobs_BT),
        values_BT=cut(known.values_BT),
        returns_BT=None if known.values_BT is None else cut(valued.returns_BT),
    )


def _parts(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Each part that any score has; NaN for samples whose score lacks it."""
    scores = [sample.score.parts if isinstance(sample.score, Score) else {} for sample in samples]
    names = sorted({name for score in scores for name in score})
    return {name: torch.tensor([score.get(name, float("nan")) for score in scores]) for name in names}
