#!/bin/sh
# transformers 5.24.0 answers a second turn, in float64: `generate` is given the whole conversation and the cache that the
# first turn returned, with `prompt_lookup_num_tokens`.
# One would guess: what the cache holds is not forwarded again, and drafts change no token, as in the first turn.
# Seen: the whole conversation is forwarded behind what the cache holds of it, and another text comes, and no word of it.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - 2> said <<'PYTHON' || { cat said; exit 1; }
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
config = LlamaConfig(**sizes, initializer_range=0.5, eos_token_id=None, pad_token_id=0)
torch.manual_seed(1)
model = LlamaForCausalLM(config).double()
prompt, said = torch.randint(2, 64, (1, 30)), torch.randint(2, 64, (1, 9))


def text(ids, **options):
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "return_dict_in_generate": True}
    return model.generate(ids, max_new_tokens=40, **options)


drafts = {"prompt_lookup_num_tokens": 5}
seen = []
for first in ({}, drafts):
    for second in ({}, drafts):
        turn = text(prompt, **first)
        assert torch.equal(turn.sequences, text(prompt).sequences)
        whole = torch.cat([turn.sequences, said], dim=1)
        answer = text(whole, cache=turn.cache, **second)
        same, held = torch.equal(answer.sequences, text(whole).sequences), answer.cache.get_seq_length()
        seen.append(same)
        count = answer.sequences.shape[1]
        print(f"transformers {transformers.__version__}, drafts in the turns: {bool(first)}, {bool(second)};", end=" ")
        print(f"the same text: {same}; the cache holds {held} of {count} tokens")
raise SystemExit(seen != [True, False] * 2)
PYTHON
! grep -i -e cache said
