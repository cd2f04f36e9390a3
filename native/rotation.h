// One rotation of blocks in place; what it is, is told in kernels/backends/reference/hadamard.py.
//
// A large block does not fit into the cache, so it is seen as a matrix: first its rows are rotated, which are contiguous
// and short, then its columns, a panel of them at a time in a buffer.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "common.h"
#include "simd/hadamard.h"

namespace thinwire {

class Rotation {
   public:
    // Of x in place, or of `from` into x.
    Rotation(float* x, bool inverse, int threads) : Rotation(x, x, inverse, threads) {}
    Rotation(const float* from, float* x, bool inverse, int threads)
        : loops_(hadamard_loops()), from_(from), x_(x), inverse_(inverse), threads_(threads) {}

    // All of [begin, begin + n) in blocks of `size` elements; n is a multiple of size.
    void rotate(index begin, index n, index size, Flip flip) const {
        flip.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
        index distance = std::min(size, longest_row);  // of the butterflies still to come
        rows(begin, n, distance, flip, !inverse_, inverse_ && distance == size);
        while (distance < size) {
            const index count = std::min(most_rows, size / distance);
            columns(begin, n, count, distance, flip, inverse_ && distance * count == size);
            distance *= count;
        }
    }

   private:
    static constexpr index longest_row = 1 << 12;  // 16 KB: stays in the first-level cache
    static constexpr index most_rows = 1 << 12;    // times panel_width elements: stays in the second
    static constexpr index grain = 1 << 16;        // elements of contiguous blocks per range

    static Flip from(Flip flip, index offset) {
        flip.counter += offset;
        return flip;
    }

    void rows(index begin, index n, index size, const Flip& flip, bool before, bool after) const {
        parallel_for(n, std::max(size, grain), threads_, [&](index first, index last) {
            const Flip here = from(flip, first);
            loops_.blocks(from_ + begin + first, x_ + begin + first, last - first, size, before ? &here : nullptr,
                          after ? &here : nullptr);
        });
    }

    void columns(index begin, index n, index count, index stride, const Flip& flip, bool after) const {
        const index panels = (stride + panel_width - 1) / panel_width, items = n / (count * stride) * panels;
        const index share = (items + threads_ - 1) / threads_;
        std::vector<std::unique_ptr<float[]>> buffers(threads_);
        for (auto& buffer : buffers) buffer.reset(new float[count * panel_width]);
        parallel_for(items, share, threads_, [&](index first, index last) {
            for (index item = first; item < last; ++item) {
                const index offset = item / panels * count * stride, column = item % panels * panel_width;
                const Flip here = from(flip, offset);
                loops_.columns(x_ + begin + offset, count, stride, column, std::min(column + panel_width, stride),
                               after ? &here : nullptr, buffers[first / share].get());
            }
        });
    }

    const HadamardLoops& loops_;
    const float* const from_;
    float* const x_;
    const bool inverse_;
    const int threads_;
};

}  // namespace thinwire
