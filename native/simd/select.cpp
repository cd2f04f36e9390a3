#include "select.h"

#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::int32_t;
using std::uint32_t;
using std::uint64_t;

constexpr int group = 32;  // elements looked at together: one bit each in `hits`

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

// Calls body(key of element i) once per kind of key, so that the choice stays outside the loops.
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

void sample(const float* x, const float* owed, const float* weight, index n, index count, uint32_t* keys) {
    for (index i = 0; i < count; ++i) {
        const index first = i * n / count, width = (i + 1) * n / count - first;
        const uint64_t hash = static_cast<uint32_t>(i) * 2654435761u;
        const index at = first + static_cast<index>(hash * static_cast<uint64_t>(width) >> 32);
        const float sum = owed ? x[at] + owed[at] : x[at], score = weight ? sum * weight[at] : sum;
        keys[i] = Plain{&score}(0);
    }
}

index collect_one_by_one(const float* x, const float* weight, index from, index n, index first, uint32_t floor,
                         int32_t* positions, uint32_t* keys, index count, index capacity) {
    with_keys(x, weight, [&](const auto key) {
        uint32_t fixed = floor;
        each_hit(key, from, n, fixed, [&](index i, uint32_t value) {
            if (count == capacity) return ++count, false;
            positions[count] = static_cast<int32_t>(first + i);
            keys[count++] = value;
            return true;
        });
    });
    return count;
}

// Without a branch on what is found: where one element in a hundred is, the processor cannot foretell it.
index collect(const float* x, const float* weight, index n, index first, uint32_t floor, int32_t* positions,
              uint32_t* keys, index capacity) {
    index i = 0, count = 0;
#if defined(__AVX512F__)
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(floor)), nan = _mm512_set1_epi32(nan_key);
    __m512i place = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), (__m512i)lane_numbers());
    for (; i + lanes <= n && count <= capacity; i += lanes) {
        const f32 value = weight ? load<f32>(x + i) * load<f32>(weight + i) : load<f32>(x + i);
        const __m512i bits = _mm512_and_si512((__m512i)value, _mm512_set1_epi32(0x7FFFFFFF));
        const __m512i key = _mm512_min_epu32(bits, nan);
        const __mmask16 hits = _mm512_cmpge_epu32_mask(key, limit);
        _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(hits, place));
        _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(hits, key));
        count += __builtin_popcount(hits);
        place = _mm512_add_epi32(place, _mm512_set1_epi32(lanes));
    }
    if (count > capacity) return capacity + 1;
#endif
    return collect_one_by_one(x, weight, i, n, first, floor, positions, keys, count, capacity);
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
