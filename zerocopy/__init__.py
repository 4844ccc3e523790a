"""zc-handoff: prefill on one machine, stream the exact continuation state, decode on another."""

__version__ = "0.1.0"
