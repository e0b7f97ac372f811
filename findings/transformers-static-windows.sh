#!/bin/sh
# transformers 5.24.0 generates by GPT-Neo (as TinyStories' models are), whose every second layer reads a window of 256 tokens,
# with `cache_implementation="static"`.
# One would guess: the same greedy text as with a cache that grows, or a refusal.
# Seen: another text as soon as the cache is longer than the window, which is taken at the cache's end and not at the text's.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - 2> said <<'PYTHON' || { cat said; exit 1; }
import torch
import transformers
from transformers import GPTNeoConfig, GPTNeoForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
config = GPTNeoConfig(**sizes, initializer_range=0.5, bos_token_id=1, eos_token_id=None, pad_token_id=0)
torch.manual_seed(1)
model = GPTNeoForCausalLM(config).double().eval()
prompt = torch.randint(2, 64, (1, 40))


def text(count, **options):
    options |= {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    return model.generate(prompt, max_new_tokens=count, **options)[0, 40:].tolist()


seen = []
for count in (200, 300):  # with the prompt less than a window, and more
    plain, static = text(count), text(count, cache_implementation="static")
    seen.append(next((at for at in range(count) if plain[at] != static[at]), count))
    print(f"transformers {transformers.__version__}, window {config.window_size}, {40 + count} tokens:", end=" ")
    print(f"{seen[-1]} of {count} new ones before the first that differs")
raise SystemExit(seen[0] != 200 or seen[1] > 100)
PYTHON
! grep -i -e static -e window said
