// Selected elements, or chunks of them, in and out of a buffer. Indices come from the network: all are checked before
// anything is written. Bound by cache misses, not by arithmetic, so there are no loops in simd/.
#include <algorithm>
#include <cstring>

#include "common.h"

namespace thinwire {
namespace {

using std::int32_t;
using std::uint32_t;

constexpr index grain = 1 << 14;  // elements per range: each may be a cache miss

struct Chunks {
    const int32_t* indices;
    index count, size;  // how many are chosen, and the elements of each
    index length;       // of the buffer

    index begin(index i) const { return indices[i] * size; }
    index entries(index i) const { return std::min(size, length - begin(i)); }

    void check() const {
        const uint32_t limit = static_cast<uint32_t>((length + size - 1) / size);
        bool outside = false;
        for (index i = 0; i < count; ++i) outside |= static_cast<uint32_t>(indices[i]) >= limit;
        if (!outside) return;
        const auto [low, high] = std::minmax_element(indices, indices + count);
        throw std::invalid_argument("indices must be in 0.." + std::to_string(index{limit} - 1) + ", got " +
                                    std::to_string(*low) + ".." + std::to_string(*high));
    }

    bool ascending() const {
        bool strictly = true;
        for (index i = 1; i < count; ++i) strictly &= indices[i - 1] < indices[i];
        return strictly;
    }

    template <class Body>
    void each(int threads, const Body& body) const {
        parallel_for(count, std::max<index>(1, grain / size), threads, [&](index first, index last) {
            for (index i = first; i < last; ++i) body(i);
        });
    }
};

void copy_out(const float* x, const Chunks& chunks, index i, float* out) {
    float* values = out + i * chunks.size;
    const index entries = chunks.entries(i);
    std::memcpy(values, x + chunks.begin(i), entries * sizeof(float));
    std::fill(values + entries, values + chunks.size, 0.0f);
}

void clear(float* x, const Chunks& chunks, index i) { std::fill_n(x + chunks.begin(i), chunks.entries(i), 0.0f); }

void gather(const float* x, const Chunks& chunks, float* out, int threads) {
    chunks.check();
    if (chunks.size == 1) return chunks.each(threads, [&](index i) { out[i] = x[chunks.indices[i]]; });
    chunks.each(threads, [&](index i) { copy_out(x, chunks, i, out); });
}

void take(float* x, const Chunks& chunks, float* out, int threads) {
    if (!chunks.ascending()) {  // an index may come twice, and both must see what was there
        gather(x, chunks, out, threads);
        for (index i = 0; i < chunks.count; ++i) clear(x, chunks, i);
        return;
    }
    chunks.check();
    if (chunks.size == 1) return chunks.each(threads, [&](index i) {
        out[i] = x[chunks.indices[i]];
        x[chunks.indices[i]] = 0.0f;
    });
    chunks.each(threads, [&](index i) {
        copy_out(x, chunks, i, out);
        clear(x, chunks, i);
    });
}

void put(float* x, const Chunks& chunks, const float* values, int threads) {
    chunks.check();
    if (!chunks.ascending()) threads = 1;  // two threads must not meet at one element
    if (chunks.size == 1) return chunks.each(threads, [&](index i) { x[chunks.indices[i]] = values[i]; });
    chunks.each(threads, [&](index i) {
        std::memcpy(x + chunks.begin(i), values + i * chunks.size, chunks.entries(i) * sizeof(float));
    });
}

void scatter_add(const float* values, const Chunks& chunks, float weight, float* out, int threads) {
    chunks.check();
    if (!chunks.ascending()) threads = 1;
    if (chunks.size == 1) return chunks.each(threads, [&](index i) { out[chunks.indices[i]] += weight * values[i]; });
    chunks.each(threads, [&](index i) {
        float* to = out + chunks.begin(i);
        const float* from = values + i * chunks.size;
        for (index j = 0, entries = chunks.entries(i); j < entries; ++j) to[j] += weight * from[j];
    });
}

}  // namespace

void bind_sparse(nb::module_& m) {
    m.def("gather", [](address x, index n, address indices, index count, index chunk, address out, int threads) {
        gather(at<const float>(x), {at<const int32_t>(indices), count, chunk, n}, at<float>(out), threads);
    }, without_gil());
    m.def("take", [](address x, index n, address indices, index count, index chunk, address out, int threads) {
        take(at<float>(x), {at<const int32_t>(indices), count, chunk, n}, at<float>(out), threads);
    }, without_gil());
    m.def("put", [](address x, index n, address indices, index count, index chunk, address values, int threads) {
        put(at<float>(x), {at<const int32_t>(indices), count, chunk, n}, at<const float>(values), threads);
    }, without_gil());
    m.def("scatter_add", [](address x, index n, address indices, index count, index chunk, address values, float weight,
                            int threads) {
        scatter_add(at<const float>(values), {at<const int32_t>(indices), count, chunk, n}, weight, at<float>(x), threads);
    }, without_gil());
}

}  // namespace thinwire
