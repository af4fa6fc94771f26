"""``planaria run --engine k8s``: what it submits, and how it follows that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planaria.cli import k8s
from planaria.engines.kubernetes.api import Api, ApiError, Kind


def test_words_of_the_script_are_not_variables_of_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--engine", "k8s", "--image", "i", "--dry-run", "--groups", "2", "train.py", "$(POD_IP)", "it's $5 or $$"]
    command = [sys.executable, "-m", "planaria", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=170)
    (container,) = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["train.py", "$$(POD_IP)", "it's $$5 or $$$$"]


@pytest.mark.parametrize(
    ("given", "made"), [("Llama_3.1", "llama-3-1"), ("70B.run", "job-70b-run"), ("7" * 60, "job-" + "7" * 40)]
)
def test_a_job_has_a_name_that_kubernetes_takes(tmp_path: Path, given: str, made: str) -> None:
    (tmp_path / "train.py").touch()
    words = ["--engine", "k8s", "--image", "i", "--dry-run", "--job", given, "train.py"]
    command = [sys.executable, "-m", "planaria", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=170)
    assert yaml.safe_load(done.stdout)["metadata"]["name"] == made


class Restarting(Api):
    """An API server that is away for a moment."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        answer: dict[str, Any] | ApiError = self._answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def list(self, kind: Kind, namespace: str, selector: str = "") -> dict[str, Any]:
        return {"items": [meshed("a"), meshed("b")]}

    async def log(self, namespace: str, pod: str, container: str) -> AsyncIterator[str]:
        yield f"{container} of {pod} speaks"


def meshed(name: str) -> dict[str, Any]:
    """A pod into which a webhook has put another container. Without a name the API server says no log of it."""
    ours = {"name": "trainer", "volumeMounts": [{"name": "planaria-credentials"}]}
    spec = {"containers": [{"name": "istio-proxy", "volumeMounts": [{"name": "certs"}]}, ours]}
    return {"metadata": {"name": name, "uid": name}, "spec": spec, "status": {"phase": "Running"}}


async def test_following_outlives_an_api_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(k8s, "_LOOK", 0.01)
    over = {"status": {"outcome": {"exitCode": 1, "reason": "too few groups"}, "step": 7}}
    away = [ApiError(0, "Unreachable", "the API server does not answer"), ApiError(503, "", "Kubernetes says 503")]
    assert await k8s._follow(Restarting(*away, over), "n", "j") == 1
    out, said = capsys.readouterr()
    assert sorted(out.splitlines()) == ["trainer of a speaks", "trainer of b speaks"]
    assert "does not answer; the job goes on" in said and "job j: too few groups (step 7)" in said
    with pytest.raises(ApiError, match="forbidden"):
        await k8s._follow(Restarting(ApiError(403, "Forbidden", "forbidden")), "n", "j")
