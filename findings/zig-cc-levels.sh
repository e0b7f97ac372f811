#!/bin/sh
# `python -m ziglang cc` (ziglang 0.17.1) is given -O1, -O2 and -O3.
# One would guess: three levels, as of the clang that it is.
# Seen: one. The objects are the same to the byte, those of clang's -O2; -Xclang -O3 behind -O3 asks for the real third one.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ziglang==0.17.1
cd "$folder"
export ZIG_GLOBAL_CACHE_DIR="$folder/cache" ZIG_LOCAL_CACHE_DIR="$folder/cache"
cat > sums.c <<'C'
/* what only the third level copies for the two values of a choice that a loop does not change */
static __attribute__((noinline)) int sum(const int *from, int count, const int *step) {
    int total = 0;
    for (int i = 0; i < count; i++) total += from[i] * *step;
    return total;
}
int twice(const int *from, int count) {
    int two = 2;
    return sum(from, count, &two);
}
C
for level in -O1 -O2 -O3 "-O3 -Xclang -O3"; do
    venv/bin/python -m ziglang cc $level -c sums.c -o object.o
    sha256sum object.o | cut -c-16 > "of$level"
    echo "$level: $(cat "of$level")"
done
cmp -s of-O1 of-O3 && cmp -s of-O2 of-O3 && ! cmp -s of-O3 "of-O3 -Xclang -O3"
