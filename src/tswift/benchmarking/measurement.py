"""A name that ``cli/options.py`` imports from here until it does so from ``config``."""

from tswift.benchmarking.config import REFERENCE

__all__ = ["REFERENCE"]
