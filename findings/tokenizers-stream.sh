#!/bin/sh
# `DecodeStream` of tokenizers 0.23.3 is given special tokens that it skips, as a model sends that is made to go on past its end.
# One would guess: each costs the same, as each token of a text does.
# Seen: none is ever let go while no text comes, so that the last quarter of 12,000 takes some 7 times the first's time.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import tokenizers
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate("abcd ")}, []))
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(["</s>"])
seen = []
for name, ids in (("text", [0, 1, 4] * 4000), ("</s>", [5] * 12000)):
    stream, times = DecodeStream(skip_special_tokens=True), []
    for begin in range(0, 12000, 3000):
        started = time.process_time()
        for token in ids[begin : begin + 3000]:
            stream.step(tokenizer, token)
        times.append(time.process_time() - started)
    print(f"tokenizers {tokenizers.__version__}, {name}:", *(f"{seconds:.4f} s" for seconds in times))
    seen.append(times)
raise SystemExit(seen[1][-1] < 3 * seen[1][0] or sum(seen[1]) < 20 * sum(seen[0]))
PYTHON
