"""The process that owns engine contexts. An engine abort kills a worker, never the daemon."""
