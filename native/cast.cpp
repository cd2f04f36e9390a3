// Casts between float32 and the 16-bit formats, with the scaling or the sum in the same pass.
#include "simd/cast.h"

#include "common.h"

namespace thinwire {
namespace {

constexpr index grain = 1 << 16;  // entries per range: a few microseconds, well above the cost of a thread

template <class In, class Out>
auto over(void (*CastLoops::*loop)(const In*, float, Out*, index)) {
    return [loop](address x, float weight, address out, index n, int threads) {
        const auto run = cast_loops().*loop;
        parallel_for(n, grain, threads, [&](index begin, index end) {
            run(at<const In>(x) + begin, weight, at<Out>(out) + begin, end - begin);
        });
    };
}

}  // namespace

void bind_cast(nb::module_& m) {
    m.def("scale", over(&CastLoops::scale), without_gil());
    m.def("scale_to_fp16", over(&CastLoops::scale_to_fp16), without_gil());
    m.def("scale_to_bf16", over(&CastLoops::scale_to_bf16), without_gil());
    m.def("add_from_fp16", over(&CastLoops::add_from_fp16), without_gil());
    m.def("add_from_bf16", over(&CastLoops::add_from_bf16), without_gil());
}

}  // namespace thinwire
