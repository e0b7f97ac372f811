"""Two runs of a text side by side: ``python results/smollm2-long-cpu-epyc/table.py AR AUTO``.

Both are folders of ``tswift generate``. Times are those of the steps, by the journals' checkpoints,
between which they are taken to pass evenly; prefills are apart.
"""

import sys
from pathlib import Path

import numpy as np

from tswift.jobs.folder import JOURNAL, parse_journal

EVERY = 20_000  # tokens of a row

runs = [parse_journal((Path(name) / JOURNAL).read_bytes()).checkpoints for name in sys.argv[1:3]]
ends = [(run[-1].tokens, run[-1].crc32) for run in runs]
print(f"{ends[0][0]:,} tokens, {'the same' if ends[0] == ends[1] else 'NOT the same'}")
places = [0, *range(EVERY, min(tokens for tokens, _ in ends) + 1, EVERY)]
seconds, passes = (
    [
        np.interp(
            places,
            [0, *(each.tokens for each in run)],
            [0, *(each.counters[name] for each in run)],
        )
        for run in runs
    ]
    for name in ("seconds", "passes")
)
plain, other = seconds
print("| generated | T_AR, s | T, s | x | tokens a step | x since the row before |")
print("| ---: | ---: | ---: | ---: | ---: | ---: |")
for row in range(1, len(places)):
    x = (plain[row] - plain[row - 1]) / (other[row] - other[row - 1])
    print(
        f"| {places[row]:,} | {plain[row]:,.0f} | {other[row]:,.0f} | "
        f"{plain[row] / other[row]:.2f} | {places[row] / passes[1][row]:.2f} | {x:.2f} |"
    )
