// The counter-based generator's keys; see kernels/backends/reference/draws.py.
#pragma once
#include <cstdint>

namespace thinwire {

// What the walk of a key is made of, so that no regular key has a regular walk.
inline std::uint64_t scrambled(std::uint64_t key) {
    key += 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

// The word at one place of a walk.
inline std::uint32_t hashed(std::uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

}  // namespace thinwire
