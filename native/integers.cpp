// Packed narrow integers: pack, add, add with saturation.
#include "simd/integers.h"

#include "common.h"

namespace thinwire {
namespace {

constexpr index grain = 1 << 16;  // a multiple of 8: ranges begin on whole bytes

void check(index n, int size, int width, index bytes) {
    require((size == 1 || size == 2 || size == 4) && width >= 1 && width <= 8 * size,
            "integers are at least one bit wide, and no wider than what holds them");
    require(bytes == (n * width + 7) / 8, "the packed integers have another length");
}

void pack_ints(address values, index n, int size, int width, address out, index bytes, int threads) {
    check(n, size, width, bytes);
    const auto loop = integer_loops().pack;
    std::atomic<bool> fit{true};
    parallel_for(n, grain, threads, [&](index begin, index end) {
        if (!loop(at<const char>(values) + begin * size, end - begin, size, width, at<std::uint8_t>(out) + begin / 8 * width))
            fit.store(false, std::memory_order_relaxed);
    });
    if (!fit) throw std::invalid_argument("a value does not fit into " + std::to_string(width) + " bits");
}

template <Into into>
void add_ints(address data, index bytes, int width, address out, index n, int size, int threads) {
    check(n, size, width, bytes);
    const auto loop = integer_loops().unpack;
    parallel_for(n, grain, threads, [&](index begin, index end) {
        loop(at<const std::uint8_t>(data) + begin / 8 * width, end - begin, width, into, size,
             at<char>(out) + begin * size);
    });
}

}  // namespace

void bind_integers(nb::module_& m) {
    m.def("pack_ints", pack_ints, without_gil());
    m.def("add_packed", add_ints<Into::add>, without_gil());
    m.def("add_packed_saturating", add_ints<Into::add_saturating>, without_gil());
}

}  // namespace thinwire
