// Tables of 2^K floats, looked up by every lane at once. To be included by files in simd/ only.
#pragma once
#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

// entries[i] in every lane, from memory; each i must be a valid index.
inline f32 gather(const float* entries, i32 i) {
#if defined(__AVX512F__)
    return (f32)_mm512_i32gather_ps((__m512i)i, entries, 4);
#elif defined(__AVX2__)
    return (f32)_mm256_i32gather_ps(entries, (__m256i)i, 4);
#else
    f32 v;
    for (int k = 0; k < lanes; ++k) v[k] = entries[i[k]];
    return v;
#endif
}

// Likewise from bytes, which must be followed by 3 more.
inline i32 gather_bytes(const std::uint8_t* entries, i32 i) {
#if defined(__AVX512F__)
    return (i32)_mm512_i32gather_epi32((__m512i)i, entries, 1) & 0xFF;
#elif defined(__AVX2__)
    return (i32)_mm256_i32gather_epi32(reinterpret_cast<const int*>(entries), (__m256i)i, 1) & 0xFF;
#else
    i32 v;
    for (int k = 0; k < lanes; ++k) v[k] = entries[i[k]];
    return v;
#endif
}

// entries[i] by permutations inside registers, which up to K = 5 are faster than loads.
template <int K>
struct Table {
    static constexpr int size = 1 << K;
    float entries[size < 16 ? 16 : size];

    f32 operator[](i32 i) const {
#if defined(__AVX512F__)
        if constexpr (K <= 4) return permute(0, i);
        if constexpr (K == 5) return choose(i, 4, permute(0, i), permute(16, i));
#elif defined(__AVX2__)
        if constexpr (K <= 3) return permute(0, i);
        if constexpr (K == 4) return choose(i, 3, permute(0, i), permute(8, i));
        if constexpr (K == 5)
            return choose(i, 4, choose(i, 3, permute(0, i), permute(8, i)), choose(i, 3, permute(16, i), permute(24, i)));
#endif
        return gather(entries, i);
    }

  private:
#if defined(__AVX512F__)
    f32 permute(int from, i32 i) const {
        return (f32)_mm512_permutexvar_ps((__m512i)i, (__m512)load<f32>(entries + from));
    }
    static f32 choose(i32 i, int bit, f32 zero, f32 one) {
        return (f32)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)(i << (31 - bit))), (__m512)zero, (__m512)one);
    }
#elif defined(__AVX2__)
    f32 permute(int from, i32 i) const {
        return (f32)_mm256_permutevar8x32_ps((__m256)load<f32>(entries + from), (__m256i)i);
    }
    // Blends look at the sign bit.
    static f32 choose(i32 i, int bit, f32 zero, f32 one) {
        return (f32)_mm256_blendv_ps((__m256)zero, (__m256)one, (__m256)(i << (31 - bit)));
    }
#endif
};

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
