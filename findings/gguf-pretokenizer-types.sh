#!/bin/sh
# transformers 5.23.0 reads the tokenizer of a GGUF file whose `tokenizer.ggml.pre` is `smollm`.
# One would guess: digits are words of their own, as in llama.cpp and in the tokenizer.json of those
# models, or a message that this way to cut text is not known.
# Seen: text is cut as GPT-2's, so that "12" is one token and two spaces before a digit are parted;
# and nothing is said. Of 60 names that llama.cpp knows, 23 are in the table there.
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
tokens = [*letters, "12", "\u0120\u0120"]
writer = gguf.GGUFWriter("digits.gguf", "llama")
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(tokens)
writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
writer.add_token_merges(["1 2", "\u0120 \u0120"])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
tokenizer = PreTrainedTokenizerFast.from_pretrained(".", gguf_file="digits.gguf")
found = tokenizer.tokenize("a  12")
print(f"transformers {transformers.__version__}: {found}; digits by themselves would be 1 and 2")
raise SystemExit(found != ["a", "\u0120", "\u0120", "12"])
PYTHON
