// The blocks of a buffer, cut into pieces that threads can take one at a time.
// See kernels/backends/reference/__init__.py for what stretches and blocks are.
#pragma once
#include <vector>

#include "common.h"

namespace thinwire {

// Where the stretches of a buffer lie: one after the other (stride 1, one bound more than stretches), or with gaps between
// them that are not looked at (stride 2, each with its own begin and end). See `starts` in kernels/backends/reference.
struct Stretches {
    const index* bounds;
    index count, stride;

    index begin(index s) const { return bounds[s * stride]; }
    index end(index s) const { return bounds[s * stride + 1]; }

    // Throws unless they ascend inside of [0, n), and cover it where there are no gaps.
    void check(index n) const {
        require(count >= 0 && (stride == 1 || stride == 2), "the number of stretches must not be negative");
        index last = 0;
        for (index s = 0; s < count; ++s) {
            require(begin(s) >= last && end(s) >= begin(s), "starts must not decrease");
            last = end(s);
        }
        require(last <= n, "starts must end inside of the buffer");
        require(stride == 2 || (last == n && (count == 0 || begin(0) == 0)),
                "starts must begin at 0 and end at the number of elements");
    }
};

// A run of elements inside one stretch: some whole blocks, or a part of one long block.
struct Piece {
    index begin, end;  // elements of the buffer
    index stretch;
    index place;  // of the first element in its stretch
    index block;  // number of the first element's block
    index byte;   // where the first element's code begins; a piece that cuts a block begins on a whole byte
};

class Pieces {
  public:
    // Throws unless the stretches lie in a buffer of `count` elements. `bits` may be 0 where nothing is packed.
    Pieces(Stretches stretches, index count, index block, int bits) : stretches(stretches), block_(block) {
        require(block >= 0, "the block must not be negative");
        stretches.check(count);
        for (index s = 0; s < stretches.count; ++s) {
            const index begin = stretches.begin(s), length = stretches.end(s) - begin;
            const index whole = block ? block : length;
            const index block_bytes = bytes(whole, bits);
            const index step = whole >= size ? size : size / (whole ? whole : 1) * whole;
            for (index place = 0; place < length;) {
                const index ordinal = place / whole, inside = place % whole;
                index end = place + step;
                if (whole >= size && end > (ordinal + 1) * whole) end = (ordinal + 1) * whole;
                if (end > length) end = length;
                all.push_back({begin + place, begin + end, s, place, blocks + ordinal,
                               packed + ordinal * block_bytes + bytes(inside, bits)});
                place = end;
            }
            if (whole) packed += length / whole * block_bytes + bytes(length % whole, bits);
            blocks += block ? (length + block - 1) / block : 1;
        }
    }

    // body(piece) for each; threads only help where there is enough to do.
    template <class Body>
    void run(int threads, const Body& body) const {
        const index worthwhile = all.empty() ? 1 : (all.back().end + size - 1) / size;
        parallel_for(static_cast<index>(all.size()), 1, threads < worthwhile ? threads : static_cast<int>(worthwhile),
                     [&](index begin, index) { body(all[begin]); });
    }

    // Whether the piece holds whole blocks, rather than a part of one.
    bool whole(const Piece& piece) const {
        const index length = stretches.end(piece.stretch) - stretches.begin(piece.stretch), place = piece.place;
        const index end = place + piece.end - piece.begin;
        return block_ ? place % block_ == 0 && (end == length || end % block_ == 0) : place == 0 && end == length;
    }

    const Stretches stretches;
    std::vector<Piece> all;
    index blocks = 0;  // of all stretches
    index packed = 0;  // bytes of all packed codes

  private:
    const index block_;
    static constexpr index size = 1 << 16;  // elements; a multiple of 8, so that cuts lie on whole bytes
    static index bytes(index codes, int bits) { return (codes * bits + 7) / 8; }
};

// body(begin, end, block, byte) for each block, or part of one, in a piece.
template <class Body>
void for_blocks(const Piece& piece, index block, int bits, const Body& body) {
    index begin = piece.begin, number = piece.block, byte = piece.byte;
    index left = block ? block - piece.place % block : piece.end - piece.begin;  // of the block we are in
    while (begin < piece.end) {
        const index n = left < piece.end - begin ? left : piece.end - begin;
        body(begin, begin + n, number, byte);
        begin += n;
        left = block;
        ++number;
        byte += (n * bits + 7) / 8;
    }
}

}  // namespace thinwire
