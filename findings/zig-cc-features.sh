#!/bin/sh
# `python -m ziglang cc` (ziglang 0.17.1, the C compiler that pip installs) is given -mavx2, on an x86 processor with FMA.
# One would guess: the flag adds AVX2 to what the compiler uses without it, as with gcc and clang.
# Seen: it takes away. Without any such flag the compiler uses all that this processor has, so a * b + c is rounded once;
# with -mavx2 it uses AVX2 and nothing else that is newer than the first x86-64, so a * b + c is rounded twice: another number.
set -e
grep -qw fma /proc/cpuinfo || { echo "this processor has no FMA"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ziglang==0.17.1
cd "$folder"
export ZIG_GLOBAL_CACHE_DIR="$folder/cache" ZIG_LOCAL_CACHE_DIR="$folder/cache"
cat > product.c <<'C'
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **given) {
    const double a = atof(given[1]), c = -a * a;
    printf("%g\n", a * a + c);
}
C
cat > fused.c <<'C'
#ifdef __FMA__
int fused;
#else
#error no fused products
#endif
C
by() { venv/bin/python -m ziglang cc -O2 "$@"; }
by product.c -o bare && by -mavx2 product.c -o avx2
bare=$(./bare 1.1) avx2=$(./avx2 1.1)
by -c fused.c -o bare.o && fused=1 || fused=0
by -mavx2 -c fused.c -o avx2.o 2> said && still=1 || still=0
echo "a * a - a * a of 1.1: $bare without -mavx2, $avx2 with it; FMA: $fused, $still"
test "$fused$still" = 10 && test "$bare" != "$avx2"
