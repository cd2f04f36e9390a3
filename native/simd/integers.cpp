#include "integers.h"

#include <type_traits>  // of these two, types only
#include <utility>

#include "bits.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// 8 values into W bytes; every shift is a constant.
template <int W, class T>
inline void pack8(const T* values, uint8_t* out) {
    uint64_t words[(8 * W + 63) / 64] = {};
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const int word = k * W / 64, shift = k * W % 64;
        const uint64_t bits = static_cast<uint32_t>(static_cast<int32_t>(values[k])) & ((1ull << W) - 1);
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

template <int W, class T>
bool pack_width(const T* values, index n, uint8_t* out) {
    constexpr int unused = 32 - W;
    uint32_t misfits = 0;
    for (index i = 0; i < n; ++i) {
        const auto value = static_cast<uint32_t>(static_cast<int32_t>(values[i]));
        misfits |= static_cast<uint32_t>(static_cast<int32_t>(value << unused) >> unused) ^ value;
    }
    if (misfits) return false;
    index i = 0;
    for (; i + 8 <= n; i += 8, out += W) pack8<W>(values + i, out);
    if (i < n) {
        T padded[8] = {};
        uint8_t packed[W];
        __builtin_memcpy(padded, values + i, sizeof(T) * (n - i));
        pack8<W>(padded, packed);
        __builtin_memcpy(out, packed, ((n - i) * W + 7) / 8);
    }
    return true;
}

// Bytes go through the same words as codes, 64 at a time.
template <int W>
bool pack_bytes(const int8_t* values, index n, uint8_t* out) {
    constexpr uint8_t half = 1 << (W - 1), mask = 2 * half - 1;
    uint8_t misfits = 0;
    index i = 0;
    for (; i + group <= n; i += group, out += 8 * W) {
        uint8_t codes[group];
        for (int k = 0; k < group; ++k) {
            const auto value = static_cast<uint8_t>(values[i + k]);
            misfits |= static_cast<uint8_t>(value + half) & static_cast<uint8_t>(~mask);
            codes[k] = value & mask;
        }
        pack<W>(codes, out);
    }
    return misfits == 0 && pack_width<W>(values + i, n - i, out);
}

// out[k] and the value that is added to it.
template <int W, Into into, class T>
inline T sum(T out, T value) {
    if (into == Into::add) return static_cast<T>(static_cast<uint32_t>(out) + static_cast<uint32_t>(value));
    // What is further out than `far` stays beyond `most` whatever is added: the sum then fits into 32 bits.
    using Sum = std::conditional_t<(W < 30), int32_t, int64_t>;
    constexpr Sum far = static_cast<Sum>(1) << (W + 1), most = static_cast<Sum>((1u << (W - 1)) - 1);
    Sum total = out;
    total = total > far ? far : total;
    total = total < -far ? -far : total;
    total += value;
    total = total > most ? most : total;
    return static_cast<T>(total < -most ? -most : total);
}

template <int W, Into into, class T>
inline void put(const T* values, int count, T* out) {
    for (int k = 0; k < count; ++k) out[k] = sum<W, into>(out[k], values[k]);
}

// 64 values; up to 8 bytes past them are read.
template <int W, class T>
inline void unpack64(const uint8_t* in, T* values) {
    if constexpr (sizeof(T) == 1) {
        constexpr uint8_t half = 1 << (W - 1);
        uint8_t codes[group];
        unpack<W>(in, codes);
        for (int k = 0; k < group; ++k) values[k] = static_cast<T>(static_cast<uint8_t>((codes[k] ^ half) - half));
    } else if constexpr (sizeof(T) == 4) {
        for (int k = 0; k < group; k += 8) unpack8<W>(in + k / 8 * W, values + k);
    } else {
        int32_t wide[group];
        for (int k = 0; k < group; k += 8) unpack8<W>(in + k / 8 * W, wide + k);
        for (int k = 0; k < group; ++k) values[k] = static_cast<T>(wide[k]);
    }
}

template <int W, Into into, class T>
void unpack_into(const uint8_t* in, index n, T* out) {
    T values[group];  // enough that `put` vectorises, and that the next group covers what is read too far
    index i = 0;
    for (; i + 2 * group <= n; i += group, in += 8 * W) {
        unpack64<W>(in, values);
        put<W, into>(values, group, out + i);
    }
    for (; i < n; i += group, in += 8 * W) {
        const int count = n - i < group ? static_cast<int>(n - i) : group;
        uint8_t padded[8 * W + 8] = {};
        __builtin_memcpy(padded, in, (count * W + 7) / 8);
        unpack64<W>(padded, values);
        put<W, into>(values, count, out + i);
    }
}

template <int W, class T>
bool pack_any(const void* values, index n, uint8_t* out) {
    if constexpr (sizeof(T) == 1)
        return pack_bytes<W>(static_cast<const T*>(values), n, out);
    else
        return pack_width<W>(static_cast<const T*>(values), n, out);
}

template <int W, class T>
void unpack_any(const uint8_t* in, index n, Into into, void* out) {
    switch (into) {
        case Into::add: return unpack_into<W, Into::add>(in, n, static_cast<T*>(out));
        case Into::add_saturating: return unpack_into<W, Into::add_saturating>(in, n, static_cast<T*>(out));
    }
}

template <class T, int... Before>
struct Widths {
    static constexpr bool (*pack[])(const void*, index, uint8_t*) = {pack_any<Before + 1, T>...};
    static constexpr void (*unpack[])(const uint8_t*, index, Into, void*) = {unpack_any<Before + 1, T>...};
};

template <class T, int... Before>
Widths<T, Before...> widths_of(std::integer_sequence<int, Before...>);

template <class T>
using AllWidths = decltype(widths_of<T>(std::make_integer_sequence<int, 8 * sizeof(T)>()));

bool pack(const void* values, index n, int size, int width, uint8_t* out) {
    switch (size) {
        case 1: return AllWidths<int8_t>::pack[width - 1](values, n, out);
        case 2: return AllWidths<int16_t>::pack[width - 1](values, n, out);
        default: return AllWidths<int32_t>::pack[width - 1](values, n, out);
    }
}

void unpack(const uint8_t* in, index n, int width, Into into, int size, void* out) {
    switch (size) {
        case 1: return AllWidths<int8_t>::unpack[width - 1](in, n, into, out);
        case 2: return AllWidths<int16_t>::unpack[width - 1](in, n, into, out);
        default: return AllWidths<int32_t>::unpack[width - 1](in, n, into, out);
    }
}

}  // namespace

const IntegerLoops integer_loops = {pack, unpack};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
