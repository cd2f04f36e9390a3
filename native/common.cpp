// Finds the processor's instruction set, once.
#include "common.h"

#if defined(THINWIRE_WITH_AVX)
#include <cpuid.h>
#endif

namespace thinwire {
namespace {

#if defined(THINWIRE_WITH_AVX)
// All of x86-64-v3, feature by feature: compilers before GCC 12 do not know the levels by name, nor all features.
bool has_v3() {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && (c & bit_MOVBE) &&
           __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & bit_LZCNT);
}

bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

InstructionSet best() {
#if defined(THINWIRE_WITH_AVX)
    __builtin_cpu_init();
    if (has_v4() && __builtin_cpu_supports("avx512vbmi")) return InstructionSet::avx512vbmi;
    if (has_v4()) return InstructionSet::avx512;
    if (has_v3()) return InstructionSet::avx2;
#endif
    return InstructionSet::baseline;
}

std::atomic<InstructionSet> chosen{best()};

constexpr const char* names[] = {"baseline", "avx2", "avx512", "avx512vbmi"};

}  // namespace

InstructionSet instruction_set() { return chosen.load(std::memory_order_relaxed); }

void bind_common(nb::module_& m) {
    m.def("instruction_set", [] { return names[static_cast<int>(instruction_set())]; },
          "The instruction set the kernels use.");
    m.def("instruction_sets", [] {
        nb::list all;
        for (int set = 0; set <= static_cast<int>(best()); ++set) all.append(names[set]);
        return all;
    }, "All instruction sets this processor runs, the best last.");
    m.def("use_instruction_set", [](const std::string& name) {
        for (int set = 0; set <= static_cast<int>(best()); ++set)
            if (name == names[set]) return chosen.store(static_cast<InstructionSet>(set));
        throw std::invalid_argument("this processor does not run the instruction set " + name);
    }, "Use another of `instruction_sets()`: for tests, which hold all of them equal.");
}

}  // namespace thinwire
