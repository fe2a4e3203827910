"""Machines on Kubernetes, by its official client against the recorded answers of a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from kube_chapters import CHAPTERS, Scene
from kube_recorded import Answers, load, served, write_kubeconfig

pytest.importorskip("kubernetes")


class Nothing:
    """What happens in the cluster has happened when it was recorded."""

    def runs_on_a_node(self, name: str) -> None:
        pass

    def node_ends_it_after(self, name: str, seconds: float) -> None:
        pass

    def pod_ends(self, name: str, status: dict[str, object]) -> None:
        pass

    def pod_of_job_fails(self, name: str) -> None:
        pass

    def quota_of_pods(self, pods: int) -> None:
        pass

    def old_versions_go_before_the_next_page(self) -> None:
        pass


@pytest.mark.parametrize("name", CHAPTERS)
async def test_the_recorded_cluster(name: str, tmp_path: Path) -> None:
    _, chapters = load()
    answers = Answers(chapters[name])
    with served(answers) as url:
        write_kubeconfig(tmp_path / "kubeconfig", url)
        await CHAPTERS[name](Scene(tmp_path, tmp_path / "kubeconfig", Nothing()))
    assert answers.unasked == []
    assert not answers.left
