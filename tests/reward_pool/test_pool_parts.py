"""The small parts: declarations, headers, kinds of failure, breaker, queue, retry budget."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.errors import ConfigError
from penstock.reward.breaker import Breaker, Health
from penstock.reward.headers import duration_s, retry_after_s, told_limits
from penstock.reward.limits import Endpoint, PoolOptions, load_pool, read_key
from penstock.reward.queue import DueQueue
from penstock.reward.retry import Kind, RetryBudget, kind_of_error, kind_of_status


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"request_per_minute": 5}, "did you mean 'requests_per_minute'"),
        ({"requests_per_minute": -1}, "'requests_per_minute' = -1: Input should be greater than 0"),
        ({"concurrency": 0}, "'concurrency' = 0"),
        ({"timeout_s": 0}, "'timeout_s' = 0"),
        ({"models": []}, "'models' is empty"),
        ({"headers": {"Authorization": "Bearer x"}}, "use api_key_env or api_key_file"),
        ({"api_key_env": "A", "api_key_file": "b"}, "not both"),
        ({"models": "judge"}, "'models' = 'judge': Input should be a list"),
        ({"headers": {"x-team": "rl\r\nx-other: 1"}}, "'headers' holds 'x-team', which can't be sent"),
        ({"headers": {"x team": "rl"}}, "'headers' holds 'x team', which can't be sent"),
        ({"name": "a\nb"}, "characters that no table can show"),
    ],
)
def test_a_wrong_declaration_is_refused_with_key_value_and_what_is_allowed(declared: dict, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Endpoint("https://a.example", **declared)
    assert says in str(error.value)


def test_an_address_that_is_none_or_holds_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        Endpoint("a.example")
    for holds_a_key in (
        "https://me:secret@a.example",
        "https://me:secret@a.example:port",
        "https://a.example/v1?key=secret",
    ):
        with pytest.raises(ConfigError, match="api_key_env or api_key_file") as error:
            Endpoint(holds_a_key)
        assert "secret" not in str(error.value)
    for address in (
        "http://",
        "http:///v1",
        "http://a:99999",
        "http://a:0",
        "http://a:port/v1",
        "http://a b/v1",
        "http://[::1",
    ):
        with pytest.raises(ConfigError, match=f"{re.escape(repr(address))} is no address"):
            Endpoint(address)
    assert Endpoint("http://[::1]:8000/v1").label == "http://[::1]:8000/v1"


def test_a_pool_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text('[[endpoints]]\nurl = "https://a.example/v1"\nmodels = ["judge-*"]\n[pool]\nattempts = 2\n')
    config = load_pool(file)
    assert config.endpoints[0].serves("judge-1")
    assert not config.endpoints[0].serves("rm")
    assert config.pool.attempts == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[endpoints]", "not TOML"),
        ("", "no endpoint"),
        ("[[endpoint]]\nurl='https://a.example'", "unknown key 'endpoint'"),
        ("[[endpoints]]\nurl='https://a.example'\nburst=0", "endpoints[0]: 'burst' = 0"),
        ("[[endpoints]]\nurl='https://a.example'\n[pool]\nretry=1", "unknown key 'retry'"),
    ],
)
def test_a_wrong_pool_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_pool(file)
    assert says in str(error.value)
    assert str(file) in str(error.value)


def test_a_missing_pool_file_and_a_missing_key_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_pool(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        read_key(Endpoint("https://a.example", api_key_env="NO_SUCH_KEY"))
    monkeypatch.setenv("A_KEY", "secret")
    assert read_key(Endpoint("https://a.example", api_key_env="A_KEY")) == "secret"
    (tmp_path / "key").write_text("from-file\n")
    assert read_key(Endpoint("https://a.example", api_key_file=str(tmp_path / "key"))) == "from-file"


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (b" \n", "is empty"),
        (b"s3cr\xff\xfet", "is not text"),
        (b"s3c\nret", "line breaks"),
        ("s3crét".encode(), "ASCII"),
    ],
)
def test_what_can_be_no_key_is_refused_and_not_shown(tmp_path: Path, held: bytes, says: str) -> None:
    (tmp_path / "key").write_bytes(held)
    with pytest.raises(ConfigError, match=says) as error:
        read_key(Endpoint("https://a.example", api_key_file=str(tmp_path / "key")))
    assert "s3c" not in str(error.value)


def test_a_key_where_its_name_belongs_is_refused_and_not_shown() -> None:
    for wrong in (
        {"api_key_env": "sk-s3cret"},
        {"headers": {"X-Api-Key": "s3cret"}},
        {"headers": {"api-key": "s3cret"}},
    ):
        with pytest.raises(ConfigError, match="api_key_env") as error:
            Endpoint("https://a.example", **wrong)
        assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match="api_key_header"):
        Endpoint("https://a.example", api_key_header="x key\r\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("6m0s", 360.0),
        ("120ms", 0.12),
        ("1h2m3s", 3723.0),
        ("1970-01-01T00:01:40Z", 100.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 100.0),
        ("1969-01-01T00:00:00Z", 0.0),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("6m oops", None),
    ],
)
def test_durations_of_all_providers_are_understood_and_others_left_out(text: str, seconds: float | None) -> None:
    assert duration_s(text, wall_s=0.0) == seconds


@given(st.text(max_size=20))
def test_no_header_can_break_the_parser(text: str) -> None:
    seconds = duration_s(text, wall_s=0.0)
    assert seconds is None or 0 <= seconds < math.inf


def test_limits_are_read_from_openai_and_anthropic_headers() -> None:
    openai = told_limits(
        {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-limit-tokens": "150000",
            "x-ratelimit-remaining-tokens": "149984",
            "x-ratelimit-reset-tokens": "6m0s",
        },
        0.0,
    )
    assert openai is not None
    assert openai.requests == (60, 59, 1.0)
    assert openai.tokens == (150000, 149984, 360.0)
    anthropic = told_limits(
        {
            "anthropic-ratelimit-requests-limit": "50",
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-requests-reset": "1970-01-01T00:00:30Z",
        },
        10.0,
    )
    assert anthropic is not None
    assert anthropic.requests == (50, 0, 20.0)
    assert anthropic.tokens is None
    assert told_limits({"content-type": "text/html"}, 0.0) is None
    assert retry_after_s({"retry-after-ms": "250", "retry-after": "9"}, 0.0) == 0.25
    assert retry_after_s({"retry-after": "2"}, 0.0) == 2.0


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, "", Kind.DONE),
        (429, "", Kind.TURNED_AWAY),
        (429, '{"error":{"code":"insufficient_quota"}}', Kind.SPENT),
        (402, "", Kind.SPENT),
        (503, "", Kind.TURNED_AWAY),
        (529, "", Kind.TURNED_AWAY),
        (500, "", Kind.BROKEN),
        (502, "", Kind.BROKEN),
        (408, "", Kind.BROKEN),
        (400, "", Kind.FINAL),
        (401, "", Kind.FINAL),
        (403, "", Kind.FINAL),
        (404, "", Kind.FINAL),
        (422, "", Kind.FINAL),
    ],
)
def test_each_status_has_its_kind(status: int, body: str, kind: Kind) -> None:
    assert kind_of_status(status, body) is kind


def test_exceptions_are_told_apart_by_type_by_status_and_by_the_users_hook() -> None:
    class Refused(Exception):
        status_code = 429

    assert kind_of_error(TimeoutError()) is Kind.BROKEN
    assert kind_of_error(ConnectionResetError()) is Kind.BROKEN
    assert kind_of_error(KeyError("x")) is Kind.FINAL
    assert kind_of_error(Refused()) is Kind.TURNED_AWAY
    assert kind_of_error(KeyError("x"), lambda error: Kind.BROKEN) is Kind.BROKEN
    assert kind_of_error(KeyError("x"), lambda error: None) is Kind.FINAL


def test_a_breaker_opens_after_failures_in_a_row_probes_once_and_doubles_its_pause() -> None:
    breaker = Breaker(threshold=3, pause_s=1.0, longest_s=3.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.succeeded()
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    assert breaker.ready_at(0.5) == 1.0
    breaker.sent()
    assert breaker.health is Health.HALF_OPEN
    assert breaker.ready_at(1.0) == math.inf, "one probe at a time"
    breaker.failed(1.0)
    assert breaker.ready_at(1.0) == 3.0, "twice as long"
    breaker.sent()
    breaker.failed(3.0)
    assert breaker.ready_at(3.0) == 6.0, "and no longer than the longest"
    breaker.sent()
    breaker.succeeded()
    assert breaker.ready_at(6.0) == 6.0
    assert breaker.health is Health.CLOSED


def test_a_retry_budget_earns_a_share_of_the_jobs_and_refills_with_time() -> None:
    budget = RetryBudget(share=0.2, reserve=2)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(5):
        budget.job()
    assert budget.take(0.0)
    assert not budget.take(0.0)
    assert budget.ready_at(0.0) == pytest.approx(50.0)
    assert budget.take(50.0)


class SmallBlocks(DueQueue):
    BLOCK = 4


class QueueIsASortedList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: DueQueue = SmallBlocks()
        self.model: list = []
        self.numbers = 0

    @rule(due=st.integers(0, 9))
    def add(self, due: int) -> None:
        job = SimpleNamespace(due=float(due), number=self.numbers)
        self.numbers += 1
        self.queue.add(job)
        self.model.append(job)
        self.model.sort(key=lambda j: (j.due, j.number))

    @rule(index=st.integers(0, 12))
    def pop(self, index: int) -> None:
        if index < len(self.model):
            assert self.queue[index] is self.model[index]
            assert self.queue.pop(index) is self.model.pop(index)
        else:
            with pytest.raises(IndexError):
                self.queue.pop(index)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            job = data.draw(st.sampled_from(self.model))
            self.model.remove(job)
            assert self.queue.remove(job)
            assert not self.queue.remove(job)

    @invariant()
    def same(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)


TestQueue = QueueIsASortedList.TestCase
TestQueue.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_options_refuse_what_can_not_be() -> None:
    with pytest.raises(ConfigError, match="hedge_share"):
        PoolOptions(hedge_share=1.5)
    with pytest.raises(ConfigError, match="unknown key"):
        PoolOptions(hedges=1)  # type: ignore[call-arg]
