#!/bin/sh
# transformers 5.23.0, on a machine without a GPU, makes plain numbers of a checkpoint in FP8 with a
# scale for each block. One would guess: dtype=torch.bfloat16 gives a model in bfloat16, as with
# 5.17.0 and 5.24.0. Seen: its matrices come in float32 and all else in bfloat16, whichever of these
# the scales are in, so that the first forward pass raises; with dtype=torch.float32 it works.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=4)
).save_pretrained("model")
weights = load_file("model/model.safetensors")
config = json.loads(Path("model/config.json").read_text())
config["quantization_config"] = {
    "quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"
}
Path("model/config.json").write_text(json.dumps(config))


def loaded(scales: torch.dtype, dtype: torch.dtype) -> tuple[list[str], str]:
    """The dtypes of a model in FP8 that is loaded in a dtype, and what its first pass came to."""
    made = dict(weights)
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        made[name] = weights[name].to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = torch.ones(rows // 16, columns // 16, dtype=scales)
    save_file(made, "model/model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained("model", dtype=dtype)
    try:
        model(torch.tensor([[1, 2, 3]]))
        came = "works"
    except RuntimeError as error:
        came = f"raises: {error}"
    return sorted({str(weight.dtype) for weight in model.parameters()}), came


narrow = [loaded(scales, torch.bfloat16) for scales in (torch.float32, torch.bfloat16)]
wide = loaded(torch.float32, torch.float32)
print(f"transformers {transformers.__version__}: in bfloat16 {narrow}, in float32 {wide}")
raises = all(len(dtypes) == 2 and came.startswith("raises") for dtypes, came in narrow)
raise SystemExit(not raises or wide != (["torch.float32"], "works"))
PYTHON
