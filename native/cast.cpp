// Casts between float32 and the 16-bit formats, with the scaling or the sum in the same pass.
#include "simd/cast.h"

#include <algorithm>

#include "common.h"

namespace thinwire {
namespace {

using std::uint16_t;

constexpr index grain = 1 << 16;  // elements per range: a few microseconds, well above the cost of taking the next

template <class In, class Out>
auto over(void (*CastLoops::*loop)(const In*, float, Out*, index)) {
    return [loop](address x, float weight, address out, index n, int threads) {
        const auto run = cast_loops().*loop;
        parallel_for(n, grain, threads, [&](index begin, index end) {
            run(at<const In>(x) + begin, weight, at<Out>(out) + begin, end - begin);
        });
    };
}

// A cast and what it loses, x - back * out: a stretch at a time, while it is in the cache. `lost` may be x.
auto losing(void (*CastLoops::*cast)(const float*, float, uint16_t*, index),
            void (*CastLoops::*lose)(const uint16_t*, float, const float*, float*, index)) {
    return [=](address x, float weight, float back, address out, address lost, index n, int threads) {
        constexpr index stretch = 1 << 11;
        const auto narrow = cast_loops().*cast;
        const auto rest = cast_loops().*lose;
        parallel_for(n, grain, threads, [&](index begin, index end) {
            for (index i = begin; i < end; i += stretch) {
                const index count = std::min(stretch, end - i);
                narrow(at<const float>(x) + i, weight, at<uint16_t>(out) + i, count);
                rest(at<const uint16_t>(out) + i, back, at<const float>(x) + i, at<float>(lost) + i, count);
            }
        });
    };
}

// The sum of `count` arrays of n halves, end to end, in float32 and rounded once. `out` may be the first of them.
auto sum(void (*CastLoops::*read)(const uint16_t*, float*, index),
         void (*CastLoops::*add)(const uint16_t*, float, float*, index),
         void (*CastLoops::*write)(const float*, float, uint16_t*, index)) {
    return [=](address x, index count, index n, address out, int threads) {
        const CastLoops& loops = cast_loops();
        parallel_for(n, grain, threads, [&](index begin, index end) {
            constexpr index stretch = 1 << 10;
            float total[stretch];
            for (index i = begin; i < end; i += stretch) {
                const index length = std::min(stretch, end - i);
                (loops.*read)(at<const uint16_t>(x) + i, total, length);
                for (index k = 1; k < count; ++k) (loops.*add)(at<const uint16_t>(x) + k * n + i, 1.0f, total, length);
                (loops.*write)(total, 1.0f, at<uint16_t>(out) + i, length);
            }
        });
    };
}

// In place, halves take the front of the floats' memory: elements [begin, end) are halves in bytes [2 begin, 2 end) and
// floats in bytes [4 begin, 4 end), which are apart wherever end <= 2 begin. So an ordinary loop, on as many threads as
// there are, does one such span after the other, and the few elements at the front go by way of the stack.
constexpr index front = 4096;
constexpr index worthwhile = 1 << 20;  // elements of a span: for fewer, waking threads takes longer than the cast

auto narrow(void (*CastLoops::*loop)(const float*, float, uint16_t*, index)) {
    return [loop](address x, float weight, index n, int threads) {
        const auto run = cast_loops().*loop;
        const auto wide = at<const float>(x);
        const auto half = at<uint16_t>(x);
        uint16_t first[front];
        run(wide, weight, first, std::min(front, n));
        std::copy_n(first, std::min(front, n), half);
        for (index begin = front, end; begin < n; begin = end) {
            end = std::min(2 * begin, n);
            parallel_for(end - begin, grain, end - begin < worthwhile ? 1 : threads, [&](index from, index to) {
                run(wide + begin + from, weight, half + begin + from, to - from);
            });
        }
    };
}

// The way back, from the last span to the first.
auto widen(void (*CastLoops::*loop)(const uint16_t*, float*, index)) {
    return [loop](address x, index n, int threads) {
        const auto run = cast_loops().*loop;
        const auto half = at<const uint16_t>(x);
        const auto wide = at<float>(x);
        for (index end = n, begin; end > front; end = begin) {
            begin = std::max(front, (end + 1) / 2);
            parallel_for(end - begin, grain, end - begin < worthwhile ? 1 : threads, [&](index from, index to) {
                run(half + begin + from, wide + begin + from, to - from);
            });
        }
        uint16_t first[front];
        std::copy_n(half, std::min(front, n), first);
        run(first, wide, std::min(front, n));
    };
}

}  // namespace

void bind_cast(nb::module_& m) {
    m.def("scale", over(&CastLoops::scale), without_gil());
    m.def("scale_to_fp16", over(&CastLoops::scale_to_fp16), without_gil());
    m.def("scale_to_bf16", over(&CastLoops::scale_to_bf16), without_gil());
    m.def("losing_to_fp16", losing(&CastLoops::scale_to_fp16, &CastLoops::lose_fp16), without_gil());
    m.def("losing_to_bf16", losing(&CastLoops::scale_to_bf16, &CastLoops::lose_bf16), without_gil());
    m.def("sum_fp16", sum(&CastLoops::fp16_to_float, &CastLoops::add_from_fp16, &CastLoops::scale_to_fp16), without_gil());
    m.def("sum_bf16", sum(&CastLoops::bf16_to_float, &CastLoops::add_from_bf16, &CastLoops::scale_to_bf16), without_gil());
    m.def("narrow_to_fp16", narrow(&CastLoops::scale_to_fp16), without_gil());
    m.def("narrow_to_bf16", narrow(&CastLoops::scale_to_bf16), without_gil());
    m.def("widen_from_fp16", widen(&CastLoops::fp16_to_float), without_gil());
    m.def("widen_from_bf16", widen(&CastLoops::bf16_to_float), without_gil());
    m.def("add_from_fp16", over(&CastLoops::add_from_fp16), without_gil());
    m.def("add_from_bf16", over(&CastLoops::add_from_bf16), without_gil());
}

}  // namespace thinwire
