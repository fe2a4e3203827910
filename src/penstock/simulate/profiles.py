"""What a machine does with a model: decode, prefill, training and weight transfer in seconds, as a handful of numbers.

The roofline of one decode step with B sequences that hold K tokens of context between them:

    step_s = step_base_s + B * sequence_s + K * context_s

`step_base_s` is reading the weights once and launching the kernels, `sequence_s` the arithmetic of one token,
`context_s` reading one token's keys and values. Decides nothing; `fit` finds the numbers of a real run, and
`shipped/*.toml` derives those of three published models, each in a comment.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.config.run import RolloutConfig
from penstock.config.toml import read_toml
from penstock.errors import ConfigError
from penstock.weights.choose import DRAFT_PARTS

__all__ = ["Lengths", "MachineProfile", "Prices", "Profile", "Training", "load_profile", "shipped", "shipped_names"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FOLDER = Path(__file__).parent / "shipped"
RUN = RolloutConfig()
"""As a run has it where its configuration says nothing."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineProfile(_Strict):
    """One rollout instance."""

    step_base_s: Positive
    sequence_s: NotNegative
    context_s: NotNegative
    prefill_s_per_token: NotNegative
    max_running: Annotated[int, Field(ge=1)]
    kv_tokens: Annotated[int, Field(ge=1)]
    """Tokens of context that fit at once."""
    shared_prompts: bool = False
    """A prompt is prefilled, and its keys and values held, once while any of its samples runs. Each sequence still
    reads all of its context at each step: only kernels made for it read a common part once for several of them."""
    link_gbit_s: Positive = 50.0
    apply_s: NotNegative = 0.0
    """A difference applied to the version before and verified, by all cores that do it."""
    load_s: NotNegative = 0.0
    """A version that is whole in host memory, into the engine, as this package's agents do it."""
    boot_s: NotNegative = 0.0
    """From being asked for to being connected, engine started."""

    def slower_by(self, factor: float) -> MachineProfile:
        """One like it that takes so many times as long for all that it computes."""
        times = ("step_base_s", "sequence_s", "context_s", "prefill_s_per_token")
        return self.model_copy(update={name: factor * getattr(self, name) for name in times})

    def step_s(self, running: float, context: float) -> float:
        """One decode step; `context` is the sum over the running sequences."""
        return self.step_base_s + running * self.sequence_s + context * self.context_s


class Training(_Strict):
    """The reserved machines as a trainer."""

    s_per_token: NotNegative
    """All passes over one token of prompt or response."""
    optimizer_s: NotNegative = 0.0
    switch_s: NotNegative = 0.0
    """From generating to training, and back: weights resharded, memory handed over."""
    micro_batch_samples: Annotated[int, Field(ge=1)] = 32
    ahead_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of `s_per_token`, passes that need no whole group: old and reference log-probabilities, values."""
    ahead_samples: Annotated[int, Field(ge=1)] = 1
    """Where such passes are made ahead, they are of so many samples at least."""
    reward_s: NotNegative = 0.0
    """From a sample's last token to its score, on average; the machines generate meanwhile."""


class Prices(_Strict):
    """Dollars an hour."""

    reserved: NotNegative
    """All reserved machines together."""
    spot: NotNegative
    """One remote instance."""
    on_demand: NotNegative
    """One remote instance that is never taken away."""
    kinds: dict[str, NotNegative] = {}
    """One remote instance of another kind (`Profile.kinds`); where it has none here, it costs as much as any."""


class Lengths(_Strict):
    """Response lengths: log-normal about a median that grows over the run, cut at a limit."""

    prompt_tokens: Annotated[int, Field(ge=1)] = 512
    median_tokens: Positive = 6000
    spread: NotNegative = 0.6
    """Standard deviation of the logarithm; `prompt_share` of its square is the prompt's, the rest the sample's."""
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    max_tokens: Annotated[int, Field(ge=1)] = 14336
    growth_per_step: NotNegative = 0.0
    """The median's growth from one step to the next, as a share."""
    quantiles: tuple[Positive, ...] = ()
    """At equal distances from 0 to 1, as a run had them: then lengths are drawn by them, and `median_tokens` and
    `spread` only say what they have. A sweep over either reshapes them."""


class Profile(_Strict):
    """All that a simulation needs to know of a run, but the trace."""

    name: str
    prompts: Annotated[int, Field(ge=1)] = 128
    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    weights_gb: NotNegative
    difference_gb: NotNegative | None = None
    """Of a version to the one before it, on the wire. None: every version travels whole."""
    encode_s: NotNegative = 0.0
    """A version checked and its difference encoded, at the reserved machines, once for all; it is sent meanwhile."""
    store_gbit_s: Positive = 200.0
    """The link out of the reserved machines, shared by all that pull."""
    reserved_instances: Annotated[int, Field(ge=0)]
    reserved_beside: bool = False
    """They generate while the trainer trains, all the time (`rollout.window = "off"`), and take no turns with it. The
    speeds of both are then those that they have beside each other, as a run's are."""
    reserved: MachineProfile
    spot: MachineProfile
    kinds: dict[str, MachineProfile] = {}
    """Remote machines of other kinds: a node named `KIND:...` in a trace is one."""
    training: Training
    prices: Prices
    lengths: Lengths = Lengths()
    max_pending_per_instance: Annotated[int, Field(ge=1)] = RUN.max_pending_per_instance
    heartbeat_s: Positive = RUN.heartbeat_s
    """Between two reports of a machine's work."""

    @model_validator(mode="after")
    def _kinds_are_known(self) -> Profile:
        if unknown := sorted(self.prices.kinds.keys() - self.kinds.keys()):
            raise ValueError(f"prices.kinds has a price of {', '.join(unknown)}, and kinds no such machine")
        return self

    def remote(self, node: str) -> MachineProfile:
        """What a node of a trace is."""
        return self.kinds.get(_kind(node), self.spot)

    def price_per_h(self, node: str, spot: bool = True) -> float:
        """Dollars that a node costs; `spot`: as one that may be taken away."""
        return self.prices.kinds.get(_kind(node), self.prices.spot) if spot else self.prices.on_demand

    def pull_s(self, node: str = "", sharing: int = 1) -> float:
        """Seconds that a machine pulls a whole version, where so many share the store's link. Nothing but the link
        counts: whoever loads each tensor as it comes is done with the last."""
        return 8 * self.weights_gb / self._gbit_s(node, sharing)

    def agent_pull_s(self, node: str = "", sharing: int = 1, difference: bool = False) -> float:
        """The same as this package's agents do it: they load a version once it is whole and verified, and pull a
        `difference` where they hold the version before, unless the whole is there sooner.

        Encoding, wire and applying go on side by side, one part of `DRAFT_PARTS` after the other: the longest of them
        counts, and a part of each other one.
        """
        return self._agent_pull_s(self.remote(node), self._gbit_s(node, sharing), difference)

    def own_pull_s(self, difference: bool = False) -> float:
        """The same of a reserved machine that generates beside the trainer: the store's link is not between them."""
        return self._agent_pull_s(self.reserved, self.reserved.link_gbit_s, difference)

    def _agent_pull_s(self, machine: MachineProfile, gbit_s: float, difference: bool) -> float:
        there_s = 8 * self.weights_gb / gbit_s
        if difference and self.difference_gb is not None:
            stages = (self.encode_s, 8 * self.difference_gb / gbit_s, machine.apply_s)
            there_s = min(there_s, max(stages) + (sum(stages) - max(stages)) / DRAFT_PARTS)
        return there_s + machine.load_s

    def least_pull_s(self, node: str = "") -> float:
        """Alone, by whichever way, of whoever held the version before."""
        return min(self.pull_s(node), self.agent_pull_s(node, difference=True))

    def _gbit_s(self, node: str, sharing: int) -> float:
        return min(self.remote(node).link_gbit_s, self.store_gbit_s / max(1, sharing))


def _kind(node: str) -> str:
    return node.partition(":")[0]


def load_profile(path: Path) -> Profile:
    """From TOML. Raises ConfigError that names the file and each key that is wrong."""
    table = read_toml(path)
    try:
        profile = Profile.model_validate(table)
    except ValidationError as error:
        problems = "\n".join(
            # What several keys say together has no place of its own.
            f"  - {'.'.join(map(str, problem['loc']))}: {problem['msg']} (is {problem['input']!r:.80})"
            if problem["loc"]
            else f"  - {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise ConfigError(f"{path}: not a profile:\n{problems}") from None
    lengths = profile.lengths
    said = "median_tokens" in lengths.model_fields_set
    if (
        lengths.quantiles
        and said
        and not math.isclose(lengths.median_tokens, statistics.median(lengths.quantiles), rel_tol=0.01)
    ):
        raise ConfigError(
            f"{path}: lengths.median_tokens is {lengths.median_tokens:g}, and lengths.quantiles, by which lengths are "
            f"drawn, have {statistics.median(lengths.quantiles):.4g} in the middle; leave the file as it was and say "
            f"--grid lengths.median_tokens={lengths.median_tokens:g}, which scales them, or take the quantiles out"
        )
    return profile


def shipped_names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def shipped(name: str) -> Profile:
    """A profile by name, or by the path of its file."""
    path = FOLDER / f"{name}.toml"
    if path.exists():
        return load_profile(path)
    if name.endswith(".toml"):
        return load_profile(Path(name))
    raise ConfigError(
        f"there is no profile {name!r}; there are: {', '.join(shipped_names()) or 'none'}; or give a path"
    )
