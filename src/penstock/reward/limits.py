"""What a user declares about services and about the pool over them: limits, prices, routes, patience.

Decides what a declaration may say and how it is read from TOML; unknown keys and impossible values are refused with
the key, the value and what is allowed. Refuses to know how limits are kept (`pacer`, `admission`) or used
(`schedule`). Holds names of keys (an environment variable, a file), never a key itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import os
import re
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as _validated

from penstock.errors import ConfigError

__all__ = [
    "Endpoint",
    "FunctionLimits",
    "PoolConfig",
    "PoolOptions",
    "declared",
    "load_functions",
    "load_pool",
    "read_declared",
    "read_key",
]

_T = TypeVar("_T")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
KEY_HEADERS = frozenset(("authorization", "api-key", "x-api-key"))
"""Headers that hold keys, in lower case: never declared as they are, since declarations are shown."""
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _say(error: ValidationError, owner: type, where: str) -> ConfigError:
    """All of a declaration's faults in one message: key, value, what is allowed."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = [field.name for field in dataclasses.fields(owner)]
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"unknown key '{key}'; {hint}")
        elif fault["type"] in ("missing", "missing_argument"):
            lines.append(f"'{key}' is missing")
        else:
            what = f"'{key}' = {fault['input']!r}: " if key else ""
            said = fault["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
            lines.append(f"{what}{said}")
    return ConfigError(f"{where}: " + "; ".join(lines))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def declared(cls: type[_T]) -> type[_T]:
    """A frozen dataclass, checked by pydantic, that raises `ConfigError` for what it refuses."""
    made: Any = _validated(cls, frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
    check: Callable[..., None] = made.__init__

    @functools.wraps(check)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise _say(error, made, cls.__name__) from None

    made.__init__ = init
    return made


def _check_address(url: str) -> None:
    """Raises ValueError for an address that no request could be sent to, or that a path can't be put behind."""
    try:
        address = urllib.parse.urlsplit(url)
        whole = bool(address.hostname) and (address.port is None or address.port > 0) and not re.search(r"\s", url)
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"'url' = {url!r} is no address: it needs a host, and a port from 1 to 65535 if any")
    if address.query or address.fragment:
        raise ValueError("'url' must end with its path; a key belongs into api_key_env or api_key_file")


@declared
class Endpoint:
    """One service of the pool, with what its owner says about it. What isn't declared is learned."""

    url: str
    """Base address, such as `https://a.example/v1`; or `local:NAME` for a transport given to the pool by name."""
    _: dataclasses.KW_ONLY
    name: str = ""
    """How tables and events call it; the address if empty."""
    models: tuple[str, ...] = ("*",)
    """Shell patterns of the model names it serves; the first pool endpoint isn't special, all that match compete."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Model name as asked for -> model name as this service knows it."""
    requests_per_minute: Positive | None = None
    """At most this many in any 60 s, and paced evenly within; learned if undeclared."""
    tokens_per_minute: Positive | None = None
    """At most this many prompt and output tokens in any 60 s; estimated from a request's text and limits before."""
    burst: Count | None = None
    """Requests that may leave at once after a pause; a tenth of a second's worth (at least 1) if undeclared."""
    concurrency: Count | None = None
    """At most this many in flight; learned if undeclared."""
    price_per_1k_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """In the currency of the pool's `max_spend`."""
    price_per_request: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    weight: Positive = 1.0
    """Preference: expected finish times count divided by it, so 2 is chosen while at most twice as slow."""
    timeout_s: Positive = 120.0
    """Longest wait for one attempt's whole answer."""
    connect_timeout_s: Positive = 10.0
    """Longest wait for name look-up, TCP and TLS together."""
    api_key_env: str = ""
    """Environment variable that holds the service's key."""
    api_key_file: str = ""
    """File that holds the service's key; read when it is first needed."""
    api_key_header: str = "Authorization"
    """Header that takes the key: `Authorization` as `Bearer KEY`, any other (such as `api-key`) as it is."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Sent with every request. Not for keys: use `api_key_env` or `api_key_file`."""
    refunds_cancelled: bool = False
    """The provider gives back the quota of a request that is cancelled."""

    @model_validator(mode="after")
    def _address(self) -> Endpoint:
        if not self.url.startswith(("http://", "https://", "local:")):
            raise ValueError("'url' must start with http://, https:// or local:")
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ValueError("'url' holds a user or password; put keys into api_key_env or api_key_file")
        if not self.url.startswith("local:"):
            _check_address(self.url)
        if self.api_key_env and self.api_key_file:
            raise ValueError("give either api_key_env or api_key_file, not both")
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError("'api_key_env' must be the name of an environment variable; what it holds is no name")
        for header in self.headers:
            if header.lower() in {*KEY_HEADERS, self.api_key_header.lower()}:
                raise ValueError(
                    f"'headers' holds {header!r}, a key's place; use api_key_env or api_key_file, and api_key_header"
                )
        if not HEADER_NAME.fullmatch(self.api_key_header):
            raise ValueError(f"'api_key_header' = {self.api_key_header!r} is no name of a header")
        for header, value in self.headers.items():
            if not HEADER_NAME.fullmatch(header) or not value.isprintable():
                raise ValueError(
                    f"'headers' holds {header!r}, which can't be sent: a name or value with odd characters"
                )
        if not self.label.isprintable():
            raise ValueError(f"'name' = {self.label!r} holds characters that no table can show")
        if not self.models:
            raise ValueError("'models' is empty: the endpoint would never be used")
        return self

    @property
    def label(self) -> str:
        return self.name or self.url

    def serves(self, model: str) -> bool:
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)


@declared
class PoolOptions:
    """How the pool as a whole behaves."""

    _: dataclasses.KW_ONLY
    attempts: Count = 4
    """Attempts of one job that may break (time-out, reset, 5xx); being turned away (429) costs none."""
    timeout_s: Positive = 600.0
    """Deadline of a job, waiting included, unless the call names its own."""
    retry_share: Share = 0.2
    """Retries the pool may make, as a share of its jobs; beyond it retries wait, they aren't refused."""
    retry_reserve: Count = 50
    """Retries that are always allowed at first; refilled by time, one share of it each second / 10."""
    hedge_share: Share = 0.05
    """Second attempts of slow jobs, as a share of all jobs; 0 turns hedging off."""
    hedge_after_s: Positive | None = None
    """Age at which a job counts as slow; learned (95th percentile) if undeclared."""
    aging_s: Positive = 60.0
    """A job waits at most this long behind later jobs of the next higher priority."""
    patience_s: Positive = 60.0
    """A job without a deadline of its own is due this long after it was queued."""
    max_queued: Count = 1_000_000
    """Jobs waiting; more are refused."""
    max_in_flight: Count = 1024
    """Bound on what one endpoint of undeclared concurrency may be tried with."""
    max_spend: Positive | None = None
    """Money the pool may spend in its life, in the endpoints' currency."""
    seconds_per_unit: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How many seconds of waiting one unit of money is worth, when a dearer endpoint would finish sooner."""
    breaker_failures: Count = 5
    """Failures in a row that take an endpoint out."""
    breaker_pause_s: Positive = 1.0
    """First time out; doubled each time the probe fails, up to `breaker_pause_max_s`."""
    breaker_pause_max_s: Positive = 60.0


@declared
class FunctionLimits:
    """What a file says about a function under `accelerate`; what it leaves out is as the decorator says."""

    _: dataclasses.KW_ONLY
    timeout_s: Positive | None = None
    """Longest time for a call, waiting for its turn included."""
    attempts: Count | None = None
    """Tries of a call whose error another try may mend."""
    hedge_after_s: Positive | None = None
    """Age at which a call is started a second time."""
    hedge_share: Share | None = None
    """Second starts, as a share of all calls."""
    priority: float | None = None
    """Who waits with a higher one goes first."""
    concurrency: Count | None = None
    """Calls at once, for each key."""
    requests_per_minute: Positive | None = None
    """Calls in any 60 s, for each key."""
    burst: Count | None = None
    """Calls that may start at once after a pause."""


@declared
class PoolConfig:
    """A pool as a TOML file declares it, and the functions beside it."""

    endpoints: tuple[Endpoint, ...] = dataclasses.field(default_factory=tuple)
    pool: PoolOptions = dataclasses.field(default_factory=PoolOptions)
    functions: Mapping[str, FunctionLimits] = dataclasses.field(default_factory=dict)


def load_pool(path: str | os.PathLike[str]) -> PoolConfig:
    """Reads `[[endpoints]]`, `[pool]` and `[functions.NAME]` from a TOML file. All or nothing.

    Raises:
        ConfigError: no such file, not TOML, unknown key, impossible value, or no endpoint; names the file.
    """
    file = Path(path)
    data = _toml(file)
    endpoints = data.get("endpoints", [])
    if not isinstance(endpoints, list) or not endpoints:
        raise ConfigError(f'{file}: no endpoint; declare at least one as [[endpoints]] with url = "..."')
    read = tuple(read_declared(Endpoint, entry, f"{file}: endpoints[{n}]") for n, entry in enumerate(endpoints))
    pool = read_declared(PoolOptions, data.get("pool", {}), f"{file}: pool")
    return PoolConfig(read, pool, _functions(data, file))


def load_functions(path: str | os.PathLike[str]) -> Mapping[str, FunctionLimits]:
    """Reads `[functions.NAME]` from a file that may declare a pool as well.

    Raises:
        ConfigError: as `load_pool`, but for the missing endpoints.
    """
    file = Path(path)
    data = _toml(file)
    return load_pool(file).functions if "endpoints" in data else _functions(data, file)


def _toml(file: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    if unknown := sorted(data.keys() - {"endpoints", "pool", "functions"}):
        raise ConfigError(f"{file}: unknown key '{unknown[0]}'; known keys: endpoints, pool, functions")
    return data


def _functions(data: dict[str, Any], file: Path) -> dict[str, FunctionLimits]:
    tables = data.get("functions", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: 'functions' must hold tables: [functions.NAME]")
    return {name: read_declared(FunctionLimits, said, f"{file}: functions.{name}") for name, said in tables.items()}


def read_declared(kind: type[_T], data: Any, where: str) -> _T:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise _say(error, kind, where) from None


def read_key(endpoint: Endpoint) -> str:
    """The service's key, or "" where none is declared.

    Raises:
        ConfigError: the declared variable isn't set, the file can't be read, or what it holds can't be a key; the key
            itself is never in the message.
    """
    if endpoint.api_key_env:
        where = f"{endpoint.label}: api_key_env names {endpoint.api_key_env}, which"
        key = os.environ.get(endpoint.api_key_env, "")
    elif endpoint.api_key_file:
        where = f"{endpoint.label}: api_key_file {endpoint.api_key_file}"
        try:
            key = Path(endpoint.api_key_file).read_text()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where} is not text") from None
    else:
        return ""
    key = key.strip()
    if not key:
        raise ConfigError(f"{where} is {'not set' if endpoint.api_key_env else 'empty'}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where} holds characters that no key has: line breaks inside it, or others than ASCII")
    return key
