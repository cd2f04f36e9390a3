// Packed narrow integers: pack, add, add with saturation.
#include "simd/integers.h"

#include "common.h"

namespace thinwire {
namespace {

constexpr index grain = 1 << 16;  // a multiple of 8: ranges begin on whole bytes

void check(index n, int width, index bytes) {
    require(width >= 1 && width <= 32, "integers are 1..32 bits wide");
    require(bytes == (n * width + 7) / 8, "the packed integers have another length");
}

void pack_ints(address values, index n, int width, address out, index bytes, int threads) {
    check(n, width, bytes);
    const auto loop = integer_loops().pack;
    std::atomic<bool> fit{true};
    parallel_for(n, grain, threads, [&](index begin, index end) {
        if (!loop(at<const std::int32_t>(values) + begin, end - begin, width, at<std::uint8_t>(out) + begin / 8 * width))
            fit.store(false, std::memory_order_relaxed);
    });
    if (!fit) throw std::invalid_argument("a value does not fit into " + std::to_string(width) + " bits");
}

template <Into into>
void add_ints(address data, index bytes, int width, address out, index n, int threads) {
    check(n, width, bytes);
    const auto loop = integer_loops().unpack;
    parallel_for(n, grain, threads, [&](index begin, index end) {
        loop(at<const std::uint8_t>(data) + begin / 8 * width, end - begin, width, into, at<std::int32_t>(out) + begin);
    });
}

}  // namespace

void bind_integers(nb::module_& m) {
    m.def("pack_ints", pack_ints, without_gil());
    m.def("add_packed", add_ints<Into::add>, without_gil());
    m.def("add_packed_saturating", add_ints<Into::add_saturating>, without_gil());
}

}  // namespace thinwire
