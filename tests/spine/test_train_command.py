"""`penstock train` as a person runs it: whole runs of a tiny model in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.cli import main
from penstock.cli.run_start import held_out_questions
from penstock.config import load_config
from penstock.train.warm_start import ensure_model

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}

CONFIG = """
name = "tiny"
output_dir = "runs"

[model.warm_start]
recipe = "penstock.train.recipes:spell_backward"
hidden_size = 32
layers = 2
heads = 2
intermediate_size = 64
steps = 4
batch_size = 16
warmup_steps = 1
cache_dir = "CACHE"

[data]
max_prompt_tokens = 16

[[data.train]]
kind = "reasoning_gym"
path = "spell_backward"
size = 60
seed = 1_000_000
options = { min_word_len = 3, max_word_len = 4 }

[[data.eval]]
kind = "reasoning_gym"
path = "spell_backward"
size = 10
seed = 500_000_000
options = { min_word_len = 3, max_word_len = 4 }

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
deadline_s = 60
heartbeat_s = 0.5
sampling = { max_new_tokens = 12 }
engines = { count = 2, max_running = 8, max_context_tokens = 64, kv_cache_mib = 8, frame_steps = 2 }

[reward]
function = "penstock.reward.verifiers:random_reward"

[train]
steps = 4
lr = 1e-3
min_samples_per_micro_batch = 4
tokens_per_micro_batch = 512
threads = 1

[observe]
view = "lines"
"""


ONE_ENGINE = "--rollout.engines.count=1"
PACED = "--rollout.engines.tokens_per_s=2000"
"""Engines without a model, for what is told of processes and not of tokens."""


@pytest.fixture
def work(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("CACHE", str(models)))
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "train", *words]


def train(work: Path, *words: str, expect: int = 0) -> str:
    done = subprocess.run(
        command("tiny.toml", *words), cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    output = done.stdout + done.stderr
    assert done.returncode == expect, output
    return output


def start(work: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("tiny.toml", *words),
        cwd=work,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"the run ended before it said {words!r}: {''.join(seen)}")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_a_drill_ends_with_everything_that_was_promised(work: Path) -> None:
    # Steps of this model are so short that the drill may have to settle for an idle engine, some steps later.
    output = train(work, "--train.steps=12", "--drill.kill_at=0.25", "--drill.restart_at=0.8", "--train.eval_every=6")
    folder = work / "runs" / "tiny-001"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "done"
    assert summary["steps"] == 12
    assert summary["samples_lost"] == summary["samples_failed"] == 0
    # 16 samples a step, and about 10 questions at steps 0, 6 and 12.
    assert summary["samples_finished"] >= 12 * 16 + 3 * 8
    assert summary["instances_lost"] == 1
    assert summary["tokens_recomputed"] is not None
    assert summary["tokens_generated"] > 0
    assert 0 <= summary["trainer_wait_share"] <= 1
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert "was killed (SIGKILL): killed on purpose by the drill" in output
    assert "the drill's replacement" in output
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == list(range(12))
    kinds = {row["event"] for row in lines(folder / "events.jsonl")}
    assert kinds >= {"run_started", "instance_changed", "step_finished", "evaluated", "engine_exited", "run_finished"}
    assert {row["batch"].split("-")[0] for row in lines(folder / "samples.jsonl")} == {"train", "eval"}
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = folder / "checkpoints" / "step-000012"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_stood(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no run named tiny" in refused(work, capfd, "--resume", "latest", expect=1)
    train(work, ONE_ENGINE, "--train.steps=2")
    # A later run that failed before its first checkpoint does not hide the one that is meant.
    (work / "runs" / "tiny-002").mkdir()
    output = train(work, ONE_ENGINE, "--resume", "latest")
    folder = work / "runs" / "tiny-001"
    assert "resumed from" in output
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert not any((work / "runs" / "tiny-002").iterdir())
    assert "nothing is left to do" in refused(work, capfd, "--resume", "latest", expect=2)


BIG_PASSES = "--train.tokens_per_micro_batch=2048"

HANGING = """
import time

def blocks_the_loop_now_and_then(sample):
    time.sleep(3600 if sample.id.batch == "train-2" else 0)
    return 1.0

async def blocks_the_loop(sample):
    return blocks_the_loop_now_and_then(sample)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, (PACED,)),
        (signal.SIGINT, (PACED, "--reward.function=./hanging.py:blocks_the_loop")),
        (
            signal.SIGINT,
            (PACED, "--reward.function=./hanging.py:blocks_the_loop_now_and_then", "--reward.mode=process"),
        ),
    ],
)
def test_ctrl_c_and_sigterm_end_all_children_within_five_seconds(
    work: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    (work / "hanging.py").write_text(HANGING)
    process = start(work, "--train.steps=100000", "--data.eval=[]", *words)
    read_until(process, "step 2/")
    children = children_of(process)
    assert len(children) >= 3, "a manager and two engines"
    process.send_signal(number)
    # The issue's own bound, from the signal to the last child's end.
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert process.wait(timeout=20) == 130
    summary = json.loads((work / "runs" / "tiny-001" / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert len(gone) == len(children)
    # Wherever it was told: an update that was under way came to its end.
    (saved,) = (work / "runs" / "tiny-001" / "checkpoints").iterdir()
    assert int(saved.name.rpartition("-")[2]) >= 1


@pytest.mark.slow
def test_children_leave_by_themselves_when_the_trainer_is_killed(work: Path) -> None:
    process = start(work, "--train.steps=100000")
    read_until(process, "step 2/")
    children = children_of(process)
    process.kill()
    process.wait(timeout=10)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.slow
def test_engine_and_manager_that_die_are_replaced_and_what_was_done_is_kept_when_no_more_are(work: Path) -> None:
    options = ("--data.eval=[]", "--train.checkpoint_every=0", "--manager.restarts=1")
    process = start(work, PACED, "--train.steps=100000", *options)
    read_until(process, "step 2/")
    named = {" ".join(child.cmdline()): child for child in children_of(process)}
    next(child for words, child in named.items() if "engine-0" in words).kill()
    read_until(process, "engine-2 joined")
    next(child for words, child in named.items() if " manager " in words).kill()
    read_until(process, "the manager is back")
    read_until(process, "step ")
    named = {" ".join(child.cmdline()): child for child in children_of(process)}
    next(child for words, child in named.items() if " manager " in words).kill()
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait(timeout=60) == 1
    assert "the manager died (killed by SIGKILL" in output
    summary = json.loads((work / "runs" / "tiny-001" / "summary.json").read_text())
    assert summary["manager_restarts"] == 1
    assert summary["manager_losses"] >= 1
    assert "go on with: penstock train tiny.toml" in output
    assert any((work / "runs" / "tiny-001" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_two_runs_side_by_side_do_not_meet(work: Path) -> None:
    one, other = start(work, ONE_ENGINE), start(work, ONE_ENGINE)
    for process in (one, other):
        assert process.wait(timeout=110) == 0, process.stdout.read() if process.stdout else ""
    assert {path.name for path in (work / "runs").iterdir()} == {"tiny-001", "tiny-002"}


def refused(work: Path, capfd: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> str:
    """Runs the command in this process (its engines are processes all the same) and returns its last words."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    capfd.readouterr()
    code = main(["train", str(work / "tiny.toml"), f"--output_dir={work / 'runs'}", "--observe.view=none", *words])
    error = capfd.readouterr().err
    assert code in ((expect,) if expect else (1, 2)), error
    assert "penstock: error:" in error
    assert "Traceback (most recent call last)" not in error.split("ends in:")[0]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "something is left running"
    return error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model.warm_start.recipe=", "--model.path=missing"), "missing"),
        (("--reward.function=penstock.reward.verifiers:no_such",), "no_such"),
        (("--data.train.0.path=no_such_task",), "no_such_task"),
        (("--rollout.prompts_per_step=1000",), "1000"),
        (("--data.max_prompt_tokens=2",), "the prompt has"),
        (("--resume", "nowhere"), "nowhere"),
        (("--train.advantage=nonsense",), "nonsense"),
        (("--rollout.eval_sampling.max_new_tokens=60",), "eval_sampling"),
        (("--data.max_prompt_tokens=600", "--rollout.engines.max_context_tokens=1024", BIG_PASSES), "positions"),
        (("--rollout.engines.device=cuda:7",), "exited before any instance was ready"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing_running(
    work: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert named in refused(work, capfd, *words)


def test_a_broken_checkpoint_is_named(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config([work / "tiny.toml"], [])
    broken = work / "broken"
    shutil.copytree(ensure_model(config.model, held_out_questions(config)), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    error = refused(work, capfd, "--model.warm_start.recipe=", f"--model.path={broken}")
    assert str(broken) in error


@pytest.mark.parametrize("key", ["manager.port", "weights.port"])
def test_a_port_in_use_is_named(work: Path, capfd: pytest.CaptureFixture[str], key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"{port}" in refused(work, capfd, f"--{key}={port}")


@pytest.mark.ci
def test_a_run_killed_in_mid_step_and_resumed_finds_what_the_step_had_generated(work: Path) -> None:
    paced = ("--rollout.engines.tokens_per_s=60", "--rollout.engines.count=1", "--data.eval=[]")
    options = (*paced, "--train.steps=2", "--train.checkpoint_every=1")
    process = start(work, *options)
    read_until(process, "step 1/")
    folder = work / "runs" / "tiny-001"
    journal = folder / "journal"
    children = children_of(process)
    before = sum(path.stat().st_size for path in journal.iterdir())
    deadline = time.monotonic() + 60
    # A step's prompts take less than this, so some of its tokens are there.
    while sum(path.stat().st_size for path in journal.iterdir()) < before + 1200:
        assert time.monotonic() < deadline, "the second step got no tokens"
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=10)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    output = train(work, *options, "--resume", "latest")
    assert "batch train-1 goes on" in output
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    [taken_up] = [event for event in events if event["event"] == "batch_taken_up"]
    assert taken_up["tokens"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_recovered"] == taken_up["finished"]


def test_a_model_that_the_built_in_engine_does_not_run_is_refused_before_engines_wait_for_it(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = work / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3_text", "max_position_embeddings": 512}))
    (folder / "model.safetensors").write_bytes(b"")
    error = refused(work, capfd, "--model.warm_start.recipe=", f"--model.path={folder}", expect=2)
    assert 'not one the built-in engine runs: llama, qwen2, qwen3; rollout.engines.kind = "vllm"' in error
