// Products of matrices with thin factors. Threads take rows, or columns, of every sum: none is divided among them.
#include "simd/products.h"

#include <algorithm>

#include "common.h"
#include "sums.h"

namespace thinwire {
namespace {

constexpr index grain = 1 << 16;  // entries of the matrix per range

// Rows or columns per range: a multiple of 16, so that none shares a vector with its neighbour.
index share(index across) { return std::max<index>(16, (grain / std::max<index>(across, 1)) / 16 * 16); }

void check(index rows, index cols, int rank) {
    require(rows >= 0 && cols >= 0 && rank >= 1 && rank <= largest_rank, "a factor has 1 to 64 vectors");
}

// Of matrix + owed, where there is anything owed: formed in `total`, a few rows at a time, and multiplied from the cache.
void with_rows(address matrix, index rows, index cols, address basis, int rank, address out, address owed, address total,
               int threads) {
    check(rows, cols, rank);
    const auto multiply = [&](const float* from, index first, index count) {
        product_loops().with_rows(from, 0, count, rows, cols, at<const float>(basis), rank, at<float>(out) + first);
    };
    const index step = cols ? std::max<index>(1, std::min<index>(4, largest_tile / cols)) : 1;
    parallel_for(rows, share(cols), threads, [&](index first, index last) {
        const index begin = first * cols;
        if (!owed) return multiply(at<const float>(matrix) + begin, first, last - first);
        if (cols <= largest_tile) {
            for_sums(at<const float>(matrix) + begin, at<const float>(owed) + begin, (last - first) * cols,
                     at<float>(total) + begin, step * cols, rows * cols, [&](const float* sums, index at, index count) {
                multiply(sums, first + at / cols, count / cols);
            });
            return;
        }
        for (index row = first; row < last; ++row) {
            float* const sums = at<float>(total) + row * cols;
            statistics_loops().add(at<const float>(matrix) + row * cols, at<const float>(owed) + row * cols, cols, sums);
            multiply(sums, row, 1);
        }
    });
}

void with_columns(address matrix, index rows, index cols, address basis, int rank, address out, int threads) {
    check(rows, cols, rank);
    // Alone, whole rows: they are contiguous.
    const index wide = threads > 1 ? std::max<index>(256, (cols / threads + 15) / 16 * 16) : std::max<index>(cols, 1);
    parallel_for(cols, wide, threads, [&](index first, index last) {
        product_loops().with_columns(at<const float>(matrix), first, last, rows, cols, at<const float>(basis), rank,
                                     at<float>(out));
    });
}

void outer(address p, address q, int rank, index rows, index cols, address out, address matrix, address lost, int threads) {
    check(rows, cols, rank);
    parallel_for(rows, share(cols), threads, [&](index first, index last) {
        product_loops().outer(at<const float>(p), at<const float>(q), rank, first, last, rows, cols, at<float>(out),
                              at<const float>(matrix), at<float>(lost));
    });
}

}  // namespace

void bind_products(nb::module_& m) {
    m.def("with_rows", with_rows, without_gil());
    m.def("with_columns", with_columns, without_gil());
    m.def("outer", outer, without_gil());
}

}  // namespace thinwire
