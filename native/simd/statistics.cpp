#include "statistics.h"

#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

constexpr int sums = 16;

typedef float f32x4 __attribute__((vector_size(16)));
typedef std::int32_t i32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));

// Magnitudes are compared as integers: their order is that of the floats, with Inf and then the NaNs at the top.
struct Partial {
    f64x4 magnitude[sums / 4] = {}, square[sums / 4] = {};
    i32x4 peak[sums / 4] = {};

    template <bool Magnitude, bool Peak, bool Square>
    void add(const float* x) {
        for (int k = 0; k < sums / 4; ++k) {
            const i32x4 bits = load<i32x4>(x + 4 * k) & 0x7FFFFFFF;
            const f64x4 wide = __builtin_convertvector((f32x4)bits, f64x4);
            if (Magnitude) magnitude[k] += wide;
            if (Square) square[k] += wide * wide;
            if (Peak) peak[k] = larger(bits, peak[k]);
        }
    }

    template <bool Magnitude, bool Peak, bool Square>
    Statistics total() const {
        Statistics all;
        if (Magnitude) all.magnitude = sum(magnitude);
        if (Square) all.square = sum(square);
        if (Peak) {
            const i32x4 top = larger(larger(peak[0], peak[1]), larger(peak[2], peak[3]));
            const std::int32_t a = top[0] > top[1] ? top[0] : top[1], b = top[2] > top[3] ? top[2] : top[3];
            all.peak = __builtin_bit_cast(float, a > b ? a : b);
        }
        return all;
    }

  private:
    static i32x4 larger(i32x4 a, i32x4 b) { return a > b ? a : b; }
    static double sum(const f64x4* of) {
        const f64x4 all = (of[0] + of[1]) + (of[2] + of[3]);
        return (all[0] + all[1]) + (all[2] + all[3]);
    }
};

template <bool Magnitude, bool Peak, bool Square>
Statistics of_run(const float* x, index n) {
    Partial partial;
    index i = 0;
    for (; i + sums <= n; i += sums) partial.add<Magnitude, Peak, Square>(x + i);
    if (i < n) {
        float rest[sums] = {};  // zeros change nothing
        __builtin_memcpy(rest, x + i, 4 * (n - i));
        partial.add<Magnitude, Peak, Square>(rest);
    }
    return partial.total<Magnitude, Peak, Square>();
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

}  // namespace

const StatisticsLoops statistics_loops = {of, all_finite};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
