"""The command line: each subcommand parses, calls, prints; ``tools`` has the small ones.

Begin with ``app``, which declares the subcommands and turns every error into one line;
``options`` makes options of the configs' declared fields. It imports torch only inside a
subcommand.
"""

import os
import signal
import threading

# PyTorch's threads are to sleep while they wait, not to spin: on a machine with other work to do, a
# token took 136 ms instead of 3.4. It is read when torch is imported, which no module imported here
# does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Ctrl-C while modules are imported ends the process as the system does, without a traceback
_OURS = threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _OURS:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tswift.cli.app import main  # noqa: E402

if _OURS:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["main"]
