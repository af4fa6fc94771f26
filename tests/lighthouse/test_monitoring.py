"""The alert rules and the dashboard that are shipped: they ask for figures that exist, and fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from planaria.lighthouse.metrics import families

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"


def series(family: Metric) -> Iterator[str]:
    """The names under which Prometheus keeps it."""
    if family.type == "counter":
        yield f"{family.name}_total"
    elif isinstance(family, HistogramMetricFamily):
        yield from (f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
    else:
        yield family.name


def used() -> Iterator[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (v["query"] for v in dashboard["templating"]["list"])


def test_rules_and_dashboard_ask_for_figures_that_exist() -> None:
    there = {name for family in families([], leads=True) for name in series(family)}
    asked = {name for text in used() for name in re.findall(r"planaria_\w+", text)}
    assert asked and asked <= there, asked - there


def test_every_rule_is_tried() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    fires = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert names - fires == {"PlanariaSeveralLeaders"}, "it takes two lineages"
    assert names == {each["alertname"] for test in tests for each in test["alert_rule_test"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in panels}) == len(panels)
