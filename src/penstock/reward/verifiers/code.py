"""Verifiers of code: the row's tests are run on it, here in a sandbox or by services that run code.

Decide what a verdict for each test makes of the reward. What tests mean is `cases`' business, how a program is held is
`sandbox`'s, and where it runs, for `sandbox_fusion`, is the compute pool's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from penstock.errors import PoolError, RewardError
from penstock.reward.options import factory
from penstock.reward.sandbox import End, Limits, Run, Sandbox, SandboxError
from penstock.reward.verifiers.cases import Case, Verdict, cases_of, code_of
from penstock.sample import Sample, Score, Unscored

if TYPE_CHECKING:
    from penstock.reward.pool import ComputePool

__all__ = ["code_tests", "sandbox_fusion"]

Reward = Literal["all", "fraction"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
_VERDICTS = {
    End.TIME_OUT: Verdict.TIME_OUT,
    End.MEMORY: Verdict.MEMORY,
    End.OUTPUT: Verdict.OUTPUT,
    End.CRASHED: Verdict.CRASHED,
}


@factory
def code_tests(
    *,
    field: str = "tests",
    reward: Reward = "all",
    timeout_s: Seconds = 10.0,
    cpu_s: Count = 10,
    memory_mb: Count = 512,
    disk_mb: Count = 16,
    processes: Count = 32,
    open_files: Count = 64,
    output_bytes: Count = 1_000_000,
    network: Literal["deny", "allow"] = "deny",
    python: str = "",
    read_only: Sequence[str] = (),
    stop_at_failure: bool = False,
) -> Callable[[Sample], Score | Unscored]:
    """Runs the response's Python code (its last fenced block, or all of it) against the tests in the row's `field`.

    1 where all tests pass, else 0; with `reward="fraction"` the share that passes. Parts: `pass_rate`, and the share of
    each other verdict there is. Each test is a run of its own in a `Sandbox` (its limits are the options), for at most
    `timeout_s`. `stop_at_failure` runs no test after one that failed; those count as not passed. `read_only` names
    further folders that the code may read, such as packages for `python`. See `cases_of` for the shapes of tests.

    Raises:
        RewardError: there is no isolation here, an impossible limit, or not even an empty program runs within them.
    """
    limits = Limits(timeout_s, cpu_s, memory_mb, disk_mb, processes, open_files, output_bytes)
    sandbox = Sandbox(limits, network, python, tuple(read_only))
    sandbox.check()

    def verify(sample: Sample) -> Score | Unscored:
        cases = _cases(sample, field)
        if isinstance(cases, Unscored):
            return cases
        verdicts: list[Verdict] = []
        for case in cases:
            try:
                verdicts.append(verdict_of(case, sandbox.run(case.program, case.stdin)))
            except SandboxError as error:
                return Unscored(str(error))
            if stop_at_failure and verdicts[-1] is not Verdict.PASSED:
                break
        return score_of(verdicts, len(cases), reward)

    return verify


def verdict_of(case: Case, run: Run) -> Verdict:
    """What a run says of its test."""
    if run.end is not End.EXITED:
        return _VERDICTS[run.end]
    return Verdict.PASSED if case.right(run.stdout) else Verdict.WRONG


def score_of(verdicts: Sequence[Verdict], tests: int, reward: Reward) -> Score:
    """The reward of a sample with so many tests, of which these have been run."""
    rate = verdicts.count(Verdict.PASSED) / tests
    shares = {
        verdict.value.replace(" ", "_").replace("-", "_"): count / tests for verdict, count in Counter(verdicts).items()
    }
    shares.pop("passed", None)
    return Score(rate if reward == "fraction" else float(rate == 1.0), {"pass_rate": rate, **shares})


def _cases(sample: Sample, field: str) -> list[Case] | Unscored:
    try:
        return cases_of(sample.row.get(field), code_of(sample.response))
    except (ValueError, TypeError) as error:
        return Unscored(f"the row of {sample.prompt.source}, field '{field}': {error}")


@factory
def sandbox_fusion(
    pool: str | Any,
    *,
    field: str = "tests",
    reward: Reward = "all",
    timeout_s: Seconds = 10.0,
    memory_mb: Count = 512,
    language: str = "python",
    model: str = "",
) -> Callable[[Sample], Awaitable[Score | Unscored]]:
    """As `code_tests`, run by services with SandboxFusion's HTTP API (`POST /run_code`), by way of a compute pool.

    `pool` is a `ComputePool`, or the TOML file that declares one; its endpoints share the tests by their limits, and a
    `SandboxTransport` is one of them as well. `model` picks endpoints where others of the pool do something else.
    Languages other than Python take tests by input and output only. A test that gets no run leaves the sample unscored.

    Raises:
        RewardError: tests can't be put in that language; ConfigError: the file declares no pool.
    """
    from penstock.reward.pool import ComputePool

    runner: ComputePool = ComputePool.from_toml(pool) if isinstance(pool, str) else pool
    if not isinstance(runner, ComputePool):
        raise RewardError(f"sandbox_fusion: pool is {type(pool).__name__}; give a ComputePool or the path of its TOML")
    about = {"language": language, "run_timeout": timeout_s, "memory_limit_MB": memory_mb}
    about |= {"model": model} if model else {}

    async def verify(sample: Sample) -> Score | Unscored:
        cases = _cases(sample, field)
        if isinstance(cases, Unscored):
            return cases
        if language != "python" and any(case.marked for case in cases):
            return Unscored(f"the row of {sample.prompt.source}, field '{field}': these tests are for Python only")
        asked = [asyncio.ensure_future(_asked(runner, case, about)) for case in cases]
        try:
            verdicts = await asyncio.gather(*asked)
        except (PoolError, SandboxError) as error:
            return Unscored(str(error))
        finally:
            for task in asked:  # where one has failed, the others' answers are of no use
                task.cancel()
        return score_of(verdicts, len(cases), reward)

    return verify


async def _asked(pool: ComputePool, case: Case, about: dict[str, Any]) -> Verdict:
    reply = await pool.request("/run_code", {"code": case.program, "stdin": case.stdin, **about})
    return fusion_verdict(case, reply.value)


def fusion_verdict(case: Case, answer: Any) -> Verdict:
    """What SandboxFusion's answer says of a test. Raises SandboxError where it did not run it."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise SandboxError(f"the sandbox service could not run the code: {str(message)[:300]}")
    compiled, run = answer.get("compile_result"), answer.get("run_result")
    if run is None and compiled is not None:
        return Verdict.TIME_OUT if compiled.get("status") == "TimeLimitExceeded" else Verdict.CRASHED
    if not isinstance(run, dict):
        raise SandboxError("the sandbox service's answer holds no run_result")
    if run.get("status") == "TimeLimitExceeded":
        return Verdict.TIME_OUT
    if run.get("return_code") != 0:
        last = (run.get("stderr") or "").strip().splitlines()[-1:]
        return Verdict.MEMORY if last and last[0].startswith("MemoryError") else Verdict.CRASHED
    return Verdict.PASSED if case.right(run.get("stdout") or "") else Verdict.WRONG
