"""The manifests in deploy/ are what the source makes, and give no more rights than the operator uses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from planaria.engines.kubernetes.deploy import chart, manifests, plain

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_what_lies_in_deploy_was_made_from_this_source() -> None:
    text = "run: python -m planaria.engines.kubernetes.deploy"
    assert (DEPLOY / "planaria.yaml").read_text() == plain("planaria", "planaria:0.1.0"), text
    for name, content in chart().items():
        assert (DEPLOY / "chart" / name).read_text() == content, text


def test_nobody_reads_secrets_or_may_do_everything() -> None:
    for body in manifests("n", "image"):
        for rule in body.get("rules", ()):
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            assert "secrets" not in rule["resources"]


def test_helm_makes_the_same_of_the_chart_as_is_in_the_plain_manifests() -> None:
    if (helm := shutil.which("helm")) is None:
        pytest.skip("there is no helm here")
    command = [helm, "template", "x", str(DEPLOY / "chart"), "-n", "planaria", "--include-crds"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    key = lambda body: (body["kind"], body["metadata"]["name"])  # noqa: E731
    made = sorted((body for body in yaml.safe_load_all(done.stdout) if body), key=key)
    ours = sorted(
        (b for b in yaml.safe_load_all(plain("planaria", "planaria:0.1.0")) if b["kind"] != "Namespace"), key=key
    )
    assert made == ours
