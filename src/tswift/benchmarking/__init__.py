"""Benchmarks: what was measured, summarised, reported, drawn, and compared with an earlier
measurement.

Begin with ``request`` (what a command asks for) and ``run`` (methods in turns, over slices of one
text). ``summary.METRICS`` declares each figure once: column, unit, direction, record. ``suites``
are the paper's tables. Only the command line imports it.
"""
