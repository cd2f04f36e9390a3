#include "cast.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint16_t;
using std::uint32_t;

uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded >> 16);
}

// IEEE half by arithmetic on the bits, for processors without the instruction; written so that it vectorises.
uint16_t fp16_of(float x) {
    const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    // Below 2^-14: adding 0.5 lines the result's last bit up with float32's last bit, and the addition rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x477FF000 ? 0x7C00 : half;  // at or above 65520: rounds to infinity
    half = magnitude > 0x7F800000 ? 0x7E00 : half;
    return static_cast<uint16_t>(sign | half);
}

float of_fp16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = static_cast<uint32_t>(half & 0x7FFF) << 13;
    const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);  // also makes subnormals normal, exactly
    return float_of(sign | (magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : scaled));
}

float of_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

void scale(const float* x, float weight, float* out, index n) {
    for (index i = 0; i < n; ++i) out[i] = weight * x[i];
}

void scale_to_bf16(const float* x, float weight, uint16_t* out, index n) {
    for (index i = 0; i < n; ++i) out[i] = bf16_of(weight * x[i]);
}

void bf16_to_float(const uint16_t* x, float* out, index n) {
    for (index i = 0; i < n; ++i) out[i] = of_bf16(x[i]);
}

void add_from_bf16(const uint16_t* x, float weight, float* out, index n) {
    for (index i = 0; i < n; ++i) out[i] += weight * of_bf16(x[i]);
}

void scale_to_fp16(const float* x, float weight, uint16_t* out, index n) {
    index i = 0;
#if defined(__F16C__)
    const __m256 w = _mm256_set1_ps(weight);
    for (; i + 8 <= n; i += 8) {
        const __m256 product = _mm256_mul_ps(w, _mm256_loadu_ps(x + i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) out[i] = fp16_of(weight * x[i]);
}

void fp16_to_float(const uint16_t* x, float* out, index n) {
    index i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
    for (; i < n; ++i) out[i] = of_fp16(x[i]);
}

void add_from_fp16(const uint16_t* x, float weight, float* out, index n) {
    index i = 0;
#if defined(__F16C__)
    const __m256 w = _mm256_set1_ps(weight);
    for (; i + 8 <= n; i += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
        _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_mul_ps(w, wide)));
    }
#endif
    for (; i < n; ++i) out[i] += weight * of_fp16(x[i]);
}

void lose_fp16(const uint16_t* half, float back, const float* x, float* lost, index n) {
    index i = 0;
#if defined(__F16C__)
    const __m256 b = _mm256_set1_ps(back);
    for (; i + 8 <= n; i += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i)));
        _mm256_storeu_ps(lost + i, _mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_mul_ps(b, wide)));
    }
#endif
    for (; i < n; ++i) lost[i] = x[i] - back * of_fp16(half[i]);
}

void lose_bf16(const uint16_t* half, float back, const float* x, float* lost, index n) {
    for (index i = 0; i < n; ++i) lost[i] = x[i] - back * of_bf16(half[i]);
}

}  // namespace

const CastLoops cast_loops = {
    scale, scale_to_fp16, scale_to_bf16, fp16_to_float, bf16_to_float, add_from_fp16, add_from_bf16,
    lose_fp16, lose_bf16,
};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
