#!/usr/bin/env bash
# Modeling code of transformers 5.24.0 hands `kwargs=` to a cache's update, which that of 5.23.0 does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/cache.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnCache:
    is_compileable = False

    def __init__(self):
        self.layers = {}

    def update(self, keys, values, layer):
        held = self.layers.get(layer)
        self.layers[layer] = (keys, values) if held is None else tuple(
            torch.cat(pair, dim=-2) for pair in zip(held, (keys, values))
        )
        return self.layers[layer]

    def get_seq_length(self, layer=0):
        return self.layers[layer][0].shape[-2] if layer in self.layers else 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, queries, layer=0):
        return queries + self.get_seq_length(layer), 0

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
cache = OwnCache()
try:
    model(torch.arange(5)[None], past_key_values=cache, use_cache=True)
    print("filled", cache.get_seq_length())
except TypeError as error:
    print("refused:", error)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
seen=""
for version in 5.23.0 5.24.0; do
  "$folder/venv/bin/pip" install --quiet "transformers==$version"
  told=$("$folder/venv/bin/python" "$folder/cache.py" 2>/dev/null)
  echo "transformers $version, guess: filled 5; seen: $told"
  seen+="${told%% *} "
done
[ "$seen" = "filled refused: " ]
