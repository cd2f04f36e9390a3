// The randomised Hadamard rotation in place; what it is, is told in kernels/backends/reference/hadamard.py.
#include "random.h"
#include "rotation.h"

namespace thinwire {
namespace {

void hadamard(address x, index n, address starts, index stretches, index block, address keys, address counters,
              bool inverse, int threads) {
    const index* const bounds = at<const index>(starts);
    require(bounds[0] == 0 && bounds[stretches] == n && std::is_sorted(bounds, bounds + stretches + 1),
            "starts must ascend from 0 to the length of x");
    const Rotation rotation(at<float>(x), inverse, threads);
    for (index stretch = 0; stretch < stretches; ++stretch) {
        index begin = bounds[stretch];
        const auto key = scrambled(at<const std::uint64_t>(keys)[stretch]);
        for (index size = block; size >= 1; size /= 2) {
            const index count = (bounds[stretch + 1] - begin) / size * size;
            if (count == 0) continue;
            const index counter = at<const index>(counters)[stretch] + begin - bounds[stretch];
            rotation.rotate(begin, count, size, {key, counter, 1.0f});
            begin += count;
        }
    }
}

}  // namespace

void bind_hadamard(nb::module_& m) { m.def("hadamard", hadamard, without_gil()); }

}  // namespace thinwire
