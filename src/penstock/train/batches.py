"""The batches that the trainer has open at the manager: sent, listened to, released, and cancelled if a run breaks off.

Decides how a batch of the configuration is packed and which of its samples are kept for people. Refuses to know what
becomes of its groups.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from penstock.config.run import RunConfig
from penstock.environments import Limits
from penstock.observe import events
from penstock.rollout.pack import Packer
from penstock.sample import Prompt
from penstock.train.dialogue import Dialogues
from penstock.train.intake import Intake
from penstock.train.ports import SampleScorer, TrainerPorts
from penstock.train.sampling import eval_sampling_of, greedy_of, sampling_of
from penstock.wire import Sampling

__all__ = ["Batches"]

# Beyond the manager's own deadline, for the rare case that the manager itself has fallen silent.
STALL_GRACE_S = 30.0
CALL_S = 30.0
"""Deadline of one call to the manager (publish, submit, release); none of them waits for generation. While the
manager is lost it is longer by `manager.reconnect_s`."""
CANCEL_S = 0.5
"""For telling the manager that open batches are given up: an ending run has little time, and Ctrl-C less."""


class Batches:
    """Batches of one run, `train-<step>`, `eval-<step>` and `greedy-<step>`. All calls come from the main thread."""

    def __init__(self, config: RunConfig, ports: TrainerPorts, clock: Callable[[], float]) -> None:
        self._config = config
        self._ports = ports
        self._clock = clock
        self._training_sampling = sampling_of(config.rollout.sampling, ports.stop_ids)
        self._eval_sampling = eval_sampling_of(config, ports.stop_ids)
        # A conversation may wait for its turn with the environment more than once, and for others with it.
        slowest_s = max(config.rollout.deadline_s, config.reward.timeout_s, config.environment.timeout_s)
        self._stall_s = slowest_s + STALL_GRACE_S
        self._stall_s += config.manager.reconnect_s
        self._call_s = CALL_S + config.manager.reconnect_s
        self._open: dict[str, Intake] = {}
        """Submitted and not released."""

    def submit_training(self, step: int, version: int, prompts: Sequence[Prompt], *, whole: bool = False) -> Intake:
        """Sends a step's prompts; their samples are scored as they finish, from now on.

        With `whole` groups come by the mini-batch, not as soon as a micro-batch is together.
        """
        rollout, train = self._config.rollout, self._config.train
        samples = len(prompts) * rollout.samples_per_prompt
        packer = Packer(
            groups_expected=len(prompts),
            samples_per_prompt=rollout.samples_per_prompt,
            mini_batch_groups=-(-len(prompts) // train.mini_batches_per_step),
            min_samples=samples if whole else train.min_samples_per_micro_batch,
            unscored=self._config.reward.unscored,
        )
        every = self._config.observe.samples_every
        return self._submit(f"train-{step}", version, prompts, packer, kept=bool(every) and step % every == 0)

    def submit_evaluation(self, step: int, version: int) -> Intake:
        """Sends the held-out questions, by the path of any other batch."""
        kept = bool(self._config.observe.samples_every)
        prompts = self._ports.eval_prompts
        samples = self._config.rollout.eval_samples
        packer = Packer(
            groups_expected=len(prompts),
            samples_per_prompt=samples,
            mini_batch_groups=len(prompts),
            min_samples=len(prompts) * samples,
            # What is known of a question counts; how much is missing is told beside it.
            unscored="drop_sample",
        )
        return self._submit(
            f"eval-{step}",
            version,
            prompts,
            packer,
            kept=kept,
            scorer=self._ports.eval_scorer,
            sampling=self._eval_sampling,
        )

    def submit_greedy(self, step: int, version: int, prompts: Sequence[Prompt]) -> Intake:
        """Asks for one greedy answer to each of a step's prompts."""
        sampling = greedy_of(self._config.rollout.sampling, self._ports.stop_ids)
        return self._submit(f"greedy-{step}", version, prompts, self._single(prompts), kept=False, sampling=sampling)

    def _single(self, prompts: Sequence[Prompt]) -> Packer:
        return Packer(
            groups_expected=len(prompts),
            samples_per_prompt=1,
            mini_batch_groups=len(prompts),
            min_samples=len(prompts),
            unscored=self._config.reward.unscored,
        )

    def release(self, intake: Intake) -> None:
        """Waits for the manager's last word on a batch and lets it forget it."""
        intake.wait_ended(self._ports.watch)
        del self._open[intake.batch]
        self.call(self._ports.rollout.release(intake.batch), f"releasing batch {intake.batch}")
        if intake.dialogues is not None:
            self.call(intake.dialogues.release(), f"releasing the turns of batch {intake.batch}")

    @contextlib.contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """Cancels the batches that are open when an error or Ctrl-C passes through."""
        try:
            yield
        except BaseException as error:
            self._cancel_open(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            raise

    # ---- within

    def _submit(
        self,
        batch: str,
        version: int,
        prompts: Sequence[Prompt],
        packer: Packer,
        *,
        kept: bool,
        scorer: SampleScorer | None = None,
        sampling: Sampling | None = None,
    ) -> Intake:
        config, ports = self._config, self._ports
        sampling = sampling or self._training_sampling
        dialogues = self._dialogues(batch, version, sampling)
        intake = Intake(
            batch,
            prompts,
            packer,
            scorer or ports.scorer,
            ports.decoder,
            stall_s=self._stall_s,
            keep=self._kept(prompts, packer.samples_per_prompt) if kept else (),
            dialogues=dialogues,
            clock=self._clock,
        )
        submission = ports.rollout.submit(
            batch=batch,
            version=version,
            prompts=prompts,
            samples_per_prompt=packer.samples_per_prompt,
            run_seed=config.seed,
            sampling=sampling if dialogues is None else dialogues.first_sampling,
            deadline_s=config.rollout.deadline_s,
            listener=intake,
        )
        # Before it is sent: a submission that breaks off half way may have reached the manager.
        self._open[batch] = intake
        self.call(submission, f"submitting batch {batch}")
        return intake

    def _dialogues(self, batch: str, version: int, sampling: Sampling) -> Dialogues | None:
        """Conversations with the run's environment, where it has one."""
        host, config = self._ports.environment, self._config
        if host is None:
            return None
        environment = config.environment
        return Dialogues(
            batch,
            host,
            self._ports.rollout,
            version,
            config.seed,
            sampling,
            config.rollout.deadline_s,
            Limits(sampling.max_new_tokens, environment.max_turns, environment.max_turn_tokens),
        )

    def _kept(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> list[tuple[int, int]]:
        """(prompt, replica) of the samples to record: of as many prompts as may be, and not those that end first."""
        everyone = ((prompt.index, replica) for replica in range(samples_per_prompt) for prompt in prompts)
        return list(itertools.islice(everyone, self._config.observe.samples_per_step))

    def call(self, call: Coroutine[Any, Any, None], what: str) -> None:
        """Has the manager told something, and waits for that; it may have to be dialled again first."""
        # Watched, since a manager of this machine that died is started again from there.
        self._ports.edge.run(call, what, self._call_s, watch=self._ports.watch)

    def _cancel_open(self, cause: str) -> None:
        """Tells the manager, within `CANCEL_S`, that nobody waits any more. What goes wrong with that is a warning."""
        given_up, self._open = self._open, {}
        if not given_up:
            return

        async def cancel() -> None:
            for intake in given_up.values():
                intake.cancel(cause)
            for batch, intake in given_up.items():
                await self._ports.rollout.cancel(batch, cause)
                if intake.dialogues is not None:
                    await intake.dialogues.cancel(cause)

        try:
            self._ports.edge.run(cancel(), f"cancelling {', '.join(given_up)}", CANCEL_S)
        # The run ends with its own error, whatever this one is.
        except Exception as error:  # noqa: BLE001
            message = f"batches could not be cancelled: {type(error).__name__}: {error}"
            self._ports.emit(events.Warned(ts=time.time(), where="rollout", message=message))
