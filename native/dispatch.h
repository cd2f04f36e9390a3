// Which instruction set runs. Every file in simd/ is compiled once per set, each time into a namespace of that name.
//
// A family puts its inner loops into one table of function pointers:
//
//     struct CastLoops { void (*to_half)(const float*, float, uint16_t*, index); };   // simd/cast.h
//     THINWIRE_LOOPS(CastLoops, cast_loops)
//
//     namespace thinwire::THINWIRE_INSTRUCTION_SET {                                    // simd/cast.cpp
//     namespace { void to_half(...) {...} }
//     const CastLoops cast_loops = {to_half};
//     }
//
//     cast_loops().to_half(...)                                                         // cast.cpp: the best one here
//
// Files in simd/ must use nothing of the standard library that is not a builtin, and keep their own functions in an
// anonymous namespace: an inline function compiled for AVX-512 must never become the copy that the linker gives to all.
#pragma once
#include <cstdint>

#if defined(THINWIRE_WITH_AVX)  // by CMakeLists.txt
#define THINWIRE_AVX(...) __VA_ARGS__
#else
#define THINWIRE_AVX(...)
#endif

namespace thinwire {

using index = std::int64_t;

enum class InstructionSet { baseline, avx2, avx512, avx512vbmi };

// The best that this processor runs, unless `use_instruction_set` said otherwise.
InstructionSet instruction_set();

#define THINWIRE_LOOPS(Table, name)                                          \
    namespace baseline { extern const Table name; }                          \
    THINWIRE_AVX(namespace avx2 { extern const Table name; })                \
    THINWIRE_AVX(namespace avx512 { extern const Table name; })              \
    THINWIRE_AVX(namespace avx512vbmi { extern const Table name; })          \
    inline const Table& name() {                                             \
        switch (instruction_set()) {                                         \
            THINWIRE_AVX(case InstructionSet::avx512vbmi: return avx512vbmi::name;) \
            THINWIRE_AVX(case InstructionSet::avx512: return avx512::name;)  \
            THINWIRE_AVX(case InstructionSet::avx2: return avx2::name;)      \
            default: return baseline::name;                                  \
        }                                                                    \
    }

}  // namespace thinwire
