"""What training heads costs: ``python results/heads-smollm2/measure.py MODEL TEXT``, in tokens/s.

The teacher's are of new rows, whose states and 64 likeliest tokens go to a file. Steps are of rows
out of that file, by number of heads and size of the draft vocabulary.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import tswift
from tswift.forward.target import Target
from tswift.speculators.heads import ConditionedHeads
from tswift.training.config import DISTILL
from tswift.training.losses import HeadsLoss
from tswift.training.teacher import LIKELIEST, Lessons, Taught, read_states, teach

LENGTH, ROWS, BATCH, STEPS = 1024, 8, 2, 12


def speed(run: Callable[[int], object], count: int, tokens: int) -> float:
    """Tokens per second of calls with 1, 2, ..., each of so many tokens, after one with 0."""
    run(0)
    started = time.perf_counter()
    for number in range(1, 1 + count):
        run(number)
    return count * tokens / (time.perf_counter() - started)


class Steps:
    """Steps of a training of heads."""

    def __init__(
        self, target: Target, drafted: Tensor | None, count: int, lessons: Lessons
    ) -> None:
        heads = ConditionedHeads(target.hidden_size, count)
        heads.draft_ids = drafted
        self._loss = HeadsLoss(heads, target, DISTILL)
        self._optimizer = torch.optim.AdamW(heads.parameters())
        self._lessons = lessons

    def __call__(self, number: int) -> None:
        """A step."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self._loss(*self._lessons.take(BATCH * number, BATCH, False))
        (found.loss.sum() / found.positions).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def read(target: Target, rows: Tensor, drafted: Tensor | None, number: int) -> Taught:
    """What the model says of a row."""
    return teach(target, rows[number], drafted)


model = tswift.load(sys.argv[1], exact=False, heads="none")
target = model.target
tokens = torch.tensor(model.tokenizer(Path(sys.argv[2]).read_text())["input_ids"])
rows = tokens[: (1 + ROWS) * LENGTH].view(-1, 1, LENGTH)
print(f"{torch.get_num_threads()} threads, rows of {LENGTH:,} tokens")
print(
    "passes alone: "
    f"{speed(lambda number: read_states(target, rows[number]), ROWS // 2, LENGTH):,.0f}"
)
for size in (8192, target.vocab_size):
    ids = (
        tokens.bincount(minlength=target.vocab_size)
        .topk(size)
        .indices.sort()
        .values.to(torch.int32)
    )
    drafted = ids if size < target.vocab_size else None
    with TemporaryDirectory() as folder:
        shape = LENGTH, target.hidden_size, LIKELIEST
        lessons = Lessons(
            Path(folder) / "file", partial(read, target, rows, drafted), 1 + ROWS, shape, seed=0
        )
        taught = speed(lambda number, lessons=lessons: lessons.take(number, 1, True), ROWS, LENGTH)
        print(
            f"{size:,} tokens drafted: teacher {taught:,.0f}, "
            f"{lessons.bytes / lessons.kept / LENGTH:,.0f} bytes each"
        )
        for count in (2, 3):
            steps = Steps(target, drafted, count, lessons)
            print(
                f"  {count} heads: steps "
                f"{speed(steps, 3 if drafted is None else STEPS, BATCH * LENGTH):,.0f}"
            )
