"""Which prompts a step trains on: a pure function of the step, so that a resumed run draws the same ones.

Knows nothing of what a prompt is, only how many there are. Epoch after epoch of seeded permutations is laid end to
end and cut into steps. Uses the standard library's generator alone, seeded by text (hashed by SHA-512), so that the
order is the same on every machine.
"""

from __future__ import annotations

import random

from penstock.errors import DataError

__all__ = ["PromptOrder"]


class PromptOrder:
    """Draws `prompts_per_step` different prompts out of `count` for each step, each once an epoch.

    Where a step reaches over the end of an epoch, the next epoch begins with prompts that this step has not drawn
    yet; the others follow in their order. So a step never holds a prompt twice, and an epoch still holds each once.
    """

    def __init__(self, count: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        """Raises DataError where a step would have to draw a prompt twice."""
        if prompts_per_step < 1:
            raise DataError(f"prompts_per_step is {prompts_per_step}; it must be at least 1")
        if count < prompts_per_step:
            raise DataError(
                f"there are {count} training prompts and a step draws {prompts_per_step} different ones; "
                "add prompts or lower rollout.prompts_per_step"
            )
        self.count = count
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0
        self._order = self._permutation(0)

    def for_step(self, step: int) -> list[int]:
        """Indices of the prompts of step `step` (from 0), `prompts_per_step` of them, all different.

        Going on from the last step asked for costs nothing; a step of an earlier epoch is worked out from the start.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        epoch, start = divmod(step * self.prompts_per_step, self.count)
        self._go_to(epoch)
        drawn = self._order[start : start + self.prompts_per_step]
        if len(drawn) < self.prompts_per_step:
            self._go_to(epoch + 1)
            drawn = drawn + self._order[: self.prompts_per_step - len(drawn)]
        return drawn

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) that the first prompt of `step` belongs to."""
        return step * self.prompts_per_step // self.count

    def _go_to(self, epoch: int) -> None:
        if epoch < self._epoch:
            self._epoch, self._order = 0, self._permutation(0)
        while self._epoch < epoch:
            self._epoch, self._order = self._epoch + 1, self._following(self._epoch + 1, self._order)

    def _following(self, epoch: int, previous: list[int]) -> list[int]:
        """The order of `epoch`, its head kept apart from the tail of `previous` that falls into the same step."""
        order = self._permutation(epoch)
        tail_length = epoch * self.count % self.prompts_per_step
        if tail_length == 0:
            return order
        head_length = self.prompts_per_step - tail_length
        tail = set(previous[-tail_length:])
        head = [index for index in order if index not in tail][:head_length]
        taken = set(head)
        return head + [index for index in order if index not in taken]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.count))
        if self.shuffle:
            random.Random(f"penstock prompts {self.seed} {epoch}").shuffle(order)
        return order
