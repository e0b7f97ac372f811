#!/bin/sh
# transformers 5.24.0 streams a text by `TextStreamer`, token by token.
# One would guess: a token costs the same wherever it stands, a few tokens decoded for each.
# Seen: all tokens since the last line break are decoded again for each, so that 5,000 tokens without one cost 2,500 each.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TextStreamer


class Counted(PreTrainedTokenizerFast):
    decoded = 0

    def decode(self, ids, **options):
        self.decoded += 1 if isinstance(ids, int) else len(ids)
        return super().decode(ids, **options)


class Kept(TextStreamer):
    text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


bare = Tokenizer(models.BPE({letter: index for index, letter in enumerate("word \n")}, []))
bare.decoder = decoders.Fuse()
seen = []
for name, text in (("one line", "word " * 1000), ("1,000 lines", "word\n" * 1000)):
    tokenizer = Counted(tokenizer_object=bare)
    ids, streamer = torch.tensor(tokenizer(text).input_ids), Kept(tokenizer)
    started = time.process_time()
    for token in ids:
        streamer.put(token[None])
    streamer.end()
    seen.append(tokenizer.decoded / len(ids))
    seconds = time.process_time() - started
    print(f"transformers {transformers.__version__}, {name}: {seen[-1]:.0f} decoded a token, {seconds:.2f} s")
    assert streamer.text == text
raise SystemExit(seen[0] < 1000 or seen[1] > 10)
PYTHON
