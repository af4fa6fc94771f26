"""Recoveries to an OpenTelemetry collector, over OTLP and HTTP. Training knows nothing of it: it is made of the record.

The identities of a trace follow from the run's directory and the quorum, so what is sent twice is one trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from planaria.errors import PlanariaError, UsageError
from planaria.explain.incidents import Story
from planaria.explain.record import Turns
from planaria.explain.spans import COMES_BACK, Span, recovery

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SECONDS = 10.0  # that a collector may take to answer; the default of OpenTelemetry


class Collector:
    """Where traces of ``run`` go, each recovery once. UsageError if OpenTelemetry is not installed, or ``endpoint`` is
    no address."""

    def __init__(self, endpoint: str, run: str) -> None:
        """``endpoint``: http://HOST:PORT of a collector."""
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(f"--otlp {endpoint}: give the address of a collector, such as http://127.0.0.1:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError:
            raise UsageError("--otlp needs OpenTelemetry; pip install 'planaria[otel]'") from None
        self.endpoint = endpoint.rstrip("/")
        self._run = run
        self._sent: set[str] = set()
        self._exporter: SpanExporter = OTLPSpanExporter(f"{self.endpoint}/v1/traces", timeout=SECONDS)
        self._resource = Resource.create({"service.name": "planaria", "planaria.run": run})

    def send_all(self, story: Story, read: Callable[[], Turns], over: bool) -> int:
        """Send those that are complete: the lost groups are back. ``over``: nothing follows, so all that there are.
        ``read``: what the groups did, asked for only if there is something to send. How many were sent. Raises
        PlanariaError if the collector does not take them."""
        known = {str(each.quorum.data.get("quorum")): each for each in story.incidents if each.quorum is not None}
        waiting = {number: each for number, each in known.items() if number not in self._sent}
        turns, before = read() if waiting else Turns(), len(self._sent)
        for number, incident in waiting.items():
            found = recovery(incident, turns)
            back = sum(span.name.endswith(COMES_BACK) for span in found.children) if found is not None else 0
            if found is not None and (over or back >= len(incident.losses)):
                self._send(number, found)
                self._sent.add(number)
        return len(self._sent) - before

    def _send(self, number: str, span: Span) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = list(self._spans(span, f"{self._run}|{number}", None))
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise PlanariaError(f"the collector at {self.endpoint} does not take traces; is it an OTLP/HTTP endpoint?")

    def close(self) -> None:
        self._exporter.shutdown()

    def _spans(self, span: Span, key: str, parent: int | None, path: str = "") -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        trace = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest())

        def context(id: int) -> SpanContext:
            return SpanContext(trace, id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        own = int.from_bytes(hashlib.blake2b(f"{key}|{path}".encode(), digest_size=8).digest())
        yield ReadableSpan(
            span.name,
            context(own),
            parent=context(parent) if parent is not None else None,
            resource=self._resource,
            attributes=dict(span.facts),
            start_time=round(span.start * 1e9),
            end_time=round(span.end * 1e9),
        )
        for number, child in enumerate(span.children):
            yield from self._spans(child, key, own, f"{path}/{number}")
