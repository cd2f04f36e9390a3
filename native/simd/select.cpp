#include "select.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::int32_t;
using std::uint32_t;
using std::uint64_t;

constexpr int group = 32;  // entries looked at together: one bit each in `hits`

struct Plain {
    const float* x;
    uint32_t operator()(index i) const {
        const uint32_t bits = __builtin_bit_cast(uint32_t, x[i]) & 0x7FFFFFFFu;
        return bits < nan_key ? bits : nan_key;
    }
};

struct Weighted {
    const float *x, *weight;
    uint32_t operator()(index i) const {
        const float score = x[i] * weight[i];
        return Plain{&score}(0);
    }
};

// Calls body(key of entry i) once per kind of key, so that the choice stays outside the loops.
template <class Body>
auto with_keys(const float* x, const float* weight, const Body& body) {
    return weight ? body(Weighted{x, weight}) : body(Plain{x});
}

// Calls hit(i, key) for every key >= floor, in order, until it returns false. `hit` may raise the floor.
// Most groups hold none, and cost one vectorised maximum.
template <class Key, class Hit>
inline __attribute__((always_inline)) void each_hit(const Key& key, index begin, index end, uint32_t& floor,
                                                    const Hit& hit) {
    index i = begin;
    for (; i + group <= end; i += group) {
        uint32_t top = 0;
        for (int j = 0; j < group; ++j) {
            const uint32_t candidate = key(i + j);
            top = top < candidate ? candidate : top;
        }
        if (top < floor) continue;
        uint32_t hits = 0;
        for (int j = 0; j < group; ++j) hits |= static_cast<uint32_t>(key(i + j) >= floor) << j;
        for (; hits; hits &= hits - 1) {
            const index at = i + __builtin_ctz(hits);
            if (!hit(at, key(at))) return;
        }
    }
    for (; i < end; ++i)
        if (key(i) >= floor && !hit(i, key(i))) return;
}

void sample(const float* x, const float* weight, index n, index count, uint32_t* keys) {
    with_keys(x, weight, [=](const auto key) {
        for (index i = 0; i < count; ++i) {
            const index first = i * n / count, width = (i + 1) * n / count - first;
            const uint64_t hash = static_cast<uint32_t>(i) * 2654435761u;
            keys[i] = key(first + static_cast<index>(hash * static_cast<uint64_t>(width) >> 32));
        }
    });
}

index collect(const float* x, const float* weight, index begin, index end, uint32_t floor, int32_t* positions,
              uint32_t* keys, index capacity) {
    return with_keys(x, weight, [=](const auto key) {
        index count = 0;
        uint32_t fixed = floor;
        each_hit(key, begin, end, fixed, [&](index i, uint32_t value) {
            if (count == capacity) return ++count, false;
            positions[count] = static_cast<int32_t>(i);
            keys[count++] = value;
            return true;
        });
        return count;
    });
}

// Four sets of bins: an increment need not wait for the one before it when both fall into the same bin.
template <class Key>
inline __attribute__((always_inline)) void add_to_bins(const Key& key, index begin, index end, uint32_t low,
                                                       uint32_t high, int shift, uint32_t* bins) {
    constexpr int sets = 4;
    uint32_t partial[sets][bins_count] = {};
    const uint32_t span = high - low;
    index i = begin;
    const auto add = [&](int set, index at) {
        const uint32_t distance = key(at) - low;
        if (distance <= span) ++partial[set][distance >> shift];
    };
    for (; i + sets <= end; i += sets)
        for (int set = 0; set < sets; ++set) add(set, i + set);
    for (; i < end; ++i) add(0, i);
    for (index bin = 0; bin < bins_count; ++bin)
        for (int set = 0; set < sets; ++set) bins[bin] += partial[set][bin];
}

void histogram(const float* x, const float* weight, index begin, index end, uint32_t low, uint32_t high, int shift,
               uint32_t* bins) {
    with_keys(x, weight, [=](const auto key) { add_to_bins(key, begin, end, low, high, shift, bins); });
}

void histogram_of_keys(const uint32_t* keys, index count, uint32_t low, uint32_t high, int shift, uint32_t* bins) {
    add_to_bins([keys](index i) { return keys[i]; }, 0, count, low, high, shift, bins);
}

void count(const float* x, const float* weight, index begin, index end, uint32_t wanted, index* above, index* equal) {
    with_keys(x, weight, [=](const auto key) {
        uint32_t larger = 0, same = 0;
        for (index i = begin; i < end; ++i) {
            larger += key(i) > wanted;
            same += key(i) == wanted;
        }
        *above = larger;
        *equal = same;
    });
}

index emit(const float* x, const float* weight, index begin, index end, uint32_t wanted, index ties, int32_t* positions) {
    return with_keys(x, weight, [=](const auto key) {
        index count = 0, left = ties;
        uint32_t floor = wanted + (left == 0);
        each_hit(key, begin, end, floor, [&](index i, uint32_t value) {
            if (value < floor) return true;  // a tie that this group saw before the last one was taken
            positions[count++] = static_cast<int32_t>(i);
            if (value == wanted && --left == 0) floor = wanted + 1;
            return true;
        });
        return count;
    });
}

}  // namespace

const SelectLoops select_loops = {sample, collect, histogram, histogram_of_keys, count, emit};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
