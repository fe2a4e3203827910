from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import socket
from pathlib import Path

import pytest

from penstock.cli import doctor
from penstock.cli.doctor import Facts, Package, Verdict, find_packages, is_older, judge, loopback_trouble, report

NAMES = {
    "": ["aiohttp", "msgspec", "pydantic"],
    "engine": ["numpy", "torch"],
    "train": ["rich", "matplotlib", "pyarrow", "reasoning-gym", "torch"],
    "datasets": ["datasets"],
    "lora": ["peft"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "verifiers": ["verifiers"],
    "math": ["math-verify"],
    "json": ["jsonschema"],
    "ray": ["ray"],
    "kubernetes": ["kubernetes"],
    "prometheus": ["prometheus-client"],
    "otel": ["opentelemetry-api"],
    "tls": ["cryptography"],
    "mooncake": ["mooncake-transfer-engine-non-cuda"],
}


def healthy() -> Facts:
    packages = [Package(name, extra, ">=1.0", "2.0") for extra, names in NAMES.items() for name in names]
    return Facts(
        packages=tuple(packages),
        python="3.11.9",
        system="Linux",
        cpu="a processor",
        cores=2,
        memory_gib=8.0,
        memory_available_gib=6.0,
        disk_free_gib=50.0,
        shared_memory_gib=4.0,
        open_files=20_000,
        loopback="",
        unwritable=(),
        terminal="",
        torch_cuda_build=None,
        sandbox="namespaces",
        servers={"vllm": None, "sglang": "/opt/sglang/bin/sglang"},
    )


def without(*names: str, version: str | None = None) -> Facts:
    facts = healthy()
    packages = [
        dataclasses.replace(package, installed=version) if package.name in names else package
        for package in facts.packages
    ]
    return dataclasses.replace(facts, packages=tuple(packages))


def verdict(facts: Facts, what: str) -> Verdict:
    (found,) = [verdict for verdict in judge(facts) if verdict.what == what]
    return found


def test_a_healthy_machine_can_do_all_that_is_built() -> None:
    works = {verdict.what: verdict.works for verdict in judge(healthy())}
    assert [what for what, yes in works.items() if not yes] == [
        "built-in engine and training on CUDA",
        "vllm engine",
    ]


def test_the_isolation_of_the_code_sandbox_is_told_and_what_keeps_it_from_a_stronger_one() -> None:
    assert verdict(healthy(), "code sandbox").works
    refused = ("namespaces: unshare: Operation not permitted",)
    weaker = verdict(dataclasses.replace(healthy(), sandbox="seccomp", sandbox_refused=refused), "code sandbox")
    assert weaker.works
    assert "seccomp" in weaker.why
    assert refused[0] in weaker.why
    between = verdict(dataclasses.replace(healthy(), sandbox="landlock", sandbox_refused=refused), "code sandbox")
    assert between.works
    assert between.why.startswith("landlock")
    none = verdict(dataclasses.replace(healthy(), sandbox="none", sandbox_refused=refused), "code sandbox")
    assert not none.works
    assert "network = 'allow'" in none.why


def test_the_quickstart_comes_first_since_the_exit_code_hangs_on_it() -> None:
    assert judge(healthy())[0].what == "quickstart"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (without("torch"), "torch is not installed; pip install 'penstock[engine]'"),
        (without("torch", version="0.9"), "torch is 0.9 and must be >=1.0"),
        (without("rich"), "rich is not installed; pip install 'penstock[train]'"),
        (without("aiohttp"), "aiohttp is not installed; pip install 'penstock'"),
        (dataclasses.replace(healthy(), loopback="127.0.0.1 can't be used: x"), "127.0.0.1 can't be used: x"),
        (dataclasses.replace(healthy(), unwritable=("runs (Read-only file system)",)), "can't write runs (Read-only"),
        (dataclasses.replace(healthy(), memory_available_gib=0.5), "GiB of memory, 0.5 are available"),
        (dataclasses.replace(healthy(), disk_free_gib=0.1), "GiB of disk, 0.1 are free"),
        (dataclasses.replace(healthy(), open_files=64), "needs 256 open files, the limit is 64 (ulimit -n)"),
        (dataclasses.replace(healthy(), torch_trouble="PyTorch can't be imported: x"), "PyTorch can't be imported: x"),
    ],
)
def test_what_stands_in_the_quickstarts_way_is_named(facts: Facts, why: str) -> None:
    found = verdict(facts, "quickstart")
    assert not found.works
    assert why in found.why


def test_a_package_that_several_parts_need_is_named_once() -> None:
    why = verdict(without("torch"), "quickstart").why
    assert why.count("torch is not installed") == 1


def test_one_core_is_slow_and_no_obstacle() -> None:
    found = verdict(dataclasses.replace(healthy(), cores=1), "quickstart")
    assert found.works
    assert "one core" in found.why


@pytest.mark.parametrize(
    ("package", "what", "extra"),
    [
        ("rich", "live view", "train"),
        ("matplotlib", "curves.png", "train"),
        ("pyarrow", "Parquet prompts", "train"),
        ("reasoning-gym", "reasoning-gym tasks", "train"),
        ("datasets", "Hugging Face data sets", "datasets"),
        ("tensorboard", "TensorBoard", "tensorboard"),
        ("wandb", "Weights & Biases", "wandb"),
        ("verifiers", "environments of verifiers", "verifiers"),
        ("peft", "LoRA adapters", "lora"),
        ("numpy", "built-in engine on CPU", "engine"),
    ],
)
def test_a_missing_package_costs_what_needs_it_and_names_its_extra(package: str, what: str, extra: str) -> None:
    found = verdict(without(package), what)
    assert not found.works
    assert f"{package} is not installed; pip install 'penstock[{extra}]'" in found.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "this PyTorch has no CUDA build"),
        ({"nvidia_driver": True}, "there is an NVIDIA driver, but this PyTorch has no CUDA build"),
        ({"torch_cuda_build": "12.8"}, "PyTorch is built for CUDA 12.8 and sees no GPU"),
    ],
)
def test_no_gpu_has_its_reason(changes: dict[str, object], why: str) -> None:
    facts = dataclasses.replace(healthy(), **changes)  # type: ignore[arg-type]
    assert verdict(facts, "built-in engine and training on CUDA") == Verdict(
        "built-in engine and training on CUDA", False, why
    )


def test_a_gpu_is_told_by_name() -> None:
    facts = dataclasses.replace(healthy(), gpus=("Some GPU (80 GiB)",), torch_cuda_build="12.8")
    found = verdict(facts, "built-in engine and training on CUDA")
    assert (found.works, found.why) == (True, "Some GPU (80 GiB)")
    assert any("Some GPU (80 GiB)" in line for line in report(facts, judge(facts)))


def test_few_open_files_rule_out_many_instances() -> None:
    assert "ulimit -n 4096" in verdict(dataclasses.replace(healthy(), open_files=1024), "hundreds of instances").why


def test_servers_are_those_that_an_agent_would_start() -> None:
    assert verdict(healthy(), "sglang engine") == Verdict("sglang engine", True, "/opt/sglang/bin/sglang")
    assert verdict(healthy(), "vllm engine").why.startswith("vllm is not on PATH")


def test_a_server_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.find_servers() == {"vllm": str(tmp_path / "vllm"), "sglang": None}


def test_each_extra_that_the_project_declares_has_a_verdict() -> None:
    declared = {package.extra for package in find_packages(importlib.metadata.requires("penstock") or ())}
    assert declared - {"", "engine", "train"} == doctor.EXTRAS.keys()
    assert set(doctor.EXTRAS.values()) <= {found.what for found in judge(healthy())}


def test_the_report_has_a_line_for_each_verdict_and_each_extra() -> None:
    facts = without("rich")
    lines = report(facts, judge(facts))
    assert any(line.startswith("  train ") and "rich MISSING" in line for line in lines)
    for found in judge(facts):
        assert any(line.startswith(f"  {'yes' if found.works else 'NO '}  {found.what}") for line in lines)


def test_packages_are_those_that_the_project_declares() -> None:
    packages = find_packages(importlib.metadata.requires("penstock") or ())
    by_extra = {(package.extra, package.name) for package in packages}
    assert {("", "msgspec"), ("engine", "torch"), ("train", "rich"), ("tensorboard", "tensorboard")} <= by_extra
    assert all(">=" in package.wanted for package in packages)


def test_requirements_are_read_whatever_else_they_ask_for() -> None:
    lines = [
        "fast-thing>=0.3; (platform_system == 'Linux') and extra == 'fast'",
        "bounded-thing<0.2,>=0.1.14; extra == 'bounded'",
        "core-thing[speedups]>=2",
    ]
    found = [(package.name, package.extra, package.wanted) for package in find_packages(lines)]
    assert found == [
        ("fast-thing", "fast", ">=0.3"),
        ("bounded-thing", "bounded", "<0.2,>=0.1.14"),
        ("core-thing", "", ">=2"),
    ]


@pytest.mark.parametrize(
    ("installed", "wanted", "older"),
    [
        ("2.13.0+cpu", ">=2.6", False),
        ("2.5.9", ">=2.6", True),
        ("10.0", ">=9.1", False),
        ("1.0", "", False),
        ("0.1.13", "<0.2,>=0.1.14", True),
        ("0.1.14", "<0.2,>=0.1.14", False),
        ("2.6", ">=2.6", False),
        ("2.6.0rc1", ">=2.6", False),
    ],
)
def test_versions_are_compared_by_number(installed: str, wanted: str, older: bool) -> None:
    assert is_older(installed, wanted) is older


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert doctor.unwritable(tmp_path / "a" / "b") == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "Not a directory" in doctor.unwritable(tmp_path / "file")


def test_loopback_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback_trouble() == ""

    def refuse(*args: object, **options: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert "127.0.0.1 can't be used: [Errno 1]" in loopback_trouble()


def test_looking_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = doctor.gather()
    assert os.listdir(tmp_path) == []
    assert facts.cores >= 1
    assert facts.memory_available_gib <= facts.memory_gib + 0.01
