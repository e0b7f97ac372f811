"""Which places of a suite differ: python results/paper-cpu/pairs.py FOLDER...

For each metric that a suite shows, its places from the highest mean to the lowest. ``>`` stands
between two whose draws (the same prompt and seed) differ by more than chance explains, by Student's
t on the pairs at 95%; ``~`` where that cannot be told. ``=`` means equal in every draw.
"""

import sys
from pathlib import Path

from scipy.stats import ttest_rel

from tswift.benchmarking.record import SuiteRecord, read
from tswift.benchmarking.suites import find_suite, measured_rows
from tswift.benchmarking.summary import METRICS, Row


def between(one: Row, other: Row, metric: str) -> str:
    """The sign between two rows."""
    draws = sorted(one.draws.keys() & other.draws.keys())
    pairs = [(one.draws[draw][metric], other.draws[draw][metric]) for draw in draws]
    if all(ours == theirs for ours, theirs in pairs):
        return "="
    if len(pairs) < 2:
        return "?"
    return ">" if ttest_rel(*zip(*pairs, strict=True)).pvalue < 0.05 else "~"


for folder in sys.argv[1:]:
    record = read(Path(folder, "suite.json"), "FOLDER")
    assert isinstance(record, SuiteRecord)
    suite = find_suite(record.suite)
    rows = measured_rows(suite, record.groups)
    print(f"\n{record.suite}: {record.title}")
    for place in dict.fromkeys(row.place for row in rows):
        for metric in dict.fromkeys((*suite.columns, *suite.plotted)):
            here = [
                row
                for row in rows
                if row.place == place and metric in next(iter(row.draws.values()))
            ]
            here.sort(key=lambda row: -(row.figures[metric].mean or 0))
            line = ""
            for row, after in zip(here, [*here[1:], None], strict=True):
                name = f"{row.axis} {METRICS[metric].text(row.figures[metric])}"
                line += name + (f" {between(row, after, metric)} " if after else "")
            if line:
                print(f"  {place[0]:,} + {place[1]:,} {METRICS[metric].heading}: {line}")
