#!/usr/bin/env bash
# An output of transformers 5.24.0 says that it has a key which none of its keys is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0
told=$("$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

output = CausalLMOutputWithPast(past_key_values=DynamicCache())
name = "past_key_values"
print(name in output, name in list(output), name in dict(output))
PYTHON
)
echo "transformers 5.24.0, in output, its list, its dict: guess: True True True; seen: $told"
[ "$told" = "True False False" ]
