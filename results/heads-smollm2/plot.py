"""training.png: tokens a step that heads of metrics.jsonl would make over a training.

python results/heads-smollm2/plot.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
lines = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
minutes = {line["step"]: line["seconds"] / 60 for line in lines if "seconds" in line}
tops = {line["step"]: line["held_out"]["top"] for line in lines if "held_out" in line}
xs = [max((m for s, m in minutes.items() if s <= step), default=0) for step in tops]
figure = Figure(figsize=(7.5, 4.2), layout="constrained")
axes = figure.subplots()
for name, marker, ys in (
    ("one drafted token", "o", [1 + first[0] for first, _ in tops.values()]),
    ("two", "s", [1 + first[0] * (1 + second[0]) for first, second in tops.values()]),
):
    axes.plot(xs, ys, marker=marker, label=name)
axes.set(
    xlabel="minutes of training on one core",
    ylabel="tokens a step, on held-out texts",
    ylim=(1, 1.4),
    title="Heads for SmolLM2-135M-Instruct, 2026-11-25",
)
axes.grid(color="#DDDDDD")
axes.legend(frameon=False)
figure.savefig(FOLDER / "training.png", dpi=120)
