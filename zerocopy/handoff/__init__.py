"""The handoff protocol, sans-IO: no socket, file, thread, clock or event loop. Time comes in as an argument."""
