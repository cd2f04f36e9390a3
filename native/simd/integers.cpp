#include "integers.h"

#include <type_traits>  // of these two, types only
#include <utility>

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// 8 values into W bytes; every shift is a constant.
template <int W>
inline void pack8(const int32_t* values, uint8_t* out) {
    uint64_t words[(8 * W + 63) / 64] = {};
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const int word = k * W / 64, shift = k * W % 64;
        const uint64_t bits = static_cast<uint32_t>(values[k]) & ((1ull << W) - 1);
        words[word] |= bits << shift;
        if (shift + W > 64) words[word + 1] |= bits >> (64 - shift);
    }
    __builtin_memcpy(out, words, W);
}

// Reads up to 8 bytes past the W.
template <int W>
inline void unpack8(const uint8_t* in, int32_t* values) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        uint64_t word;
        __builtin_memcpy(&word, in + k * W / 8, 8);
        values[k] = static_cast<int32_t>(static_cast<int64_t>(word << (64 - W - k * W % 8)) >> (64 - W));
    }
}

template <int W>
bool pack_width(const int32_t* values, index n, uint8_t* out) {
    constexpr int unused = 32 - W;
    uint32_t misfits = 0;
    for (index i = 0; i < n; ++i) {
        const auto value = static_cast<uint32_t>(values[i]);
        misfits |= static_cast<uint32_t>(static_cast<int32_t>(value << unused) >> unused) ^ value;
    }
    if (misfits) return false;
    index i = 0;
    for (; i + 8 <= n; i += 8, out += W) pack8<W>(values + i, out);
    if (i < n) {
        int32_t padded[8] = {};
        uint8_t packed[W];
        __builtin_memcpy(padded, values + i, 4 * (n - i));
        pack8<W>(padded, packed);
        __builtin_memcpy(out, packed, ((n - i) * W + 7) / 8);
    }
    return true;
}

template <int W, Into into>
inline void put(const int32_t* values, int count, int32_t* out) {
    constexpr int32_t most = static_cast<int32_t>((1u << (W - 1)) - 1);
    for (int k = 0; k < count; ++k) {
        if (into == Into::add) out[k] = static_cast<int32_t>(static_cast<uint32_t>(out[k]) + static_cast<uint32_t>(values[k]));
        if (into == Into::add_saturating) {
            // What is further out than `far` stays beyond `most` whatever is added: the sum then fits into 32 bits.
            using Sum = std::conditional_t<(W < 30), int32_t, int64_t>;
            constexpr Sum far = static_cast<Sum>(1) << (W + 1);
            Sum sum = out[k];
            sum = sum > far ? far : sum;
            sum = sum < -far ? -far : sum;
            sum += values[k];
            sum = sum > most ? most : sum;
            out[k] = static_cast<int32_t>(sum < -most ? -most : sum);
        }
    }
}

template <int W, Into into>
void unpack_into(const uint8_t* in, index n, int32_t* out) {
    constexpr int group = 64;  // enough that `put` vectorises, and that the next group covers what is read too far
    int32_t values[group];
    index i = 0;
    for (; i + 2 * group <= n; i += group, in += 8 * W) {
        for (int k = 0; k < group; k += 8) unpack8<W>(in + k / 8 * W, values + k);
        put<W, into>(values, group, out + i);
    }
    for (; i < n; i += group, in += 8 * W) {
        const int count = n - i < group ? static_cast<int>(n - i) : group;
        uint8_t padded[8 * W + 8] = {};
        __builtin_memcpy(padded, in, (count * W + 7) / 8);
        for (int k = 0; k < group; k += 8) unpack8<W>(padded + k / 8 * W, values + k);
        put<W, into>(values, count, out + i);
    }
}

template <int W>
void unpack_width(const uint8_t* in, index n, Into into, int32_t* out) {
    switch (into) {
        case Into::add: return unpack_into<W, Into::add>(in, n, out);
        case Into::add_saturating: return unpack_into<W, Into::add_saturating>(in, n, out);
    }
}

template <int... Before>
struct Widths {
    static constexpr bool (*pack[])(const int32_t*, index, uint8_t*) = {pack_width<Before + 1>...};
    static constexpr void (*unpack[])(const uint8_t*, index, Into, int32_t*) = {unpack_width<Before + 1>...};
    constexpr explicit Widths(std::integer_sequence<int, Before...>) {}
};

using AllWidths = decltype(Widths(std::make_integer_sequence<int, 32>()));

bool pack(const int32_t* values, index n, int width, uint8_t* out) { return AllWidths::pack[width - 1](values, n, out); }

void unpack(const uint8_t* in, index n, int width, Into into, int32_t* out) {
    AllWidths::unpack[width - 1](in, n, into, out);
}

}  // namespace

const IntegerLoops integer_loops = {pack, unpack};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
