#!/bin/sh
# transformers 5.24.0 generates by continuous batching: `generate_batch` is given a `GenerationConfig` with `stop_strings`.
# One would guess: the text ends there, or what cannot be had is refused, as `generate` without a tokenizer refuses it;
# processors that `generate_batch` has not are named by a warning.
# Seen: all texts are written to `max_new_tokens`, past the stop string, and no word of it.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - > said 2>&1 <<'PYTHON' && ended=0 || ended=1
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import ContinuousBatchingConfig

letters = "abcdefghijklmnopqrstuvwxyz .,"
bare = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
bare.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
sizes = dict(vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5, bos_token_id=None, eos_token_id=None)).double().eval()
ids = tokenizer("the story of a lighthouse", return_tensors="pt").input_ids
usual = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
small = ContinuousBatchingConfig(num_blocks=8, page_size=32, max_batch_tokens=64, max_requests_per_batch=1)


def alone(**options):
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **usual, **options)
    return tokenizer.decode(found[0, ids.shape[1] :])


def in_a_batch(**options):
    config = GenerationConfig(**usual, eos_token_id=-1, **options)
    found = model.generate_batch(ids.tolist(), config, continuous_batching_config=small, progress_bar=False)
    return tokenizer.decode(next(iter(found.values())).generated_tokens)


text = alone()
stop = text[9:11]
ends = alone(stop_strings=stop, tokenizer=tokenizer), in_a_batch(stop_strings=stop)
print(f"transformers {transformers.__version__}, generate stopped at {stop!r}: {ends[0]!r}; generate_batch: {ends[1]!r}")
raise SystemExit(in_a_batch() != text or not ends[0].endswith(stop) or len(ends[0]) > 11 or ends[1] != text)
PYTHON
test $ended = 0 || { cat said; exit 1; }
grep '^transformers' said
! grep -i -e "stop_str" -e "stop str" -e "stopping" said
