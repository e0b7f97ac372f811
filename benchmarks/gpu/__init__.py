"""What this project does on a GPU, in one call within nine minutes: ``make gpu`` (development only).

    python -m benchmarks.gpu --out runs/gpu/out --seconds 530
    python -m benchmarks.gpu --dry              # tiny shapes on the CPU: does it run at all?
    python -m benchmarks.gpu.estimate           # what the cost model expects

One process writes reports and archives; others measure, and append every figure to one file at once, so that nothing is
lost when one of them is killed.
"""

FIGURES = "figures.jsonl"
LEAST = 10.0  # seconds; with less left no section is begun
