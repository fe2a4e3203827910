"""Code against tests: what counts as passing, here and by way of a pool, on a stand-in of SandboxFusion's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.errors import RewardError
from penstock.reward import ComputePool, Endpoint, Sample, Sandbox, SandboxTransport, Score, Scorer, Unscored
from penstock.reward.sandbox import Limits, available_isolation
from penstock.reward.verifiers import code_tests, sandbox_fusion
from penstock.reward.verifiers.cases import cases_of, code_of

GENEROUS = {"timeout_s": 30.0, "cpu_s": 20}
PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}]
ADDS = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```"

needs_sandbox = pytest.mark.skipif(available_isolation()[0] == "none", reason=str(available_isolation()[1]))


def scored(sample: Sample, **options: Any) -> Score:
    result = code_tests(**{**GENEROUS, **options})(sample)
    assert isinstance(result, Score), result
    return result


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "response", "passed"),
    [
        (PAIRS, ADDS, 1.0),
        (json.dumps(PAIRS), ADDS, 1.0),
        ({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}, ADDS, 1.0),
        ({"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}, ADDS, 0.5),
        (PAIRS, "print(3)", 0.5),
        ({"fn_name": "add", "inputs": [[1, 2], [0.1, 0.2]], "outputs": [3, 0.3]}, FUNCTION, 1.0),
        ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, FUNCTION, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, FUNCTION, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [True]}, FUNCTION, 0.0),
        ({"fn_name": "f", "inputs": [[2]], "outputs": [4]}, "class Solution:\n def f(self, x): return x * x", 1.0),
        (["assert add(1, 2) == 3", "assert add(1, 1) == 3"], FUNCTION, 0.5),
        ("def check(f):\n    assert f(1, 2) == 3\ncheck(add)", FUNCTION, 1.0),
    ],
)
def test_the_usual_shapes_of_tests_are_run(
    make_sample: Callable[..., Sample], tests: object, response: str, passed: float
) -> None:
    score = scored(make_sample(response, tests=tests))
    assert (score.value, score.parts["pass_rate"]) == (float(passed == 1.0), passed)


@needs_sandbox
@pytest.mark.parametrize("leave", ["raise SystemExit(0)", "import os; os._exit(0)", "print('penstock-result:true')"])
def test_code_that_ends_early_has_not_passed(make_sample: Callable[..., Sample], leave: str) -> None:
    assert scored(make_sample(leave, tests=["assert False"])).value == 0.0
    assert scored(make_sample(leave, tests={"fn_name": "f", "inputs": [[]], "outputs": [1]})).value == 0.0


@needs_sandbox
def test_each_test_has_a_verdict_and_the_parts_tell_their_shares(make_sample: Callable[..., Sample]) -> None:
    code = """
match input():
    case "right": print("ok")
    case "wrong": print("no")
    case "slow":
        import time; time.sleep(600)
    case "hungry": x = bytearray(10 ** 10)
    case "loud":
        while True: print("x" * 1000)
    case "broken": 1 / 0
"""
    names = ["right", "wrong", "slow", "hungry", "loud", "broken"]
    tests = [{"input": name, "output": "ok"} for name in names]
    score = scored(make_sample(code, tests=tests), timeout_s=4.0)
    verdicts = ["pass_rate", "wrong_answer", "time_out", "memory", "output_limit", "crashed"]
    assert score == Score(0.0, dict.fromkeys(verdicts, pytest.approx(1 / 6)))


@needs_sandbox
def test_options_change_the_reward_and_the_limits(make_sample: Callable[..., Sample]) -> None:
    half = make_sample("print(3)", checks=PAIRS)
    assert scored(half, field="checks", reward="fraction").value == 0.5
    wrong_first = make_sample("print(10)", tests=PAIRS)
    assert scored(wrong_first, stop_at_failure=True).parts == {"pass_rate": 0.0, "wrong_answer": 0.5}
    hungry = make_sample("x = bytearray(3 * 10 ** 8)\nprint(3)", tests=PAIRS[:1])
    assert scored(hungry, memory_mb=128).parts["memory"] == 1.0
    assert scored(hungry, memory_mb=1024).value == 1.0
    loud = make_sample("print('x' * 10 ** 5)", tests=PAIRS[:1])
    assert "output_limit" in scored(loud, output_bytes=1000).parts


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_mb": 1}, "memory_mb = 1"),
        ({"python": "/usr/bin/no-such-python"}, "no-such-python"),
        ({"python": "/bin/false"}, "an empty program fails in the sandbox"),
        ({"read_only": ["/no/such/folder"]}, "/no/such/folder, which is not here"),
    ],
)
def test_a_sandbox_in_which_every_answer_would_fail_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RewardError, match=says):
        code_tests(**options)


@pytest.mark.parametrize(
    "tests",
    [None, [], {}, "", 7, [1], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}],
)
def test_a_row_without_tests_leaves_the_sample_unscored(make_sample: Callable[..., Sample], tests: object) -> None:
    result = code_tests(network="allow")(make_sample("print(3)", tests=tests, answer="1"))
    assert isinstance(result, Unscored)
    assert "questions.jsonl:8, field 'tests'" in result.cause


def test_expected_outputs_are_never_in_the_program_or_its_input() -> None:
    for tests in ([{"input": "1", "output": "sesame"}], {"fn_name": "f", "inputs": [[1]], "outputs": ["sesame"]}):
        (case,) = cases_of(tests, "code")
        assert "sesame" not in case.program + case.stdin
        assert case.expected == "sesame"


def test_the_last_block_is_the_code() -> None:
    assert code_of("```\na\n```\n```python\nb\n```") == "b\n"
    assert code_of("print(1)") == "print(1)"


@needs_sandbox
async def test_in_process_mode_a_row_can_have_a_scorers_worth_of_tests(make_sample: Callable[..., Sample]) -> None:
    options = {**GENEROUS, "reward": "fraction"}
    scorer = Scorer("penstock.reward.verifiers:code_tests", options=options, mode="process", processes=1, timeout_s=100)
    assert (await scorer.score(make_sample("print(3)", tests=PAIRS))) == Score(
        0.5, {"pass_rate": 0.5, "wrong_answer": 0.5}
    )
    await scorer.close()


class Service:
    """Answers `/run_code` as SandboxFusion does, from a list of answers, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.url = ""

    async def run_code(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response(self.answers.pop(0))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service, app = Service(), web.Application()
    app.router.add_post("/run_code", service.run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield service
    await runner.cleanup()


def answer(stdout: str = "", status: str = "Finished", code: int | None = 0, stderr: str = "") -> dict[str, Any]:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    whole = "Success" if status == "Finished" and code == 0 else "Failed"
    return {"status": whole, "message": "", "compile_result": None, "run_result": result, "files": {}}


async def test_a_service_is_asked_in_its_own_words(make_sample: Callable[..., Sample], service: Service) -> None:
    service.answers = [answer("3\n"), answer("10\n")]
    async with ComputePool([Endpoint(service.url, models=("code",))]) as pool:
        verify = sandbox_fusion(pool, timeout_s=7, memory_mb=99, model="code")
        assert await verify(make_sample(ADDS, tests=PAIRS)) == Score(1.0, {"pass_rate": 1.0})
    first = {"code": code_of(ADDS), "stdin": "1 2\n", "language": "python", "run_timeout": 7.0, "memory_limit_MB": 99}
    assert sorted(service.asked, key=lambda body: body["stdin"])[0] == {**first, "model": "code"}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (answer("4\n"), "wrong_answer"),
        (answer(status="TimeLimitExceeded", code=None), "time_out"),
        (answer(code=1, stderr="Traceback\nMemoryError"), "memory"),
        (answer(code=1, stderr="ZeroDivisionError"), "crashed"),
        ({**answer(), "run_result": None, "compile_result": {"status": "Finished", "return_code": 1}}, "crashed"),
    ],
)
async def test_what_a_service_says_is_a_verdict(
    make_sample: Callable[..., Sample], service: Service, given: dict[str, Any], part: str
) -> None:
    service.answers = [{**given, "status": "Failed"} if part != "wrong_answer" else given]
    async with ComputePool([Endpoint(service.url)]) as pool:
        result = await sandbox_fusion(pool)(make_sample(ADDS, tests=PAIRS[:1]))
    assert result == Score(0.0, {"pass_rate": 0.0, part: 1.0})


async def test_a_service_that_ran_nothing_leaves_the_sample_unscored(
    make_sample: Callable[..., Sample], service: Service
) -> None:
    service.answers = [{"status": "SandboxError", "message": "no room", "run_result": None}]
    async with ComputePool([Endpoint(service.url)]) as pool:
        result = await sandbox_fusion(pool)(make_sample(ADDS, tests=PAIRS[:1]))
        assert isinstance(result, Unscored)
        assert "no room" in result.cause
        other = sandbox_fusion(pool, language="cpp")
        assert isinstance(await other(make_sample(FUNCTION, tests=["assert add(1, 2) == 3"])), Unscored)


async def test_a_pool_is_named_by_its_file(
    make_sample: Callable[..., Sample], service: Service, tmp_path: Path
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[[endpoints]]\nurl = "{service.url}"\n')
    service.answers = [answer("3"), answer("11")]
    options = {"pool": str(file), "reward": "fraction"}
    scorer = Scorer("penstock.reward.verifiers:sandbox_fusion", options=options)
    result = await scorer.score(make_sample("x", tests=[PAIRS[0], {"input": "", "output": "11"}]))
    assert isinstance(result, Score)
    assert result.value in (0.0, 1.0)  # the two answers may come in either order
    await scorer.close()
    with pytest.raises(RewardError, match="give a ComputePool"):
        sandbox_fusion(7)


@needs_sandbox
async def test_a_sandbox_of_this_machine_answers_as_a_service_does(make_sample: Callable[..., Sample]) -> None:
    here = SandboxTransport(Sandbox(Limits(wall_s=30, cpu_s=20)), concurrency=2)
    endpoint = here.endpoint("sandbox")
    assert (endpoint.url, endpoint.concurrency) == ("local:sandbox", 2)
    async with ComputePool([endpoint], transports={"local:sandbox": here}) as pool:
        verify = sandbox_fusion(pool, timeout_s=30, reward="fraction")
        tests = [*PAIRS, {"input": "x", "output": "3"}]
        assert await verify(make_sample(ADDS, tests=tests)) == Score(
            pytest.approx(2 / 3), {"pass_rate": pytest.approx(2 / 3), "crashed": pytest.approx(1 / 3)}
        )
        slow = await sandbox_fusion(pool, timeout_s=0.5)(make_sample("while True: pass", tests=PAIRS[:1]))
        assert slow == Score(0.0, {"pass_rate": 0.0, "time_out": 1.0})
