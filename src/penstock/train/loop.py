"""The streaming training loop.

One step: its prompts are submitted; samples are scored as each finishes; complete groups become advantages, passes
and gradient while the others still run; actor and critic step at each mini-batch boundary; the next weight version is
published. With `train.streaming=false` groups are taken once all of them are there, and nothing else differs.

The loop decides the order of these things. Who generates, who scores, where weights and records go is passed in
(`ports`), so that tests drive the same loop with fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch

from penstock.config.run import RunConfig
from penstock.errors import RewardError
from penstock.observe import events
from penstock.sample import Group
from penstock.train.batches import Batches
from penstock.train.checkpoint import Position
from penstock.train.evaluation import evaluate
from penstock.train.flops import known_peak, measured_peak
from penstock.train.intake import Intake
from penstock.train.learner import Learner, Steps
from penstock.train.losses import steered_kl_coef
from penstock.train.ports import TrainerPorts
from penstock.train.publishing import Publishing
from penstock.train.saving import Saving
from penstock.train.stages import Stages
from penstock.train.tally import LEARNING, Tally, length_metrics, speed_metrics, stage_metrics, value_of
from penstock.train.turns import Turns

__all__ = ["Trainer", "TrainerPorts"]


class Trainer:
    """Runs `config.train.steps` steps with `learner`, from step `start_step` (0, or a checkpoint's).

    `run()` returns when the last step is done, evaluated and saved. It raises RolloutError for a batch that can't be
    completed, RewardError where scoring itself is broken or has scored no group at all, StorageError where the last
    checkpoint can't be written; an earlier checkpoint that can't be written is a warning. KeyboardInterrupt passes
    through. Whatever ends it, batches that are open are cancelled first, so that nobody generates for a run that is
    over.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        ports: TrainerPorts,
        *,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.learner = learner
        self.ports = ports
        self.step = start_step
        """Steps that are done."""
        self.version = start_step
        """Weight version that generates now: one for each step."""
        self._clock = clock
        learner.stages = Stages(clock)
        self._groups_learned_from = 0
        self._measured_at: float | None = None
        """When the last step's metrics were taken."""
        self._peak: float | None = None
        """FLOP/s of one device, once it is asked for."""
        self._at_boundary = True
        """Whether the weights are those that step `self.step` begins with."""
        self._worked_through = False
        """Whether they are those that step `self.step` ends with."""
        self._publishing = Publishing(ports, config.manager.reconnect_s)
        self._saving = Saving(config, learner, ports, start_step)
        self._batches = Batches(config, ports, clock)
        self._turns = Turns(config, ports, clock)

    # ---- the run

    def run(self) -> None:
        """All steps that are left, with the evaluations before, between and after them."""
        self._warn_of_truncation()
        self._peak_of_all()
        self.publish()
        while self.step < self.config.train.steps:
            self.train_step()
        self._evaluate_now()
        self._saving.last(self._position)
        if not self._groups_learned_from:
            raise RewardError(
                "no group of the whole run could be scored, so nothing was learned; events.jsonl has the causes "
                "(`unscorable`)"
            )

    def evaluate(self) -> None:
        """Evaluates the weights as they are, and nothing else."""
        self.publish()
        self._evaluate_now()

    def save_where_stopped(self) -> None:
        """After a run broke off: saves the step boundary that it stands at, if that is not on the disk already.

        In a step whose optimizer has stepped already there is no boundary to save. Never raises for the disk's sake.
        """
        if self._worked_through:
            # Its gradient is applied and nothing but words with the manager was left of it.
            self.step, self.version = self.step + 1, self.version + 1
            self._worked_through, self._at_boundary = False, True
        self._saving.settle()
        if self._at_boundary and self.step > self._saving.saved_step and self.learner.in_step:
            self._saving.begin(self._position)
            self._saving.settle()

    def train_step(self) -> dict[str, float]:
        """One step; returns its metrics."""
        with self._batches.cancelled_on_error():
            # Broken off from its last update on, a step would have no boundary to save, or one that no record tells of.
            with ExitStack() as held:
                metrics = self._train_step(held)
            every = self.config.train.checkpoint_every
            if every and self.step % every == 0 and self.step < self.config.train.steps:
                with self.learner.stages("checkpoint"):
                    self._saving.begin(self._position)
            return metrics

    def _train_step(self, held: ExitStack) -> dict[str, float]:
        ports, step, stages = self.ports, self.step, self.learner.stages
        # A checkpoint behind the last step's records belongs to no other step than this one.
        began = self._measured_at
        if began is None:
            # Nor does what came before the run's first one.
            stages.take()
            began = self._clock()
        prompts = ports.prompts.for_step(step)
        tally = Tally(self.version)
        with stages("publish"):
            self._publishing.settle(ports.watch)
        self._turns.begin(f"train-{step}", self.version, prompts)
        estimator = self.learner.estimator
        with stages("rollout_wait"):
            # Ahead of the samples, which can't be learned from without it.
            greedy = self._batches.submit_greedy(step, self.version, prompts) if estimator.has_baselines else None
            intake = self._batches.submit_training(step, self.version, prompts, whole=estimator.whole_mini_batch)
        ports.emit(
            events.StepStarted(
                ts=time.time(),
                step=step,
                weight_version=self.version,
                prompts=len(prompts),
                samples=intake.samples_expected,
            )
        )
        # Sent behind the training batch, it fills the engines while that one's longest samples end.
        with stages("evaluation"):
            evaluation = self._start_evaluation() if self._evaluates_before(step) else None
        self._work_through(intake, tally, self._greedy_rewards(greedy), held)
        # Without a single group, too.
        self._worked_through = True
        self._turns.trained()
        with stages("rollout_wait"):
            self._batches.release(intake)
        self._record_samples(intake)
        if evaluation is not None:
            held.close()  # Answers are waited for.
        with stages("evaluation"):
            self._finish_evaluation(evaluation)
        self._report_unscored(intake)
        self.step += 1
        self.version += 1
        self._worked_through, self._at_boundary = False, True
        self.publish()
        self._turns.ended(intake, tally.train_s, evaluation.waited_s if evaluation else 0.0, tally.ahead_token_s)
        self._saving.poll()
        self._measured_at = self._clock()
        metrics = self._metrics(intake, tally, evaluation, self._measured_at - began)
        if self.config.train.kl_target and "kl" in metrics:
            actor = self.learner.actor
            actor.kl_coef = steered_kl_coef(actor.kl_coef, metrics["kl"], intake.samples_expected, self.config.train)
        ports.record(step, metrics)
        ports.emit(events.StepFinished(ts=time.time(), step=step, metrics=metrics))
        report = ports.rollout.report_step(step, metrics["step_s"], tally.train_s, metrics["trainer_wait_s"])
        self._batches.call(report, f"reporting step {step}")
        return metrics

    def _work_through(self, intake: Intake, tally: Tally, greedy: Mapping[int, float] | None, held: ExitStack) -> None:
        """Takes groups as they come; gradient for each; the optimizers at each mini-batch boundary. Interrupts are
        `held` from the last of them on."""
        self.learner.begin_step(self.step)
        while not intake.done:
            scoring_s = intake.scoring_waited_s
            with self.learner.stages("rollout_wait"):
                groups = self._next_groups(intake, tally)
            self.learner.stages.move("rollout_wait", "scoring_wait", intake.scoring_waited_s - scoring_s)
            began = self._clock()
            if greedy is not None:
                groups = self._with_baseline(groups, greedy)
            ends = intake.packer.mini_batch_complete
            if ends:
                self._at_boundary = False
            mini_batch = intake.packer.mini_batch if ends else None
            if ends and intake.done:
                held.enter_context(self.ports.held())
            steps = self.learner.learn(groups, tally, greedy or {}, mini_batch, self.ports.watch)
            self._worked_through = intake.done
            self._note_optimizer_steps(steps, tally)
            self._groups_learned_from += len(groups)
            tally.train_s += self._clock() - began

    def _next_groups(self, intake: Intake, tally: Tally) -> list[Group]:
        """Waits for complete groups. What came of others is looked at ahead meanwhile."""
        ranks, train = self.learner.ranks.size, self.config.train
        least_ahead = max(ranks, train.samples_ahead) if train.streaming and self.learner.looks_ahead else 0
        while (groups := self._turns.take(intake, not train.streaming, least_ahead)) is None:
            began = self._clock()
            samples = intake.take_ahead(least_ahead, ranks * train.tokens_per_micro_batch)
            self.learner.look(samples, self.ports.watch)
            tally.looked(samples, self._clock() - began)
        return groups

    def _greedy_rewards(self, intake: Intake | None) -> dict[int, float] | None:
        """Waits for the greedy answers that rewards are compared with; their rewards by prompt."""
        if intake is None:
            return None
        with self.learner.stages("rollout_wait"):
            samples = [group.samples[0] for group in intake.take(whole=True, watch=self.ports.watch)]
        self._batches.release(intake)
        self._report_unscored(intake)
        return {sample.id.prompt: value_of(sample) for sample in samples}

    def _with_baseline(self, groups: Sequence[Group], greedy: Mapping[int, float]) -> list[Group]:
        """Groups whose prompt's greedy answer has a reward; the others were told of as unscored."""
        return [group for group in groups if group.prompt.index in greedy]

    # ---- edges

    def publish(self) -> None:
        """Makes the weights as they are now version `self.version`, for every agent to pull.

        Returns once they are copied; who asks for samples of them waits until agents know of them.
        """
        with self.learner.stages("publish"):
            actor = self.learner.actor
            self._publishing.begin(self.version, self.learner.weights(), actor.config_json(), actor.named_shapes())

    # ---- evaluation

    def _evaluates_before(self, step: int) -> bool:
        every = self.config.train.eval_every
        return step % every == 0 if every else step == 0

    def _start_evaluation(self) -> Intake | None:
        """Sends the held-out questions to the engines, by the path of any other batch."""
        if not self.ports.eval_prompts:
            return None
        return self._batches.submit_evaluation(self.step, self.version)

    def _evaluate_now(self) -> None:
        with self._batches.cancelled_on_error():
            self._publishing.settle(self.ports.watch)
            self._finish_evaluation(self._start_evaluation())

    def _finish_evaluation(self, intake: Intake | None) -> None:
        """Waits for an evaluation's answers, and tells what they came to (`evaluation`)."""
        if intake is None:
            return
        ports, rollout = self.ports, self.config.rollout
        groups = intake.take(whole=True, watch=ports.watch)
        self._batches.release(intake)
        self._record_samples(intake)
        self._report_unscored(intake)
        found = evaluate(groups, ports.eval_prompts, ports.eval_sets, rollout.eval_samples, rollout.eval_k)
        if found.whole is None:
            self._warn("evaluation", f"no answer of {intake.batch} could be scored; accuracy is not known")
            return
        self.ports.emit(
            events.Evaluated(
                ts=time.time(),
                step=self.step,
                weight_version=self.version,
                accuracy=found.whole.accuracy,
                questions=found.whole.questions,
                wall_s=intake.rollout_s,
                whole=found.whole,
                sets=found.sets,
            )
        )

    # ---- records

    def _record_samples(self, intake: Intake) -> None:
        if samples := intake.kept():
            self.ports.record_samples(self.step, samples)

    def _metrics(self, intake: Intake, tally: Tally, evaluation: Intake | None, step_s: float) -> dict[str, float]:
        waited_s = intake.waited_s + (evaluation.waited_s if evaluation else 0.0)
        packer, actor = intake.packer, self.learner.actor
        spent_s = self.learner.stages.take()
        counted = {
            "samples": float(intake.samples_expected),
            "unscored": float(sum(packer.unscored_samples.values())),
            "unscored_share": sum(packer.unscored_samples.values()) / intake.samples_expected,
            "failed": float(intake.failed),
            "truncated_share": intake.truncated / intake.samples_expected,
            "response_tokens": float(intake.tokens),
            "response_tokens_mean": intake.tokens / max(1, intake.samples_expected - intake.failed),
            "groups_dropped": float(sum(packer.dropped_groups.values())),
            "rollout_s": intake.rollout_s,
            "reward_s_mean": intake.reward_s_mean,
            "rollout_tokens_per_s": intake.tokens / max(1e-9, intake.rollout_s),
            "trainer_wait_s": waited_s,
            "step_s": step_s,
            "publish_stall_s": self._publishing.stall_s,
            **self._turns.metrics(),
            **intake.conversation_metrics(),
            "optimizer_steps_skipped_total": float(actor.steps_skipped),
        }
        if self.config.train.kl_coef:
            counted["kl_coef"] = actor.kl_coef
        counted |= length_metrics(intake.lengths)
        learned = self.learner.metrics()
        learning_s = sum(spent_s.get(stage, 0.0) for stage in LEARNING)
        speeds = speed_metrics(learned, learning_s, self._peak_of_all() if learned["learned/flops"] else None)
        return {**tally.metrics(), **learned, **speeds, **counted, **stage_metrics(spent_s, step_s)}

    def _peak_of_all(self) -> float:
        """FLOP/s of all ranks' devices: stated, known by name, or measured once."""
        if self._peak is None:
            actor, stated = self.learner.actor, self.config.train.peak_tflops * 1e12
            name = torch.cuda.get_device_name(actor.device) if actor.device.type == "cuda" else ""
            self._peak = stated or known_peak(name, actor.dtype) or measured_peak(actor.device, actor.dtype)
        return self._peak * self.learner.ranks.size

    def _note_optimizer_steps(self, steps: Sequence[Steps], tally: Tally) -> None:
        for done in steps:
            if done.actor is not None:
                tally.lr = done.actor.lr
                if done.actor.applied:
                    tally.grad_norms.append(done.actor.grad_norm)
                    tally.optimizer_steps += 1
                else:
                    self._warn("optimizer", f"step {self.step}: the optimizer step was left out: {done.actor.cause}")
            if done.critic is not None and done.critic.applied:
                tally.critic_grad_norms.append(done.critic.grad_norm)
            elif done.critic is not None:
                self._warn("optimizer", f"step {self.step}: the critic's step was left out: {done.critic.cause}")

    def _report_unscored(self, intake: Intake) -> None:
        causes = intake.unscored()
        if causes:
            dropped = sum(intake.packer.dropped_groups.values())
            self.ports.emit(events.Unscorable(ts=time.time(), step=self.step, causes=causes, groups_dropped=dropped))

    def _warn_of_truncation(self) -> None:
        sampling = self.config.rollout.sampling
        cut = [name for name, on in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k > 0)) if on]
        if cut:
            names = " and ".join(f"rollout.sampling.{name}" for name in cut)
            self._warn(
                "sampling",
                f"{names} cut the distribution that training samples are drawn from, and the gradient is that of the "
                "whole one (as in verl): it is biased",
            )

    def _warn(self, where: str, message: str) -> None:
        self.ports.emit(events.Warned(ts=time.time(), where=where, message=message))

    @property
    def _position(self) -> Position:
        return Position(self.step, self.version, self.config.seed)
