#!/bin/sh
# transformers 5.24.0 loads a GGUF file whose positions are scaled for long texts: by YaRN, linearly, or by a factor for
# each frequency (`rope_freqs.weight`, as every GGUF of Llama 3.1 has).
# One would guess: the model scales them, as llama.cpp does, or a message says that it will not.
# Seen: plain RoPE, the same logits to the bit as of the file without scaling, and no word of it.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2> said || { cat said; exit 1; }
import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM


def write(kind):
    writer = gguf.GGUFWriter(f"{kind}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(64)
    if kind in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
    if kind == "factors":
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(code) for code in range(33, 97)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 64)
    writer.add_token_merges([])
    draw = np.random.default_rng(0)
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    blocks = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd", "output", *norms, *(f"blk.0.{block}" for block in blocks)):
        shape = (64,) if name in norms else (64, 64)
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(kind):
    write(kind)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{kind}.gguf")
        return model.config.rope_parameters, model(torch.arange(64)[None]).logits


_, plain = logits("plain")
seen = {kind: logits(kind) for kind in ("yarn", "linear", "factors")}
for kind, (rope, found) in seen.items():
    print(f"transformers {transformers.__version__}, {kind}: {rope}, logits differ by {(found - plain).abs().max()}")
raise SystemExit(any(not torch.equal(found, plain) for _, found in seen.values()))
PYTHON
! grep -i -e rope -e scal -e freq said
