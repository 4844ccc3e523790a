"""SIGTERM ends a test run as Ctrl-C does, fixtures and all. Else it would kill it, or fail the one test that has hosts
and let the others run on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
