"""What the web pages make of what they hear, in Node: the modules that need no page."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from planaria.lighthouse.assets import assets

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed (Debian: nodejs)")

NEWS = """
const none = {from: 0, rows: []};
const news = (more) => ({anew: false, events: [], marks: [], commits: [], loss: none, progress: none, ...more});
"""
# A page with a stream, as far as stream.js knows of them.
PAGE = """
const opened = [], seen = [], handlers = {};
globalThis.document = {hidden: HIDDEN, addEventListener(name, then) { handlers[name] = then; }};
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor(url) { this.url = url; this.readyState = 0; this.on = {}; opened.push(this); }
  addEventListener(name, then) { this.on[name] = then; }
  close() { this.readyState = 2; }
};
globalThis.setTimeout = () => 0;
listen("train", {picture() {}, news() {}, silent: (since, full) => seen.push([since !== null, full])});
"""


def run(module: str, names: str, script: str) -> Any:
    """What ``script`` tells, with ``names`` of a module of ours."""
    source = assets()[module].body.decode()
    load = f"const {{ {names} }} = await import('data:text/javascript,' + encodeURIComponent({json.dumps(source)}));"
    words = [str(NODE), "--input-type=module", "-e", f"{load}\nconst tell = (it) => console.log(JSON.stringify(it));\n"]
    words[-1] += script
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("commits", "now", "speed"),
    [
        ([], 100, None),
        ([[100, 5]], 100.5, None),
        ([[90, 0], [100, 20]], 100, 2),
        ([[90, 0], [100, 20]], 110, 1),  # it slows down
        ([[90, 0], [100, 20]], 131, 0),  # it stands still
        ([[90, 0], [100, 20], [105, 3], [107, 5]], 107, 1),  # went back to a checkpoint
        ([[0, 1], [100, 2]], 100, 0.01),  # a step takes minutes
        ([[0, 1], [100, 2]], 150, 1 / 150),
        ([[0, 1], [100, 2]], 301, 0),
    ],
)
def test_the_speed_is_that_of_now(commits: list[list[float]], now: float, speed: float | None) -> None:
    script = f"const model = new Model(); model.commits = {json.dumps(commits)}; tell(model.speed({now}));"
    found = run("model.js", "Model", script)
    assert found == (speed if speed is None else pytest.approx(speed))


def test_checkpoints_push_no_loss_out_and_trouble_is_no_failure() -> None:
    marks = [["interrupt", 1, None, 1, 4, "lost"], ["trouble", 2, None, 1, 4, "late"]]
    script = f"""{NEWS}
    const model = new Model();
    model.take(news({{marks: {json.dumps(marks)}}}));
    for (let at = 0; at < 10_000; at += 1) model.take(news({{marks: [["checkpoint", at, null, -1, at, "saved"]]}}));
    tell([model.failures().map((mark) => mark.text), model.marks.length, model.marks.at(-1).at, model.marks[0].lane]);
    """
    assert run("model.js", "Model", script) == [["lost"], 1024 + 2, 9999, "interrupt"]


def test_it_says_that_nothing_was_lost_only_where_that_is_so() -> None:
    script = """
    const model = new Model();
    const before = ["redistribute", "spare", "shrink"].map((policy) => model.lostNothing(policy));
    model.marks.push({lane: "resume"});
    tell([...before, model.lostNothing("redistribute")]);
    """
    assert run("model.js", "Model", script) == [True, True, False, False]


def test_places_are_called_as_on_the_command_line() -> None:
    assert run("model.js", "placeName", 'tell([placeName(["rack:1", ""]), placeName(["rack:1", "0"])]);') == [
        "rack:1",
        "rack:1:0",
    ]


def test_a_page_that_nobody_sees_keeps_no_connection() -> None:
    script = PAGE.replace("HIDDEN", "true") + (
        "const before = opened.length; document.hidden = false; handlers.visibilitychange();"
        "tell([before, opened.length]);"
    )
    assert run("stream.js", "listen", script) == [0, 1]
    assert run("stream.js", "listen", PAGE.replace("HIDDEN", "false") + "tell(opened.length);") == 1


def test_it_is_told_whether_nobody_answers_or_too_many_listen() -> None:
    script = PAGE.replace("HIDDEN", "false") + (
        "opened[0].on.error(); handlers.visibilitychange(); opened[1].readyState = 2; opened[1].on.error(); tell(seen);"
    )
    assert run("stream.js", "listen", script) == [[True, False], [True, True]]
