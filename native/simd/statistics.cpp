#include "statistics.h"

#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

constexpr int sums = 16;

typedef float f32x4 __attribute__((vector_size(16)));
typedef std::int32_t i32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));

inline f64x4 widen(f32x4 x) {
#if defined(__AVX2__)
    return (f64x4)_mm256_cvtps_pd((__m128)x);
#else
    return f64x4{x[0], x[1], x[2], x[3]};
#endif
}

inline i32x4 larger(i32x4 a, i32x4 b) { return a > b ? a : b; }

// Four of the sixteen sums. Named members below, not an array: arrays would go through memory.
template <bool Magnitude, bool Peak, bool Square>
struct Quarter {
    f64x4 magnitude{}, square{};
    i32x4 peak{};  // magnitudes compare as integers as they do as floats, with Inf and then the NaNs at the top

    void add(const float* x) {
        const i32x4 bits = load<i32x4>(x) & 0x7FFFFFFF;
        const f64x4 wide = widen((f32x4)bits);
        if (Magnitude) magnitude += wide;
        if (Square) square += wide * wide;
        if (Peak) peak = larger(peak, bits);
    }
    void add(const Quarter& other) {
        magnitude += other.magnitude;
        square += other.square;
        peak = larger(peak, other.peak);
    }
};

template <bool Magnitude, bool Peak, bool Square>
Statistics of_run(const float* x, index n) {
    Quarter<Magnitude, Peak, Square> a, b, c, d;
    const auto add = [&](const float* from) {
        a.add(from), b.add(from + 4), c.add(from + 8), d.add(from + 12);
    };
    index i = 0;
    for (; i + sums <= n; i += sums) add(x + i);
    if (i < n) {
        float rest[sums] = {};  // zeros change nothing
        __builtin_memcpy(rest, x + i, 4 * (n - i));
        add(rest);
    }
    a.add(b), c.add(d), a.add(c);
    std::int32_t peak = a.peak[0];
    for (int i = 1; i < 4; ++i) peak = a.peak[i] > peak ? a.peak[i] : peak;
    return {(a.magnitude[0] + a.magnitude[1]) + (a.magnitude[2] + a.magnitude[3]),
            (a.square[0] + a.square[1]) + (a.square[2] + a.square[3]),
            __builtin_bit_cast(float, peak)};
}

Statistics of(const float* x, index n, Wanted wanted) {
    switch (wanted) {
        case Wanted::peak: return of_run<false, true, false>(x, n);
        case Wanted::square: return of_run<false, false, true>(x, n);
        case Wanted::magnitude: return of_run<true, false, false>(x, n);
        case Wanted::magnitude_peak: return of_run<true, true, false>(x, n);
        default: return of_run<true, true, true>(x, n);
    }
}

bool all_finite(const float* x, index n) {
    constexpr int group = 256;
    const auto finite = [](const float* from, int count) {
        // No branch inside, so that it vectorises.
        std::int32_t bad = 0;
        for (int k = 0; k < count; ++k) {
            const std::int32_t exponent = __builtin_bit_cast(std::int32_t, from[k]) & 0x7F800000;
            bad |= exponent == 0x7F800000;
        }
        return bad == 0;
    };
    index i = 0;
    for (; i + group <= n; i += group)
        if (!finite(x + i, group)) return false;
    return finite(x + i, static_cast<int>(n - i));
}

void add(const float* x, const float* y, index n, float* out) {
    for (index i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

void put_away(const float* x, index n, float* out) {
    const index before = -(reinterpret_cast<std::uintptr_t>(out) / sizeof(float)) % lanes;
    index i = 0;
    for (; i < n && i < before; ++i) out[i] = x[i];
    for (; i + lanes <= n; i += lanes) stream(load<f32>(x + i), out + i);
    for (; i < n; ++i) out[i] = x[i];
}

}  // namespace

const StatisticsLoops statistics_loops = {of, all_finite, add, put_away, streamed};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
