#include "quantize.h"

#include "bits.h"
#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint32_t;
using std::uint8_t;

// See reference/random.py.
inline f32 unit(u32 x) {
    x = (x ^ (x >> 16)) * 0x21F0AAAD;
    x = (x ^ (x >> 15)) * 0x735A2D97;
    x = x ^ (x >> 15);
    return to_float((i32)(x >> 8)) * 0x1p-24f;
}

// Even levels over [-range, range].
template <int B>
struct Uniform {
    static constexpr int bits = B;
    static constexpr float top = (1 << B) - 1;

    explicit Uniform(float range) : range(range), slope(top / 2 / range) {}

    i32 code(f32 x, f32 draw) const {
        const f32 u = x * slope + top / 2 + draw;
        return to_int(at_most(at_least(u, f32{}), all(top)));
    }
    f32 value(i32 code) const { return range * (to_float(code) * (2.0f / top) - 1.0f); }

    float range, slope;
};

// The codes of 64 elements, one per byte, and where asked for what they lose.
template <bool Random, bool Lost, class Rule>
inline void encode(const Rule& rule, const float* x, u32 walk, u32 step, std::uint8_t* codes, float* lost) {
    for (int i = 0; i < group; i += 4 * lanes) {
        i32 code[4];
        for (int k = 0; k < 4; ++k) {
            const f32 value = load<f32>(x + i + k * lanes);
            code[k] = rule.code(value, Random ? unit(walk) : all(0.5f));
            if (Lost) store(value - rule.value(code[k]), lost + i + k * lanes);
            walk += step;
        }
        store_bytes(code[0], code[1], code[2], code[3], codes + i);
    }
}

template <bool Random, bool Lost, class Rule>
void encode_run(const Rule& rule, const float* x, index n, Draws draws, uint8_t* out, float* lost) {
    constexpr int B = Rule::bits;
    const u32 first = draws.first + draws.step * lane_numbers(), step = u32{} + draws.step * lanes;
    index i = 0;
    for (; i + group <= n; i += group, out += 8 * B) {
        uint8_t codes[group];
        encode<Random, Lost>(rule, x + i, first + static_cast<uint32_t>(i) * draws.step, step, codes, lost + i);
        pack<B>(codes, out);
    }
    if (i < n) {
        const int count = static_cast<int>(n - i);
        float padded[group] = {}, left[group];
        uint8_t codes[group], packed[8 * B];
        __builtin_memcpy(padded, x + i, 4 * count);
        encode<Random, Lost>(rule, padded, first + static_cast<uint32_t>(i) * draws.step, step, codes, left);
        __builtin_memset(codes + count, 0, group - count);
        pack<B>(codes, packed);
        __builtin_memcpy(out, packed, (count * B + 7) / 8);
        if (Lost) __builtin_memcpy(lost + i, left, 4 * count);
    }
}

template <class Rule>
void encode_by(const Rule& rule, const float* x, index n, Draws draws, uint8_t* out, float* lost) {
    if (draws.random)
        lost ? encode_run<true, true>(rule, x, n, draws, out, lost) : encode_run<true, false>(rule, x, n, draws, out, lost);
    else
        lost ? encode_run<false, true>(rule, x, n, draws, out, lost) : encode_run<false, false>(rule, x, n, draws, out, lost);
}

void uniform(const float* x, index n, int bits, float range, Draws draws, uint8_t* out, float* lost) {
    if (!(range > 0)) {
        __builtin_memset(out, 0, (n * bits + 7) / 8);
        if (lost)
            for (index i = 0; i < n; ++i) lost[i] = x[i] - range * -1.0f;
        return;
    }
    switch (bits) {
        case 1: return encode_by(Uniform<1>(range), x, n, draws, out, lost);
        case 2: return encode_by(Uniform<2>(range), x, n, draws, out, lost);
        case 3: return encode_by(Uniform<3>(range), x, n, draws, out, lost);
        case 4: return encode_by(Uniform<4>(range), x, n, draws, out, lost);
        case 5: return encode_by(Uniform<5>(range), x, n, draws, out, lost);
        case 6: return encode_by(Uniform<6>(range), x, n, draws, out, lost);
        case 7: return encode_by(Uniform<7>(range), x, n, draws, out, lost);
        case 8: return encode_by(Uniform<8>(range), x, n, draws, out, lost);
    }
}

template <int B>
inline float even(int code) {
    return static_cast<float>(code) * (2.0f / ((1 << B) - 1)) - 1.0f;
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
