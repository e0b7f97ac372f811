/* How many operations of products a core can do at most: chains of multiply-adds that stay in registers.

   Matrix products reach four fifths of it, and are of floats, while passes over codes and over a cache of 16-bit
   integers multiply those, which processors do at two to four times the rate. A floor must not lie above the truth. */

#include "../vectors.h"

enum { CHAINS = 12 }; /* as many as hide the latency, and stay in 16 registers with their operands */

/* That each step multiplies anew: where adding is another instruction, a product of the same numbers would be made once. */
#ifdef __aarch64__
#define UNKNOWN(x) __asm__("" : "+w"(x))
#else
#define UNKNOWN(x) __asm__("" : "+v"(x))
#endif

#define CHAINED(SUM, BEGIN, MAKE, STEP)                                            \
    {                                                                              \
        SUM chains[CHAINS];                                                        \
        __typeof__(MAKE(0)) x = MAKE(from[0]), y = MAKE(from[1]);                  \
        for (int c = 0; c < CHAINS; c++) chains[c] = BEGIN(MAKE(c));               \
        for (int64_t round = 0; round < rounds; round++)                           \
            for (int c = 0; c < CHAINS; c++) {                                     \
                UNKNOWN(x);                                                        \
                chains[c] = STEP(chains[c], x, y);                                 \
            }                                                                      \
        for (int c = 0; c < CHAINS; c++) *(volatile SUM *)kept = chains[c];        \
    }

/* Multiply and add numbers of 8, 16 or 32 bits; returns the operations done. */
int64_t tswift_multiply(int64_t rounds, int64_t bits, const int32_t *from) {
    _Alignas(64) char kept[64];
    if (bits == 8) CHAINED(partial, begun, spread_integer, plus_small_fours)
    else if (bits == 16) CHAINED(partial, begun, spread_integer, plus_pairs)
    else CHAINED(vector, , spread, plus)
    return rounds * CHAINS * LANES * 2 * (32 / bits);
}
