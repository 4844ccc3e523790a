"""`zc-handoff`, which is also `python -m zerocopy`."""

import signal
import sys


def main() -> int:
    """`zerocopy.cli.main.run`. Ctrl-C while that is imported, a third of a second, is one like any other."""
    try:
        from zerocopy.cli.main import run

        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
