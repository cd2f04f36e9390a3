#include "hadamard.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint32_t;
using std::uint64_t;

constexpr int width = 8;
typedef float Vector __attribute__((vector_size(width * sizeof(float)), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(width * sizeof(float))));

#define THINWIRE_INLINE inline __attribute__((always_inline))

uint32_t random_u32(uint64_t key, uint32_t counter) {
    uint32_t x = counter * (static_cast<uint32_t>(key >> 32) | 1) + static_cast<uint32_t>(key);
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

THINWIRE_INLINE void flip_run(float* x, index n, uint32_t signs, uint32_t scale) {
    for (index j = 0; j < n; ++j) x[j] *= __builtin_bit_cast(float, ((signs >> j) << 31) ^ scale);
}

// Entries offset, offset + 1, ... of what `with` is for. 32 signs at a time, out of the two words they lie in.
void flip(float* x, index n, const Flip& with, index offset) {
    const uint32_t scale = __builtin_bit_cast(uint32_t, with.scale);
    const index counter = with.counter + offset;
    uint32_t word = static_cast<uint32_t>(counter >> 5);
    uint64_t signs = random_u32(with.key, ~word);
    for (index i = 0; i < n; i += 32) {
        signs |= static_cast<uint64_t>(random_u32(with.key, ~++word)) << 32;
        const uint32_t these = static_cast<uint32_t>(signs >> (counter & 31));
        if (n - i >= 32)
            flip_run(x + i, 32, these, scale);
        else
            flip_run(x + i, n - i, these, scale);
        signs >>= 32;
    }
}

// log2(radix) stages, at distances h, 2h, ..., with all that belongs together held in registers. h is a multiple of `width`.
template <int radix>
THINWIRE_INLINE void pass(float* x, index n, index h) {
    for (index block = 0; block < n; block += radix * h)
        for (index column = block; column < block + h; column += width) {
            Vector v[radix];
            for (int row = 0; row < radix; ++row) v[row] = *reinterpret_cast<const Vector*>(x + column + row * h);
            for (int distance = 1; distance < radix; distance *= 2)
                for (int row = 0; row < radix; ++row)
                    if (!(row & distance)) {
                        const Vector a = v[row], b = v[row + distance];
                        v[row] = a + b;
                        v[row + distance] = a - b;
                    }
            for (int row = 0; row < radix; ++row) *reinterpret_cast<Vector*>(x + column + row * h) = v[row];
        }
}

// All stages from distance h up to size / 2.
void passes(float* x, index n, index h, index size) {
    for (; 8 * h <= size; h *= 8) pass<8>(x, n, h);
    if (4 * h <= size) pass<4>(x, n, h), h *= 4;
    if (2 * h <= size) pass<2>(x, n, h);
}

// The lanes of v in the order of the constants that follow. GCC knows Clang's name for it since version 12.
#if __has_builtin(__builtin_shufflevector)
#define THINWIRE_SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define THINWIRE_SHUFFLED(v, ...) __builtin_shuffle(v, Bits{__VA_ARGS__})
#endif

// One stage inside each vector: `other` has what each lane is paired with, and `minus` marks the lanes that subtract.
THINWIRE_INLINE Vector within(Vector v, Vector other, Bits minus) {
    return other + reinterpret_cast<Vector>(reinterpret_cast<Bits>(v) ^ minus);
}

// The first six stages, 64 entries at a time.
void first_stages(float* x, index n) {
    constexpr uint32_t m = 0x80000000u;
    for (index block = 0; block < n; block += 64) {
        Vector v[8];
        for (int row = 0; row < 8; ++row) {
            v[row] = *reinterpret_cast<const Vector*>(x + block + row * width);
            v[row] = within(v[row], THINWIRE_SHUFFLED(v[row], 1, 0, 3, 2, 5, 4, 7, 6), Bits{0, m, 0, m, 0, m, 0, m});
            v[row] = within(v[row], THINWIRE_SHUFFLED(v[row], 2, 3, 0, 1, 6, 7, 4, 5), Bits{0, 0, m, m, 0, 0, m, m});
            v[row] = within(v[row], THINWIRE_SHUFFLED(v[row], 4, 5, 6, 7, 0, 1, 2, 3), Bits{0, 0, 0, 0, m, m, m, m});
        }
        for (int distance = 1; distance < 8; distance *= 2)
            for (int row = 0; row < 8; ++row)
                if (!(row & distance)) {
                    const Vector a = v[row], b = v[row + distance];
                    v[row] = a + b;
                    v[row + distance] = a - b;
                }
        for (int row = 0; row < 8; ++row) *reinterpret_cast<Vector*>(x + block + row * width) = v[row];
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

void blocks(float* x, index n, index size, const Flip* before, const Flip* after) {
    for (index begin = 0; begin < n; begin += size) {
        if (before) flip(x + begin, size, *before, begin);
        if (size < 64) {
            small_block(x + begin, size);
        } else {
            first_stages(x + begin, size);
            passes(x + begin, size, 64, size);
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
