// Loops of hadamard.cpp. A butterfly at distance h takes (a, b), h apart, to (a + b, a - b); distances always ascend, so
// that any way through memory gives the same bits.
#pragma once
#include "../dispatch.h"

namespace thinwire {

constexpr index panel_width = 32;  // columns that go through the cache at once

// Element i is multiplied by +scale or -scale, as bit (counter + i) of the (scrambled) key's random stream says.
struct Flip {
    std::uint64_t key;
    index counter;
    float scale;
};

struct HadamardLoops {
    // Contiguous blocks of `size` elements, n in all, of `from` (which may be x) into x. The flips come before or after the
    // butterflies; either may be null.
    void (*blocks)(const float* from, float* x, index n, index size, const Flip* before, const Flip* after);
    // Columns [begin, end), at most panel_width of them, of a row-major matrix of `size` rows and `stride` columns: each
    // is one block. `buffer` holds size * panel_width elements.
    void (*columns)(float* x, index size, index stride, index begin, index end, const Flip* after, float* buffer);
};

THINWIRE_LOOPS(HadamardLoops, hadamard_loops)

}  // namespace thinwire
