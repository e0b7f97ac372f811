"""Names that ``cli/options.py`` imports from here until it does so from ``config``."""

from tswift.benchmarking.config import BenchOptions as Entry
from tswift.benchmarking.config import parse_methods

__all__ = ["Entry", "parse_methods"]
