#!/bin/sh
# transformers 5.24.0 generates with `stop_strings` and `prompt_lookup_num_tokens`, and the stop string stands in the prompt too.
# One would guess: the text ends with the stop string, as without prompt lookup, which is to change no token.
# Seen: it goes on, as the end alone of each pass's accepted tokens is looked at.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = "abcdefghijklmnopqrstuvwxyz .,"
bare = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
bare.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
sizes = dict(vocab_size=len(letters), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(5)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None)).double()


def more(ids, count=80, **options):
    with torch.no_grad():
        longer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, tokenizer=tokenizer, **options
        )
    return longer[:, ids.shape[1] :]


ids = tokenizer("the story of a lighthouse, the story of a lighthouse, the", return_tensors="pt").input_ids
ids = torch.cat([ids, more(ids)], dim=1)  # a random model's text: it soon repeats itself
plain, looked = (tokenizer.decode(more(ids, **by)[0]) for by in ({}, {"prompt_lookup_num_tokens": 10}))
print(f"transformers {transformers.__version__}, without a stop the same text: {plain == looked}")
stop = plain[1]
ends = [tokenizer.decode(more(ids, stop_strings=stop, **by)[0]) for by in ({}, {"prompt_lookup_num_tokens": 10})]
print(f"stopped at {stop!r}: {ends[0]!r}, with prompt lookup {ends[1]!r}")
raise SystemExit(plain != looked or stop in ends[0][:-1] or stop not in ends[1][:-1])
PYTHON
