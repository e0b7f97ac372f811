#!/bin/sh
# transformers 5.24.0 generates greedily, in float64, with `guidance_scale`, and with drafts: prompt lookup or an assistant.
# One would guess: drafts change no token, as with the other settings (penalties, bans and biases are applied row by row).
# Seen: another text within ten tokens. The guiding branch has a cache of its own, from which a rejected draft is never taken.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
config = LlamaConfig(**sizes, initializer_range=0.5, eos_token_id=None)
torch.manual_seed(0)
prompt = torch.randint(0, 64, (1, 20))
model, assistant = (LlamaForCausalLM(config).double() for _ in range(2))


def text(**options):
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=60, **options)[0, 20:].tolist()


print(f"transformers {transformers.__version__}: tokens before the first that differs, of 60")
seen = []
for options in ({}, {"repetition_penalty": 1.2}, {"guidance_scale": 1.5}):
    plain = text(**options)
    drafted = [text(**options, **by) for by in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": assistant})]
    equal = [next((i for i in range(60) if plain[i] != other[i]), 60) for other in drafted]
    print(f"{options}: prompt lookup {equal[0]}, assistant {equal[1]}")
    seen.append(equal)
raise SystemExit(seen[:2] != [[60, 60]] * 2 or max(seen[2]) == 60)
PYTHON
