// Loops of quantize.cpp: each works on one block, or on a part of one that begins on a whole byte.
#pragma once
#include "../dispatch.h"

namespace thinwire {

// The draws of consecutive elements; see reference/random.py. Not random: every draw is 1/2.
struct Draws {
    bool random;
    std::uint32_t first, step;  // the affine walk: element i has the word hash(first + i * step)
};

struct QuantizeLoops {
    // `range`: the block's radius or scale as it counts: 0 where too small, NaN where not finite. `lost` may be null.
    void (*uniform)(const float* x, index n, int bits, float range, Draws draws, std::uint8_t* out, float* lost);
    // `range` has the weight in it.
    void (*uniform_value)(const std::uint8_t* codes, index n, int bits, float range, bool add, float* out);
};

THINWIRE_LOOPS(QuantizeLoops, quantize_loops)

}  // namespace thinwire
