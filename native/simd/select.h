// Loops of select.cpp. The key of an element is the bit pattern of |x| (or |x * weight|, where there are weights): for
// floats without a sign the order of the bits is the order of the values. All NaN have one key, above infinity's.
#pragma once
#include "../dispatch.h"

namespace thinwire {

constexpr std::uint32_t nan_key = 0x7F800001u;
constexpr int bin_bits = 11;
constexpr index collect_slack = 16;
constexpr index bins_count = index{1} << bin_bits;

// `weight` may be null. Ranges are [begin, end) of x; positions written are positions in x, ascending.
struct SelectLoops {
    // Keys of `count` elements of x, or of x + owed, one at a hashed place in each of `count` equal strata of x[0, n).
    void (*sample)(const float* x, const float* owed, const float* weight, index n, index count, std::uint32_t* keys);
    // Positions, from `first` on, and keys of the elements of x[0, n) with key >= floor; returns how many, or capacity + 1 if
    // there are more. There is room for `collect_slack` more than the capacity, and what lies beyond the last is anything.
    index (*collect)(const float* x, const float* weight, index n, index first, std::uint32_t floor,
                     std::int32_t* positions, std::uint32_t* keys, index capacity);
    // bins[(key - low) >> shift] += 1 for elements with low <= key <= high.
    void (*histogram)(const float* x, const float* weight, index begin, index end, std::uint32_t low,
                      std::uint32_t high, int shift, std::uint32_t* bins);
    void (*histogram_of_keys)(const std::uint32_t* keys, index count, std::uint32_t low, std::uint32_t high, int shift,
                              std::uint32_t* bins);
    // How many keys are above `key`, and how many equal to it.
    void (*count)(const float* x, const float* weight, index begin, index end, std::uint32_t key, index* above,
                  index* equal);
    // Positions of elements with a larger key, and of the first `ties` with this key; returns how many.
    index (*emit)(const float* x, const float* weight, index begin, index end, std::uint32_t key, index ties,
                  std::int32_t* positions);
};

THINWIRE_LOOPS(SelectLoops, select_loops)

}  // namespace thinwire
