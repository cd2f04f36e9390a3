// Vectors as wide as the instruction set's: GCC's and Clang's vector types, with what they lack.
//
// To be included by files in simd/ only. Intrinsics appear where the compilers' own code for an operation is slow.
#pragma once
#include <cstdint>

#include "../dispatch.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float f32 __attribute__((vector_size(4 * lanes)));
typedef std::int32_t i32 __attribute__((vector_size(4 * lanes)));
typedef std::uint32_t u32 __attribute__((vector_size(4 * lanes)));
typedef std::uint64_t u64 __attribute__((vector_size(4 * lanes)));

template <class Vector, class Element>
inline Vector load(const Element* from) {
    Vector v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class Vector, class Element>
inline void store(Vector v, Element* to) {
    __builtin_memcpy(to, &v, sizeof v);
}

// Past the caches, where the processor can: for who does not read it soon. `to` is aligned as a vector.
inline void stream(f32 v, float* to) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)v);
#else
    store(v, to);
#endif
}

// What was streamed is seen by other threads before whatever comes next.
inline void streamed() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// The same in every lane. (A bare `vector + scalar` would do, but not for a vector that is to be compared with.)
inline f32 all(float x) { return x - f32{}; }

inline f32 to_float(i32 x) { return __builtin_convertvector(x, f32); }
inline i32 to_int(f32 x) { return __builtin_convertvector(x, i32); }  // towards 0; |x| must be below 2^31

// max(x, low) and min(x, high) where x may be a NaN, which becomes `low` or `high`.
inline f32 at_least(f32 x, f32 low) {
#if defined(__AVX512F__)
    return (f32)_mm512_max_ps((__m512)x, (__m512)low);
#elif defined(__AVX2__)
    return (f32)_mm256_max_ps((__m256)x, (__m256)low);
#else
    return x > low ? x : low;
#endif
}

inline f32 at_most(f32 x, f32 high) {
#if defined(__AVX512F__)
    return (f32)_mm512_min_ps((__m512)x, (__m512)high);
#elif defined(__AVX2__)
    return (f32)_mm256_min_ps((__m256)x, (__m256)high);
#else
    return x < high ? x : high;
#endif
}

// The next integer at or above; |x| must be below 2^31.
inline f32 ceiling(f32 x) {
#if defined(__AVX512F__)
    return (f32)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (f32)_mm256_ceil_ps((__m256)x);
#else
    const f32 whole = to_float(to_int(x));
    return whole < x ? whole + 1.0f : whole;
#endif
}

// 4 vectors of integers in 0..255, in order, as bytes.
inline void store_bytes(i32 a, i32 b, i32 c, i32 d, std::uint8_t* to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8((__m512i)b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32), _mm512_cvtepi32_epi8((__m512i)c));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 48), _mm512_cvtepi32_epi8((__m512i)d));
#elif defined(__AVX2__)
    const __m256i ab = _mm256_packus_epi32((__m256i)a, (__m256i)b), cd = _mm256_packus_epi32((__m256i)c, (__m256i)d);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works in halves of the register
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
#else
    const i32 vectors[4] = {a, b, c, d};
    for (int i = 0; i < 4 * lanes; ++i) to[i] = static_cast<std::uint8_t>(vectors[i / lanes][i % lanes]);
#endif
}

// 4 vectors of integers in -128..127, in order, as bytes.
inline void store_signed_bytes(i32 a, i32 b, i32 c, i32 d, std::int8_t* to) {
#if defined(__AVX512F__)
    store_bytes(a, b, c, d, reinterpret_cast<std::uint8_t*>(to));  // which leaves out all but the last 8 bits
#elif defined(__AVX2__)
    const __m256i ab = _mm256_packs_epi32((__m256i)a, (__m256i)b), cd = _mm256_packs_epi32((__m256i)c, (__m256i)d);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
#else
    const i32 vectors[4] = {a, b, c, d};
    for (int i = 0; i < 4 * lanes; ++i) to[i] = static_cast<std::int8_t>(vectors[i / lanes][i % lanes]);
#endif
}

// As many bytes as there are lanes, as integers.
inline i32 load_bytes(const std::uint8_t* from) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (i32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    i32 v;
    for (int i = 0; i < lanes; ++i) v[i] = from[i];
    return v;
#endif
}

// The lanes' numbers: 0, 1, 2, ...
inline u32 lane_numbers() {
    u32 v;
    for (int i = 0; i < lanes; ++i) v[i] = static_cast<std::uint32_t>(i);
    return v;
}

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
