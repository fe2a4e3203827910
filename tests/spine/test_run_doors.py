"""`penstock train` behind doors of its own: role tokens and certificates for every part of a whole run."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_train_command import CONFIG, ENVIRONMENT

from certificates import Papers
from penstock.cli.run_doors import tokens_of
from penstock.config.run import ManagerConfig, RunConfig
from penstock.rollout.doors import Tokens
from penstock.tls import client_context
from penstock.train.processes import LocalProcesses

ROLES = ("agent", "trainer", "operator")
OWN = {f"PENSTOCK_{role.upper()}_TOKEN": f"the-{role}s" for role in ROLES}
LEAST = {"model": {"path": "unused"}, "data": {"train": [{"kind": "jsonl", "path": "unused"}]}}


class Run:
    """A run under mutual TLS whose doors have a token each."""

    def __init__(self, folder: Path, cache: Path, *words: str) -> None:
        self.folder = folder / "runs" / "tiny-001"
        self.papers = Papers.of(folder / "papers")
        tls = self.papers.server(client_ca=True)
        cert, key = self.papers.issue("the-run")
        files = {"cert": tls.cert, "key": tls.key, "client_ca": tls.client_ca, "ca": self.papers.ca_file}
        files |= {"own_cert": cert, "own_key": key}
        (folder / "tiny.toml").write_text(CONFIG.replace("CACHE", str(cache)))
        options = [f"--tls.{name}={path}" for name, path in files.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "train", "tiny.toml", "--data.eval=[]", *options, *words],
            cwd=folder,
            env={name: value for name, value in ENVIRONMENT.items() if name != "PENSTOCK_TOKEN"} | OWN,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def read_until(self, words: str) -> str:
        seen = []
        for line in self.process.stdout or ():
            seen.append(line)
            if words in line:
                return line
        raise AssertionError(f"the run ended before it said {words!r}: {''.join(seen)}")

    @property
    def url(self) -> str:
        return str(json.loads((self.folder / "manager.json").read_text())["url"])

    def join(self, token: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "join", "--manager", self.url, "--name", "spot", "--preemption", "none"]
            + ["--engine", "paced", "--tls-ca", self.papers.ca_file, *words],
            env={name: value for name, value in ENVIRONMENT.items() if name != "PENSTOCK_TOKEN"}
            | ({"PENSTOCK_TOKEN": token} if token else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def instances(self, token: str) -> list[dict[str, object]]:
        context = client_context(self.papers.ca_file, *self.papers.issue("someone"))
        request = urllib.request.Request(f"{self.url}/instances", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            rows: list[dict[str, object]] = json.load(answer)
            return rows

    def events(self, kind: str) -> list[dict[str, object]]:
        rows = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [row for row in rows if row["event"] == kind]

    def ends_well(self) -> dict[str, object]:
        output, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, output
        summary: dict[str, object] = json.loads((self.folder / "summary.json").read_text())
        assert summary["outcome"] == "done"
        assert summary["samples_lost"] == summary["samples_failed"] == 0
        return summary


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to be ended whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.slow
def test_a_whole_run_with_a_kill_goes_under_mutual_tls_with_a_token_for_each_role(
    tmp_path: Path, models: Path, ended: list[subprocess.Popen[str]]
) -> None:
    run = Run(tmp_path, models, "--train.steps=12", "--drill.kill_at=0.1", "--rollout.engines.tokens_per_s=500")
    ended.append(run.process)
    assert "https://127.0.0.1:" in run.read_until("the manager listens at")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        with ssl.create_default_context(cafile=run.papers.ca_file).wrap_socket(  # Without a certificate.
            socket.create_connection(("127.0.0.1", int(run.url.rpartition(":")[2]))),
            server_hostname="127.0.0.1",
        ) as bare:
            bare.recv(1)
    summary = run.ends_well()
    assert summary["instances_lost"] == 1, "the drill asks at the operators' door"
    assert not (run.folder / "token").exists(), "every door has a token of its own"
    assert {event["cause"] for event in run.events("connection_refused")} == {"it gave no certificate"}


@pytest.mark.slow
def test_a_machine_with_another_roles_token_is_told_so_on_both_sides_and_one_with_a_certificate_does_the_run(
    tmp_path: Path, models: Path, ended: list[subprocess.Popen[str]]
) -> None:
    run = Run(tmp_path, models, "--train.steps=2", "--rollout.engines.count=0")
    ended.append(run.process)
    run.read_until("the manager listens at")
    nobody = run.papers.issue("someone")
    wrong = run.join(OWN["PENSTOCK_TRAINER_TOKEN"], "--tls-cert", nobody[0], "--tls-key", nobody[1])
    ended.append(wrong)
    _, told = wrong.communicate(timeout=120)
    cause = "that token is a trainer's, and this door is for agents"
    assert wrong.returncode != 0
    assert cause in told
    with pytest.raises(urllib.error.HTTPError, match="403"):
        run.instances(OWN["PENSTOCK_AGENT_TOKEN"])
    assert run.instances(OWN["PENSTOCK_OPERATOR_TOKEN"]) == []
    own = run.papers.issue("agent/spot")
    ended.append(run.join("", "--tls-cert", own[0], "--tls-key", own[1]))
    run.ends_well()
    told_here = {(event["door"], event["cause"]) for event in run.events("connection_refused")}
    assert told_here == {
        ("agent", cause),
        ("operator", "that token is an agent's, and this door is for operators"),
    }


def environment_of(pid: int) -> dict[str, str]:
    """The kernel shows none for a moment after a process has begun."""
    deadline = time.monotonic() + 60
    while not (held := psutil.Process(pid).environ()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return held


def test_children_get_the_tokens_that_they_need_and_none_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MINE", "shared")
    manager = {"token_env": "MINE", "trainer_token_env": "NOT_SET"}
    config = RunConfig.model_validate(LEAST | {"manager": manager, "rollout": {"engines": {"tokens_per_s": 10}}})
    tokens = tokens_of(config.manager, os.environ)
    processes = LocalProcesses(config, tmp_path, tokens, lambda event: None)
    try:
        engine = processes.start_engine(processes.start_manager(), "a test")
        children = {"manager": processes._manager.process.pid, "engine": engine.process.pid}  # type: ignore[union-attr]
        held = {name: environment_of(pid) for name, pid in children.items()}
        words = " ".join(word for pid in children.values() for word in psutil.Process(pid).cmdline())
    finally:
        processes.close()
    values = {"shared", *OWN.values()}
    given = {name: {key: value for key, value in env.items() if value in values} for name, env in held.items()}
    assert given["engine"] == {"PENSTOCK_TOKEN": "the-agents"}
    assert given["manager"] == {
        "PENSTOCK_TOKEN": "shared",
        "PENSTOCK_AGENT_TOKEN": "the-agents",
        "PENSTOCK_OPERATOR_TOKEN": "the-operators",
    }
    assert not [value for value in values if value in words]


@pytest.mark.parametrize("role", ["shared", *ROLES])
def test_a_token_comes_from_the_variable_that_the_configuration_names(role: str) -> None:
    field = "token_env" if role == "shared" else f"{role}_token_env"
    doors = ManagerConfig.model_validate({field: "OF_MINE"})
    assert tokens_of(doors, {"OF_MINE": " x \n"}) == Tokens(**{role: "x"})


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"cert": "c"}, "tls.cert and tls.key belong together"),
        ({"cert": "c", "key": "k", "own_key": "k"}, "tls.own_cert and tls.own_key belong together"),
        ({"ca": "c"}, "tls.cert and tls.key are missing"),
        ({"cert": "c", "key": "k", "client_ca": "c"}, "give the run's own as tls.own_cert"),
    ],
)
def test_tls_files_that_do_not_make_sense_together_are_refused(tls: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RunConfig.model_validate(LEAST | {"tls": tls})


def test_weights_may_be_passed_on_where_the_run_has_tls() -> None:
    config = RunConfig.model_validate(LEAST | {"tls": {"cert": "c", "key": "k"}, "weights": {"relay": True}})
    assert config.weights.relay
