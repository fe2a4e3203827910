"""A run of `penstock train` on this machine: folder, model, prompts, processes, trainer, records, summary.

Wires the rooms together and decides nothing that a room decides. What was started is ended in the opposite order,
whatever happens; Ctrl-C and SIGTERM end a run like an error, with its records written and its children gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__, collector
from penstock.cli.announced import announced, reachable
from penstock.cli.interrupts import Interrupt, interruptible
from penstock.cli.run_doors import RunDoors, how_to_join, tokens_of
from penstock.cli.run_fleet import RunFleet, fleet_file
from penstock.cli.run_folder import find_run, how_to_go_on, locked, make_folder
from penstock.cli.run_ranks import RankWatch
from penstock.cli.run_records import open_metrics, write_model
from penstock.cli.run_reward_model import open_model_scorer, open_reference_scorer
from penstock.cli.run_start import (
    StepPrompts,
    checkpoint_to_evaluate,
    checkpoint_to_go_on,
    held_out_questions,
    load_tokenizer,
    stop_ids,
)
from penstock.cli.run_watch import RunWatch
from penstock.config.run import RunConfig
from penstock.data import PromptOrder, PromptSet, load_train_and_eval
from penstock.environments import EnvironmentHost, load_environment
from penstock.errors import CheckpointError, ConfigError, EngineError, PenstockError, RolloutError
from penstock.instance.builtin.spec import parse_model_spec
from penstock.observe import events
from penstock.observe.engine_tokens import tokens_of_engines
from penstock.observe.log import EventLog, read_events
from penstock.observe.metrics import read_metrics
from penstock.observe.samples import SamplesLog
from penstock.observe.state import FleetSnapshot, RunView
from penstock.observe.summary_tally import SummaryTally
from penstock.observe.terminal import View, open_view
from penstock.reward.scorer import Scorer
from penstock.rollout.client import RolloutClient
from penstock.rollout.doors import Role, Tokens
from penstock.train.checkpoint import Checkpoints
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer, TrainerPorts
from penstock.train.ports import SampleScorer
from penstock.train.preflight import check as preflight
from penstock.train.processes import FLEET_FILE, READY_FILE, LocalProcesses
from penstock.train.ranks import Ranks
from penstock.train.start import follow, make_learner
from penstock.train.warm_start import ensure_model
from penstock.weights import WeightStore
from penstock.weights.addresses import first_host
from penstock.weights.ways import lenders_of

if TYPE_CHECKING:
    from penstock.observe.summary import Summary
    from penstock.wire import FleetStatus

CONNECT_S = 20.0
CLOSE_S = 1.0
GOODBYE_S = 2.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(config: RunConfig, resume: str | None, *, eval_only: bool = False) -> int:
    """Trains as `config` says, in a new folder or, with `resume` (a folder, or `latest`), in that run's own.

    With `eval_only` it evaluates, in a new folder, the checkpoint that `resume` names, or the model as it is.
    Of ranks that torchrun started, the first one does all that; the others learn with it.
    """
    with (
        interruptible() as interrupt,
        contextlib.closing(Ranks.from_environment()) as ranks,
        contextlib.closing(RankWatch.of(ranks)) as watch,
    ):
        try:
            return _run_rank(config, resume, ranks, eval_only, interrupt)
        except BaseException as error:
            # What the loss of another rank leads to is told as that: followers and leader meet it as broken sockets.
            lost = watch.explained(error, how_to_go_on(sys.argv[1:], Path("latest"), ranks.size), interrupt.at)
            if lost is None:
                raise
            raise lost from error


def _run_rank(config: RunConfig, resume: str | None, ranks: Ranks, eval_only: bool, interrupt: Interrupt) -> int:
    if not ranks.leads:
        follow(config, ranks)
        return 0
    preflight(config)
    if eval_only:
        if not config.data.eval:
            raise ConfigError("--eval-only: data.eval is empty, so there is nothing to evaluate on")
        checkpoint = checkpoint_to_evaluate(config, resume) if resume else None
    else:
        checkpoint = checkpoint_to_go_on(config, find_run(config, resume)) if resume else None
    folder = checkpoint.parent.parent if checkpoint and not eval_only else make_folder(config)
    with locked(folder):
        return _Run(config, folder, checkpoint, ranks, interrupt, eval_only).carry_out()


class _Run:
    """One run from its first event to its summary."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        checkpoint: Path | None,
        ranks: Ranks,
        interrupt: Interrupt,
        eval_only: bool = False,
    ) -> None:
        self.config = config
        self.interrupt = interrupt
        self.eval_only = eval_only
        self.ranks = ranks
        self.folder = folder
        self.checkpoint = checkpoint
        """Where to go on from."""
        self.began = time.monotonic()
        self.gone: set[str] = set()
        """Names of instances that the manager gave up or saw leave."""
        self.closing = contextlib.ExitStack()
        self.tally = SummaryTally()
        """Of this part of the run, for a summary where the disk has no whole log of it."""
        self.view: View
        self.events: EventLog

    def carry_out(self) -> int:
        """0 when the run is done. Raises what ended it, after everything is closed and recorded."""
        config = self.config
        self.view = self.closing.enter_context(open_view(config.observe.view, RunView(steps=config.train.steps)))
        outcome, summary = "done", None
        try:
            self.events = EventLog(self.folder / "events.jsonl", self.view.apply, self._notice, self.tally.take)
            self.closing.callback(self.events.close)
            self._emit(
                events.RunStarted(
                    ts=time.time(), run=self.folder.name, version=__version__, config=config.model_dump(mode="json")
                )
            )
            with contextlib.ExitStack() as parts:
                self._train(parts)
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self.interrupt.held():
                with contextlib.ExitStack() as last:
                    last.push(self.closing)
                    if hasattr(self, "events"):
                        wall_s = time.monotonic() - self.began
                        self._emit(events.RunFinished(ts=time.time(), wall_s=wall_s, outcome=outcome))
                        summary = self._summarise()
                if summary is not None:
                    self._show(summary, outcome)
        return 0

    # ---- the parts, in the order they are needed

    def _train(self, parts: contextlib.ExitStack) -> None:
        """Starts everything, trains, and leaves `parts` to end it all in the opposite order."""
        config = self.config
        edge = parts.enter_context(EdgeLoop())
        scorer, eval_scorer = self._scorers(edge, parts)
        base, train_prompts, eval_prompts, tokenizer = self._model_and_prompts(held_out_questions(config))
        if config.train.reference.workers and not self.eval_only:
            scorer = open_reference_scorer(config, base, scorer, edge, parts)
            parts.callback(self._closed_in_time, edge, scorer.close, "the reference's scorer")
        order = PromptOrder(
            len(train_prompts), config.rollout.prompts_per_step, config.seed, shuffle=config.data.shuffle
        )
        tokens = self._tokens()
        doors = RunDoors(config.tls, self._emit)
        processes = LocalProcesses(config, self.folder, tokens, self._emit)
        parts.callback(processes.close)
        told = fleet_file(config, self.folder)
        if config.fleet.wanted:
            (self.folder / FLEET_FILE).write_text(told.model_dump_json(indent=2))
            (self.folder / READY_FILE).unlink(missing_ok=True)  # An earlier manager's.
        operator, agent = tokens.of(Role.OPERATOR), tokens.of(Role.AGENT)
        fleet = RunFleet(config, told, operator, agent, edge, self._emit, doors.own)
        # The manager asks for machines as soon as it listens: should the rest not start, nobody else releases them.
        parts.callback(fleet.release)
        fleet.manager_url = manager_url = processes.start_manager()
        self._say(f"the manager listens at {manager_url}")
        self._tell_how_to_join()
        for _ in range(config.rollout.engines.count):
            processes.start_engine(manager_url, "the run starts")

        # The engines start up on their own while this process loads the model.
        learner, start_step = self._learner(base)
        store = WeightStore(
            self.folder.name,
            config.weights.host,
            config.weights.port,
            tokens.of(Role.AGENT),
            chunk_bytes=int(config.weights.chunk_mib * 2**20),
            keep_versions=config.weights.keep_versions,
            keep_bytes=int(config.weights.keep_gib * 2**30),
            advertise=config.weights.advertise,
            tls=doors.store,
            lenders=lenders_of(config.weights.ways, first_host(config.weights.advertise) or config.weights.host),
        )
        source = store.start()
        parts.callback(store.close)
        metrics = open_metrics(config, self.folder, self._emit)
        parts.callback(metrics.close)
        self.events.listen(metrics.take)
        samples = SamplesLog(self.folder / "samples.jsonl", emit=self._emit)
        parts.callback(samples.close)
        client = RolloutClient(
            manager_url,
            tokens.of(Role.TRAINER),
            self._emit,
            self._take_status,
            max_frame_bytes=config.manager.max_frame_mib * 2**20,
            reconnect_s=config.manager.reconnect_s,
            tls=doors.own,
        )
        parts.callback(self._closed_in_time, edge, client.close, "the manager's socket")
        edge.run(client.connect(), "connecting to the manager", CONNECT_S)
        watch = RunWatch(config, processes, manager_url, tokens.of(Role.OPERATOR), edge, self._emit, doors.own)
        self.events.listen(watch.notice)
        # Told first of all when the run ends, so that none outlives the five seconds whatever else takes its time.
        parts.callback(processes.terminate)
        parts.callback(client.expect_end)
        parts.callback(fleet.release)
        ports = TrainerPorts(
            rollout=client,
            scorer=scorer,
            weights=store,
            weights_source=source,
            decoder=tokenizer,
            prompts=StepPrompts(train_prompts.prompts, order),
            eval_prompts=eval_prompts.prompts,
            eval_sets={
                prompt.index: config.data.eval[origin].label
                for prompt, origin in zip(eval_prompts.prompts, eval_prompts.origins, strict=True)
            },
            stop_ids=stop_ids(base, tokenizer),
            edge=edge,
            eval_scorer=eval_scorer,
            environment=self._environment(tokenizer, parts),
            emit=self._emit,
            record=metrics.write,
            record_samples=samples.write,
            checkpoints=Checkpoints(self.folder / "checkpoints", config.train.keep_checkpoints),
            watch=watch,
            # Ranks that learn together are told to end together, and wait for each other in mid-pass.
            held=self.interrupt.held if self.ranks.size == 1 else contextlib.nullcontext,
        )
        trainer = Trainer(config, learner, ports, start_step=start_step)
        collector.settle()
        try:
            if self.eval_only:
                trainer.evaluate()
            else:
                trainer.run()
        except BaseException as error:
            if isinstance(error, RolloutError):
                processes.settle_manager()
            fleet.release()
            client.expect_end()
            processes.close()
            trainer.save_where_stopped()
            if isinstance(error, RolloutError):
                processes.check_manager()
            raise
        learner.end()
        watch.finish()
        fleet.release()
        # Here and not with the rest: the manager still tells what it had of each engine when that one said goodbye.
        processes.stop_engines()
        self._wait_for_goodbyes(set(processes.engines))
        if not self.eval_only:
            # Last: nobody whom somebody pays for waits for it.
            write_model(self.folder, self._emit)

    def _model_and_prompts(self, held_out: frozenset[str]) -> tuple[Path, PromptSet, PromptSet, Any]:
        said = 0.0

        def progress(step: int, steps: int, loss: float) -> None:
            nonlocal said
            if step >= steps or time.monotonic() - said > 5:
                said = time.monotonic()
                self._say(f"warm start: supervised step {step} of {steps}, loss {loss:.3f}")

        base = ensure_model(self.config.model, held_out, progress)
        self._check_model(base)
        tokenizer = load_tokenizer(base)
        train_prompts, eval_prompts = load_train_and_eval(self.config.data, tokenizer)
        for prompts, name in ((train_prompts, "training"), (eval_prompts, "evaluation")):
            left_out = ", ".join(f"{count} {cause}" for cause, count in prompts.skipped.items())
            self._say(f"{len(prompts)} {name} prompts" + (f"; left out: {left_out}" if left_out else ""))
        return base, train_prompts, eval_prompts, tokenizer

    def _check_model(self, base: Path) -> None:
        """Refuses a model that the run's engines can't run, or that its samples may outgrow."""
        try:
            text = (base / "config.json").read_text()
            positions = json.loads(text).get("max_position_embeddings")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{base / 'config.json'} is missing or broken: {error}") from error
        engines = self.config.rollout.engines
        if engines.kind == "builtin" and engines.count:
            try:
                parse_model_spec(text)
            except EngineError as error:
                advice = 'rollout.engines.kind = "vllm" or "sglang" may run it'
                raise ConfigError(f"{base / 'config.json'}: {error}; {advice}") from error
        rollout, prompt_tokens = self.config.rollout, self.config.data.max_prompt_tokens
        samplings = [rollout.sampling, *([rollout.eval_sampling] if rollout.eval_sampling else [])]
        longest = prompt_tokens + max(sampling.max_new_tokens for sampling in samplings)
        if isinstance(positions, int) and longest > positions:
            raise ConfigError(
                f"data.max_prompt_tokens + max_new_tokens = {longest} is over the {positions} positions of the model "
                f"in {base} (max_position_embeddings)"
            )

    def _learner(self, base: Path) -> tuple[Learner, int]:
        """What learns, and the step to go on with."""
        learner, position = make_learner(self.config, base, self.checkpoint, self.ranks)
        if self.checkpoint is not None:
            self._say(f"resumed from {self.checkpoint}")
        return learner, position

    def _scorers(self, edge: EdgeLoop, parts: contextlib.ExitStack) -> tuple[SampleScorer, Scorer]:
        """The reward's, and evaluation's apart from it, so that replacing the reward never replaces the yardstick."""
        reward = self.config.reward
        if reward.model.path:
            model = open_model_scorer(self.config, edge, parts)
            parts.callback(self._closed_in_time, edge, model.close, "the reward model's scorer")
            given = (reward.eval_function, reward.eval_options) if reward.eval_function else None
            return model, self._scorer(*(given or (reward.function, reward.options)), edge, parts)
        scorer = self._scorer(reward.function, reward.options, edge, parts)
        if not reward.eval_function or (reward.eval_function, reward.eval_options) == (reward.function, reward.options):
            return scorer, scorer
        return scorer, self._scorer(reward.eval_function, reward.eval_options, edge, parts)

    def _scorer(self, function: str, options: dict[str, Any], edge: EdgeLoop, parts: contextlib.ExitStack) -> Scorer:
        reward = self.config.reward

        async def start() -> Scorer:
            scorer = Scorer(
                function,
                options=options,
                mode=reward.mode,
                processes=reward.processes,
                timeout_s=reward.timeout_s,
                concurrency=reward.concurrency,
                threads=self.config.cluster.execute_threads,
                output=self.folder / "logs" / "reward.log",
            )
            await scorer.start()
            return scorer

        scorer = edge.run(start(), f"loading the reward function {function}", reward.load_timeout_s)
        parts.callback(self._closed_in_time, edge, scorer.close, "the scorer")
        return scorer

    def _environment(self, tokenizer: Any, parts: contextlib.ExitStack) -> EnvironmentHost | None:
        environment = self.config.environment
        if not environment.path:
            return None
        host = EnvironmentHost(
            load_environment(environment.path, environment.options, tokenizer),
            vocab_size=len(tokenizer),
            timeout_s=environment.timeout_s,
            max_observation_tokens=environment.max_observation_tokens,
            concurrency=environment.concurrency,
        )
        parts.callback(host.close)
        return host

    def _closed_in_time(self, edge: EdgeLoop, close: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        """A part on the edge loop that doesn't close in time must not keep the others from it."""
        try:
            edge.run(close(), f"closing {what}", CLOSE_S)
        except PenstockError as error:
            self._emit(events.Warned(ts=time.time(), where="shutdown", message=str(error)))

    def _tell_how_to_join(self) -> None:
        """For a manager that other machines can reach: what to type there, and what would keep them out."""
        manager, weights = self.config.manager, self.config.weights
        if manager.host in LOOPBACK:
            return
        listens = json.loads((self.folder / READY_FILE).read_text())["url"]
        there, secured = reachable(listens, announced(self.config)), how_to_join(self.config.tls)
        self._say(f"other machines join with: penstock join --manager {there}{secured}")
        if weights.host in LOOPBACK:
            message = f"machines that join can't fetch weights: weights.host is {weights.host}; set it to 0.0.0.0"
            self._emit(events.Warned(ts=time.time(), where="weights", message=message))

    def _tokens(self) -> Tokens:
        """The user's; a shared one, where a door needs it, is made and left in the folder for whoever may read it."""
        manager = self.config.manager
        tokens = tokens_of(manager, os.environ)
        if not all(tokens.of(role) for role in Role):
            token = secrets.token_urlsafe(32)
            path = self.folder / "token"
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
            self._say(
                f"{manager.token_env} is not set: a token was made, for machines that join and for operators: {path}"
            )
            tokens = replace(tokens, shared=token)
        return tokens

    def _wait_for_goodbyes(self, names: set[str]) -> None:
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and not names <= self.gone:
            time.sleep(0.02)

    # ---- records

    def _emit(self, event: events.Event) -> None:
        self.events.emit(event)

    def _say(self, message: str) -> None:
        self._emit(events.Noted(ts=time.time(), message=message))

    def _notice(self, event: events.Event) -> None:
        if isinstance(event, events.InstanceChanged) and event.after == "gone":
            self.gone.add(event.name)

    def _take_status(self, status: FleetStatus) -> None:
        self.view.apply_fleet(FleetSnapshot.of(status, time.time()))

    def _summarise(self) -> Summary | None:
        """Summary and curves out of the records; what can't be written is said and spoils nothing else."""
        from penstock.observe.plots import draw_curves
        from penstock.observe.summary import summarise, tally_summary, write_summary

        try:
            log = list(read_events(self.folder / "events.jsonl"))
            path = self.folder / "metrics.jsonl"
            metrics = read_metrics(path) if path.exists() else []
            drawn, accepted = tokens_of_engines(log)
            folder = str(self.folder)
            if self.events.dropped:
                message = f"{self.events.dropped} events are not on the disk; the summary is of this part of the run"
                self._emit(events.Warned(ts=time.time(), where="summary", message=message))
                summary = tally_summary(self.tally, folder=folder)
            else:
                summary = summarise(log, metrics, folder=folder, tokens_drawn=drawn, tokens_accepted=accepted)
        except (PenstockError, OSError) as error:
            self._emit(events.Warned(ts=time.time(), where="summary", message=str(error)))
            return None
        try:
            write_summary(self.folder / "summary.json", summary)
            draw_curves(self.folder / "curves.png", log, metrics, title=summary.run)
        except (PenstockError, OSError) as error:
            self._emit(events.Warned(ts=time.time(), where="summary", message=str(error)))
        # An interrupt that was held for as long as may be is one more reason for having no picture.
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - and so is whatever a library does
            message = f"there is no picture of the curves: {type(error).__name__}: {error}".rstrip(": ")
            self._emit(events.Warned(ts=time.time(), where="summary", message=message))
        return summary

    def _show(self, summary: Summary, outcome: str) -> None:
        from penstock.observe.summary import print_summary

        if self.config.observe.view == "none" or (not summary.steps and outcome != "done"):
            # A run that never came to its first step has nothing to sum up; its error is told.
            return
        print_summary(summary)
        if outcome == "done":
            return
        if any((self.folder / "checkpoints").glob("step-*")):
            print(f"go on with: {how_to_go_on(sys.argv[1:], self.folder, self.ranks.size)}")
        else:
            print("no checkpoint was written, so this run can't go on; train.checkpoint_every says how often one is")
