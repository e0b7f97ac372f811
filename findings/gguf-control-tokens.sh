#!/bin/sh
# transformers 5.23.0 reads the tokenizer of a GGUF file with a control token that has letters
# outside the alphabet of bytes, as all of DeepSeek's have: <|User|> with two full-width bars.
# One would guess: the token is found in a text, as llama.cpp finds it and as <|user|> is.
# Seen: it is cut into pieces, so that a chat by the model's own template begins no turn.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 gguf==0.19.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gguf
import transformers
from transformers import PreTrainedTokenizerFast

letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
plain, wide = "<|user|>", "<\uff5cUser\uff5c>"
tokens = [*letters, "th", "the", plain, wide]
types = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2
writer = gguf.GGUFWriter("control.gguf", "qwen2")
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("deepseek-r1-qwen")
writer.add_token_list(tokens)
writer.add_token_types(types)
writer.add_token_merges(["t h", "th e"])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
tokenizer = PreTrainedTokenizerFast.from_pretrained(".", gguf_file="control.gguf")
found = [tokenizer.tokenize(f"{token}the") for token in (plain, wide)]
print(f"transformers {transformers.__version__}: {found[0]}, and {len(found[1])} tokens of the other")
raise SystemExit(found[0] != [plain, "the"] or len(found[1]) < 5)
PYTHON
