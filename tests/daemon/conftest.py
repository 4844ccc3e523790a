from __future__ import annotations

import pytest

from tests.daemon import wires
from transport.quic_choice import built


@pytest.fixture(params=["tcp", "quic"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What joins hosts: each in turn, for the modules that ask for it."""
    if request.param == "quic" and not built():
        pytest.skip("ngtcp2 is not installed")
    monkeypatch.setattr(wires, "transport", request.param)
    return str(request.param)
