"""Engines behind one small protocol: `base` says what an engine must do, `llama` is the first that does."""
