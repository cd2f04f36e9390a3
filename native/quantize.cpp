// Quantise and pack; unpack and add. One call does all blocks of a bucket.
#include "simd/quantize.h"

#include <cmath>

#include "blocks.h"

namespace thinwire {
namespace {

// A block's radius or scale as it counts; see reference/quantize.py.
float effective(float range) {
    if (!std::isfinite(range)) return std::nanf("");
    return range < 0x1p-120f ? 0.0f : range;
}

Draws draws_of(address keys, address counters, const Piece& piece, index begin) {
    if (!keys) return {false, 0, 0};
    const auto key = at<const std::uint64_t>(keys)[piece.stretch];
    const index counter = at<const index>(counters)[piece.stretch] + piece.place + (begin - piece.begin);
    const auto low = static_cast<std::uint32_t>(key), step = static_cast<std::uint32_t>(key >> 32) | 1;
    return {true, low + static_cast<std::uint32_t>(counter) * step, step};
}

void quantize_uniform(address x, index n, address starts, index stretches, index block, int bits, address radius,
                      index radii, address keys, address counters, address out, index out_bytes, address lost, int threads) {
    const Pieces pieces(starts, stretches, n, block, bits);
    require(radii == pieces.blocks, "one radius per block is needed");
    require(out_bytes == pieces.packed, "out must be as long as the packed codes");
    const auto loop = quantize_loops().uniform;
    pieces.run(threads, [&](const Piece& piece) {
        for_blocks(piece, block, bits, [&](index begin, index end, index number, index byte) {
            loop(at<const float>(x) + begin, end - begin, bits, effective(at<const float>(radius)[number]),
                 draws_of(keys, counters, piece, begin), at<std::uint8_t>(out) + byte, lost ? at<float>(lost) + begin : nullptr);
        });
    });
}

void dequantize_uniform(address codes, index code_bytes, address starts, index stretches, index block, int bits,
                        address radius, index radii, float weight, bool add, address out, index n, int threads) {
    const Pieces pieces(starts, stretches, n, block, bits);
    require(radii == pieces.blocks, "one radius per block is needed");
    require(code_bytes == pieces.packed, "the packed codes have another length");
    const auto loop = quantize_loops().uniform_value;
    pieces.run(threads, [&](const Piece& piece) {
        for_blocks(piece, block, bits, [&](index begin, index end, index number, index byte) {
            loop(at<const std::uint8_t>(codes) + byte, end - begin, bits, weight * effective(at<const float>(radius)[number]),
                 add, at<float>(out) + begin);
        });
    });
}

}  // namespace

void bind_quantize(nb::module_& m) {
    m.def("quantize_uniform", quantize_uniform, without_gil());
    m.def("dequantize_uniform", dequantize_uniform, without_gil());
}

}  // namespace thinwire
