"""The examples on the page about machines are what the code takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.cli.announced import announced, reachable
from penstock.cli.provision import BUILT_IN, make_provisioner
from penstock.cli.provision.kube_template import ContainerEnvironment, filled_in, read_template
from penstock.cli.provision.wiring import provision_config, read_fleet_file
from penstock.config.fleet import FleetConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.rollout.provision_types import JoinOrder

PAGE = (Path(__file__).parents[2] / "docs" / "provisioning.md").read_text()
JOIN = JoinOrder("run", "http://m:1", "t")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_configuration_on_the_page_is_one() -> None:
    sections = [FleetConfig.model_validate(tomllib.loads(text)["fleet"]) for text in blocks("toml")]
    assert {section.provisioner for section in sections} == set(BUILT_IN)


def test_every_key_on_the_page_is_one() -> None:
    table = PAGE.partition("## What to set")[2].partition("##")[0]
    named = {key for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert named <= FleetConfig.model_fields.keys()
    assert len(named) > 12


def test_the_template_on_the_page_becomes_a_machine(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "agent.yaml").write_text(text)
    made = filled_in(read_template(tmp_path / "agent.yaml"), "m-1", {}, ContainerEnvironment(JOIN, "penstock/token"))
    assert made["metadata"]["name"] == "m-1"
    assert made["spec"]["containers"][0]["args"][-1] == "vllm"


async def test_the_class_on_the_page_is_a_provisioner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    (tmp_path / "my_cloud.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_provisioner("my_cloud:MyCloud", JOIN, {"region": "there"})
    names = await made.add(2)
    assert [seen.id for seen in await made.list()] == list(names)
    await made.release(names[0])
    assert len(await made.list()) == 1


def test_a_file_for_a_manager_of_one_s_own_is_read_and_refused_by_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('run = "my-run"\n[fleet]\nprovisioner = "local"\nceiling = 3\n')
    settings = read_fleet_file(path)
    assert (settings.run, settings.fleet.ceiling) == ("my-run", 3)
    for text, words in (
        ('run = "r"\n[fleet]\nceilling = 3\n', "fleet.ceilling"),
        ('run = "r"\n[fleet]\nfloor = 9\n', "over fleet.ceiling"),
        ('run = "r"\n[fleet]\nprice_per_h = 9\n', "no machine would be worth its price"),
        ('run = "r"\n[fleet]\nprovisioner = "local"\nbudget = 9\n', "fleet.budget needs fleet.price_per_h"),
        ('run = "r"\n[fleet]\nprovisioner = "ray"\nbudget_per_h = 9\n', "fleet.budget_per_h needs fleet.price_per_h"),
        ('run = "r"\n[fleet]\nprovisioner = "kubernetes"\nbudget = 9\n', "'kubernetes' tells no prices"),
        ("run = ", "neither TOML nor JSON"),
        ('run = "a b"\n[fleet]\n', "run: "),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)):
            read_fleet_file(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_fleet_file(tmp_path / "none.toml")


def test_a_run_without_engines_has_a_machine_at_least() -> None:
    assert provision_config(FleetConfig(), 0).floor == 1
    assert provision_config(FleetConfig(), 1).floor == 0
    assert provision_config(FleetConfig(floor=2), 1).floor == 2
    assert provision_config(FleetConfig(ceiling=0), 0).floor == 0


def test_machines_are_told_an_address_that_they_can_reach() -> None:
    assert reachable("http://10.0.0.1:70", "") == "http://10.0.0.1:70"
    assert reachable("https://0.0.0.0:70", "trainer.example") == "https://trainer.example:70"
    assert reachable("http://0.0.0.0:70", "", here=True) == "http://127.0.0.1:70"
    assert "0.0.0.0" not in reachable("http://0.0.0.0:70", "")
    assert reachable("http://[::1]:70", "") == "http://[::1]:70"
    assert reachable("http://0.0.0.0:70", "fd00::1") == "http://[fd00::1]:70"


@pytest.mark.parametrize(
    ("weights", "fleet", "expected"),
    [
        ("", "", ""),
        ("trainer.example", "", "trainer.example"),
        ("trainer.example:7071", "", "trainer.example"),
        ("10.0.0.1,10.1.0.1", "", "10.0.0.1"),
        ("10.0.0.1:7071, 10.1.0.1", "", "10.0.0.1"),
        ("fd00::1", "", "fd00::1"),
        ("[fd00::1]:7071,nic-b", "", "fd00::1"),
        ("10.0.0.1,10.1.0.1", "other.example", "other.example"),
    ],
)
def test_the_first_host_of_the_weights_is_the_managers_too(weights: str, fleet: str, expected: str) -> None:
    data = {"train": [{"kind": "jsonl", "path": "q"}]}
    table = {"model": {"path": "m"}, "data": data, "weights": {"advertise": weights}, "fleet": {"advertise": fleet}}
    config = RunConfig.model_validate(table)
    assert announced(config) == expected


@pytest.mark.parametrize("host", ["h:7070", "http://h", "a,b", "[fd00::1]:70", "[fd00::1]", "a b"])
def test_what_is_no_single_host_is_not_advertised(host: str) -> None:
    with pytest.raises(ValidationError, match="is not one host"):
        FleetConfig(advertise=host)
    assert FleetConfig(advertise="fd00::1").advertise == "fd00::1"
