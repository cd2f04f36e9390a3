#include "quantize.h"

#include "bits.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint32_t;
using std::uint8_t;

inline float unit(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21F0AAAD;
    x = (x ^ (x >> 15)) * 0x735A2D97;
    x = x ^ (x >> 15);
    return static_cast<float>(static_cast<std::int32_t>(x >> 8)) * 0x1p-24f;
}

template <int B>
constexpr float top = (1 << B) - 1;

template <int B>
inline float even(int code) {
    return static_cast<float>(code) * (2.0f / top<B>) - 1.0f;
}

template <int B, bool Random, bool Lost>
void uniform_run(const float* x, index n, float range, Draws draws, uint8_t* out, float* lost) {
    constexpr float half = top<B> / 2;
    const float slope = half / range;
    const auto encode = [&](const float* from, int count, uint32_t first, uint8_t* codes, float* residual) {
        for (int k = 0; k < count; ++k) {
            float u = from[k] * slope + half;
            u += Random ? unit(first + static_cast<uint32_t>(k) * draws.step) : 0.5f;
            u = u > 0 ? u : 0;
            u = u < top<B> ? u : top<B>;
            const int code = static_cast<int>(u);
            codes[k] = static_cast<uint8_t>(code);
            if (Lost) residual[k] = from[k] - range * even<B>(code);
        }
    };
    index i = 0;
    for (; i + group <= n; i += group, out += 8 * B) {
        uint8_t codes[group];
        encode(x + i, group, draws.first + static_cast<uint32_t>(i) * draws.step, codes, lost + i);
        pack<B>(codes, out);
    }
    if (i < n) {
        const int count = static_cast<int>(n - i);
        uint8_t codes[group] = {}, packed[8 * B];
        encode(x + i, count, draws.first + static_cast<uint32_t>(i) * draws.step, codes, lost + i);
        pack<B>(codes, packed);
        __builtin_memcpy(out, packed, (count * B + 7) / 8);
    }
}

template <int B>
void uniform_bits(const float* x, index n, float range, Draws draws, uint8_t* out, float* lost) {
    if (draws.random)
        lost ? uniform_run<B, true, true>(x, n, range, draws, out, lost)
             : uniform_run<B, true, false>(x, n, range, draws, out, lost);
    else
        lost ? uniform_run<B, false, true>(x, n, range, draws, out, lost)
             : uniform_run<B, false, false>(x, n, range, draws, out, lost);
}

void uniform(const float* x, index n, int bits, float range, Draws draws, uint8_t* out, float* lost) {
    if (!(range > 0)) {
        __builtin_memset(out, 0, (n * bits + 7) / 8);
        if (lost)
            for (index i = 0; i < n; ++i) lost[i] = x[i] - range * -1.0f;
        return;
    }
    switch (bits) {
        case 1: return uniform_bits<1>(x, n, range, draws, out, lost);
        case 2: return uniform_bits<2>(x, n, range, draws, out, lost);
        case 3: return uniform_bits<3>(x, n, range, draws, out, lost);
        case 4: return uniform_bits<4>(x, n, range, draws, out, lost);
        case 5: return uniform_bits<5>(x, n, range, draws, out, lost);
        case 6: return uniform_bits<6>(x, n, range, draws, out, lost);
        case 7: return uniform_bits<7>(x, n, range, draws, out, lost);
        case 8: return uniform_bits<8>(x, n, range, draws, out, lost);
    }
}

template <int B, bool Add>
void uniform_value_run(const uint8_t* in, index n, float range, float* out) {
    for_groups<B>(in, n, [&](const uint8_t* bytes, index i, int count) {
        uint8_t codes[group];
        unpack<B>(bytes, codes);
        for (int k = 0; k < count; ++k) {
            const float value = range * even<B>(codes[k]);
            out[i + k] = Add ? out[i + k] + value : value;
        }
    });
}

template <int B>
void uniform_value_bits(const uint8_t* in, index n, float range, bool add, float* out) {
    add ? uniform_value_run<B, true>(in, n, range, out) : uniform_value_run<B, false>(in, n, range, out);
}

void uniform_value(const uint8_t* in, index n, int bits, float range, bool add, float* out) {
    switch (bits) {
        case 1: return uniform_value_bits<1>(in, n, range, add, out);
        case 2: return uniform_value_bits<2>(in, n, range, add, out);
        case 3: return uniform_value_bits<3>(in, n, range, add, out);
        case 4: return uniform_value_bits<4>(in, n, range, add, out);
        case 5: return uniform_value_bits<5>(in, n, range, add, out);
        case 6: return uniform_value_bits<6>(in, n, range, add, out);
        case 7: return uniform_value_bits<7>(in, n, range, add, out);
        case 8: return uniform_value_bits<8>(in, n, range, add, out);
    }
}

}  // namespace

const QuantizeLoops quantize_loops = {uniform, uniform_value};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
