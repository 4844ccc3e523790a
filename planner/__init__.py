"""Pure decisions: where a request runs and why. No I/O and no clock of its own."""
