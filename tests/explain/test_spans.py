"""Recoveries as traces: what is in them, and that a real collector's protocol carries them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from planaria.cli.explain import explain
from planaria.errors import PlanariaError, UsageError
from planaria.explain.incidents import tell
from planaria.explain.record import Spoilt, entries, turns
from planaria.explain.spans import Span, recovery
from tests.explain.test_explain import FOUNDING, START, event, killed, record, turn


class Receiver(HTTPServer):
    """Of an OpenTelemetry collector: it keeps what it is sent."""

    def __init__(self, code: int = 200) -> None:
        received: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.received = received
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.received]
        return [s for r in requests for resource in r.resource_spans for of in resource.scope_spans for s in of.spans]

    def end(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


@pytest.fixture
def collector() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.end()


def lost_and_back(run: Path) -> Path:
    record(run, [FOUNDING, *killed(2, 10.0, 2, 40), event(20, "end", "all steps", exit_code=0)])
    turn(run, 0, "1.2", 10.07, 40, [])
    turn(run, 1, "1.2", 10.08, 40, [4, 5])
    turn(run, 2, "1.3", 11.0, 44, [])
    return run


def lines(span: Span, depth: int = 0) -> Iterator[str]:
    yield f"{' ' * depth}{span.name} {span.start - START:.2f} {span.end - START:.2f}"
    for child in span.children:
        yield from lines(child, depth + 1)


def test_a_recovery_consists_of_what_each_group_did(tmp_path: Path) -> None:
    run = lost_and_back(tmp_path / "run")
    (incident,) = tell(entries(run / "events.jsonl", Spoilt())).incidents
    found = recovery(incident, turns(run, Spoilt()))
    assert found is not None
    assert [*lines(found)] == [
        "recovery 10.00 10.21",
        " detect and agree 10.00 10.07",
        " group 0 10.07 10.20",
        "  abort and form 10.07 10.08",
        "  roll call 10.08 10.10",
        "  compute, exchange and step 10.10 10.20",
        " group 1 10.08 10.21",
        "  abort and form 10.08 10.09",
        "  roll call 10.09 10.11",
        "  compute, exchange and step 10.11 10.21",
        " group 2 comes back 10.30 11.13",
        "  start and load 10.30 11.00",
        "  abort and form 11.00 11.01",
        "  roll call 11.01 11.03",
        "  compute, exchange and step 11.03 11.13",
    ]
    facts = dict(found.facts)
    assert facts["planaria.quorum"] == "1.2" and facts["planaria.lost"] == "2" and facts["planaria.step"] == 40
    assert "group 2 lost (killed by SIGKILL)" in str(facts["planaria.what"])


def test_a_collector_gets_them_and_knows_them_again(tmp_path: Path, collector: Receiver) -> None:
    run = lost_and_back(tmp_path / "run")
    explain([run], otlp=collector.url)
    spans = collector.spans()
    assert len(spans) == 15 and len({span.span_id for span in spans}) == 15 and len({s.trace_id for s in spans}) == 1
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "recovery" and round(root.end_time_unix_nano / 1e9 - START, 2) == 10.21
    assert {span.parent_span_id for span in spans} <= {b"", *(span.span_id for span in spans)}
    explain([run], otlp=collector.url)
    again = collector.spans()[15:]
    assert [s.span_id for s in again] == [s.span_id for s in spans], "sent twice is one trace"


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path, collector: Receiver) -> None:
    run = record(tmp_path / "run", [FOUNDING])
    thread = threading.Thread(target=lambda: explain([run], otlp=collector.url, follows=True), daemon=True)
    thread.start()
    with (run / "events.jsonl").open("a") as file:
        for line in killed(2, 10.0, 2, 40):
            whole = json.dumps(line) + "\n"
            file.write(whole[:20])
            file.flush()  # a look may come in the middle of a line
            file.write(whole[20:])
        turn(run, 0, "1.2", 10.07, 40, [])
        turn(run, 2, "1.3", 11.0, 44, [])
        file.write(json.dumps(event(20, "end", "all steps", exit_code=0)) + "\n")
    thread.join(300)  # a hang: the first export imports much
    assert not thread.is_alive()
    assert [span.name for span in collector.spans()].count("recovery") == 1


def test_what_is_no_collector(tmp_path: Path) -> None:
    run = lost_and_back(tmp_path / "run")
    for word in ("127.0.0.1:4318", ""):
        with pytest.raises(UsageError, match="address of a collector"):
            explain([run], otlp=word)
    with pytest.raises(UsageError, match="is for --otlp"):
        explain([run], follows=True)
    with pytest.raises(UsageError, match="not the directory of a run"):
        explain([tmp_path / "nothing"], otlp="http://127.0.0.1:1")
    refuses = Receiver(404)
    with pytest.raises(PlanariaError, match="does not take traces"):
        explain([run], otlp=refuses.url)
    refuses.end()
