// What all kernels share: memory handed in from Python, threads, and the list of families.
//
// The Python face (thinwire/kernels/*.py) owns the checks of device, dtype, contiguity and sizes; what arrives here is an
// address and a length. Python-level overhead per call is then a few `data_ptr()`, and no PyTorch header is needed.
// All functions run without the GIL, and their results do not depend on `threads`.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"

namespace thinwire {

namespace nb = nanobind;

using address = std::uintptr_t;
using without_gil = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(address where) {
    return reinterpret_cast<T*>(where);
}

// Raises ValueError in Python.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

// Calls work(with) on this thread, and on up to `threads` - 1 kept ones where those are free; returns when all have.
void run_together(int threads, void (*work)(void*), void* with);

// Calls body(begin, end) until [0, count) is covered, on up to `threads` threads. Every range begins at a multiple of
// `grain` and is `grain` long (the last may be shorter) whatever the number of threads: what a body makes per range can
// be put together in order, with the same result every time. One range stays on the calling thread. `body` must not throw.
template <class Body>
void parallel_for(index count, index grain, int threads, const Body& body) {
    const index ranges = (count + grain - 1) / grain;
    std::atomic<index> next{0};
    auto work = [&]() noexcept {
        for (index range; (range = next.fetch_add(1, std::memory_order_relaxed)) < ranges;) {
            const index begin = range * grain;
            body(begin, begin + grain < count ? begin + grain : count);
        }
    };
    if (threads <= 1 || ranges <= 1) return work();
    run_together(static_cast<int>(threads < ranges ? threads : ranges),
                 [](void* with) { (*static_cast<decltype(work)*>(with))(); }, &work);
}

void bind_cast(nb::module_& m);
void bind_integers(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_statistics(nb::module_& m);
void bind_select(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_indices(nb::module_& m);
void bind_hadamard(nb::module_& m);
void bind_rotated(nb::module_& m);
void bind_products(nb::module_& m);
void bind_words(nb::module_& m);

}  // namespace thinwire
