// Products of matrices with thin factors. Threads take rows, or columns, of every sum: none is divided among them.
#include "simd/products.h"

#include <algorithm>

#include "common.h"

namespace thinwire {
namespace {

constexpr index grain = 1 << 16;  // elements of the matrix per range

// Rows or columns per range: a multiple of 16, so that none shares a vector with its neighbour.
index share(index across) { return std::max<index>(16, (grain / std::max<index>(across, 1)) / 16 * 16); }

void check(index rows, index cols, int rank) {
    require(rows >= 0 && cols >= 0 && rank >= 1 && rank <= largest_rank, "a factor has 1 to 64 vectors");
}

// Of matrix + owed, where there is anything owed: the sum goes into `total`.
void with_rows(address matrix, index rows, index cols, address basis, int rank, address out, address owed, address total,
               int threads) {
    check(rows, cols, rank);
    parallel_for(rows, share(cols), threads, [&](index first, index last) {
        product_loops().with_rows(at<const float>(matrix), at<const float>(owed), at<float>(total), first, last, rows, cols,
                                  at<const float>(basis), rank, at<float>(out));
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
