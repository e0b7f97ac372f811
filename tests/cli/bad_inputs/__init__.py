"""Bad inputs, some hundreds of them, each tried on the command line: one clear line, exit code 2,
nothing touched.

A case is the words of a command line, and files made for it.
"""

from __future__ import annotations

from tests.cli.bad_inputs import files
from tests.cli.bad_inputs.case import Case, World, attempt, make_world, run, tree
from tests.cli.bad_inputs.heads import HEADS
from tests.cli.bad_inputs.models import MODELS
from tests.cli.bad_inputs.options import OPTIONS
from tests.cli.bad_inputs.runs import RUNS

CASES: tuple[Case, ...] = (*OPTIONS, *files.CASES, *MODELS, *HEADS, *RUNS)

__all__ = ["CASES", "Case", "World", "attempt", "make_world", "run", "tree"]
