"""`python -m zerocopy` is `zc-handoff`."""

import sys

from zerocopy.cli.main import run

sys.exit(run())
