// Rotate and quantise, decode and rotate back, a block at a time in the cache. What it all means is told in
// kernels/backends/reference/rotated.py: every block is padded with zeros to a power of two, and rotated by itself.
#include "simd/rotated.h"

#include <bit>
#include <cstring>
#include <new>

#include "blocks.h"
#include "random.h"
#include "ranges.h"
#include "rotation.h"
#include "simd/statistics.h"

namespace thinwire {
namespace {

constexpr index smallest = 64;        // elements of a padded block
constexpr index in_cache = 1 << 16;   // larger blocks are done one after the other, by all threads together

// A block, as it lies in memory and among the padded ones.
struct Block {
    index begin, count;  // its elements in the buffer
    index size, first;   // when padded: how many, and the first one's place
    index number, stretch;
    index place;  // of its first element in its stretch
};

// Memory for some padded blocks. They begin with a cache line, and not all at the same place of a page: the processor
// takes stores and loads that agree in their last 12 bits for the same.
class Buffer {
   public:
    Buffer(int blocks, index size)
        : stride_(size + 5 * line), memory_(new (std::align_val_t(4 * line)) float[blocks * stride_]) {}
    ~Buffer() { ::operator delete[](memory_, std::align_val_t(4 * line)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    float* operator[](int block) const { return memory_ + block * stride_; }

   private:
    static constexpr index line = 16;  // elements
    const index stride_;
    float* const memory_;
};

class PaddedBlocks {
   public:
    PaddedBlocks(Stretches stretches, index n, index block) : block_(block) {
        require(block >= smallest && std::has_single_bit(static_cast<std::uint64_t>(block)),
                "blocks must be powers of two, of 64 entries or more");
        stretches.check(n);
        const index step = std::max(block, in_cache);
        for (index s = 0; s < stretches.count; ++s) {
            const index length = stretches.end(s) - stretches.begin(s);
            for (index place = 0; place < length; place += step) {
                const index part = std::min(step, length - place), full = part / block, rest = part % block;
                runs_.push_back({stretches.begin(s) + place, part, padded, blocks, s, place});
                padded += full * block + size_of(rest);
                blocks += full + (rest > 0);
            }
        }
    }

    // body(block, threads, buffer), where the buffer has `buffers` padded blocks.
    template <class Body>
    void each(int threads, int buffers, const Body& body) const {
        if (block_ > in_cache) {
            const Buffer buffer(buffers, largest());
            for (const Run& run : runs_) blocks_of(run, [&](const Block& block) { body(block, threads, buffer); });
            return;
        }
        parallel_for(static_cast<index>(runs_.size()), 1, threads, [&](index at, index) {
            const Buffer buffer(buffers, block_);
            blocks_of(runs_[at], [&](const Block& block) { body(block, 1, buffer); });
        });
    }

    index padded = 0, blocks = 0;

   private:
    // Whole blocks of one stretch, and where its end is reached what is left.
    struct Run {
        index begin, count, first, number, stretch, place;
    };

    index size_of(index count) const {
        if (count == 0 || count == block_) return count;
        return std::max(smallest, static_cast<index>(std::bit_ceil(static_cast<std::uint64_t>(count))));
    }

    index largest() const {
        index most = 0;
        for (const Run& run : runs_) most = std::max(most, size_of(std::min(block_, run.count)));
        return most;
    }

    template <class Body>
    void blocks_of(const Run& run, const Body& body) const {
        Block block = {run.begin, 0, 0, run.first, run.number, run.stretch, run.place};
        for (index left = run.count; left > 0; left -= block.count) {
            block.count = std::min(block_, left);
            block.size = size_of(block.count);
            body(block);
            block.begin += block.count;
            block.place += block.count;
            block.first += block.size;
            ++block.number;
        }
    }

    const index block_;
    std::vector<Run> runs_;
};

// The rotation of one block: its stretch's key, from its first element's counter on.
class Signs {
   public:
    Signs(address keys, address counters) : keys(keys), counters(counters) {}

    // A block of the buffer x, padded, into y.
    void rotate(const float* x, const Block& block, float* y, int threads) const {
        if (block.count == block.size) return rotate(x + block.begin, y, block, false, threads);
        std::memcpy(y, x + block.begin, block.count * sizeof(float));
        std::fill(y + block.count, y + block.size, 0.0f);
        rotate(y, y, block, false, threads);
    }
    void back(float* y, const Block& block, int threads) const { rotate(y, y, block, true, threads); }

   private:
    const address keys, counters;

    void rotate(const float* from, float* y, const Block& block, bool inverse, int threads) const {
        const auto key = scrambled(at<const std::uint64_t>(keys)[block.stretch]);
        const index counter = at<const index>(counters)[block.stretch] + block.place;
        Rotation(from, y, inverse, threads).rotate(0, block.size, block.size, {key, counter, 1.0f});
    }
};

void rotate_round(address x, index n, address starts, index stretches, index stride, index block, address step,
                  index steps, float offset, int low, int high, address signs, address keys, address counters, int size,
                  address out, index out_count, address lost, int threads) {
    const PaddedBlocks blocks({at<const index>(starts), stretches, stride}, n, block);
    require(steps == blocks.blocks, "one step per block is needed");
    require(out_count == blocks.padded, "the integers of these blocks have another number");
    const Steps how = {offset, low, high};
    const RotatedLoops& loops = rotated_loops();
    const Signs sign(signs, counters);
    blocks.each(threads, 1, [&](const Block& block, int inner, const Buffer& buffer) {
        float* const y = buffer[0];
        sign.rotate(at<const float>(x), block, y, inner);
        const Draws draws = draws_of(keys, counters, block.stretch, block.place);
        loops.round(y, block.size, effective(at<const float>(step)[block.number]), how, draws, size,
                    at<char>(out) + block.first * size, lost != 0);
        if (!lost) return;
        sign.back(y, block, inner);
        loops.subtract(at<const float>(x) + block.begin, y, block.count, at<float>(lost) + block.begin);
    });
}

void unrotate_sum(address total, index total_count, int size, address starts, index stretches, index stride, index block,
                  address scale, index scales, float offset, address signs, address counters, address out, index n,
                  int threads) {
    const PaddedBlocks blocks({at<const index>(starts), stretches, stride}, n, block);
    require(scales == blocks.blocks, "one scale per block is needed");
    require(total_count == blocks.padded, "the integers of these blocks have another number");
    const RotatedLoops& loops = rotated_loops();
    const Signs sign(signs, counters);
    blocks.each(threads, 1, [&](const Block& block, int inner, const Buffer& buffer) {
        float* const y = buffer[0];
        loops.scale(at<const char>(total) + block.first * size, block.size, size, at<const float>(scale)[block.number],
                    offset, y);
        sign.back(y, block, inner);
        loops.positive(y, block.count, at<float>(out) + block.begin);
    });
}

// What makes a block's estimate unbiased; in float32 step by step, as the reference does it.
float corrected(float energy, float coded, float error, float deviation) {
    if (!(energy > 0)) return energy;  // a NaN stays
    const float product = (energy + coded - error) / 2;
    const float scale = deviation * energy / product;
    // deviation * energy is the gradient's third power: where float32 cannot hold it, divide first.
    return std::isinf(scale) && std::isfinite(energy) ? energy / product * deviation : scale;
}

void rotate_quantize(address x, index n, address starts, index stretches, index stride, index block, int bits,
                     address level, address next, address interval, address cell, int cells, int crowd,
                     float cells_per_unit, address signs, address counters, address scale, index scales, address out,
                     index out_bytes, address lost, int threads) {
    const PaddedBlocks blocks({at<const index>(starts), stretches, stride}, n, block);
    require(scales == blocks.blocks, "one scale per block is needed");
    require(out_bytes == blocks.padded * bits / 8, "the packed codes of these blocks have another length");
    const LevelTable table = {at<const float>(level), at<const float>(next), at<const Pair>(interval),
                              at<const Pair>(cell), cells, crowd, cells_per_unit};
    const QuantizeLoops& loops = quantize_loops();
    const Signs sign(signs, counters);
    const auto square = [&](const float* y, index count) {
        return static_cast<float>(statistics_loops().of(y, count, Wanted::square).square);
    };
    blocks.each(threads, 2, [&](const Block& block, int inner, const Buffer& buffer) {
        float* const y = buffer[0];
        float* const said = buffer[1];
        sign.rotate(at<const float>(x), block, y, inner);
        const float energy = square(y, block.size), deviation = std::sqrt(energy / static_cast<float>(block.size));
        std::uint8_t* const codes = at<std::uint8_t>(out) + block.first * bits / 8;
        loops.levels(y, block.size, bits, table, effective(deviation), {false, 0, 0}, codes, y);
        loops.levels_value(codes, block.size, bits, table.level, effective(deviation), false, said);
        const float own = corrected(energy, square(said, block.size), square(y, block.size), deviation);
        at<float>(scale)[block.number] = own;
        if (!lost) return;
        loops.levels_value(codes, block.size, bits, table.level, effective(own), false, said);
        sign.back(said, block, inner);
        rotated_loops().subtract(at<const float>(x) + block.begin, said, block.count, at<float>(lost) + block.begin);
    });
}

void unrotate_levels_sum(const std::vector<address>& codes, index code_bytes, address starts, index stretches,
                         index stride, index block, int bits, address level, const std::vector<address>& scale,
                         index scales, float weight, const std::vector<address>& signs, address counters, bool add,
                         address out, index n, int threads) {
    const PaddedBlocks blocks({at<const index>(starts), stretches, stride}, n, block);
    require(scales == blocks.blocks, "one scale per block is needed");
    require(code_bytes == blocks.padded * bits / 8, "the packed codes of these blocks have another length");
    blocks.each(threads, 1, [&](const Block& block, int inner, const Buffer& buffer) {
        float* const y = buffer[0];
        float* const to = at<float>(out) + block.begin;
        if (!add) std::fill_n(to, block.count, 0.0f);
        for (std::size_t i = 0; i < codes.size(); ++i) {
            const float range = effective(at<const float>(scale[i])[block.number]);
            quantize_loops().levels_value(at<const std::uint8_t>(codes[i]) + block.first * bits / 8, block.size, bits,
                                          at<const float>(level), range, false, y);
            Signs(signs[i], counters).back(y, block, inner);
            rotated_loops().add(y, block.count, weight, to);
        }
    });
}

}  // namespace

void bind_rotated(nb::module_& m) {
    m.def("rotate_round", rotate_round, without_gil());
    m.def("unrotate_sum", unrotate_sum, without_gil());
    m.def("rotate_quantize", rotate_quantize, without_gil());
    m.def("unrotate_levels_sum", unrotate_levels_sum, without_gil());
}

}  // namespace thinwire
