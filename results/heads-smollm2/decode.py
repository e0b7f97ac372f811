"""Decoding with heads beside decoding without:
``python results/heads-smollm2/decode.py MODEL HEADS PROSE [LENGTH]``.

All ways take turns of 50 tokens in one process; each text is compared with plain decoding's.
Prefill is apart.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import tswift
from tswift.decoding.loop import Step
from tswift.drafting.options import DraftOptions, parse_tree
from tswift.engine import Request, begin
from tswift.sampling.parameters import SamplingParams

TURN = 50
ASKED = "Write a long story about a lighthouse keeper who finds a letter in a bottle."

model = tswift.load(sys.argv[1], heads=sys.argv[2])
length = int(sys.argv[4]) if len(sys.argv) > 4 else 500
prose = model.tokenizer(Path(sys.argv[3]).read_text())["input_ids"]
chat = model.tokenizer.apply_chat_template(
    [{"role": "user", "content": ASKED}],
    tokenize=True,
    add_generation_prompt=True,
    return_dict=False,
)
WAYS: dict[str, tuple[str, DraftOptions]] = {
    "ar": ("ar", DraftOptions()),
    **{
        f"medusa {tree}": ("medusa", DraftOptions(tree=parse_tree(tree)))
        for tree in ("1", "2", "1,1", "2,1")
    },
    "auto": ("auto", DraftOptions()),
}


def turn(steps: Iterator[Step], tokens: int) -> tuple[list[int], float, int]:
    """The next tokens, at least so many if there are, the seconds that they took, and the steps."""
    text: list[int] = []
    seconds, count = 0.0, 0
    for step in steps:
        text += step.tokens
        seconds += step.seconds
        count += 1
        if len(text) >= tokens:
            break
    return text, seconds, count


print(f"{length} tokens{model.remarks()}")
prompts = {"chat": chat, "prose, 512": prose[:512], "prose, 4,096": prose[:4096]}
for (name, prompt), temperature in product(prompts.items(), (1.0, 0.0)):
    runs = {}
    for way, (method, options) in WAYS.items():
        request = Request(
            prompt, length, method, SamplingParams(temperature=temperature), 1, options
        )
        runs[way] = begin(model, request).steps()
    texts: dict[str, list[int]] = {way: [] for way in WAYS}
    seconds, passes = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    while any(len(text) < length for text in texts.values()):
        for way, steps in runs.items():
            wanted = min(TURN, length - len(texts[way]))
            if wanted > 0:
                more, took, count = turn(steps, wanted)
                texts[way] += more
                seconds[way] += took
                passes[way] += count
    print(f"{name}, T {temperature:g}")
    for way, text in texts.items():
        same = "same" if text == texts["ar"] else "DIFFERENT"
        rate, x = len(text) / seconds[way], seconds["ar"] / seconds[way]
        print(
            f"  {way:15} {same} {len(text) / passes[way]:5.2f} tokens/step {rate:6.1f} tokens/s  "
            f"x {x:.2f}",
            flush=True,
        )
