"""What a step may ask of the host and of a CUDA device at most: lower it where a method comes to need less.

``python -m tests.cuda.table --bounds`` prints today's figures in this form.
"""

from __future__ import annotations

# by method and heads: waits, copies to the device, copies from it, kernels outside graphs, graph launches; medians
BOUNDS: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("ar", "chained"): (1, 0, 1, 0, 1),
    ("medusa", "chained"): (1, 0, 1, 0, 2),
    ("medusa", "conditioned"): (1, 0, 1, 0, 2),
    ("tokenswift", "chained"): (1, 1, 1, 0, 2),
    ("tokenswift", "conditioned"): (1, 1, 1, 0, 2),
    ("cascade", "chained"): (6, 12, 6, 180, 2),
    ("cascade", "conditioned"): (6, 13, 6, 217, 2),
    ("recall", "chained"): (2, 2, 2, 7, 1),
    ("reuse", "chained"): (1, 0, 1, 0, 1),
    ("magicdec", "chained"): (5, 3, 5, 9, 5),
    ("standalone", "chained"): (5, 2, 5, 6, 5),
    ("triforce", "chained"): (16, 15, 16, 111, 16),
    ("auto", "chained"): (3, 5, 3, 73, 1),
    ("auto", "conditioned"): (3, 6, 3, 135, 1),
    ("ar-reference", "chained"): (1, 0, 1, 0, 1),
}

# where the host may wait for the device, and copy to it, once a text is under way
WAITS = frozenset(
    {
        "decoding/device_step.py:_verified",
        "decoding/sampling.py:draw_with_runner_up",
        "drafting/heads.py:_candidates",
        "drafting/history.py:think",
    }
)
SENT = frozenset(
    {
        "decoding/device_step.py:send",
        "decoding/sampling.py:noise_bits",
        "decoding/sampling.py:extend",
        "decoding/loop.py:_verify",
        "drafting/heads.py:guess",
        "drafting/chains.py:cache",
        "drafting/history.py:committed",
        "kv/cache.py:commit",
        "kv/partial.py:append",
        "kv/partial.py:select",
        "kv/cache.py:settle",
        "models/target.py:embed",
    }
)
