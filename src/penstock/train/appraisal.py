"""Complete groups into passes: rewards, KL penalty, values and advantages, then the samples cut by token budget.

Decides what is computed before advantages are, or ahead of whole groups, and which samples are learned from. Refuses to
know when groups come and when the optimizer steps. Shape suffixes: `_B`, B samples of whole groups; `_BT`, the same
with their output tokens right-padded to T.
"""

from __future__ import annotations

from array import array
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
from penstock.train.losses import approximate_kl
from penstock.train.ranks import Ranks
from penstock.train.tally import Tally, value_of

__all__ = ["Appraiser"]


class _Asked(NamedTuple):
    """Of a sample: what forward passes tell."""

    old: bool
    reference: bool
    values: bool


class _Known(NamedTuple):
    """What forward passes told of all samples, where anything asks for it; on the CPU."""

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
        if not chosen:
            return []
        old_BT = self._old_logprobs([samples[k] for k in chosen], watch)
        parts = self._split([samples[k] for k in chosen])
        tally.passes += len(parts)
        batches = []
        for part in self._own(parts):
            rows = [chosen[k] for k in part] or [chosen[0]]
            batch = collate_samples([samples[k] for k in rows]) if part else idle_pass(samples[chosen[0]])
            if old_BT is not None:
                batch = replace(batch, old_logprobs_BT=old_BT[part or [0], : batch.mask_BT.shape[1]])
            batches.append(_with(batch, rows, valued, known))
        return batches

    def _split(self, samples: Sequence[Sample]) -> list[list[int]]:
        lengths = [len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples]
        return split_passes(lengths, self.config.tokens_per_micro_batch, self._ranks.size)

    def _own(self, parts: list[list[int]]) -> list[list[int]]:
        """This rank's passes: each has as many, since all have to compute at the same time."""
        return parts[self._ranks.rank :: self._ranks.size]

    def looks_ahead(self, actor_learns: bool) -> bool:
        """Whether anything can be told of samples before their groups are whole."""
        return any(self._ahead(actor_learns))

    def look(self, samples: Sequence[Sample], actor_learns: bool, watch: Callable[[], None]) -> None:
        """Makes the passes without a gradient that learning from these samples will need. All ranks tell them what
        came of it: `old_logprobs`, `reference_logprobs`, `values`."""
        self._fill(samples, self._ahead(actor_learns), watch)

    def _ahead(self, actor_learns: bool) -> _Asked:
        """What takes a pass of its own, now or once the groups are whole."""
        config, actor, before = self.config, self._actor, self._before()
        old = (actor_learns and actor.old_takes_a_pass) or (before.old and not actor.old_from_rollout)
        reference = (actor_learns and config.kl_coef > 0) or before.reference
        return _Asked(old, reference and not config.reference.workers, self._critic is not None)

    def _before(self) -> _Asked:
        """What has to be known before advantages are, or before weights move."""
        penalised = self.config.kl_in == "reward" and self.config.kl_coef > 0
        return _Asked(penalised or self.config.epochs > 1, penalised, self._critic is not None)

    def _look(self, samples: Sequence[Sample], watch: Callable[[], None]) -> _Known:
        """What passes tell before advantages are known; of some samples it may be known already."""
        before = self._before()
        if not any(before):
            return _Known(None, None)
        # Where some have been looked at and others not, passes over both would need what only some have.
        known = before._replace(reference=before.reference or any(s.reference_logprobs is not None for s in samples))
        self._fill(samples, known, watch)
        longest = max(len(sample.token_ids) for sample in samples)
        kl_BT = None
        if before.reference:
            old_BT = _padded([sample.old_logprobs for sample in samples], longest)
            reference_BT = _padded([sample.reference_logprobs for sample in samples], longest)
            mask_BT = _padded([own_tokens(sample) for sample in samples], longest)
            kl_BT = approximate_kl(old_BT, reference_BT, self.config.kl_estimator) * mask_BT
            device = self._actor.device
            self._actor.sums.add("kl", kl_BT.to(device), mask_BT.to(device))
        values_BT = _padded([sample.values for sample in samples], longest) if before.values else None
        return _Known(kl_BT, values_BT)

    def _old_logprobs(self, samples: Sequence[Sample], watch: Callable[[], None]) -> Tensor | None:
        """[B, T] of samples that are learned from, where they have to be known before, or some are: then all are made
        known. So are the reference's."""
        asked = _Asked(
            self._before().old or any(sample.old_logprobs is not None for sample in samples),
            any(sample.reference_logprobs is not None for sample in samples),
            False,
        )
        self._fill(samples, asked, watch)
        longest = max(len(sample.token_ids) for sample in samples)
        return _padded([sample.old_logprobs for sample in samples], longest) if asked.old else None

    def _fill(self, samples: Sequence[Sample], asked: _Asked, watch: Callable[[], None]) -> None:
        """Tells samples what is asked of them and not known."""
        alike: dict[_Asked, list[Sample]] = {}
        for sample in samples:
            alike.setdefault(_unknown(sample, asked), []).append(sample)
        for unknown, rows in alike.items():
            if any(unknown):
                self._tell(rows, unknown, watch)

    def _tell(self, samples: Sequence[Sample], asked: _Asked, watch: Callable[[], None]) -> None:
        """Tells samples what is asked of all of them; every rank makes a part of the passes."""
        longest = max(len(sample.token_ids) for sample in samples)
        old_BT, reference_BT, values_BT = told = torch.zeros(3, len(samples), longest)
        for part in self._own(self._split(samples)):
            rows = part or [0]
            batch = collate_samples([samples[k] for k in rows]) if part else idle_pass(samples[0])
            mask_BT, width = batch.mask_BT, batch.mask_BT.shape[1]
            if asked.old:
                batch = self._actor.with_old_logprobs(batch)
                assert batch.old_logprobs_BT is not None
                old_BT[rows, :width] += batch.old_logprobs_BT.cpu() * mask_BT
            if asked.reference:
                reference_BT[rows, :width] += self._actor.reference_logprobs(batch).cpu() * mask_BT
            if asked.values and self._critic is not None:
                batch = self._critic.with_values(batch)
                assert batch.values_BT is not None
                values_BT[rows, :width] += batch.values_BT.cpu() * mask_BT
            watch()
        self._ranks.add_up(told)
        for k, sample in enumerate(samples):
            old, reference, values = (array("f", row_T[: len(sample.token_ids)].tolist()) for row_T in told[:, k])
            if asked.old:
                sample.old_logprobs = old
            if asked.reference:
                sample.reference_logprobs = reference
            if asked.values:
                sample.values = values

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
        values_BT=cut(known.values_BT),
        returns_BT=None if known.values_BT is None else cut(valued.returns_BT),
    )


def _unknown(sample: Sample, asked: _Asked) -> _Asked:
    return _Asked(
        asked.old and sample.old_logprobs is None,
        asked.reference and sample.reference_logprobs is None,
        asked.values and sample.values is None,
    )


def _padded(columns: Sequence[Sequence[float] | None], width: int) -> Tensor:
    """float32 [B, T]: of each sample a column that is known, 0 behind its end."""
    padded_BT = torch.zeros(len(columns), width)
    for row_T, column in zip(padded_BT, columns, strict=True):
        assert column is not None
        row_T[: len(column)] = torch.tensor(column, dtype=torch.float32)
    return padded_BT


def _parts(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Each part that any score has; NaN for samples whose score lacks it."""
    scores = [sample.score.parts if isinstance(sample.score, Score) else {} for sample in samples]
    names = sorted({name for score in scores for name in score})
    return {name: torch.tensor([score.get(name, float("nan")) for score in scores]) for name in names}
