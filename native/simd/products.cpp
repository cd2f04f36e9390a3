#include "products.h"

#include "vector.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

#define THINWIRE_INLINE inline __attribute__((always_inline))

constexpr int sums = 16;  // interleaved, of every inner product
constexpr int parts = sums / lanes;

THINWIRE_INLINE float total(f32 (&part)[parts]) {
    float all[sums];
    for (int i = 0; i < parts; ++i) store(part[i], all + i * lanes);
    for (int half = sums / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) all[i] += all[i + half];
    return all[0];
}

// Whether a matrix that nobody reads soon may be written past the caches: vectors must lie as the processor wants them, and
// what a cache would keep until it is read is better off there.
bool may_pass(const float* to, index rows, index cols) {
    constexpr index long_enough = 1 << 18;
    return reinterpret_cast<std::uintptr_t>(to) % sizeof(f32) == 0 && cols % lanes == 0 && rows * cols >= long_enough;
}

// The rows of a matrix that are multiplied together: as they are, or with what is owed, the sum going into `total`.
struct Rows {
    const float* matrix;
    const float* owed;
    float* total;
    bool past;  // the caches: nobody reads the sum soon

    template <bool Owed>
    THINWIRE_INLINE f32 at(index i) const {
        if (!Owed) return load<f32>(matrix + i);
        const f32 sum = load<f32>(matrix + i) + load<f32>(owed + i);
        past ? stream(sum, total + i) : store(sum, total + i);
        return sum;
    }
};

// R rows with K vectors of the basis.
template <int R, int K, bool Owed>
THINWIRE_INLINE void inner(const Rows& from, index cols, const float* basis, index rows, float* out) {
    f32 acc[R][K][parts] = {};
    const auto add = [&](const auto& at, const auto& of) {
        for (int part = 0; part < parts; ++part) {
            f32 q[K];
            for (int k = 0; k < K; ++k) q[k] = load<f32>(of(k) + part * lanes);
            for (int r = 0; r < R; ++r) {
                const f32 m = at(r, part * lanes);
                for (int k = 0; k < K; ++k) acc[r][k][part] += m * q[k];
            }
        }
    };
    index j = 0;
    for (; j + sums <= cols; j += sums)
        add([&](int r, int i) { return from.at<Owed>(r * cols + j + i); }, [&](int k) { return basis + k * cols + j; });
    if (j < cols) {
        float left[R][sums] = {}, right[K][sums] = {};
        for (int r = 0; r < R; ++r)
            for (index i = j; i < cols; ++i) {
                const index at = r * cols + i;
                left[r][i - j] = Owed ? from.total[at] = from.matrix[at] + from.owed[at] : from.matrix[at];
            }
        for (int k = 0; k < K; ++k) __builtin_memcpy(right[k], basis + k * cols + j, 4 * (cols - j));
        add([&](int r, int i) { return load<f32>(left[r] + i); }, [&](int k) { return right[k]; });
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < K; ++k) out[k * rows + r] = total(acc[r][k]);
}

// The first vectors of the basis form the sum, all others read it.
template <int R>
void inner_by(Rows from, index cols, const float* basis, int rank, index rows, float* out) {
    const auto some = [&]<int K>(int k) {
        if (from.owed)
            inner<R, K, true>(from, cols, basis + k * cols, rows, out + k * rows);
        else
            inner<R, K, false>(from, cols, basis + k * cols, rows, out + k * rows);
        if (from.owed) from = {from.total, nullptr, nullptr, false};
    };
    int k = 0;
    for (; k + 4 <= rank; k += 4) some.template operator()<4>(k);
    for (; k + 2 <= rank; k += 2) some.template operator()<2>(k);
    for (; k < rank; ++k) some.template operator()<1>(k);
}

void with_rows(const float* matrix, const float* owed, float* total, index first, index last, index rows, index cols,
               const float* basis, int rank, float* out) {
    // Where the rank takes more than one go, the next reads the sum.
    const bool past = owed && total != matrix && (rank == 1 || rank == 2 || rank == 4) && may_pass(total, rows, cols);
    const auto from = [&](index i) {
        return Rows{matrix + i * cols, owed ? owed + i * cols : nullptr, owed ? total + i * cols : nullptr, past};
    };
    index i = first;
    for (; i + 4 <= last; i += 4) inner_by<4>(from(i), cols, basis, rank, rows, out + i);
    for (; i < last; ++i) inner_by<1>(from(i), cols, basis, rank, rows, out + i);
    if (past) streamed();
}

// `count` rows from `row` on, at most R, into columns [first, last) of K rows of `out`.
template <int R, int K>
THINWIRE_INLINE void combine(const float* matrix, index row, int count, index first, index last, index rows, index cols,
                             const float* basis, float* out) {
    float factor[K][R];
    for (int k = 0; k < K; ++k)
        for (int r = 0; r < count; ++r) factor[k][r] = basis[k * rows + row + r];
    const float* from = matrix + row * cols;
    index j = first;
    for (; j + lanes <= last; j += lanes) {
        f32 acc[K];
        for (int k = 0; k < K; ++k) acc[k] = load<f32>(out + k * cols + j);
        for (int r = 0; r < count; ++r) {
            const f32 m = load<f32>(from + r * cols + j);
            for (int k = 0; k < K; ++k) acc[k] += m * factor[k][r];
        }
        for (int k = 0; k < K; ++k) store(acc[k], out + k * cols + j);
    }
    for (; j < last; ++j)
        for (int k = 0; k < K; ++k) {
            float acc = out[k * cols + j];
            for (int r = 0; r < count; ++r) acc += from[r * cols + j] * factor[k][r];
            out[k * cols + j] = acc;
        }
}

template <int K>
void combine_rows(const float* matrix, index row, int count, index first, index last, index rows, index cols,
                  const float* basis, float* out) {
    constexpr int most = 8;
    if (count == most)
        combine<most, K>(matrix, row, most, first, last, rows, cols, basis, out);
    else
        combine<most, K>(matrix, row, count, first, last, rows, cols, basis, out);
}

void with_columns(const float* matrix, index first, index last, index rows, index cols, const float* basis, int rank,
                  float* out) {
    for (int k = 0; k < rank; ++k)
        for (index j = first; j < last; ++j) out[k * cols + j] = 0.0f;
    for (index row = 0; row < rows; row += 8) {
        const int count = rows - row < 8 ? static_cast<int>(rows - row) : 8;
        int k = 0;
        for (; k + 4 <= rank; k += 4)
            combine_rows<4>(matrix, row, count, first, last, rows, cols, basis + k * rows, out + k * cols);
        for (; k < rank; ++k)
            combine_rows<1>(matrix, row, count, first, last, rows, cols, basis + k * rows, out + k * cols);
    }
}

template <int R, bool Lost>
THINWIRE_INLINE void outer_rows(const float* p, const float* q, int rank, index rows, index cols, bool past, float* out,
                                const float* matrix, float* lost) {
    float factor[largest_rank][R];  // of its own: the compiler must not suspect that a store changes it
    for (int k = 0; k < rank; ++k)
        for (int r = 0; r < R; ++r) factor[k][r] = p[k * rows + r];
    index j = 0;
    for (; j + lanes <= cols; j += lanes) {
        f32 acc[R];
        const f32 begin = load<f32>(q + j);
        for (int r = 0; r < R; ++r) acc[r] = begin * factor[0][r];
        for (int k = 1; k < rank; ++k) {
            const f32 next = load<f32>(q + k * cols + j);
            for (int r = 0; r < R; ++r) acc[r] += next * factor[k][r];
        }
        for (int r = 0; r < R; ++r) {
            if (Lost) store(load<f32>(matrix + r * cols + j) - acc[r], lost + r * cols + j);
            past ? stream(acc[r], out + r * cols + j) : store(acc[r], out + r * cols + j);
        }
    }
    for (; j < cols; ++j)
        for (int r = 0; r < R; ++r) {
            float acc = q[j] * factor[0][r];
            for (int k = 1; k < rank; ++k) acc += q[k * cols + j] * factor[k][r];
            if (Lost) lost[r * cols + j] = matrix[r * cols + j] - acc;
            out[r * cols + j] = acc;
        }
}

template <bool Lost>
void outer_by(const float* p, const float* q, int rank, index first, index last, index rows, index cols, float* out,
              const float* matrix, float* lost) {
    index i = first;
    const bool past = (!Lost || (out != matrix && out != lost)) && may_pass(out, rows, cols);
    const auto at = [&](auto* from) { return from + i * cols; };
    // Rows are often a power of two apart, so that they compete for the same places in the cache: few at a time.
    constexpr int together = Lost ? 2 : 4;
    for (; i + together <= last; i += together)
        outer_rows<together, Lost>(p + i, q, rank, rows, cols, past, at(out), at(matrix), at(lost));
    for (; i < last; ++i) outer_rows<1, Lost>(p + i, q, rank, rows, cols, past, at(out), at(matrix), at(lost));
    if (past) streamed();
}

void outer(const float* p, const float* q, int rank, index first, index last, index rows, index cols, float* out,
           const float* matrix, float* lost) {
    lost ? outer_by<true>(p, q, rank, first, last, rows, cols, out, matrix, lost)
         : outer_by<false>(p, q, rank, first, last, rows, cols, out, out, out);
}

}  // namespace

const ProductLoops product_loops = {with_rows, with_columns, outer};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
