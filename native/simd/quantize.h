// Loops of quantize.cpp: each works on one block, or on a part of one that begins on a whole byte.
#pragma once
#include "../dispatch.h"

namespace thinwire {

// The draws of consecutive elements; see reference/draws.py. Not random: every draw is 1/2.
struct Draws {
    bool random;
    std::uint32_t first, step;  // the affine walk: element i has the word hash(first + i * step)
};

// Two numbers that are looked up together, for the price of one.
struct Pair {
    float first, second;
};

// A table of 2^bits sorted levels, and what finds a value's interval in it in constant time; see kernels/levels.py.
struct LevelTable {
    const float* level;    // 2^bits
    const float* next;     // 2^bits: level[j + 1] where interval j + 1 exists, else NaN, which no value reaches
    const Pair* interval;  // 2^bits: level[j], 1 / (level[j + 1] - level[j]); the last is not used
    // A value's cell is (value - level[0]) * cells_per_unit, clipped to 0..cells - 1. `first` is the interval (the bits of an
    // int32) that the cell begins in, `second` the level that ends it; no cell holds more than `crowd` inner levels.
    const Pair* cell;
    std::int32_t cells, crowd;
    float cells_per_unit;
    const struct LevelBytes* bytes = nullptr;  // null: nobody reads it
};

// The same for instructions that look up 64 bytes at once: floats are 4 planes of bytes, and cells are fewer, so that one
// may hold several levels.
struct LevelBytes {
    static constexpr bool made_for(int bits) { return bits >= 6; }  // fewer levels fit into registers as floats
    static constexpr int most_cells(int bits) { return bits == 8 ? 1024 : bits == 7 ? 512 : 256; }

    alignas(64) std::uint8_t start[1024];  // by cell: the interval that it begins in
    alignas(64) std::uint8_t next[4][256], level[4][256], inverse_gap[4][256];  // by interval
    int steps;  // inner levels in a cell, at most
    float cells_per_unit, last;

    explicit LevelBytes(const LevelTable& table, int bits);
};

struct QuantizeLoops {
    // `range`: the block's radius or scale as it counts: 0 where too small, NaN where not finite. `lost` may be null.
    void (*uniform)(const float* x, index n, int bits, float range, Draws draws, std::uint8_t* out, float* lost);
    void (*levels)(const float* x, index n, int bits, const LevelTable& table, float range, Draws draws,
                   std::uint8_t* out, float* lost);
    // `range` has the weight in it.
    void (*uniform_add)(const std::uint8_t* codes, index n, int bits, float range, float* out);
    void (*levels_value)(const std::uint8_t* codes, index n, int bits, const float* level, float range, bool add,
                         float* out);
};

THINWIRE_LOOPS(QuantizeLoops, quantize_loops)

}  // namespace thinwire
