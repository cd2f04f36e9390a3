// Loops of rotated.cpp: what is done with a block between two rotations, while it is in the cache.
#pragma once
#include "quantize.h"

namespace thinwire {

// Integers q stand for (q + offset) steps, and are kept to low..high.
struct Steps {
    float offset;
    std::int32_t low, high;
};

// `size`: bytes of an integer, 1, 2 or 4.
struct RotatedLoops {
    // y in steps, rounded at random, into `out`; where `keep`, y becomes what the integers stand for. The step is as it
    // counts: 0 where too small, NaN where not finite. n is a multiple of 64.
    void (*round)(float* y, index n, float step, const Steps& steps, Draws draws, int size, void* out, bool keep);
    // y = scale * (float)q + offset * scale.
    void (*scale)(const void* q, index n, int size, float scale, float offset, float* y);
    void (*subtract)(const float* x, const float* y, index n, float* out);  // out = x - y
    void (*add)(const float* y, index n, float weight, float* out);         // out += weight * y
    void (*positive)(const float* y, index n, float* out);                  // out = y + 0: no zero has a sign
};

THINWIRE_LOOPS(RotatedLoops, rotated_loops)

}  // namespace thinwire
