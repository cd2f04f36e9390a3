// Tables of 2^K floats, looked up by every lane at once. To be included by files in simd/ only.
#pragma once
#include "quantize.h"
#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

// elements[i] in every lane, from memory; each i must be a valid index.
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

// elements[i] by permutations inside registers, which up to K = 5 are faster than loads.
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
    // Of 32 elements, which takes as long as of 16.
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
    // Half the cost of the other, but each half of the register sees only its own 4 elements.
    f32 permute_within(i32 i) const {
        return (f32)_mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(entries)), (__m256i)i);
    }
    // Blends look at the sign bit.
    static f32 choose(i32 i, int bit, f32 zero, f32 one) {
        return (f32)_mm256_blendv_ps((__m256)zero, (__m256)one, (__m256)(i << (31 - bit)));
    }
#endif
};

#if defined(__AVX512VBMI__)
// 2^K bytes, K at most 8, looked up by 64 bytes at once.
template <int K>
struct ByteTable {
    __m512i parts[K <= 6 ? 1 : K == 7 ? 2 : 4];

    ByteTable() = default;
    explicit ByteTable(const std::uint8_t* from) {
        for (auto& part : parts) part = _mm512_loadu_si512(from), from += 64;
    }
    __m512i operator[](__m512i at) const {
        if constexpr (K <= 6) return _mm512_permutexvar_epi8(at, parts[0]);
        if constexpr (K >= 7) {
            const __m512i low = _mm512_permutex2var_epi8(parts[0], at, parts[1]);
            if constexpr (K == 7) return low;
            if constexpr (K == 8)
                return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low,
                                              _mm512_permutex2var_epi8(parts[2], at, parts[3]));
        }
    }
};

// 2^K floats, looked up by 64 bytes at once.
template <int K>
struct FloatTable {
    ByteTable<K> planes[4];

    FloatTable() = default;
    explicit FloatTable(const std::uint8_t (&from)[4][256]) {
        for (int i = 0; i < 4; ++i) planes[i] = ByteTable<K>(from[i]);
    }
    void find(__m512i at, f32* out) const {
        // What unpacking in quarters of the register does to the order of fours is done to the indices beforehand.
        at = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), at);
        const __m512i a = planes[0][at], b = planes[1][at], c = planes[2][at], d = planes[3][at];
        const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
        const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
        out[0] = (f32)_mm512_unpacklo_epi16(ab, cd);
        out[1] = (f32)_mm512_unpackhi_epi16(ab, cd);
        out[2] = (f32)_mm512_unpacklo_epi16(AB, CD);
        out[3] = (f32)_mm512_unpackhi_epi16(AB, CD);
    }
};

// 4 vectors of integers in 0..255, in order, as 64 bytes.
inline __m512i bytes_of(const i32* v) {
    const auto narrow = [&](int k) { return _mm512_cvtepi32_epi8((__m512i)v[k]); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(narrow(0)), narrow(1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(narrow(2)), narrow(3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Where of 64 integers, in 4 vectors, a bit is set.
inline __mmask64 have(const i32* v, int bit) {
    const auto part = [&](int k) { return _mm512_test_epi32_mask((__m512i)v[k], _mm512_set1_epi32(bit)); };
    return _mm512_kunpackd(_mm512_kunpackw(part(3), part(2)), _mm512_kunpackw(part(1), part(0)));
}

// Where of 64 elements a is below b.
inline __mmask64 below(const f32* a, const f32* b) {
    const auto part = [&](int k) { return _mm512_cmp_ps_mask((__m512)a[k], (__m512)b[k], _CMP_LT_OQ); };
    return _mm512_kunpackd(_mm512_kunpackw(part(3), part(2)), _mm512_kunpackw(part(1), part(0)));
}

inline __mmask64 not_below(const f32* a, const f32* b) {
    const auto part = [&](int k) { return _mm512_cmp_ps_mask((__m512)a[k], (__m512)b[k], _CMP_GE_OQ); };
    return _mm512_kunpackd(_mm512_kunpackw(part(3), part(2)), _mm512_kunpackw(part(1), part(0)));
}

inline __m512i one_more(__m512i v, __mmask64 where) {
    return _mm512_mask_add_epi8(v, where, v, _mm512_set1_epi8(1));
}
#endif

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
