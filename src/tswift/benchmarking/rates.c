/* How many operations of products a core can do at most: chains of multiply-adds that stay in registers.

   Matrix products reach four fifths of it, and are of floats, while passes over codes and over a cache of 16-bit
   integers multiply those, which processors do at two to four times the rate. A floor must not lie above the truth. */

#include <immintrin.h>
#include <stdint.h>

enum { CHAINS = 12 }; /* as many as hide the latency, and stay in 16 registers with their operands */

#ifdef __AVX512F__
typedef __m512 floats;
typedef __m512i integers;
enum { LANES = 16 };
#define FLOATS(x) _mm512_set1_ps(x)
#define INTEGERS(x) _mm512_set1_epi32(x)
#define ADDED(x, y) _mm512_add_epi32(x, y)
#define FLOAT_STEP(sum, x, y) _mm512_fmadd_ps(x, y, sum)
#ifdef __AVX512VNNI__
#define SHORT_STEP(sum, x, y) _mm512_dpwssd_epi32(sum, x, y)
#define BYTE_STEP(sum, x, y) _mm512_dpbusd_epi32(sum, x, y)
#else
#define SHORT_STEP(sum, x, y) ADDED(sum, _mm512_madd_epi16(x, y))
#define BYTE_STEP(sum, x, y) _mm512_add_epi16(sum, _mm512_maddubs_epi16(x, y))
#endif
#else
typedef __m256 floats;
typedef __m256i integers;
enum { LANES = 8 };
#define FLOATS(x) _mm256_set1_ps(x)
#define INTEGERS(x) _mm256_set1_epi32(x)
#define ADDED(x, y) _mm256_add_epi32(x, y)
#define FLOAT_STEP(sum, x, y) _mm256_fmadd_ps(x, y, sum)
#ifdef __AVXVNNI__
#define SHORT_STEP(sum, x, y) _mm256_dpwssd_avx_epi32(sum, x, y)
#define BYTE_STEP(sum, x, y) _mm256_dpbusd_avx_epi32(sum, x, y)
#else
#define SHORT_STEP(sum, x, y) ADDED(sum, _mm256_madd_epi16(x, y))
#define BYTE_STEP(sum, x, y) _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y))
#endif
#endif

#define CHAINED(TYPE, MAKE, STEP)                                                  \
    {                                                                              \
        TYPE sums[CHAINS];                                                         \
        const TYPE x = MAKE(from[0]), y = MAKE(from[1]);                           \
        for (int c = 0; c < CHAINS; c++) sums[c] = MAKE(c);                        \
        for (int64_t round = 0; round < rounds; round++)                           \
            for (int c = 0; c < CHAINS; c++) sums[c] = STEP(sums[c], x, y);        \
        for (int c = 0; c < CHAINS; c++) *(volatile TYPE *)kept = sums[c];         \
    }

/* Multiply and add numbers of 8, 16 or 32 bits; returns the operations done. */
int64_t tswift_multiply(int64_t rounds, int64_t bits, const int32_t *from) {
    _Alignas(64) char kept[64];
    if (bits == 8)
        CHAINED(integers, INTEGERS, BYTE_STEP)
    else if (bits == 16)
        CHAINED(integers, INTEGERS, SHORT_STEP)
    else
        CHAINED(floats, FLOATS, FLOAT_STEP)
    return rounds * CHAINS * LANES * 2 * (32 / bits);
}
