"""The command line. One module per subcommand: parse, call, print."""

import os

# PyTorch's threads are to sleep while they wait, not to spin: on a machine with other work to do, a token took 136 ms
# instead of 3.4. It is read when torch is imported, which no module imported here does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tswift.cli.app import main

__all__ = ["main"]
