// Loops of statistics.cpp. All sums are taken in 16 interleaved float64 sums that are added in a fixed order, whatever the
// instruction set: element i goes into sum i % 16.
#pragma once
#include "../dispatch.h"

namespace thinwire {

struct Statistics {
    double magnitude;  // sum of |x|
    double square;     // sum of x^2
    float peak;        // largest |x|; NaN if there is a NaN
};

// Which of them are wanted.
enum class Wanted { magnitude_peak_square, magnitude_peak, magnitude, peak, square };

struct StatisticsLoops {
    Statistics (*of)(const float* x, index n, Wanted wanted);
    bool (*all_finite)(const float* x, index n);
    void (*add)(const float* x, const float* y, index n, float* out);  // out = x + y
    void (*put_away)(const float* x, index n, float* out);  // out = x, past the caches: for who does not read it soon
    void (*all_put_away)();  // and other threads see it before whatever comes next
};

THINWIRE_LOOPS(StatisticsLoops, statistics_loops)

}  // namespace thinwire
