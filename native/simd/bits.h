// Codes of a fixed width, between bytes and a packed little-endian string: 8 codes are B bytes.
//
// To be included by files in simd/ only.
#pragma once
#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

constexpr int group = 64;  // codes that are packed together: 8 words of 8 codes

// Every second byte, word and double word moves down to its neighbour: 8 bytes of B bits each become 8 B bits.
template <int B>
inline u64 squeeze(u64 w) {
    w = (w & 0x00FF00FF00FF00FF) | ((w & 0xFF00FF00FF00FF00) >> (8 - B));
    w = (w & 0x0000FFFF0000FFFF) | ((w & 0xFFFF0000FFFF0000) >> (16 - 2 * B));
    return (w & 0x00000000FFFFFFFF) | ((w & 0xFFFFFFFF00000000) >> (32 - 4 * B));
}

template <int B>
inline u64 spread(u64 w) {
    constexpr std::uint64_t four = (1ull << (4 * B)) - 1, two = (1ull << (2 * B)) - 1, one = (1ull << B) - 1;
    constexpr std::uint64_t twos = two | two << 32, ones = (one | one << 16) | (one | one << 16) << 32;
    w = (w & four) | ((w << (32 - 4 * B)) & (four << 32));
    w = (w & twos) | ((w << (16 - 2 * B)) & (twos << 16));
    return (w & ones) | ((w << (8 - B)) & (ones << 8));
}

// 64 codes, one per byte, into exactly 8 B bytes.
template <int B>
inline void pack(const std::uint8_t* codes, std::uint8_t* out) {
    std::uint64_t words[8];
    for (int i = 0; i < 8; i += lanes / 2) store(squeeze<B>(load<u64>(codes + 8 * i)), words + i);
    for (int i = 0; i < 8; ++i) {
        // A store of 8 bytes is faster than one of B; the next one covers what it wrote too much.
        if (i * B + 8 <= 8 * B)
            __builtin_memcpy(out + i * B, &words[i], 8);
        else
            __builtin_memcpy(out + i * B, &words[i], B);
    }
}

// The inverse. Reads 7 B + 8 bytes: up to 7 beyond the codes.
template <int B>
inline void unpack(const std::uint8_t* in, std::uint8_t* codes) {
    std::uint64_t words[8];
    for (int i = 0; i < 8; ++i) __builtin_memcpy(&words[i], in + i * B, 8);
    for (int i = 0; i < 8; i += lanes / 2) store(spread<B>(load<u64>(words + i)), codes + 8 * i);
}

// Calls `at_group(in, i, count)` for every 64 codes of n; `in` may be read 7 bytes past the codes.
template <int B, class AtGroup>
inline void for_groups(const std::uint8_t* in, index n, const AtGroup& at_group) {
    index i = 0;
    for (; i + group + 64 <= n; i += group, in += 8 * B) at_group(in, i, group);
    for (; i < n; i += group, in += 8 * B) {
        const int count = n - i < group ? static_cast<int>(n - i) : group;
        std::uint8_t padded[8 * B + 8] = {};
        __builtin_memcpy(padded, in, (count * B + 7) / 8);
        at_group(padded, i, count);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
