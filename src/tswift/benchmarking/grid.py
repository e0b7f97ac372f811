"""Old name of :mod:`tswift.benchmarking.table`, for the commands that still say ``Grid``."""

from tswift.benchmarking.table import NOTHING as NOTHING
from tswift.benchmarking.table import Table as Grid
from tswift.benchmarking.table import method_name as method_name

__all__ = ["NOTHING", "Grid", "method_name"]
