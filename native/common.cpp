// Finds the processor's instruction set, once.
#include "common.h"

namespace thinwire {
namespace {

InstructionSet best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return InstructionSet::avx512;
    if (__builtin_cpu_supports("x86-64-v3")) return InstructionSet::avx2;
#endif
    return InstructionSet::baseline;
}

std::atomic<InstructionSet> chosen{best()};

constexpr const char* names[] = {"baseline", "avx2", "avx512"};

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
