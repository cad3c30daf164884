"""Spans, carriers and the export thread, with receivers that die, come back or never existed."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from flotilla.common.v1.roles import ROLES
from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition, NotFinite
from flotilla_core.telemetry import export, names
from flotilla_core.telemetry.spans import format_traceparent, parse_traceparent

NOBODY = "127.0.0.1:9"


class Receiver(TraceServiceServicer):
    """A receiver that can be killed and started again on its port."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def kill(self) -> None:
        self._server.stop(None).wait()

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            self.resource = {a.key: a.value for a in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def named(self, name: str) -> Span:
        return next(span for span in self.spans if span.name == name)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    telemetry.start("trainer", "trainer-0-ab12", [f"127.0.0.1:{running.port}"])
    yield running
    telemetry.stop()
    running.kill()


def test_parents_links_and_roots_are_as_the_code_says(receiver: Receiver) -> None:
    with telemetry.span("step", attributes={names.RUN_ID: "run-1", names.STEP: 3}) as step:
        with telemetry.span("train"):
            carrier = telemetry.current_carrier()
        sample = telemetry.start_span("sample", parent=telemetry.ROOT, links=[step])
        sample.end()
    telemetry.start_span("rank", parent=telemetry.from_carrier(carrier), links=[sample]).end()
    telemetry.stop()
    assert receiver.named("train").parent_span_id == receiver.named("step").span_id
    assert receiver.named("rank").parent_span_id == receiver.named("train").span_id
    assert receiver.named("sample").trace_id != receiver.named("step").trace_id
    assert receiver.named("sample").parent_span_id == b""
    assert receiver.named("sample").links[0].span_id == receiver.named("step").span_id
    assert receiver.named("rank").links[0].span_id == receiver.named("sample").span_id
    assert receiver.resource[names.SERVICE_NAME].string_value == "trainer"
    assert receiver.resource[names.SERVICE_INSTANCE_ID].string_value == "trainer-0-ab12"
    assert receiver.resource[names.PROCESS_PID].int_value == os.getpid()


def test_a_failure_is_on_the_span_and_passes_on(receiver: Receiver) -> None:
    with pytest.raises(NotFinite), telemetry.span("train"):
        raise NotFinite("the loss is NaN", where="step 3")
    telemetry.stop()
    failed = receiver.named("train")
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert "the loss is NaN" in failed.status.message
    assert {a.key: a.value.string_value for a in failed.attributes}[names.ERROR_TYPE] == "NotFinite"


def test_a_child_process_continues_the_trace_of_its_carrier(receiver: Receiver) -> None:
    with telemetry.span("front") as front:
        carrier = telemetry.current_carrier()
    code = (
        "from flotilla_core import telemetry; "
        f"telemetry.start('rank', 'rank-0', ['127.0.0.1:{receiver.port}']); "
        f"telemetry.start_span('in the rank', parent=telemetry.from_carrier({carrier})).end(); telemetry.stop()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert receiver.named("in the rank").parent_span_id == front.get_span_context().span_id.to_bytes(8)


def test_spans_that_end_while_the_receiver_is_dead_arrive_when_it_is_back(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    receiver.kill()
    for index in range(1000):
        telemetry.start_span(f"span-{index}").end()
    deadline = time.monotonic() + 10
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(caplog.records) == 1
    receiver.start()
    while len(receiver.spans) < 1000 and time.monotonic() < deadline + 10:
        time.sleep(0.02)
    assert sorted(span.name for span in receiver.spans) == sorted(f"span-{index}" for index in range(1000))
    assert len(caplog.records) == 1


def test_an_unreachable_endpoint_costs_one_warning_a_bounded_queue_and_a_bounded_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    telemetry.start("trainer", "trainer-0", [NOBODY])
    for _ in range(export.QUEUE_SPANS + 100):
        telemetry.start_span("unseen").end()
    assert telemetry.dropped_spans() >= 100
    before = time.monotonic()
    telemetry.stop()
    assert time.monotonic() - before < 2.5
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "cannot be sent" in m]) == 1
    assert len(messages) == 2  # and one on what was lost


def test_an_endpoint_that_is_away_does_not_keep_spans_from_another(receiver: Receiver) -> None:
    telemetry.stop()
    telemetry.start("trainer", "trainer-0", [NOBODY, f"127.0.0.1:{receiver.port}"])
    telemetry.start_span("both").end()
    telemetry.stop()
    assert receiver.named("both")


def test_without_endpoints_nothing_is_recorded() -> None:
    telemetry.start("trainer", "trainer-0", [])
    with telemetry.span("nothing") as span:
        assert not span.is_recording()
        assert telemetry.current_carrier() == {}
    telemetry.stop()


def test_a_second_start_is_refused(receiver: Receiver) -> None:
    with pytest.raises(FailedPrecondition):
        telemetry.start("trainer", "trainer-0", [NOBODY])


def test_seeding_random_does_not_repeat_ids(receiver: Receiver) -> None:
    ids = set()
    for _ in range(3):
        random.seed(7)
        ids.add(telemetry.start_span("seeded", parent=telemetry.ROOT).get_span_context().trace_id)
    assert len(ids) == 3


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-0-0-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
    ],
)
def test_a_malformed_traceparent_starts_a_new_trace(header: str) -> None:
    assert parse_traceparent(header) is None


def test_a_traceparent_survives_the_round_trip() -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    parsed = parse_traceparent(header)
    assert parsed is not None
    assert parsed.is_remote
    assert format_traceparent(parsed) == header


def test_untraced_methods_exist_in_the_contracts() -> None:
    assert ROLES.keys() >= names.UNTRACED_METHODS
