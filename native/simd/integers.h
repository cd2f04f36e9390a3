// Loops of integers.cpp: signed integers of `width` bits, packed little-endian; 8 of them are `width` bytes. Unpacked they
// are int8, int16 or int32 (`size` bytes), which hold `width` bits.
#pragma once
#include "../dispatch.h"

namespace thinwire {

enum class Into { add, add_saturating };  // what unpacked integers do to `out`

struct IntegerLoops {
    // False if one of the values does not fit into `width` bits.
    bool (*pack)(const void* values, index n, int size, int width, std::uint8_t* out);
    // Sums wrap; saturating ones are clipped to +-(2^(width-1) - 1).
    void (*unpack)(const std::uint8_t* in, index n, int width, Into into, int size, void* out);
};

THINWIRE_LOOPS(IntegerLoops, integer_loops)

}  // namespace thinwire
