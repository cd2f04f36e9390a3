// Statistics of every block in one pass, and whether all is finite.
#include "simd/statistics.h"

#include "blocks.h"
#include "sums.h"

namespace thinwire {
namespace {

Wanted wanted_of(bool magnitude, bool peak, bool square) {
    if (magnitude && peak && !square) return Wanted::magnitude_peak;
    if (magnitude && !peak && !square) return Wanted::magnitude;
    if (!magnitude && peak && !square) return Wanted::peak;
    if (!magnitude && !peak && square) return Wanted::square;
    return Wanted::magnitude_peak_square;
}

void add(Statistics& total, const Statistics& part) {
    total.magnitude += part.magnitude;
    total.square += part.square;
    // A NaN stays; it is the largest of all if compared as an integer.
    if (!(part.peak <= total.peak) && total.peak == total.peak) total.peak = part.peak;
}

// Addresses of float32[blocks]; 0 where not wanted.
void block_statistics(address x, index n, address bounds, index stretches, index stride, index block, address absmean,
                      address absmax, address square, index blocks, address owed, address total, int threads) {
    const Pieces pieces({at<const index>(bounds), stretches, stride}, n, block, 0);
    require(blocks == pieces.blocks || blocks < 0, "one number per block is needed");
    const float* const from = at<const float>(owed ? total : x);
    const auto loop = statistics_loops().of;
    const Wanted wanted = wanted_of(absmean, absmax, square);
    const auto write = [&](index number, const Statistics& all, index length) {
        if (absmean) at<float>(absmean)[number] = static_cast<float>(length ? all.magnitude / static_cast<double>(length) : 0);
        if (absmax) at<float>(absmax)[number] = all.peak;
        if (square) at<float>(square)[number] = static_cast<float>(all.square);
    };

    // Blocks that lie in one piece are done where they are found. Parts of longer ones are put together in order.
    struct Part {
        index block, length;
        Statistics statistics;
        bool whole;
    };
    std::vector<Part> parts(pieces.all.size());
    pieces.run(threads, [&](const Piece& piece) {
        Part& part = parts[&piece - pieces.all.data()];
        part.whole = pieces.whole(piece);
        if (owed && part.whole && block && block <= largest_tile) {
            const index step = std::max(tile / block, index{1}) * block;
            for_sums(at<const float>(x) + piece.begin, at<const float>(owed) + piece.begin, piece.end - piece.begin,
                     at<float>(total) + piece.begin, step, n, [&](const float* sums, index first, index count) {
                for (index at = 0; at < count; at += block)
                    write(piece.block + (first + at) / block, loop(sums + at, std::min(block, count - at), wanted),
                          std::min(block, count - at));
            });
            return;
        }
        if (owed)  // a piece stays in the cache until it is looked at
            statistics_loops().add(at<const float>(x) + piece.begin, at<const float>(owed) + piece.begin,
                                   piece.end - piece.begin, at<float>(total) + piece.begin);
        for_blocks(piece, block, 0, [&](index begin, index end, index number, index) {
            const Statistics found = loop(from + begin, end - begin, wanted);
            if (part.whole) return write(number, found, end - begin);
            part.block = number, part.length = end - begin, part.statistics = found;
        });
    });
    if (!block)
        for (index s = 0; s < stretches; ++s)
            if (pieces.stretches.begin(s) == pieces.stretches.end(s)) write(s, {}, 0);
    for (std::size_t i = 0; i < parts.size();) {
        if (parts[i].whole) {
            ++i;
            continue;
        }
        Part sum = parts[i++];
        for (; i < parts.size() && !parts[i].whole && parts[i].block == sum.block; ++i) {
            add(sum.statistics, parts[i].statistics);
            sum.length += parts[i].length;
        }
        write(sum.block, sum.statistics, sum.length);
    }
}

bool all_finite(address x, index n, int threads) {
    const auto loop = statistics_loops().all_finite;
    std::atomic<bool> finite{true};
    parallel_for(n, 1 << 16, threads, [&](index begin, index end) {
        if (finite.load(std::memory_order_relaxed) && !loop(at<const float>(x) + begin, end - begin))
            finite.store(false, std::memory_order_relaxed);
    });
    return finite;
}

// kept = x, which nobody reads soon.
void keep(address kept, address x, index n, int threads) {
    const auto& loops = statistics_loops();
    parallel_for(n, 1 << 16, threads, [&](index begin, index end) {
        if (n < streamed_from) return void(std::copy(at<const float>(x) + begin, at<const float>(x) + end, at<float>(kept) + begin));
        loops.put_away(at<const float>(x) + begin, end - begin, at<float>(kept) + begin);
        loops.all_put_away();
    });
}

}  // namespace

void bind_statistics(nb::module_& m) {
    m.def("keep", keep, without_gil());
    m.def("block_statistics", block_statistics, without_gil());
    m.def("all_finite", all_finite, without_gil());
}

}  // namespace thinwire
