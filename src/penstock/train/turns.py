"""The trainer's turns on its own devices, where reserved engines generate on them for a part of each step.

Says where the trainer stands in its step, and keeps it from training until the devices are its own. How long the
engines generate is the manager's to decide (`rollout.windows`). With `rollout.window = "off"` nothing is said and
nothing is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.config.run import RunConfig
from penstock.sample import Group, Prompt
from penstock.train.intake import Intake
from penstock.train.ports import TrainerPorts
from penstock.wire import TrainerTurn

__all__ = ["Turns"]

CALL_S = 30.0
"""For one word to the manager; while that is lost, `manager.reconnect_s` more."""


class Turns:
    """One trainer's; all calls come from its main thread. Each raises RolloutError where the manager is given up."""

    def __init__(self, config: RunConfig, ports: TrainerPorts, clock: Callable[[], float] = time.monotonic) -> None:
        window = config.rollout.window
        self.enabled = window != "off"
        self.window_s = 0.0
        """The engines generated for so long in the present step, as far as is known."""
        self._length_s = float(window) if isinstance(window, int | float) else -1.0
        self._micro_batch_samples = config.train.min_samples_per_micro_batch
        self._ahead_samples = 1
        self._samples_per_prompt = config.rollout.samples_per_prompt
        self._call_s = CALL_S + config.manager.reconnect_s
        self._ports = ports
        self._clock = clock
        self._batch = ""
        self._version = 0
        self._prompt_tokens = 0
        self._trained_at = 0.0
        self._has = False

    def begin(self, batch: str, version: int, prompts: Sequence[Prompt]) -> None:
        """A step begins, and there is nothing to train on yet."""
        self._batch, self._version, self.window_s = batch, version, 0.0
        self._prompt_tokens = self._samples_per_prompt * sum(len(prompt.token_ids) for prompt in prompts)
        self._say("begins")

    def take(self, intake: Intake, whole: bool, least_ahead: int = 0) -> list[Group] | None:
        """The next complete groups, once the devices are the trainer's; raises as `Intake.take` does.

        None where there are none, and above 0 so many samples that can be looked at ahead. While it waits it gives the
        devices back. `Intake.waited_s` leaves out the time in which the engines generated: the devices were at work.
        """
        if self.enabled and self._has and not intake.ready(whole, least_ahead):
            self._has = False
            self._say("waits")
        self._ahead_samples = max(1, least_ahead)
        intake.wait(whole, self._ports.watch, least_ahead)
        if self.enabled and not self._has:
            self._acquire(intake)
        return intake.take(whole, self._ports.watch) if not least_ahead or intake.ready(whole) else None

    def trained(self) -> None:
        """All of the step is trained on, and its optimizer has stepped."""
        self._trained_at, self._has = self._clock(), False
        self._say("trained")

    def ended(self, intake: Intake, train_s: float, waited_s: float, ahead_token_s: float = 0.0) -> None:
        """The next weights are on their way. `waited_s`: for an evaluation, since the step was trained on.
        `ahead_token_s`: passes that needed no whole group took so long for each of their tokens; 0: there were none."""
        rest_s = max(0.0, self._clock() - self._trained_at - waited_s)
        tokens = intake.tokens + self._prompt_tokens
        self._say("ended", tokens=tokens, train_s=train_s, rest_s=rest_s, ahead_token_s=ahead_token_s)

    def metrics(self) -> dict[str, float]:
        return {"window_s": self.window_s} if self.enabled else {}

    # ---- within

    def _acquire(self, intake: Intake) -> None:
        began = self._clock()
        asked = self._ports.rollout.take_turn(self._turn("wants"))
        # No deadline of its own: it is over when the batch's is, or when there is no manager any more.
        watch = intake.watched(self._ports.watch)
        window_s = self._ports.edge.run(asked, "waiting for the trainer's own devices", float("inf"), watch=watch)
        self._has = True
        waited_s = intake.waited_s + self._clock() - began
        intake.waited_s = max(0.0, waited_s - (window_s - self.window_s))
        self.window_s = window_s

    def _say(
        self, state: str, *, tokens: int = 0, train_s: float = 0.0, rest_s: float = 0.0, ahead_token_s: float = 0.0
    ) -> None:
        if self.enabled:
            turn = self._turn(state, tokens=tokens, train_s=train_s, rest_s=rest_s, ahead_token_s=ahead_token_s)
            what = f"telling the manager that {self._batch} {state}"
            self._ports.edge.run(self._ports.rollout.take_turn(turn), what, self._call_s, self._ports.watch)

    def _turn(
        self, state: str, *, tokens: int = 0, train_s: float = 0.0, rest_s: float = 0.0, ahead_token_s: float = 0.0
    ) -> TrainerTurn:
        return TrainerTurn(
            number=0,
            batch=self._batch,
            version=self._version,
            state=state,
            window_s=self._length_s,
            micro_batch_samples=self._micro_batch_samples,
            tokens=tokens,
            train_s=train_s,
            rest_s=rest_s,
            ahead_token_s=ahead_token_s,
            ahead_samples=self._ahead_samples,
        )
