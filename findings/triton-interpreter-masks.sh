#!/usr/bin/env bash
# A mask that triton types as int1 is refused by the interpreter of 3.9.0, and taken by that of 3.7.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
import torch, triton
import triton.language as tl

@triton.jit
def copy(source, to, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    mask = (at < SIZE - 1) & (count > 0)  # a block, and a number
    tl.static_assert(mask.dtype == tl.int1)
    tl.store(to + at, tl.load(source + at, mask=mask, other=0), mask=mask)

source, to = torch.arange(8), torch.zeros(8, dtype=torch.int64)
try:
    copy[1,](source, to, 3, SIZE=8)
    print("copied", to.tolist())
except Exception as error:
    print("refused:", error)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
seen=""
for version in 3.7.1 3.9.0; do
  "$folder/venv/bin/pip" install --quiet "triton==$version"
  told=$(TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/kernel.py" 2>/dev/null)
  echo "triton $version, guess: copied [0, 1, 2, 3, 4, 5, 6, 0]; seen: $told"
  seen+="${told%% *} "
done
[ "$seen" = "copied refused: " ]
