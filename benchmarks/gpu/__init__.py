"""What this project can do on a GPU, in one call: ``make gpu`` (development only).

Costs of passes against their floor, the host's share of a step, transformers' generate beside ours, and texts of
100,000 tokens. Everything goes into one folder, and what was measured is there whatever ends the run.

    python -m benchmarks.gpu --out runs/gpu --seconds 480
    python -m benchmarks.gpu --out /tmp/dry --dry           # tiny shapes on the CPU: does it run at all?
"""

import time

BEGAN = time.time()  # before torch is imported, which takes its seconds of the limit
