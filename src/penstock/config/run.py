"""What a run is, as strict models: one field, one meaning, with its unit in the name and its help below it.

Unknown keys are refused. `config.load` layers TOML files and `--a.b=c` overrides and turns validation errors into
messages that name the key, the value and what is allowed.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.cluster.errors import ClusterError
from penstock.cluster.execute import parse_execute
from penstock.config.fleet import FleetConfig
from penstock.config.reward_model import RewardModelConfig
from penstock.config.section import Section
from penstock.config.train import TrainConfig


class SourceConfig(Section):
    """One source of prompts."""

    kind: Literal["jsonl", "parquet", "hf", "reasoning_gym"]
    """`jsonl` and `parquet` files, a Hugging Face data set saved on disk (`hf`), or a task of reasoning-gym."""
    path: str = ""
    """File or folder; for `reasoning_gym` the task's name."""
    prompt_field: str = "prompt"
    """Field of a row that holds the question: text, or a list of chat messages. (`question` for reasoning-gym.)"""
    size: int | None = Field(default=None, ge=1)
    """Take at most this many rows. reasoning-gym tasks need it."""
    seed: int = Field(default=0, ge=0)
    """First item seed of a reasoning-gym task: item i uses seed + i, so keep ranges of two sources far apart."""
    options: dict[str, str | int | float | bool | list[int] | list[float] | list[str]] = {}
    """Options of a reasoning-gym task."""
    name: str = ""
    """What a held-out set is called where its accuracy is told; by default after its `path`."""

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).stem or self.kind


class DataConfig(Section):
    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = []
    system_prompt: str = ""
    """Put before each question where the tokenizer has a chat template."""
    chat_template: Literal["auto", "never", "require"] = "auto"
    """`auto` uses the tokenizer's chat template where it has one."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are refused or skipped, as `overlong_prompts` says."""
    overlong_prompts: Literal["error", "skip"] = "error"
    """Skipped prompts are counted and reported."""
    shuffle: bool = True
    """Draw training prompts in a seeded order that changes each epoch."""


class WarmStartConfig(Section):
    """Makes a small model on this machine and teaches it a first, faulty version of the task."""

    recipe: str = ""
    """Import path (`package.module:function`) of a recipe; empty for none."""
    hidden_size: int = Field(default=128, ge=8)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    intermediate_size: int = Field(default=352, ge=8)
    steps: int = Field(default=250, ge=1)
    """Supervised steps."""
    batch_size: int = Field(default=128, ge=1)
    """Examples in a supervised step."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak, after `warmup_steps`; falls to 0 along a cosine."""
    warmup_steps: int = Field(default=50, ge=0)
    seed: int = Field(default=0, ge=0)
    cache_dir: str = ".cache/models"
    """Models made once are kept here, under the hash of everything that went into them."""


class ModelConfig(Section):
    path: str = ""
    """A Hugging Face model folder with its tokenizer. Empty: made by `warm_start`."""
    warm_start: WarmStartConfig = WarmStartConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that engines get and of the arithmetic of the passes. What is trained and kept in checkpoints is
    always float32: most steps are smaller than bfloat16 can hold."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if bool(self.path) == bool(self.warm_start.recipe):
            raise ValueError(
                "give either model.path or model.warm_start.recipe, and not both; "
                "--model.warm_start.recipe= leaves out the recipe of a layer below"
            )
        return self


class SamplingConfig(Section):
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    stop_token_ids: list[int] = []
    """Besides the tokenizer's end-of-sequence token."""


class EngineConfig(Section):
    """The engines that `penstock train` starts on this machine."""

    count: int = Field(default=1, ge=0)
    """0: only machines that join from outside."""
    kind: Literal["builtin", "vllm", "sglang"] = "builtin"
    """`vllm` and `sglang`: servers that their agents start, found on PATH."""
    command: str = ""
    """Command line that starts such a server, with {model}, {host} and {port}; by default the agent's own."""
    options: dict[str, str | int | float | bool] = {}
    """Options of such a server by their own names, such as `{ enforce-eager = true }`; true is a bare flag."""
    codes: bool = False
    """Such a server computes with the codes of quantized weights (`weights.codec` int8 or fp8, docs/reshard.md); else
    it is given the numbers that they stand for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    max_running: int = Field(default=64, ge=1)
    """Most sequences decoded at once by one engine."""
    max_context_tokens: int = Field(default=2048, ge=2)
    kv_cache_mib: int = Field(default=1024, ge=1)
    """Bound on the KV cache of one engine; `max_running` is lowered to fit it."""
    frame_steps: int = Field(default=8, ge=1)
    """Decode steps gathered in one token frame: what losing a machine can cost in tokens for each sample."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one engine."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share the model of one engine. The built-in one does so on CPU; a server is told its own way."""
    restarts: int = Field(default=3, ge=0)
    """Engines of this machine that die by accident are replaced so often in a run, each time after a longer wait."""
    tokens_per_s: float = Field(default=0, ge=0)
    """Above 0: the engine is paced to this rate, as a remote machine would be (for tests and benchmarks)."""

    @model_validator(mode="after")
    def _one_engine(self) -> EngineConfig:
        if self.kind == "builtin" and (self.command or self.options):
            raise ValueError('rollout.engines.command and options are for kind = "vllm" or "sglang"')
        if self.kind != "builtin" and self.tokens_per_s:
            raise ValueError(f'rollout.engines.tokens_per_s makes a paced engine, and kind is "{self.kind}"')
        if self.tensor_parallel > 1 and self.tokens_per_s:
            raise ValueError("rollout.engines.tokens_per_s makes a paced engine, which has no tensor_parallel")
        return self


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=8, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    eval_sampling: SamplingConfig | None = None
    """For evaluation; by default greedy with the same token limit."""
    eval_samples: int = Field(default=1, ge=1)
    """Answers to each held-out question. More than one, for pass@k, need an `eval_sampling` above temperature 0."""
    eval_k: list[int] = [1, 4, 8]
    """The k of pass@k; those above `eval_samples` are left out."""
    engines: EngineConfig = EngineConfig()
    window: Literal["off", "auto"] | float = "off"
    """Engines that share the trainer's own devices generate for a window of each step, then hand over to training: for
    as long as is worked out to be best (`auto`), or so many seconds. `off`: they generate when there is work, beside
    training, as on devices of their own. Without a machine from outside the window is as long as the rollout
    (docs/windows.md)."""
    max_pending_per_instance: int = Field(default=16, ge=1)
    """Samples sent to an instance beyond what it can run at once; the rest wait at the manager."""
    balance: str = Field(default="penstock.rollout.balanced:Balanced", pattern=r"^[\w.]+:\w+$")
    """Where samples go: import path of a policy, package.module:Class (docs/simulate.md shows one)."""
    deadline_s: float = Field(default=600, gt=0)
    """A step that makes no progress for so long ends in an error with the cause."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """An instance silent for three heartbeats is given up for dead."""
    load_deadline_s: float = Field(default=120, gt=0)
    """An instance that takes longer to load a weight version is given up for dead; one whose engine server starts with
    its first has `--engine-start-s` more."""
    stall_s: float = Field(default=300, gt=0)
    """An instance that has work and gives no token for so long is given up, even where it says that it lives."""

    @model_validator(mode="after")
    def _answers_differ(self) -> RolloutConfig:
        if self.eval_samples > 1 and (self.eval_sampling is None or self.eval_sampling.temperature == 0):
            raise ValueError(
                f"rollout.eval_samples={self.eval_samples}: greedy answers to one question are all the same; give "
                "rollout.eval_sampling a temperature above 0"
            )
        if any(k < 1 for k in self.eval_k):
            raise ValueError(f"rollout.eval_k={self.eval_k}: each must be at least 1")
        return self

    @field_validator("window")
    @classmethod
    def _seconds(cls, window: str | float) -> str | float:
        if isinstance(window, float) and not 0 <= window < math.inf:
            raise ValueError(f"rollout.window={window:g}: a window in seconds must be at least 0")
        return window


class ManagerConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 to let other machines join."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port."""
    token_env: str = "PENSTOCK_TOKEN"
    """Environment variable with the shared token; a random one is made where it is not set and a door needs it."""
    agent_token_env: str = "PENSTOCK_AGENT_TOKEN"
    """Environment variable with a token for agents alone; where it is not set, the shared one opens their door."""
    trainer_token_env: str = "PENSTOCK_TRAINER_TOKEN"
    """The same for the trainer."""
    operator_token_env: str = "PENSTOCK_OPERATOR_TOKEN"
    """The same for operators."""
    max_frame_mib: int = Field(default=64, ge=1, le=1024)
    journal: Literal["off", "never", "interval", "always"] = "interval"
    """Keeps every unfinished sample on the disk, in the run's folder, so that the manager may die and a resumed run
    finds what was generated. Says when the disk is waited for: `never` (power loss may cost half a minute of tokens;
    the death of a process costs nothing), once a second (`interval`), or before anybody is answered (`always`)."""
    journal_max_mib: int = Field(default=16384, ge=1)
    """One that grows larger is suspended, with a warning; it needs about three times the unfinished samples' size."""
    trainer_grace_s: float = Field(default=300, ge=0)
    """A trainer that is gone finds its batches if it is back, or resumed, within so long; 0: they are void at once."""
    reconnect_s: float = Field(default=60, ge=0)
    """A manager that is lost is dialled again for so long before the run ends; 0: it ends at once."""
    restarts: int = Field(default=3, ge=0)
    """The run's own manager is started again so often where its process ends by accident."""


class TlsConfig(Section):
    """TLS for the run's manager and weight store. All are PEM files; without `cert` both speak in the clear."""

    cert: str = ""
    """Certificate that manager and weight store show, with its chain. It names every host that they are reached by."""
    key: str = ""
    """Its private key."""
    client_ca: str = ""
    """Every peer must have a certificate of this CA; one that names a role opens that door without a token."""
    ca: str = ""
    """CA by which the run's own trainer and engines know manager and store; by default the system's."""
    own_cert: str = ""
    """Certificate of the run's own trainer and engines, which `client_ca` asks for. It names no role: tokens do."""
    own_key: str = ""
    """Its private key."""

    @model_validator(mode="after")
    def _belong_together(self) -> TlsConfig:
        for cert, key, name in ((self.cert, self.key, ""), (self.own_cert, self.own_key, "own_")):
            if bool(cert) != bool(key):
                raise ValueError(f"tls.{name}cert and tls.{name}key belong together; one of them is missing")
        if not self.cert and (self.client_ca or self.ca or self.own_cert):
            raise ValueError("tls.cert and tls.key are missing; the other TLS files are of no use without them")
        if self.client_ca and not self.own_cert:
            raise ValueError("tls.client_ca asks every peer for a certificate; give the run's own as tls.own_cert")
        return self


class WeightsConfig(Section):
    host: str = "127.0.0.1"
    """Address that the weight store listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    advertise: str = ""
    """Host name or address that agents reach the store by, or several with commas between them; by default `host`."""
    chunk_mib: float = Field(default=4.0, ge=1 / 64, le=1024)
    connections: int = Field(default=2, ge=1)
    """TCP connections of one agent's pull; there is at least one to each address."""
    keep_versions: int = Field(default=2, ge=1)
    """Versions held in host memory."""
    keep_gib: float = Field(default=0.0, ge=0)
    """Host memory for all of them; the newest is held whatever its size. 0 is no bound but `keep_versions`."""
    codec: Literal["auto", "raw", "lossless", "delta", "zipnn", "int8", "fp8"] = "auto"
    """How this machine's engines fetch weights: as they are, compressed without loss, or as the difference to the
    version before; `auto` measures link and processors and takes what ends soonest. All of these are exact. `int8` and
    `fp8` quantize matrices by output channel (docs/reshard.md); `auto` never does. `zipnn` is lossless by that package,
    where trainer and engine have it installed."""
    keep_base: bool = True
    """Engines keep the version that they serve in host memory too, so that the next can come as a difference."""
    relay: bool = False
    """Engines pass on to each other what they have of a version, so that the trainer's link carries it about once."""
    ways: list[Literal["shm", "mooncake"]] = ["shm"]
    """Faster ways than TCP to the trainer's copy, the first choice first, where both ends have them: shared memory for
    engines on this machine; Mooncake's transfer engine, which asks for no token and encrypts nothing."""
    resume: bool = False
    """Engines keep on disk what came of a version, so that one that is started again goes on from there."""


class RewardConfig(Section):
    function: str = "penstock.reward.verifiers:reasoning_gym_exact"
    """Import path (`package.module:function`) of `f(sample) -> float | Score`, sync or async."""
    options: dict[str, Any] = {}
    """Options of `function`, by name; one that it doesn't take is refused."""
    eval_function: str = ""
    """Scores the held-out answers, in the same form; by default `function`. Accuracy is the share of 1 or more."""
    eval_options: dict[str, Any] = {}
    """Options of `eval_function`; where that is left out, `options` holds for both."""
    mode: Literal["inline", "sync", "thread", "process", "ray"] = "inline"
    """How functions are called while rollouts and training go on. `thread`, also called `inline`: sync ones on threads
    of the trainer, async ones on its loop. `sync`: one sample after another. `process`: in processes that are killed at
    `timeout_s`, for verifiers that may hang or compute. `ray`: the same in actors on Ray."""
    processes: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=30.0, gt=0)
    """For one sample; then it is unscored."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """For importing the reward function, before the run starts."""
    concurrency: int = Field(default=256, ge=1)
    """Async reward calls in flight."""
    unscored: Literal["drop_group", "drop_sample"] = "drop_group"
    """What becomes of a group with an unscored member. Never zero."""
    model: RewardModelConfig = RewardModelConfig()

    @model_validator(mode="after")
    def _whose_options(self) -> RewardConfig:
        if self.eval_options and not self.eval_function:
            raise ValueError("reward.eval_options needs reward.eval_function; reward.options holds for both")
        return self


class EnvironmentConfig(Section):
    """What samples talk with, turn by turn (docs/environments.md)."""

    path: str = ""
    """Import path (`package.module:Class` or `./file.py:Class`) of an environment; empty for single answers. All that
    is said in a conversation, by the model or to it, counts towards `max_new_tokens`."""
    options: dict[str, Any] = {}
    """Options of it, by name."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of the model in one conversation; one that would go on then is truncated."""
    max_turn_tokens: int = Field(default=0, ge=0)
    """Bound on one turn of the model; 0: what is left of `max_new_tokens`. A turn that is cut short ends its sample."""
    max_observation_tokens: int = Field(default=0, ge=0)
    """An answer that is longer leaves its sample unscored; 0: only what is left of `max_new_tokens` bounds it."""
    timeout_s: float = Field(default=30.0, gt=0)
    """For one call; then the sample is unscored."""
    concurrency: int = Field(default=256, ge=1)
    """Calls in flight."""

    @model_validator(mode="after")
    def _whose_options(self) -> EnvironmentConfig:
        if self.options and not self.path:
            raise ValueError("environment.options needs environment.path")
        return self


class ClusterConfig(Section):
    """How the run's workers are called: those of `reward.model` and `train.reference` (docs/cluster.md)."""

    execute_mode: str = "all"
    """How calls are launched: `all` in turn, `all_multithread` from a pool of threads, or on `rank_zero` alone."""
    execute_threads: int = Field(default=8, ge=1)
    """Threads of the pool that launches calls, of the one for rewards, and most that synchronous reward functions run
    on in `reward.mode="thread"`."""

    @field_validator("execute_mode")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            return parse_execute(name)
        except ClusterError as error:
            raise ValueError(f"cluster.execute_mode: {error}") from None


class DrillConfig(Section):
    """A rehearsed accident: kills an engine during the run and starts another later."""

    kill_at: float | None = Field(default=None, gt=0, lt=1)
    """Share of the run's steps after which one engine gets SIGKILL in mid-generation."""
    restart_at: float | None = Field(default=None, gt=0, lt=1)
    """Share of the run's steps after which another engine is started; without `kill_at` there is nothing to replace."""

    @model_validator(mode="after")
    def _in_order(self) -> DrillConfig:
        if self.restart_at is not None and self.kill_at is not None and self.restart_at <= self.kill_at:
            raise ValueError("drill.restart_at must come after drill.kill_at")
        return self


class ObserveConfig(Section):
    view: Literal["auto", "live", "lines", "none"] = "auto"
    """`live` redraws the terminal, `lines` prints a line a step; `auto` takes `live` on a terminal."""
    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (the wandb extra). `offline` writes files in the run's folder, for `wandb sync`; `online` takes
    its key from the environment variable WANDB_API_KEY. A resumed run goes on in the same one."""
    wandb_project: str = "penstock"
    wandb_entity: str = ""
    """Team or user; by default the key's own."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between those of which a few samples are kept in samples.jsonl, to be read by people; 0 keeps none."""
    samples_per_step: int = Field(default=4, ge=0)
    """Samples kept of such a step, and of each evaluation; 0 keeps none."""


class RunConfig(Section):
    """A run of `penstock train`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Letters, digits and any of `._-`."""
    output_dir: str = "runs"
    """The run's folder is made here as `<name>-<number>`."""
    seed: int = Field(default=0, ge=0)
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    fleet: FleetConfig = FleetConfig()
    manager: ManagerConfig = ManagerConfig()
    tls: TlsConfig = TlsConfig()
    weights: WeightsConfig = WeightsConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    cluster: ClusterConfig = ClusterConfig()
    train: TrainConfig = TrainConfig()
    observe: ObserveConfig = ObserveConfig()
    drill: DrillConfig = DrillConfig()

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.rollout.prompts_per_step % self.train.mini_batches_per_step:
            raise ValueError(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step} is not divisible by "
                f"train.mini_batches_per_step={self.train.mini_batches_per_step}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.sampling.max_new_tokens
        if longest > self.rollout.engines.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.sampling.max_new_tokens = {longest} is over "
                f"rollout.engines.max_context_tokens={self.rollout.engines.max_context_tokens}"
            )
        if self.rollout.engines.codes and (
            self.weights.codec not in ("int8", "fp8") or self.rollout.engines.kind == "builtin"
        ):
            raise ValueError(
                'rollout.engines.codes is for rollout.engines.kind = "vllm" or "sglang" with weights.codec = "int8" or '
                '"fp8": there are no codes to compute with otherwise'
            )
        if self.environment.max_turn_tokens > self.rollout.sampling.max_new_tokens:
            raise ValueError(
                f"environment.max_turn_tokens={self.environment.max_turn_tokens} is over "
                f"rollout.sampling.max_new_tokens={self.rollout.sampling.max_new_tokens}, which all turns share"
            )
        temperature = self.rollout.sampling.temperature
        if temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature=0: greedy answers to one prompt are all the same and teach nothing; "
                "must be above 0 (1 is usual; evaluation has rollout.eval_sampling)"
            )
        if temperature != 1 and self.train.old_logprobs == "rollout":
            raise ValueError(old_logprobs_refusal(temperature))
        if temperature != 1 and self.train.rollout_correction != "off":
            raise ValueError(
                f"train.rollout_correction can't be used with rollout.sampling.temperature={temperature:g}: engines "
                "report log-probabilities at temperature 1"
            )
        evaluation = self.rollout.eval_sampling
        if evaluation is not None:
            needed = self.data.max_prompt_tokens + evaluation.max_new_tokens
            if needed > self.rollout.engines.max_context_tokens:
                raise ValueError(
                    f"data.max_prompt_tokens + rollout.eval_sampling.max_new_tokens = {needed} is over "
                    f"rollout.engines.max_context_tokens={self.rollout.engines.max_context_tokens}"
                )
        if longest > self.train.tokens_per_micro_batch:
            raise ValueError(
                f"train.tokens_per_micro_batch={self.train.tokens_per_micro_batch} is below the longest "
                f"sample of {longest} tokens (data.max_prompt_tokens + rollout.sampling.max_new_tokens)"
            )
        return self


def old_logprobs_refusal(temperature: float) -> str:
    """Why the engine's log-probabilities can't be the ratio's denominator at this temperature."""
    return (
        f'train.old_logprobs="rollout" can\'t be used with rollout.sampling.temperature={temperature:g}: engines '
        "report log-probabilities at temperature 1, and the ratio needs those of the distribution that tokens were "
        'drawn from; use "auto" or "recompute"'
    )
