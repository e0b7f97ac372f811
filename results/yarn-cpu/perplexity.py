"""What stretched positions lose: negative log-likelihood by position of a text, in nats a token.

python perplexity.py MODEL TEXT FACTOR:TOKENS...
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch

from tswift.caches import FullKV
from tswift.forward.text import chunks
from tswift.loading.model import load

ENDS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
ROWS = 64  # of logits at a time


@torch.inference_mode()
def main(model: str, text: str, *cells: str) -> None:
    """Measure and print."""
    words = Path(text).read_text()
    for cell in cells:
        factor, count = map(int, cell.split(":"))
        loaded = load(model, device="cpu", yarn=factor if factor > 1 else None)
        target = loaded.target
        ids = torch.tensor(loaded.encode(words)[: count + 1])
        losses: list[float] = []
        for passed in chunks(target, ids[:-1].tolist(), FullKV(target.kv_shape, count + 600)):
            for hidden in passed.hidden.split(ROWS):
                after = ids[len(losses) + 1 :][: len(hidden), None]
                scores = target.logits(hidden).log_softmax(-1).gather(1, after)
                losses += (-scores[:, 0]).tolist()
        ends = [0, *(end for end in ENDS if end <= count)]
        means = [sum(losses[start:end]) / (end - start) for start, end in pairwise(ends)]
        print(f"| {factor} | {' | '.join(f'{mean:.2f}' for mean in means)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
