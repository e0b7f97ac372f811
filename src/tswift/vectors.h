/* Vectors under the same names on x86 processors, with AVX-512 or else with AVX2, FMA and F16C, and on 64-bit ARM
   processors, with NEON. No other file knows of instructions.

   A vector has LANES numbers of 32 bits, and + - * / & | << work on it. Every number has the same bits everywhere, but
   those of a NaN. */

#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Of which kind numbers are: weights, and keys and values. */
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define INT16 3
#define INT8 4

/* REGISTERS that hold vectors; CODED, rows whose sums of products with codes stay in them. */
#if defined __AVX512F__
enum { LANES = 16, REGISTERS = 32, CODED = 8 };
#elif defined __AVX2__
enum { LANES = 8, REGISTERS = 16, CODED = 4 };
#else
enum { LANES = 4, REGISTERS = 32, CODED = 2 };
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES))); /* or pairs of 16 bits, or fours of 8 bits */
typedef vector any_vector __attribute__((aligned(1), may_alias));
typedef integers any_integers __attribute__((aligned(1), may_alias));

INLINE vector load(const void *from) { return *(const any_vector *)from; }
INLINE void store(void *to, vector x) { *(any_vector *)to = x; }
INLINE integers load_integers(const void *from) { return *(const any_integers *)from; }
INLINE void store_integers(void *to, integers x) { *(any_integers *)to = x; }
INLINE vector spread(float x) { return x - (vector){0}; } /* plus would turn -0 */
INLINE integers spread_integer(int32_t x) { return x - (integers){0}; }
INLINE vector as_float(integers x) { return __builtin_convertvector(x, vector); }

/* Numbers in bfloat16 of two vectors that take turns. */
INLINE void load_pair(const uint16_t *from, vector pair[2]) {
    const integers both = load_integers(from);
    pair[0] = (vector)(both << 16);
    pair[1] = (vector)(both & (int32_t)0xffff0000);
}

#ifdef __x86_64__
#include <immintrin.h>

/* Most instructions differ by their names alone. */
#ifdef __AVX512F__
#define X86(name) _mm512_##name
typedef __m512i whole;
typedef __m256i half;
INLINE vector repeat_two(double x) { return (vector)_mm512_set1_pd(x); }
INLINE vector repeat_four(__m128 x) { return _mm512_broadcast_f32x4(x); }
INLINE half load_half(const void *from) { return _mm256_loadu_si256(from); }
INLINE void store_half(void *to, half x) { _mm256_storeu_si256(to, x); }
INLINE int differ(vector x, vector y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_OQ) != 0; }
INLINE vector unless_less(vector y, vector x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, spread(least), _CMP_NLT_UQ), y);
}
INLINE vector put(vector into, vector x, int lane, int dims) {
    return _mm512_mask_mov_ps(into, (dims == 2 ? 0x5555 : 0x1111) << lane, x);
}
INLINE void store_shorts(int16_t *to, integers x) { store_half(to, _mm512_cvtsepi32_epi16((whole)x)); }
INLINE void store_bytes(uint8_t *to, integers x) {
    _mm_storeu_si128((__m128i *)to, _mm_xor_si128(_mm512_cvtsepi32_epi8((whole)x), _mm_set1_epi8(-128)));
}
#else
#define X86(name) _mm256_##name
typedef __m256i whole;
typedef __m128i half;
INLINE vector repeat_two(double x) { return (vector)_mm256_set1_pd(x); }
INLINE vector repeat_four(__m128 x) { return _mm256_set_m128(x, x); }
INLINE half load_half(const void *from) { return _mm_loadu_si128(from); }
INLINE void store_half(void *to, half x) { _mm_storeu_si128(to, x); }
INLINE int differ(vector x, vector y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_NEQ_OQ)); }
INLINE vector unless_less(vector y, vector x, float least) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, spread(least), _CMP_LT_OQ), y);
}
INLINE vector put(vector into, vector x, int lane, int dims) {
    const __m256i lanes = _mm256_and_si256(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(dims - 1));
    return _mm256_blendv_ps(into, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(lane))));
}
INLINE __m128i shorts(integers x) {
    return _mm_packs_epi32(_mm256_castsi256_si128((whole)x), _mm256_extracti128_si256((whole)x, 1));
}
INLINE void store_shorts(int16_t *to, integers x) { store_half(to, shorts(x)); }
INLINE void store_bytes(uint8_t *to, integers x) {
    const __m128i bytes = _mm_packs_epi16(shorts(x), shorts(x));
    _mm_storel_epi64((__m128i *)to, _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
}
#endif

INLINE void relax(void) { _mm_pause(); }
INLINE vector plus(vector sum, vector x, vector y) { return X86(fmadd_ps)(x, y, sum); }
INLINE vector higher(vector x, vector y) { return X86(max_ps)(x, y); }
INLINE vector lower(vector x, vector y) { return X86(min_ps)(x, y); }
INLINE vector load_bfloats(const uint16_t *from) {
    return (vector)X86(slli_epi32)(X86(cvtepu16_epi32)(load_half(from)), 16);
}
INLINE vector load_halves(const uint16_t *from) { return X86(cvtph_ps)(load_half(from)); }
INLINE void store_halves(uint16_t *to, vector x) { store_half(to, X86(cvtps_ph)(x, 0)); }
INLINE float half_to_float(uint16_t x) { return _cvtsh_ss(x); }
INLINE uint16_t float_to_half(float x) { return _cvtss_sh(x, 0); }
INLINE integers rounded(vector x) { return (integers)X86(cvtps_epi32)(x); }
INLINE vector swap_pairs(vector x) { return X86(permute_ps)(x, 0x4e); }
INLINE vector swap_neighbours(vector x) { return X86(permute_ps)(x, 0xb1); }
INLINE integers firsts(integers x, integers y) { return (integers)X86(unpacklo_epi32)((whole)x, (whole)y); }
INLINE integers lasts(integers x, integers y) { return (integers)X86(unpackhi_epi32)((whole)x, (whole)y); }
INLINE integers first_pairs(integers x, integers y) { return (integers)X86(unpacklo_epi64)((whole)x, (whole)y); }
INLINE integers last_pairs(integers x, integers y) { return (integers)X86(unpackhi_epi64)((whole)x, (whole)y); }
INLINE vector repeat(const void *from, const int dims) {
    float one;
    double two;
    memcpy(&one, from, sizeof one);
    memcpy(&two, from, sizeof two);
    return dims == 1 ? spread(one) : dims == 2 ? repeat_two(two) : repeat_four(_mm_loadu_ps(from));
}
INLINE void interleave_shorts(int32_t *to, const int16_t *const from[2], int at) {
    __m256i x[2]; /* their second and third quarters change places, as halves are interleaved apart */
    for (int k = 0; k < 2; k++)
        x[k] = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(from[k] + at)), 0xd8);
    _mm256_storeu_si256((__m256i *)to, _mm256_unpacklo_epi16(x[0], x[1]));
    _mm256_storeu_si256((__m256i *)(to + 8), _mm256_unpackhi_epi16(x[0], x[1]));
}
INLINE void interleave_bytes(int32_t *to, const uint8_t *const from[4], int at) {
    __m128i x[4];
    for (int k = 0; k < 4; k++) x[k] = _mm_loadu_si128((const __m128i *)(from[k] + at));
    const __m128i signs = _mm_set1_epi8(-128);
    const __m128i first = _mm_unpacklo_epi8(x[0], x[1]), second = _mm_unpacklo_epi8(x[2], x[3]);
    const __m128i third = _mm_unpackhi_epi8(x[0], x[1]), fourth = _mm_unpackhi_epi8(x[2], x[3]);
    const __m128i made[] = {
        _mm_unpacklo_epi16(first, second), _mm_unpackhi_epi16(first, second),
        _mm_unpacklo_epi16(third, fourth), _mm_unpackhi_epi16(third, fourth),
    };
    for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)(to + 4 * i), _mm_xor_si128(made[i], signs));
}

/* GCC would add products to each other before the sum, copy sums to and fro, and run out of registers, were it not told
   which instruction adds. */
typedef integers partial;
INLINE partial begun(integers x) { return x; }
INLINE integers total_of_pairs(partial x) { return x; }
INLINE integers total_of_fours(partial x) { return x; }
INLINE partial added(partial sum, whole products) {
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(products));
    return sum;
}
#if defined __AVX512VNNI__
INLINE partial plus_pairs(partial sum, integers x, integers y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
INLINE partial plus_fours(partial sum, integers x, integers y) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
#define plus_small_fours plus_fours
#else
#if defined __AVXVNNI__ && !defined __AVX512F__
INLINE partial plus_pairs(partial sum, integers x, integers y) {
    return (partial)_mm256_dpwssd_avx_epi32((whole)sum, (whole)x, (whole)y);
}
INLINE partial plus_fours(partial sum, integers x, integers y) {
    return (partial)_mm256_dpbusd_avx_epi32((whole)sum, (whole)x, (whole)y);
}
#define plus_small_fours plus_fours
#else
INLINE partial plus_pairs(partial sum, integers x, integers y) {
    return added(sum, X86(madd_epi16)((whole)x, (whole)y));
}
/* Sums that 16 bits hold. */
INLINE partial plus_small_fours(partial sum, integers x, integers y) {
    return (partial)X86(add_epi16)((whole)sum, X86(maddubs_epi16)((whole)x, (whole)y));
}
/* Two products are added up in 16 bits first, which two of 8 bits do not fit in: the highest bits are taken apart. */
INLINE partial plus_fours(partial sum, integers x, integers y) {
    const whole ones = X86(set1_epi16)(1);
    const integers highest = spread_integer((int32_t)0x80808080);
    sum = added(sum, X86(madd_epi16)(X86(maddubs_epi16)((whole)(x & ~highest), (whole)y), ones));
    return added(sum, X86(madd_epi16)(X86(maddubs_epi16)((whole)(x & highest), (whole)y), ones));
}
#endif
#endif
#else
#include <arm_neon.h>

INLINE void relax(void) { __asm__ volatile("yield"); }
INLINE vector plus(vector sum, vector x, vector y) { return vfmaq_f32(sum, x, y); }
INLINE vector higher(vector x, vector y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE vector lower(vector x, vector y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE int differ(vector x, vector y) { return vmaxvq_u32((uint32x4_t)((x < y) | (x > y))) != 0; }
INLINE vector unless_less(vector y, vector x, float least) { return (vector)((integers)y & ~(x < spread(least))); }
INLINE vector put(vector into, vector x, int lane, int dims) {
    const integers lanes = (integers){0, 1, 2, 3} & (dims - 1), own = lanes == lane;
    return vbslq_f32((uint32x4_t)own, x, into);
}
INLINE vector load_bfloats(const uint16_t *from) { return (vector)vshll_n_u16(vld1_u16(from), 16); }
INLINE vector load_halves(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
INLINE void store_halves(uint16_t *to, vector x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE float half_to_float(uint16_t x) {
    __fp16 half;
    memcpy(&half, &x, sizeof half);
    return half;
}
INLINE uint16_t float_to_half(float x) {
    const __fp16 half = x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
/* What is too large, and NaN, becomes the least integer, as on x86 processors. */
INLINE integers rounded(vector x) {
    const integers fits = x < spread(0x1p31f);
    return ((integers)vcvtnq_s32_f32(x) & fits) | (~fits & INT32_MIN);
}
INLINE void store_shorts(int16_t *to, integers x) { vst1_s16(to, vqmovn_s32(x)); }
INLINE void store_bytes(uint8_t *to, integers x) {
    const int16x4_t halves = vqmovn_s32(x);
    const int32x2_t bytes = (int32x2_t)vqmovn_s16(vcombine_s16(halves, halves));
    const int32_t four = vget_lane_s32(bytes, 0) ^ (int32_t)0x80808080;
    memcpy(to, &four, sizeof four);
}
INLINE vector swap_pairs(vector x) { return vextq_f32(x, x, 2); }
INLINE vector swap_neighbours(vector x) { return vrev64q_f32(x); }
INLINE integers firsts(integers x, integers y) { return vzip1q_s32(x, y); }
INLINE integers lasts(integers x, integers y) { return vzip2q_s32(x, y); }
INLINE integers first_pairs(integers x, integers y) { return (integers)vzip1q_s64((int64x2_t)x, (int64x2_t)y); }
INLINE integers last_pairs(integers x, integers y) { return (integers)vzip2q_s64((int64x2_t)x, (int64x2_t)y); }
INLINE vector repeat(const void *from, const int dims) {
    return dims == 1 ? (vector)vld1q_dup_f32(from) : dims == 2 ? (vector)vld1q_dup_u64(from) : load(from);
}
INLINE void interleave_shorts(int32_t *to, const int16_t *const from[2], int at) {
    for (int i = 0; i < 16; i += 8) {
        int16x8x2_t x;
        for (int k = 0; k < 2; k++) x.val[k] = vld1q_s16(from[k] + at + i);
        vst2q_s16((int16_t *)(to + i), x);
    }
}
INLINE void interleave_bytes(int32_t *to, const uint8_t *const from[4], int at) {
    uint8x16x4_t x;
    for (int k = 0; k < 4; k++) x.val[k] = veorq_u8(vld1q_u8(from[k] + at), vdupq_n_u8(128));
    vst4q_u8((uint8_t *)to, x);
}

/* Sums of products are taken apart, as they come: of pairs, those of the first two lanes and of the last two. */
typedef struct {
    integers low, high;
} partial;
INLINE integers total_of_pairs(partial x) { return vpaddq_s32(x.low, x.high); }
INLINE partial plus_pairs(partial sum, integers x, integers y) {
    const int16x8_t first = (int16x8_t)x, second = (int16x8_t)y;
    sum.low = vmlal_s16(sum.low, vget_low_s16(first), vget_low_s16(second));
    sum.high = vmlal_high_s16(sum.high, first, second);
    return sum;
}
#ifdef __ARM_FEATURE_DOTPROD
/* Only signed bytes are multiplied: 128 is taken off the first of fours, and the high sums are of the second alone. */
INLINE partial begun(integers x) { return (partial){x, {0}}; }
INLINE integers total_of_fours(partial x) { return x.low + (x.high << 7); }
INLINE integers dot(integers sum, integers x, integers y) { return vdotq_s32(sum, (int8x16_t)x, (int8x16_t)y); }
INLINE partial plus_fours(partial sum, integers x, integers y) {
    sum.low = dot(sum.low, x ^ (int32_t)0x80808080, y);
    sum.high = dot(sum.high, spread_integer(0x01010101), y);
    return sum;
}
INLINE partial plus_small_fours(partial sum, integers x, integers y) { return (partial){dot(sum.low, x, y), sum.high}; }
#else
INLINE partial begun(integers x) { return (partial){vzip1q_s32(x, (integers){0}), vzip2q_s32(x, (integers){0})}; }
INLINE integers total_of_fours(partial x) { return total_of_pairs(x); }
INLINE partial plus_fours(partial sum, integers x, integers y) {
    const uint8x16_t first = (uint8x16_t)x;
    const int8x16_t second = (int8x16_t)y;
    const int16x8_t low = (int16x8_t)vmovl_u8(vget_low_u8(first)), high = (int16x8_t)vmovl_high_u8(first);
    sum.low = vpadalq_s16(sum.low, vmulq_s16(low, vmovl_s8(vget_low_s8(second))));
    sum.high = vpadalq_s16(sum.high, vmulq_s16(high, vmovl_high_s8(second)));
    return sum;
}
INLINE partial plus_small_fours(partial sum, integers x, integers y) {
    sum.low = (integers)vmlaq_s8((int8x16_t)sum.low, (int8x16_t)x, (int8x16_t)y);
    return sum;
}
#endif
#endif

/* Codes of neighbouring inputs, of every output of a vector, times rounded inputs of 16 bits, by fours. Of four inputs
   a row has two words, which words_of_four leaves in the first two of their lanes, and so the codes have two parts. Which
   of the words is multiplied, the compiler knows; three beyond it can be read. */
#ifdef __ARM_FEATURE_DOTPROD
/* The words are the low bytes and the high ones, both signed. Of codes of 8 bits 128 is taken off, and so the sum of the
   inputs comes first. */
INLINE integers words_of_four(integers x) {
    const uint8x16_t taken = {0, 4, 8, 12, 17, 21, 25, 29};
    return (integers)vqtbl2q_u8((uint8x16x2_t){{(uint8x16_t)x, (uint8x16_t)(x + 128)}}, taken);
}
INLINE integers part_of_codes(integers codes, int four, int part, int bits) {
    if (bits == 8) return codes ^ (int32_t)0x80808080;
    return four ? (integers)vshrq_n_u8((uint8x16_t)codes, 4) : codes & 0x0f0f0f0f;
}
INLINE integers dot_by(integers sum, integers codes, const int32_t *words, int at) {
    const integers some = load_integers(words + at / 4 * 4);
    switch (at % 4) {
    case 0: return vdotq_laneq_s32(sum, (int8x16_t)codes, (int8x16_t)some, 0);
    case 1: return vdotq_laneq_s32(sum, (int8x16_t)codes, (int8x16_t)some, 1);
    case 2: return vdotq_laneq_s32(sum, (int8x16_t)codes, (int8x16_t)some, 2);
    default: return vdotq_laneq_s32(sum, (int8x16_t)codes, (int8x16_t)some, 3);
    }
}
INLINE partial begun_codes(int32_t inputs, int bits) { return begun(spread_integer(bits == 8 ? inputs * 128 : 0)); }
INLINE partial plus_codes(partial sum, integers codes, const int32_t *words, int at, int part) {
    if (part) sum.high = dot_by(sum.high, codes, words, at);
    else sum.low = dot_by(sum.low, codes, words, at);
    return sum;
}
INLINE integers total_of_codes(partial x) { return x.low + (x.high << 8); }
#else
/* The words are pairs of 16 bits: the first and the third, then the second and the fourth, as codes are widened. */
typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));
INLINE integers words_of_four(integers x) { return (x & 0xffff) | (integers)swap_pairs((vector)x) << 16; }
INLINE integers part_of_codes(integers codes, int four, int part, int bits) {
    const int at = four * bits + part * 8;
    const pairs shifted = (pairs)codes >> at;
    return (integers)(at + bits == 16 ? shifted : shifted & (uint16_t)((1 << bits) - 1));
}
INLINE partial begun_codes(int32_t inputs, int bits) { return (partial){0}; }
INLINE partial plus_codes(partial sum, integers codes, const int32_t *words, int at, int part) {
#ifdef __AVX512VNNI__
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(words[at]));
    return sum;
#else
    return plus_pairs(sum, codes, spread_integer(words[at]));
#endif
}
INLINE integers total_of_codes(partial x) { return total_of_pairs(x); }
#endif
