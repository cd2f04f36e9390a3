// Ascending indices below n in few bits; the format is told in kernels/backends/reference/indices.py. The decoder
// believes nothing: it checks sizes, counts, order and padding, and stays inside its buffers whatever the bytes say.
#include <algorithm>
#include <bit>
#include <cstring>

#include "blocks.h"
#include "random.h"

namespace thinwire {
namespace {

using std::int32_t;
using std::uint64_t;
using std::uint8_t;

index bytes_for(index bits) { return (bits + 7) / 8; }

// Up to 8 bytes from `data` on as one little-endian word; bytes past `end` read as 0.
uint64_t word_at(const uint8_t* data, const uint8_t* end) {
    uint64_t word = 0;
    if constexpr (std::endian::native == std::endian::little) {
        if (end - data >= 8) {
            std::memcpy(&word, data, 8);
            return word;
        }
    }
    for (int byte = 0; byte < 8 && data + byte < end; ++byte) word |= uint64_t{data[byte]} << (8 * byte);
    return word;
}

void intact(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("encoded indices are damaged: ") + what);
}

struct Format {
    index k, n;
    int low_bits;

    index low_bytes() const { return bytes_for(k * low_bits); }
    index high_bits() const { return ((n - k) >> low_bits) + k; }
    index high_bytes() const { return bytes_for(high_bits()); }
    uint64_t low_mask() const { return (uint64_t{1} << low_bits) - 1; }
};

void encode(const int32_t* indices, const Format& format, uint8_t* out) {
    const index k = format.k;
    bool ascending = indices[0] >= 0 && indices[k - 1] < format.n;
    for (index i = 1; i < k; ++i) ascending &= indices[i - 1] < indices[i];
    require(ascending, "indices must ascend, without repeats, from 0 or more to below n");
    uint8_t* const high = out + format.low_bytes();
    std::memset(high, 0, format.high_bytes());
    uint64_t pending = 0;
    int filled = 0;
    for (index i = 0; i < k; ++i) {
        const index value = indices[i] - i, position = (value >> format.low_bits) + i;
        high[position >> 3] |= static_cast<uint8_t>(1 << (position & 7));
        pending |= (static_cast<uint64_t>(value) & format.low_mask()) << filled;
        for (filled += format.low_bits; filled >= 8; filled -= 8, pending >>= 8) *out++ = static_cast<uint8_t>(pending);
    }
    if (filled) *out = static_cast<uint8_t>(pending);
}

void decode(const uint8_t* data, const Format& format, int32_t* out) {
    const uint8_t *const high = data + format.low_bytes(), *const end = high + format.high_bytes();
    index ones = 0;
    for (const uint8_t* at = high; at < end; at += std::min<index>(8, end - at)) ones += std::popcount(word_at(at, end));
    intact(ones == format.k, "they are more or fewer than they should be");
    const auto clean = [](const uint8_t* end, index bits) { return bits % 8 == 0 || end[-1] >> (bits % 8) == 0; };
    intact(clean(end, format.high_bits()) && clean(high, format.k * format.low_bits), "their padding is not zero");
    index i = 0, previous = 0;
    bool ascending = true;
    for (const uint8_t* at = high; at < end; at += std::min<index>(8, end - at)) {
        for (uint64_t word = word_at(at, end); word; word &= word - 1, ++i) {
            // k bits are set among high_bits, so the high part is at most (n - k) >> low_bits: nothing overflows.
            const index part = (at - high) * 8 + std::countr_zero(word) - i, bit = i * format.low_bits;
            const uint64_t low = word_at(data + (bit >> 3), end) >> (bit & 7) & format.low_mask();
            const index value = part << format.low_bits | static_cast<index>(low);
            ascending &= value >= previous;
            previous = value;
            out[i] = static_cast<int32_t>(value + i);
        }
    }
    intact(ascending && previous <= format.n - format.k, "they do not ascend to below n");
}

// Places in stretches of a buffer; see reference/draws.py.
void draw_places(address bounds, index count, index stride, address few, address keys, address out) {
    const Stretches stretches{at<const index>(bounds), count, stride};
    const index* const chosen = at<const index>(few);
    for (index s = 0; s < stretches.count; ++s) {
        const index numel = stretches.end(s) - stretches.begin(s), count = chosen[s + 1] - chosen[s];
        if (count == 0) continue;
        const std::uint64_t key = scrambled(at<const std::uint64_t>(keys)[s]);
        const auto below = [&](index counter, index limit) {
            const std::uint32_t step = static_cast<std::uint32_t>(key >> 32) | 1;
            const std::uint32_t word = hashed(static_cast<std::uint32_t>(counter) * step + static_cast<std::uint32_t>(key));
            return static_cast<index>(static_cast<std::uint64_t>(word) * static_cast<std::uint64_t>(limit) >> 32);
        };
        const index turn = below(count, numel);
        std::int32_t* const places = at<std::int32_t>(out) + chosen[s];
        for (index i = 0, begin = 0, end; i < count; ++i, begin = end) {
            end = (i + 1) * numel / count;
            index place = begin + below(i, end - begin) + turn;
            place -= place >= numel ? numel : 0;
            places[i] = static_cast<std::int32_t>(stretches.begin(s) + place);
        }
    }
}

}  // namespace

void bind_indices(nb::module_& m) {
    m.def("draw_places", draw_places, without_gil());
    m.def("encode_indices", [](address indices, index k, index n, int low_bits, address out) {
        encode(at<const int32_t>(indices), {k, n, low_bits}, at<uint8_t>(out));
    }, without_gil());
    m.def("decode_indices", [](address data, index k, index n, int low_bits, address out) {
        decode(at<const uint8_t>(data), {k, n, low_bits}, at<int32_t>(out));
    }, without_gil());
}

}  // namespace thinwire
