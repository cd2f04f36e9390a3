// x + owed, formed a tile at a time, so that whoever is next reads it from the cache.
#pragma once
#include <algorithm>

#include "simd/statistics.h"

namespace thinwire {

// Elements. Short: while a tile is looked at and put away, the processor must not run out of reads that it can begin.
constexpr index tile = 256;
constexpr index largest_tile = 1 << 12;
constexpr index streamed_from = 1 << 18;  // elements of a sum that no cache keeps until it is needed again

// Calls look(sums, first, count) for every tile of `step` elements, at most `largest_tile`, of x + owed; total = x + owed.
// A total that is not x, part of a `whole` that is long, goes past the caches: nobody looks at it soon, and it need not be
// read to be written.
template <class Look>
void for_sums(const float* x, const float* owed, index n, float* total, index step, index whole, const Look& look) {
    const auto& loops = statistics_loops();
    const bool past = total != x && whole >= streamed_from;
    alignas(64) float sums[largest_tile];
    for (index first = 0; first < n; first += step) {
        const index count = std::min(step, n - first);
        float* const to = past ? sums : total + first;
        loops.add(x + first, owed + first, count, to);
        look(to, first, count);
        if (past) loops.put_away(sums, count, total + first);
    }
    if (past) loops.all_put_away();
}

}  // namespace thinwire
