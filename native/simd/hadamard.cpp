#include "hadamard.h"

#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint32_t;
using std::uint64_t;

#define THINWIRE_INLINE inline __attribute__((always_inline))

constexpr index first = 64;  // elements whose stages are done in registers, and the signs that are drawn together

uint32_t random_u32(uint64_t key, uint32_t counter) {
    uint32_t x = counter * (static_cast<uint32_t>(key >> 32) | 1) + static_cast<uint32_t>(key);
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

// The signs of elements offset, offset + 1, ..., 64 at a time, out of the three words they lie in.
class Signs {
   public:
    Signs(const Flip& with, index offset)
        : key_(with.key), word_(static_cast<uint32_t>((with.counter + offset) >> 5)), shift_((with.counter + offset) & 31),
          next_(random_u32(key_, ~word_)) {}

    uint64_t next() {
        const uint64_t low = next_ | static_cast<uint64_t>(random_u32(key_, ~(word_ + 1))) << 32;
        word_ += 2;
        next_ = random_u32(key_, ~word_);
        return shift_ ? low >> shift_ | next_ << (64 - shift_) : low;
    }

   private:
    const uint64_t key_;
    uint32_t word_;
    const int shift_;
    uint64_t next_;
};

// v times +scale, or -scale where a bit of `signs` is set.
THINWIRE_INLINE f32 flipped(f32 v, float scale, uint64_t signs) {
#if defined(__AVX512F__)
    const __m512i product = _mm512_castps_si512((__m512)(v * scale));
    return (f32)_mm512_mask_xor_epi32(product, static_cast<__mmask16>(signs), product, _mm512_set1_epi32(INT32_MIN));
#else
    const u32 bits = (static_cast<uint32_t>(signs) >> lane_numbers()) << 31;
    return v * (f32)(bits ^ __builtin_bit_cast(uint32_t, scale));
#endif
}

void flip(float* x, index n, const Flip& with, index offset) {
    Signs stream(with, offset);
    for (index i = 0; i < n; i += first) {
        uint64_t signs = stream.next();
        index j = i;
        for (; j + lanes <= n && j < i + first; j += lanes, signs >>= lanes)
            store(flipped(load<f32>(x + j), with.scale, signs), x + j);
        for (; j < n && j < i + first; ++j, signs >>= 1) x[j] *= signs & 1 ? -with.scale : with.scale;
    }
}

template <int rows>
THINWIRE_INLINE void butterflies(f32 (&v)[rows]) {
    for (int distance = 1; distance < rows; distance *= 2)
        for (int row = 0; row < rows; ++row)
            if (!(row & distance)) {
                const f32 a = v[row], b = v[row + distance];
                v[row] = a + b;
                v[row + distance] = a - b;
            }
}

// log2(radix) stages, at distances h, 2h, ..., with all that belongs together held in registers. h is a multiple of `lanes`.
template <int radix>
THINWIRE_INLINE void pass(float* x, index n, index h) {
    for (index block = 0; block < n; block += radix * h)
        for (index column = block; column < block + h; column += lanes) {
            f32 v[radix];
            for (int row = 0; row < radix; ++row) v[row] = load<f32>(x + column + row * h);
            butterflies(v);
            for (int row = 0; row < radix; ++row) store(v[row], x + column + row * h);
        }
}

// All stages from distance h up to size / 2.
void passes(float* x, index n, index h, index size) {
    for (; 8 * h <= size; h *= 8) pass<8>(x, n, h);
    if (4 * h <= size) pass<4>(x, n, h), h *= 4;
    if (2 * h <= size) pass<2>(x, n, h);
}

// The stage at a distance inside of vectors: lanes whose number has that bit subtract. Times +-1 is exact, so a fused
// multiplication changes nothing.
THINWIRE_INLINE f32 within(f32 v, f32 other, int distance) {
    f32 sign;
    for (int i = 0; i < lanes; ++i) sign[i] = i & distance ? -1.0f : 1.0f;
#if defined(__AVX512F__)
    return (f32)_mm512_fmadd_ps((__m512)v, (__m512)sign, (__m512)other);
#elif defined(__AVX2__)
    return (f32)_mm256_fmadd_ps((__m256)v, (__m256)sign, (__m256)other);
#else
    return v * sign + other;
#endif
}

// All stages inside of a vector.
THINWIRE_INLINE f32 inner_stages(f32 v) {
#if defined(__AVX512F__)
    v = within(v, (f32)_mm512_permute_ps((__m512)v, 0xB1), 1);
    v = within(v, (f32)_mm512_permute_ps((__m512)v, 0x4E), 2);
    v = within(v, (f32)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xB1), 4);
    return within(v, (f32)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4E), 8);
#elif defined(__AVX2__)
    v = within(v, (f32)_mm256_permute_ps((__m256)v, 0xB1), 1);
    v = within(v, (f32)_mm256_permute_ps((__m256)v, 0x4E), 2);
    return within(v, (f32)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1), 4);
#else
    v = within(v, f32{v[1], v[0], v[3], v[2]}, 1);
    return within(v, f32{v[2], v[3], v[0], v[1]}, 2);
#endif
}

// The first six stages, 64 elements at a time.
void first_stages(const float* from, float* x, index n, const Flip* before, index offset) {
    constexpr int rows = first / lanes;
    Signs stream(before ? *before : Flip{}, offset);
    for (index block = 0; block < n; block += first) {
        f32 v[rows];
        for (int row = 0; row < rows; ++row) v[row] = load<f32>(from + block + row * lanes);
        if (before) {
            uint64_t signs = stream.next();
            for (int row = 0; row < rows; ++row, signs >>= lanes) v[row] = flipped(v[row], before->scale, signs);
        }
        for (int row = 0; row < rows; ++row) v[row] = inner_stages(v[row]);
        butterflies(v);
        for (int row = 0; row < rows; ++row) store(v[row], x + block + row * lanes);
    }
}

void small_block(float* x, index size) {
    for (index h = 1; h < size; h *= 2)
        for (index i = 0; i < size; ++i)
            if (!(i & h)) {
                const float a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
}

void blocks(const float* from, float* x, index n, index size, const Flip* before, const Flip* after) {
    for (index begin = 0; begin < n; begin += size) {
        if (size < first) {
            if (from != x) __builtin_memcpy(x + begin, from + begin, size * sizeof(float));
            if (before) flip(x + begin, size, *before, begin);
            small_block(x + begin, size);
        } else {
            first_stages(from + begin, x + begin, size, before, begin);
            passes(x + begin, size, first, size);
        }
        if (after) flip(x + begin, size, *after, begin);
    }
}

void columns(float* x, index size, index stride, index begin, index end, const Flip* after, float* buffer) {
    const index used = end - begin;
    for (index row = 0; row < size; ++row) {
        // Rows lie on different pages, where the processor does not prefetch by itself.
        const float* ahead = x + (row + 16 < size ? row + 16 : row) * stride + begin;
        __builtin_prefetch(ahead, 1);
        __builtin_prefetch(ahead + used / 2, 1);
        __builtin_prefetch(ahead + used - 1, 1);
        float* to = buffer + row * panel_width;
        __builtin_memcpy(to, x + row * stride + begin, used * sizeof(float));
        __builtin_memset(to + used, 0, (panel_width - used) * sizeof(float));
    }
    passes(buffer, size * panel_width, panel_width, size * panel_width);
    for (index row = 0; row < size; ++row) {
        float* from = buffer + row * panel_width;
        if (after) flip(from, used, *after, row * stride + begin);
        __builtin_memcpy(x + row * stride + begin, from, used * sizeof(float));
    }
}

}  // namespace

const HadamardLoops hadamard_loops = {blocks, columns};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
