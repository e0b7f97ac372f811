"""Benchmarks: what was measured, summarised, reported,
drawn and compared with an earlier measurement.
"""
