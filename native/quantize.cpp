// Quantise and pack; unpack and add. One call does all blocks of a bucket.
#include "simd/quantize.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "blocks.h"
#include "ranges.h"
#include "sums.h"

namespace thinwire {
namespace {

Draws after(Draws draws, index elements) {
    draws.first += static_cast<std::uint32_t>(elements) * draws.step;
    return draws;
}

// What all four kernels are told of their blocks; see Pieces.
struct Blocked {
    Stretches stretches;
    index block;
    index range_count;  // radii or scales, one per block

    Pieces pieces(index n, int bits, index code_bytes) const {
        Pieces all(stretches, n, block, bits);
        require(range_count == all.blocks, "one radius or scale per block is needed");
        require(code_bytes == all.packed, "the packed codes of these blocks have another length");
        return all;
    }
};

float range_of(address ranges, index number) { return effective(at<const float>(ranges)[number]); }

template <class Loop>
void encode(address x, index n, const Blocked& blocked, address ranges, int bits, address keys, address counters, address out,
            index out_bytes, address lost, int threads, const Loop& loop) {
    blocked.pieces(n, bits, out_bytes).run(threads, [&](const Piece& piece) {
        const Draws draws = draws_of(keys, counters, piece.stretch, piece.place);
        for_blocks(piece, blocked.block, bits, [&](index begin, index end, index number, index byte) {
            loop(at<const float>(x) + begin, end - begin, range_of(ranges, number), after(draws, begin - piece.begin),
                 at<std::uint8_t>(out) + byte, lost ? at<float>(lost) + begin : nullptr);
        });
    });
}

// What some payloads stand for, in order, onto `out`, or onto zeros: a block at a time, while it is in the cache.
// Whether the sum is surely finite: `largest` is the largest level.
template <class Loop>
bool decode(const std::vector<address>& codes, index code_bytes, const Blocked& blocked,
            const std::vector<address>& ranges, int bits, float weight, float largest, bool add, address out, index n,
            int threads, const Loop& loop) {
    require(codes.size() == ranges.size(), "every payload has radii or scales of its own");
    std::atomic<bool> finite{true};
    blocked.pieces(n, bits, code_bytes).run(threads, [&](const Piece& piece) {
        for_blocks(piece, blocked.block, bits, [&](index begin, index end, index number, index byte) {
            float* const to = at<float>(out) + begin;
            if (!add) std::fill_n(to, end - begin, 0.0f);
            double reach = 0;
            for (std::size_t i = 0; i < codes.size(); ++i) {
                const float range = range_of(ranges[i], number);
                reach += std::abs(static_cast<double>(range));
                loop(at<const std::uint8_t>(codes[i]) + byte, end - begin, weight * range, to);
            }
            if (!(reach * std::abs(static_cast<double>(weight)) * largest < 0x1p126))
                finite.store(false, std::memory_order_relaxed);
        });
    });
    return finite;
}

void quantize_uniform(address x, index n, address bounds, index stretches, index stride, index block, int bits,
                      address radius, index radii, address keys, address counters, address out, index out_bytes,
                      address lost, int threads) {
    const auto loop = quantize_loops().uniform;
    encode(x, n, {{at<const index>(bounds), stretches, stride}, block, radii}, radius, bits, keys, counters, out, out_bytes,
           lost, threads,
           [&](const float* from, index count, float range, Draws draws, std::uint8_t* to, float* left) {
               loop(from, count, bits, range, draws, to, left);
           });
}

bool dequantize_uniform(const std::vector<address>& codes, index code_bytes, address bounds, index stretches,
                        index stride, index block, int bits, const std::vector<address>& radius, index radii, float weight,
                        bool add, address out, index n, int threads) {
    const auto loop = quantize_loops().uniform_add;
    return decode(codes, code_bytes, {{at<const index>(bounds), stretches, stride}, block, radii}, radius, bits, weight,
                  1.0f, add, out, n, threads,
           [&](const std::uint8_t* from, index count, float range, float* to) { loop(from, count, bits, range, to); });
}

// A table of levels, and its bytes where they are of use.
class Levels {
  public:
    Levels(int bits, address level, address next, address interval, address cell, int cells, int crowd, float cells_per_unit)
        : table{at<const float>(level), at<const float>(next), at<const Pair>(interval),
                at<const Pair>(cell), cells, crowd, cells_per_unit} {
        if (instruction_set() == InstructionSet::avx512vbmi && LevelBytes::made_for(bits)) table.bytes = &bytes_.emplace(table, bits);
    }
    Levels(const Levels&) = delete;

    LevelTable table;

  private:
    std::optional<LevelBytes> bytes_;
};

void quantize_levels(address x, index n, address bounds, index stretches, index stride, index block, int bits,
                     address level, address next, address interval, address cell, int cells, int crowd,
                     float cells_per_unit, address scale, index scales, address keys, address counters, address out, index out_bytes, address lost, int threads) {
    const Levels levels(bits, level, next, interval, cell, cells, crowd, cells_per_unit);
    const LevelTable& table = levels.table;
    const auto loop = quantize_loops().levels;
    encode(x, n, {{at<const index>(bounds), stretches, stride}, block, scales}, scale, bits, keys, counters, out, out_bytes,
           lost, threads,
           [&](const float* from, index count, float range, Draws draws, std::uint8_t* to, float* left) {
               loop(from, count, bits, table, range, draws, to, left);
           });
}

// Where Laplace data are truncated: `threshold` scales out, or at the largest element. See reference/laplace.py, whose
// roundings these are, one after the other.
float truncation(const Statistics& found, index count, float threshold, bool moments) {
    const float mean = static_cast<float>(found.magnitude / static_cast<double>(count));
    float scale = mean;
    if (moments) {
        const float half = static_cast<float>(found.square) / static_cast<float>(2 * count);
        const float root = std::sqrt(half);
        const float product = root * std::sqrt(root);
        if (half > 0x1p-100f && half < INFINITY) scale = product / std::sqrt(mean);
    }
    const float reach = scale * threshold;
    if (std::isnan(reach) || std::isnan(found.peak)) return std::nanf("");
    return std::min(reach, found.peak);
}

// Settle, look, choose a range, quantise and pack: block by block, each read once from memory.
void quantize_laplace(address x, index n, address bounds, index stretches, index stride, index block, int bits,
                      address level, address next, address interval, address cell, int cells, int crowd, float cells_per_unit,
                      float threshold, bool moments, address owed, address radius, index radii, address keys,
                      address counters, address out, index out_bytes, address lost, int threads) {
    require(block > 0 && block <= largest_tile, "blocks have 1 to 4096 elements here");
    const Levels levels(bits, level, next, interval, cell, cells, crowd, cells_per_unit);
    const auto loop = quantize_loops().levels;
    const auto& look = statistics_loops();
    const Blocked blocked{{at<const index>(bounds), stretches, stride}, block, radii};
    blocked.pieces(n, bits, out_bytes).run(threads, [&](const Piece& piece) {
        const Draws draws = draws_of(keys, counters, piece.stretch, piece.place);
        alignas(64) float sums[largest_tile];
        for_blocks(piece, block, bits, [&](index begin, index end, index number, index byte) {
            const float* from = at<const float>(x) + begin;
            if (owed) look.add(from, at<const float>(owed) + begin, end - begin, sums), from = sums;
            const float found = truncation(look.of(from, end - begin, Wanted::magnitude_peak_square), end - begin, threshold, moments);
            at<float>(radius)[number] = found;
            loop(from, end - begin, bits, levels.table, effective(found), after(draws, begin - piece.begin),
                 at<std::uint8_t>(out) + byte, lost ? at<float>(lost) + begin : nullptr);
        });
    });
}

bool dequantize_levels(const std::vector<address>& codes, index code_bytes, address bounds, index stretches,
                       index stride, index block, int bits, address level, const std::vector<address>& scale, index scales,
                       float weight, bool add,
                       address out, index n, int threads) {
    const auto loop = quantize_loops().levels_value;
    const float* const table = at<const float>(level);
    const float largest = std::max(std::abs(table[0]), std::abs(table[(1 << bits) - 1]));
    return decode(codes, code_bytes, {{at<const index>(bounds), stretches, stride}, block, scales}, scale, bits, weight,
                  largest, add, out, n, threads,
           [&](const std::uint8_t* from, index count, float range, float* to) {
               loop(from, count, bits, table, range, true, to);
           });
}

}  // namespace

LevelBytes::LevelBytes(const LevelTable& table, int bits) : steps(0) {
    const int intervals = 1 << bits, cells = std::min(table.cells, most_cells(bits)), merged = table.cells / cells;
    for (int cell = 0; cell < 1024; ++cell) {
        const int from = std::min(cell, cells - 1) * merged, to = from + merged;
        const auto begin = [&](int fine) {
            return fine < table.cells ? std::bit_cast<std::int32_t>(table.cell[fine].first) : std::max(intervals - 2, 0);
        };
        start[cell] = static_cast<std::uint8_t>(begin(from));
        steps = std::max(steps, begin(to) - begin(from));
    }
    const auto split = [](std::uint8_t (&planes)[4][256], int j, float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        for (int plane = 0; plane < 4; ++plane) planes[plane][j] = static_cast<std::uint8_t>(word >> (8 * plane));
    };
    for (int j = 0; j < 256; ++j) {
        const int known = std::min(j, intervals - 1);
        split(next, j, table.next[known]);
        split(level, j, table.interval[known].first);
        split(inverse_gap, j, table.interval[known].second);
    }
    cells_per_unit = table.cells_per_unit / static_cast<float>(merged);  // a power of 2: exact
    last = static_cast<float>(cells - 1);
}

void bind_quantize(nb::module_& m) {
    m.def("quantize_uniform", quantize_uniform, without_gil());
    m.def("dequantize_uniform", dequantize_uniform, without_gil());
    m.def("quantize_levels", quantize_levels, without_gil());
    m.def("quantize_laplace", quantize_laplace, without_gil());
    m.def("dequantize_levels", dequantize_levels, without_gil());
}

}  // namespace thinwire
