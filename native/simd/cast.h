// Loops of cast.cpp. Halves are raw 16-bit words; every conversion rounds to nearest even and keeps Inf and NaN.
#pragma once
#include "../dispatch.h"

namespace thinwire {

struct CastLoops {
    void (*scale)(const float* x, float weight, float* out, index n);              // out = weight * x
    void (*scale_to_fp16)(const float* x, float weight, std::uint16_t* out, index n);
    void (*scale_to_bf16)(const float* x, float weight, std::uint16_t* out, index n);
    void (*fp16_to_float)(const std::uint16_t* x, float* out, index n);
    void (*bf16_to_float)(const std::uint16_t* x, float* out, index n);
    void (*add_from_fp16)(const std::uint16_t* x, float weight, float* out, index n);  // out += weight * x
    void (*add_from_bf16)(const std::uint16_t* x, float weight, float* out, index n);
    void (*lose_fp16)(const std::uint16_t* half, float back, const float* x, float* lost, index n);  // x - back * half
    void (*lose_bf16)(const std::uint16_t* half, float back, const float* x, float* lost, index n);
};

THINWIRE_LOOPS(CastLoops, cast_loops)

}  // namespace thinwire
