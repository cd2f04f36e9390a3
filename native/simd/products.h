// Loops of products.cpp: a matrix of rows `stride` elements apart, and factors that are kept wide, (rank, size). Every
// product reads the matrix once, row by row. What sums are taken in which order is told in reference/products.py.
#pragma once
#include "../dispatch.h"

namespace thinwire {

constexpr int largest_rank = 64;

struct ProductLoops {
    // out[k, i] = <matrix[i], basis[k]> for rows first <= i < last; `out` has `rows` columns.
    void (*with_rows)(const float* matrix, const float* owed, float* total, index first, index last, index rows, index cols,
                      const float* basis, int rank, float* out);
    // out[k, j] = the sum over rows i of basis[k, i] matrix[i, j], for columns first <= j < last.
    void (*with_columns)(const float* matrix, index first, index last, index rows, index cols, const float* basis,
                         int rank, float* out);
    // out[i, j] = the sum over k of p[k, i] q[k, j] for rows first <= i < last; lost = matrix - out, unless it is null.
    // out and lost may be the matrix itself.
    void (*outer)(const float* p, const float* q, int rank, index first, index last, index rows, index cols, float* out,
                  const float* matrix, float* lost);
};

THINWIRE_LOOPS(ProductLoops, product_loops)

}  // namespace thinwire
