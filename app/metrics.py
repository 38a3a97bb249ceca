"""Prometheus metrics: the engine's own counters, and latency as it delivers tokens to the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.deps import EnginePort, StatusPort
from engine.request import OutputEvent, Request

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_ACCEPT_LENGTH = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests taken in",
    "generation_tokens": "Tokens emitted",
    "cached_tokens": "Prompt tokens served from the prefix cache",
    "drafted_tokens": "Draft tokens verified",
    "accepted_tokens": "Draft tokens emitted, bonus tokens left out",
    "verify_steps": "Steps of a request with at least one draft token",
    "preemptions": "Requests that lost their slots and were recomputed",
}
# What a drafting worker has to say, where its drafter's card promises an accept length.
_WORKER = {
    "drafter_accept_length": "Accept length of the last window of drafts, as if all were verified to their ends",
    "drafter_accept_length_promised": "Accept length that the drafter's card promises, of text like its training data",
    "drafter_accept_length_alarm": "1 while drafter_accept_length falls short of what is promised",
}


@dataclass(slots=True)
class Timing:
    """When a request was submitted and its tokens arrived, in seconds of `time.monotonic`."""

    start: float
    admitted: bool = False
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0


class _EngineCollector(Collector):
    """Reads the engine's snapshot when scraped; gives nothing before the server was first seen ready."""

    def __init__(self, engine: Callable[[], EnginePort], status: StatusPort) -> None:
        self._get_engine = engine
        self._status = status
        self._engine: EnginePort | None = None

    def collect(self) -> Iterator[Metric]:
        if self._engine is None:
            if not self._status.ready:
                return
            self._engine = self._get_engine()  # kept, so that a draining server is still measured
        stats = self._engine.stats()
        yield GaugeMetricFamily("tandem_requests_running", "Requests in the batch", stats.running)
        yield GaugeMetricFamily("tandem_requests_waiting", "Requests in the queue", stats.waiting)
        yield GaugeMetricFamily(
            "tandem_kv_slots_capacity", "KV slots in the pool, in tokens", stats.slots_total
        )
        slots = GaugeMetricFamily("tandem_kv_slots", "KV slots by state, in tokens", labels=["state"])
        slots.add_metric(["free"], stats.slots_free)
        slots.add_metric(["evictable"], stats.slots_evictable)
        slots.add_metric(["protected"], stats.slots_protected)
        yield slots
        for name, value in stats.worker.items():
            yield GaugeMetricFamily(f"tandem_{name}", _WORKER[name], value)
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"tandem_{name}", help_text, getattr(stats, f"{name}_total"))
        finished = CounterMetricFamily(
            "tandem_requests_finished", "Requests by finish reason", labels=["reason"]
        )
        for reason, count in stats.requests_finished.items():
            finished.add_metric([reason], count)
        yield finished


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Callable[[], EnginePort], status: StatusPort) -> None:
        """`engine` is first called once `status` says ready."""
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineCollector(engine, status))

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_{name}", help_text, buckets=buckets, registry=registry)

        self._ttft = histogram("time_to_first_token_seconds", "From submission to the first token", _LATENCY)
        self._itl = histogram(
            "inter_token_latency_seconds", "Between two deliveries of tokens", _TOKEN_LATENCY
        )
        self._tpot = histogram(
            "time_per_output_token_seconds", "Mean after the first, by request", _TOKEN_LATENCY
        )
        self._queue = histogram("queue_time_seconds", "From submission to admission into the batch", _LATENCY)
        self._e2e = histogram("e2e_request_latency_seconds", "From submission to the last token", _LATENCY)
        self._accept = histogram("accept_length", "Tokens a verify step, mean by request", _ACCEPT_LENGTH)

    def start(self) -> Timing:
        """A request is being submitted."""
        return Timing(time.monotonic())

    def observe(self, timing: Timing, request: Request, event: OutputEvent) -> None:
        """Count an event of `request`, which `timing` was started for."""
        now = time.monotonic()
        if request.admitted_at is not None and not timing.admitted:
            timing.admitted = True
            self._queue.observe(request.admitted_at - timing.start)
        if event.token_ids:
            if timing.first_token is None:
                timing.first_token = now
                self._ttft.observe(now - timing.start)
            else:
                self._itl.observe(now - timing.last_token)
            timing.last_token = now
            timing.tokens += len(event.token_ids)
        if event.finish_reason not in ("stop", "length"):
            return
        self._e2e.observe(now - timing.start)
        if timing.first_token is not None and timing.tokens > 1:
            self._tpot.observe((timing.last_token - timing.first_token) / (timing.tokens - 1))
        stats = event.speculation
        if stats is not None and stats.verify_steps:
            self._accept.observe(stats.verify_emitted_tokens / stats.verify_steps)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
