// Tables of 2^K floats, looked up by every lane at once. To be included by files in simd/ only.
#pragma once
#include "quantize.h"
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

struct Pairs {
    f32 first, second;
};

// Likewise, pairs. AVX2's own gathers are slower than one load per lane.
inline Pairs gather_pairs(const Pair* entries, i32 i) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    alignas(32) std::int32_t at[lanes];
    store(i, at);
    const auto two = [&](int lane) {
        const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(entries + at[lane])));
        return _mm_loadh_pi(low, reinterpret_cast<const __m64*>(entries + at[lane + 1]));
    };
    const __m256 a = _mm256_insertf128_ps(_mm256_castps128_ps256(two(0)), two(4), 1);
    const __m256 b = _mm256_insertf128_ps(_mm256_castps128_ps256(two(2)), two(6), 1);
    return {(f32)_mm256_shuffle_ps(a, b, 0x88), (f32)_mm256_shuffle_ps(a, b, 0xDD)};
#elif defined(__AVX512F__)
    // 16 loads of pairs instead of 32 of numbers.
    const auto eight = [&](__m256i at) { return _mm512_castpd_ps(_mm512_i32gather_pd(at, entries, 8)); };
    const __m512 a = eight(_mm512_castsi512_si256((__m512i)i)), b = eight(_mm512_extracti64x4_epi64((__m512i)i, 1));
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {(f32)_mm512_permutex2var_ps(a, even, b),
            (f32)_mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b)};
#else
    return {gather(&entries->first, i + i), gather(&entries->first, i + i + 1)};
#endif
}

// entries[i] by permutations inside registers, which up to K = 5 are faster than loads.
template <int K>
struct Table {
    static constexpr int size = 1 << K;
    float entries[size < 16 ? 16 : size];

    f32 operator[](i32 i) const {
        if constexpr (K == 0) return all(entries[0]);
#if defined(__AVX512F__)
        if constexpr (K <= 4) return permute(0, i);
        if constexpr (K == 5) return permute_two(0, i);
        if constexpr (K == 6) return choose(i, 5, permute_two(0, i), permute_two(32, i));
        if constexpr (K == 7)
            return choose(i, 6, choose(i, 5, permute_two(0, i), permute_two(32, i)),
                          choose(i, 5, permute_two(64, i), permute_two(96, i)));
#elif defined(__AVX2__)
        if constexpr (K <= 2) return permute_within(i);
        if constexpr (K == 3) return permute(0, i);
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
    // Of 32 entries, which takes as long as of 16.
    f32 permute_two(int from, i32 i) const {
        return (f32)_mm512_permutex2var_ps((__m512)load<f32>(entries + from), (__m512i)i,
                                           (__m512)load<f32>(entries + from + 16));
    }
    static f32 choose(i32 i, int bit, f32 zero, f32 one) {
        return (f32)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)(i << (31 - bit))), (__m512)zero, (__m512)one);
    }
#elif defined(__AVX2__)
    f32 permute(int from, i32 i) const {
        return (f32)_mm256_permutevar8x32_ps((__m256)load<f32>(entries + from), (__m256i)i);
    }
    // Half the cost of the other, but each half of the register sees only its own 4 entries.
    f32 permute_within(i32 i) const {
        return (f32)_mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(entries)), (__m256i)i);
    }
    // Blends look at the sign bit.
    static f32 choose(i32 i, int bit, f32 zero, f32 one) {
        return (f32)_mm256_blendv_ps((__m256)zero, (__m256)one, (__m256)(i << (31 - bit)));
    }
#endif
};

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
