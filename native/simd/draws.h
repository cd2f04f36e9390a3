// The draws of consecutive elements. To be included by files in simd/ only.
#pragma once
#include "quantize.h"
#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

// See reference/draws.py.
inline f32 unit(u32 x) {
    x = (x ^ (x >> 16)) * 0x21F0AAAD;
    x = (x ^ (x >> 15)) * 0x735A2D97;
    x = x ^ (x >> 15);
    return to_float((i32)(x >> 8)) * 0x1p-24f;
}

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
