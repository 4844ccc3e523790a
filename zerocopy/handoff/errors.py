"""Whose fault it was. Every error has a stable `reason` (a short slug for metrics and clients) and a sentence."""

from __future__ import annotations


class HandoffError(Exception):
    """Base of all: `reason` is a stable slug, the message names both values and the next step."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LocalProtocolError(HandoffError):
    """This host's own code called the protocol in a way it does not allow."""


class RemoteProtocolError(HandoffError):
    """The peer sent something the protocol does not allow; the handoff, or the link, ends."""
