#!/bin/sh
# PyTorch 2.13.0 sums bytes (uint8) into int64 on a CPU.
# One would guess: at the speed at which memory is read, or at numpy's.
# Seen: 5 to 20 times as long as numpy takes for the same sum of the same memory.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import numpy
import torch

torch.set_num_threads(1)
data = torch.randint(0, 256, (50_000_000,), dtype=torch.uint8)


def seconds(work):
    times = []
    for _ in range(7):
        started = time.process_time()
        total = int(work())
        times.append(time.process_time() - started)
    return min(times), total


by_torch, total = seconds(lambda: data.sum(dtype=torch.int64))
by_numpy, same = seconds(lambda: data.numpy().sum(dtype=numpy.int64))
ratio = by_torch / by_numpy
print(f"torch {torch.__version__}: {by_torch:.4f} s, numpy {numpy.__version__}: {by_numpy:.4f} s, x {ratio:.1f}")
raise SystemExit(total != same or ratio < 2)
PYTHON
