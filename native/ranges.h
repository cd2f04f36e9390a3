// What quantising kernels share: a block's range as it counts, and the draws of its elements.
#pragma once
#include <cmath>

#include "common.h"
#include "random.h"
#include "simd/quantize.h"

namespace thinwire {

// A block's radius or scale as it counts; see reference/quantize.py.
inline float effective(float range) {
    if (!std::isfinite(range)) return std::nanf("");
    return range < 0x1p-120f ? 0.0f : range;
}

// The draws from a place in a stretch on; nearest where there are no keys.
inline Draws draws_of(address keys, address counters, index stretch, index place) {
    if (!keys) return {false, 0, 0};
    const auto key = scrambled(at<const std::uint64_t>(keys)[stretch]);
    const index counter = at<const index>(counters)[stretch] + place;
    const auto low = static_cast<std::uint32_t>(key), step = static_cast<std::uint32_t>(key >> 32) | 1;
    return {true, low + static_cast<std::uint32_t>(counter) * step, step};
}

}  // namespace thinwire
