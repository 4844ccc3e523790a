"""The uvloop process on every host: peers, handoffs, admission, HTTP API, metrics."""
