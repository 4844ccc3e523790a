"""Metrics have bounded labels, and a log line holds nothing but known fields (M1, M2, X4)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zerocopy.daemon.telemetry import MAX_REASONS, HandoffRecord, Telemetry, configure_logging, log_event
from zerocopy.handoff.components import Component


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


# -- metrics


def test_a_request_is_counted_once_by_outcome_reason_and_placement() -> None:
    telemetry = Telemetry()
    telemetry.request_started()
    telemetry.request_started()
    assert value(telemetry, "zc_requests_active") == 2
    telemetry.request_ended("ok", "ok", "disaggregated")
    telemetry.request_ended("failed", "no-prefiller", "none")
    assert value(telemetry, "zc_requests_active") == 0
    assert value(telemetry, "zc_requests_total", outcome="ok", reason="ok", placement="disaggregated") == 1
    assert value(telemetry, "zc_requests_total", outcome="failed", reason="no-prefiller", placement="none") == 1


def test_a_handoff_reports_bytes_phases_overlap_and_tail() -> None:
    telemetry = Telemetry()
    record = HandoffRecord(
        role="decoder", outcome="ok", reason="ok", overlap=0.9, tail_s=0.2, phase_s={"wire": 1.5, "commit": 0.01},
        component_bytes={Component.ATTENTION_KV: 1 << 20, Component.MTP_HIDDEN: 256},
    )  # fmt: skip
    telemetry.handoff_ended(record)
    telemetry.handoff_ended(record)
    assert value(telemetry, "zc_handoffs_total", role="decoder", outcome="ok", reason="ok") == 2
    assert value(telemetry, "zc_handoff_bytes_total", role="decoder", component="attention_kv") == 2 << 20
    assert value(telemetry, "zc_handoff_bytes_total", role="decoder", component="mtp_hidden") == 512
    assert value(telemetry, "zc_handoff_phase_seconds_sum", role="decoder", phase="wire") == 3.0
    assert value(telemetry, "zc_handoff_overlap_ratio_sum", role="decoder") == 1.8
    assert value(telemetry, "zc_handoff_tail_seconds_count", role="decoder") == 2


def test_a_handoff_that_never_ran_has_no_phases_overlap_or_tail() -> None:
    telemetry = Telemetry()
    telemetry.handoff_ended(HandoffRecord(role="prefiller", outcome="failed", reason="identity"))
    assert value(telemetry, "zc_handoff_tail_seconds_count", role="prefiller") is None
    assert value(telemetry, "zc_handoff_overlap_ratio_count", role="prefiller") is None


def test_time_per_token_counts_only_tokens_after_the_first() -> None:
    telemetry = Telemetry()
    telemetry.first_token("local", 0.3)
    telemetry.generated("local", 1, 0.0)
    assert value(telemetry, "zc_tpot_seconds_count", placement="local") is None
    telemetry.generated("local", 11, 1.0)
    assert value(telemetry, "zc_tpot_seconds_sum", placement="local") == pytest.approx(0.1)
    assert value(telemetry, "zc_output_tokens_total") == 12
    assert value(telemetry, "zc_ttft_seconds_sum", placement="local") == 0.3


def test_gauges_follow_the_last_value() -> None:
    telemetry = Telemetry(["p1"])
    telemetry.reserved(5)
    telemetry.reserved(0)
    telemetry.late_page(3)
    telemetry.serving(True)
    telemetry.worker_restarted("worker-lost")
    telemetry.fell_back("link-lost")
    telemetry.prompt_tokens("transferred", 7)
    telemetry.link("p1", up=True, rtt_s=0.001, bandwidth_bytes_s=1e9)
    telemetry.link("p1", up=False)
    assert value(telemetry, "zc_reserved_bytes") == 0
    assert value(telemetry, "zc_late_pages_total") == 3
    assert value(telemetry, "zc_serving") == 1
    assert value(telemetry, "zc_worker_restarts_total", reason="worker-lost") == 1
    assert value(telemetry, "zc_fallbacks_total", reason="link-lost") == 1
    assert value(telemetry, "zc_prompt_tokens_total", source="transferred") == 7
    assert value(telemetry, "zc_link_up", peer="p1") == 0
    assert value(telemetry, "zc_link_rtt_seconds", peer="p1") == 0.001
    assert value(telemetry, "zc_link_bandwidth_bytes_per_second", peer="p1") == 1e9


def test_reasons_from_peers_cannot_grow_the_number_of_series() -> None:
    telemetry = Telemetry()
    for i in range(10 * MAX_REASONS):
        telemetry.handoff_ended(HandoffRecord(role="decoder", outcome="failed", reason=f"made-up-{i}"))
    for reason in ("", "Has Spaces", "x" * 200, 'quote"', "new\nline", "ünicode"):
        telemetry.handoff_ended(HandoffRecord(role="decoder", outcome="failed", reason=reason))
    families = {f.name: f for f in text_string_to_metric_families(telemetry.exposition().decode())}
    series = {s.labels["reason"] for s in families["zc_handoffs"].samples}
    assert len(series) == MAX_REASONS + 1 and "other" in series
    assert not any(" " in reason or "\n" in reason for reason in series)


def test_peers_that_are_not_configured_share_one_label() -> None:
    telemetry = Telemetry(["p1"])
    for name in ("p1", "stranger-1", "stranger-2"):
        telemetry.link(name, up=True)
    text = telemetry.exposition().decode()
    assert 'peer="p1"' in text and 'peer="other"' in text and "stranger" not in text


def test_the_exposition_is_valid_and_two_daemons_in_one_process_do_not_mix() -> None:
    one, two = Telemetry(), Telemetry()
    one.late_page()
    assert value(two, "zc_late_pages_total") == 0
    families = list(text_string_to_metric_families(one.exposition().decode()))
    assert all(f.name.startswith("zc_") and f.documentation for f in families)


# -- logs


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest, restored_logging: None) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("debug", request.param, stream)
    return stream


def test_an_event_is_one_line_with_its_fields(log: io.StringIO) -> None:
    log_event("link open", peer="p1", seconds=0.25, bytes=7)
    line = log.getvalue()
    assert line.count("\n") == 1
    if line.startswith("{"):
        fields = json.loads(line)
        assert (fields["event"], fields["peer"], fields["seconds"], fields["bytes"]) == ("link open", "p1", 0.25, 7)
        assert fields["level"] == "info"
    else:
        assert "info" in line and "link open peer=p1 seconds=0.25 bytes=7" in line


@pytest.mark.parametrize(
    "fields", [{"prompt": "secret"}, {"tokens": [1, 2]}, {"tokens": "12"}, {"seconds": "x"}, {"peer": b"x"}]
)
def test_an_unknown_field_or_one_of_another_type_is_a_bug(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        log_event("event", **fields)


def test_arguments_and_exceptions_of_foreign_log_calls_are_not_written(log: io.StringIO) -> None:
    logging.getLogger("aiohttp.server").error("Error handling request %s", "SECRET PROMPT")
    logging.getLogger("lib").warning({"text": "SECRET"})
    try:
        raise ValueError("SECRET TEXT")
    except ValueError:
        logging.getLogger("lib").exception("failed")
    text = log.getvalue()
    assert "SECRET" not in text
    assert "Error handling request %s" in text and "ValueError" in text and "test_telemetry.py:" in text
    assert text.count("\n") == 3


def test_a_peers_text_cannot_forge_a_line_or_flood_the_log(log: io.StringIO) -> None:
    log_event("link closed", reason='x\n12:00:00 info forged="1"\r\x1b[31m' + "y" * 10_000)
    text = log.getvalue()
    assert text.count("\n") == 1 and "\r" not in text and "\x1b" not in text
    assert len(text) < 700
    log_event("link closed", reason="x\x1b[31my\x00z")  # a value that needs no quotes
    assert "\x1b" not in log.getvalue() and "\x00" not in log.getvalue()


def test_levels_below_the_configured_one_are_silent(restored_logging: None) -> None:
    stream = io.StringIO()
    configure_logging("warning", "text", stream)
    log_event("quiet")
    log_event("loud", level=logging.WARNING)
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()
