#include "quantize.h"

#include "bits.h"
#include "draws.h"
#include "table.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::uint32_t;
using std::uint8_t;

// Even levels over [-range, range].
template <int B>
struct Uniform {
    static constexpr int bits = B;
    static constexpr float top = (1 << B) - 1;

    explicit Uniform(float range) : range(range), slope(top / 2 / range) {}

    i32 code(f32 x, f32 draw) const {
        const f32 u = x * slope + top / 2 + draw;
        return to_int(at_most(at_least(u, f32{}), all(top)));
    }
    f32 value(i32 code) const { return range * (to_float(code) * (2.0f / top) - 1.0f); }

    float range, slope;
};

// A binary search for the interval. Step K knows the first K of B bits of its number, and asks for the next.
template <int B, int K = 0>
struct Search {
    explicit Search(const float* next) : rest(next) {
        for (int j = 0; j < 1 << K; ++j) middle.entries[j] = next[((2 * j + 1) << (B - 1 - K)) - 1];
    }
    i32 find(f32 y, i32 j) const { return rest.find(y, j + j - (i32)(y >= middle[j])); }

    Table<K> middle;
    Search<B, K + 1> rest;
};

template <int B>
struct Search<B, B> {
    explicit Search(const float*) {}
    i32 find(f32, i32 j) const { return j; }
};

// Few levels: all tables are in registers.
template <int B>
struct FewLevels {
    static constexpr int bits = B;

    FewLevels(const LevelTable& table, float range) : range(range), inverse(1.0f / range), search(table.next) {
        for (int j = 0; j < 1 << B; ++j) {
            level.entries[j] = table.interval[j].first;
            inverse_gap.entries[j] = table.interval[j].second;
        }
    }

    i32 code(f32 x, f32 draw) const {
        const f32 y = x * inverse;
        const i32 j = search.find(y, i32{});
        return j - (i32)(draw < (y - level[j]) * inverse_gap[j]);
    }
    f32 value(i32 code) const { return range * level[code]; }

    float range, inverse;
    Table<B> level, inverse_gap;
    Search<B> search;
};

// Many levels: a grid of cells gives the interval, or (rarely) one a few levels before it.
template <int B>
struct ManyLevels {
    static constexpr int bits = B;

    ManyLevels(const LevelTable& table, float range) : range(range), inverse(1.0f / range), table(table) {}

    i32 code(f32 x, f32 draw) const {
        const f32 y = x * inverse;
        const f32 cell = at_most(at_least((y - table.level[0]) * table.cells_per_unit, f32{}), all(table.cells - 1));
        const auto [begin, end] = gather_pairs(table.cell, to_int(cell));
        i32 j = (i32)begin - (i32)(y >= end);
        for (int i = 1; i < table.crowd; ++i) j -= (i32)(y >= gather(table.next, j));
        const auto [level, inverse_gap] = gather_pairs(table.interval, j);
        return j - (i32)(draw < (y - level) * inverse_gap);
    }
    f32 value(i32 code) const { return range * gather(table.level, code); }

    float range, inverse;
    const LevelTable& table;
};

#if defined(__AVX512F__)
// 2^C cells with at most one level in each, in registers like the levels: fewer steps than a search.
template <int B, int C>
struct GridLevels : FewLevels<B> {
    GridLevels(const LevelTable& table, float range)
        : FewLevels<B>(table, range), first(table.level[0]), per_unit(table.cells_per_unit), last(table.cells - 1) {
        for (int j = 0; j < table.cells; ++j) begin.entries[j] = table.cell[j].first, end.entries[j] = table.cell[j].second;
    }

    i32 code(f32 x, f32 draw) const {
        const f32 y = x * this->inverse;
        const i32 cell = to_int(at_most(at_least((y - first) * per_unit, f32{}), all(last)));
        const i32 j = (i32)begin[cell] - (i32)(y >= end[cell]);
        return j - (i32)(draw < (y - this->level[j]) * this->inverse_gap[j]);
    }

    float first, per_unit, last;
    Table<C> begin, end;
};
#endif

#if defined(__AVX512VBMI__)
// All tables as bytes, 64 elements at once: what a cell begins in, then as many comparisons as it may hold levels.
template <int B>
struct ByteLevels {
    static constexpr int bits = B;

    ByteLevels(const LevelTable& table, float range)
        : range(range), inverse(1.0f / range), first(table.level[0]), per_unit(table.bytes->cells_per_unit),
          last(table.bytes->last), steps(table.bytes->steps), next(table.bytes->next), level(table.bytes->level),
          inverse_gap(table.bytes->inverse_gap) {
        for (int part = 0; part < parts; ++part) start[part] = ByteTable<8>(table.bytes->start + 256 * part);
    }

    // The intervals that 64 cells begin in.
    __m512i begin(const i32* cell) const {
        const __m512i low = bytes_of(cell);  // which leaves out all but the last 8 bits
        if constexpr (parts == 1) return start[0][low];
        if constexpr (parts > 1) {
            const __mmask64 odd = have(cell, 256);
            const __m512i here = _mm512_mask_blend_epi8(odd, start[0][low], start[1][low]);
            if constexpr (parts == 2) return here;
            if constexpr (parts == 4)
                return _mm512_mask_blend_epi8(have(cell, 512), here,
                                              _mm512_mask_blend_epi8(odd, start[2][low], start[3][low]));
        }
    }

    __m512i codes(const f32* x, const f32* draw) const {
        f32 y[4], found[4], gap[4], share[4];
        i32 cell[4];
        for (int k = 0; k < 4; ++k) {
            y[k] = x[k] * inverse;
            cell[k] = to_int(at_most(at_least((y[k] - first) * per_unit, f32{}), all(last)));
        }
        __m512i j = begin(cell);
        for (int i = 0; i < steps; ++i) {
            next.find(j, found);
            j = one_more(j, not_below(y, found));
        }
        level.find(j, found);
        inverse_gap.find(j, gap);
        for (int k = 0; k < 4; ++k) share[k] = (y[k] - found[k]) * gap[k];
        return one_more(j, below(draw, share));
    }

    float range, inverse, first, per_unit, last;
    int steps;
    static constexpr int parts = LevelBytes::most_cells(B) / 256;
    ByteTable<8> start[parts];
    FloatTable<B> next, level, inverse_gap;
};

template <bool Random, bool Lost, int B>
inline void encode(const ByteLevels<B>& rule, const float* x, u32 walk, u32 step, std::uint8_t* codes, float* lost) {
    f32 value[4], draw[4], said[4];
    for (int k = 0; k < 4; ++k) {
        value[k] = load<f32>(x + k * lanes);
        draw[k] = Random ? unit(walk) : all(0.5f);
        walk += step;
    }
    const __m512i code = rule.codes(value, draw);
    _mm512_storeu_si512(codes, code);
    if (!Lost) return;
    rule.level.find(code, said);
    for (int k = 0; k < 4; ++k) store(value[k] - rule.range * said[k], lost + k * lanes);
}
#endif

// The codes of 64 elements, one per byte, and where asked for what they lose.
template <bool Random, bool Lost, class Rule>
inline void encode(const Rule& rule, const float* x, u32 walk, u32 step, std::uint8_t* codes, float* lost) {
    for (int i = 0; i < group; i += 4 * lanes) {
        i32 code[4];
        for (int k = 0; k < 4; ++k) {
            const f32 value = load<f32>(x + i + k * lanes);
            code[k] = rule.code(value, Random ? unit(walk) : all(0.5f));
            if (Lost) store(value - rule.value(code[k]), lost + i + k * lanes);
            walk += step;
        }
        store_bytes(code[0], code[1], code[2], code[3], codes + i);
    }
}

template <bool Random, bool Lost, class Rule>
void encode_run(const Rule& rule, const float* x, index n, Draws draws, uint8_t* out, float* lost) {
    constexpr int B = Rule::bits;
    const u32 first = draws.first + draws.step * lane_numbers(), step = u32{} + draws.step * lanes;
    index i = 0;
    for (; i + group <= n; i += group, out += 8 * B) {
        uint8_t codes[group];
        encode<Random, Lost>(rule, x + i, first + static_cast<uint32_t>(i) * draws.step, step, codes, lost + i);
        pack<B>(codes, out);
    }
    if (i < n) {
        const int count = static_cast<int>(n - i);
        float padded[group] = {}, left[group];
        uint8_t codes[group], packed[8 * B];
        __builtin_memcpy(padded, x + i, 4 * count);
        encode<Random, Lost>(rule, padded, first + static_cast<uint32_t>(i) * draws.step, step, codes, left);
        __builtin_memset(codes + count, 0, group - count);
        pack<B>(codes, packed);
        __builtin_memcpy(out, packed, (count * B + 7) / 8);
        if (Lost) __builtin_memcpy(lost + i, left, 4 * count);
    }
}

template <class Rule>
void encode_by(const Rule& rule, const float* x, index n, Draws draws, uint8_t* out, float* lost) {
    if (draws.random)
        lost ? encode_run<true, true>(rule, x, n, draws, out, lost) : encode_run<true, false>(rule, x, n, draws, out, lost);
    else
        lost ? encode_run<false, true>(rule, x, n, draws, out, lost) : encode_run<false, false>(rule, x, n, draws, out, lost);
}

// A block without a range: all codes are 0, and `first` is the level that 0 stands for.
void encode_nothing(const float* x, index n, int bits, float range, float first, uint8_t* out, float* lost) {
    __builtin_memset(out, 0, (n * bits + 7) / 8);
    if (lost)
        for (index i = 0; i < n; ++i) lost[i] = x[i] - range * first;
}

void uniform(const float* x, index n, int bits, float range, Draws draws, uint8_t* out, float* lost) {
    if (!(range > 0)) return encode_nothing(x, n, bits, range, -1.0f, out, lost);
    switch (bits) {
        case 1: return encode_by(Uniform<1>(range), x, n, draws, out, lost);
        case 2: return encode_by(Uniform<2>(range), x, n, draws, out, lost);
        case 3: return encode_by(Uniform<3>(range), x, n, draws, out, lost);
        case 4: return encode_by(Uniform<4>(range), x, n, draws, out, lost);
        case 5: return encode_by(Uniform<5>(range), x, n, draws, out, lost);
        case 6: return encode_by(Uniform<6>(range), x, n, draws, out, lost);
        case 7: return encode_by(Uniform<7>(range), x, n, draws, out, lost);
        case 8: return encode_by(Uniform<8>(range), x, n, draws, out, lost);
    }
}

void levels(const float* x, index n, int bits, const LevelTable& table, float range, Draws draws, uint8_t* out,
            float* lost) {
    if (!(range > 0)) return encode_nothing(x, n, bits, range, table.level[0], out, lost);
#if defined(__AVX512VBMI__)
    if (table.bytes && table.bytes->steps <= 8) switch (bits) {
        case 6: return encode_by(ByteLevels<6>(table, range), x, n, draws, out, lost);
        case 7: return encode_by(ByteLevels<7>(table, range), x, n, draws, out, lost);
        case 8: return encode_by(ByteLevels<8>(table, range), x, n, draws, out, lost);
    }
#endif
    switch (bits) {
        case 1: return encode_by(FewLevels<1>(table, range), x, n, draws, out, lost);
        case 2: return encode_by(FewLevels<2>(table, range), x, n, draws, out, lost);
        case 3: return encode_by(FewLevels<3>(table, range), x, n, draws, out, lost);
#if defined(__AVX512F__)
        case 4:
            if (table.crowd == 1 && table.cells <= 32) return encode_by(GridLevels<4, 5>(table, range), x, n, draws, out, lost);
            return encode_by(FewLevels<4>(table, range), x, n, draws, out, lost);
        case 5:
            if (table.crowd == 1 && table.cells <= 64) return encode_by(GridLevels<5, 6>(table, range), x, n, draws, out, lost);
            return encode_by(FewLevels<5>(table, range), x, n, draws, out, lost);
        case 6: return encode_by(FewLevels<6>(table, range), x, n, draws, out, lost);
        case 7: return encode_by(FewLevels<7>(table, range), x, n, draws, out, lost);
        case 8: return encode_by(ManyLevels<8>(table, range), x, n, draws, out, lost);
#else
        case 4: return encode_by(FewLevels<4>(table, range), x, n, draws, out, lost);
        case 5: return encode_by(FewLevels<5>(table, range), x, n, draws, out, lost);
        case 6: return encode_by(ManyLevels<6>(table, range), x, n, draws, out, lost);
        case 7: return encode_by(ManyLevels<7>(table, range), x, n, draws, out, lost);
        case 8: return encode_by(ManyLevels<8>(table, range), x, n, draws, out, lost);
#endif
    }
}

template <bool Add, class Rule>
void decode_run(const Rule& rule, const uint8_t* in, index n, float* out) {
    for_groups<Rule::bits>(in, n, [&](const uint8_t* bytes, index i, int count) {
        uint8_t codes[group];
        unpack<Rule::bits>(bytes, codes);
        const auto decode = [&](float* to) {
            for (int k = 0; k < group; k += lanes) {
                const f32 value = rule.value(load_bytes(codes + k));
                store(Add ? load<f32>(to + k) + value : value, to + k);
            }
        };
        if (count == group) return decode(out + i);
        float part[group] = {};
        __builtin_memcpy(part, out + i, 4 * count);
        decode(part);
        __builtin_memcpy(out + i, part, 4 * count);
    });
}

void uniform_add(const uint8_t* in, index n, int bits, float range, float* out) {
    switch (bits) {
        case 1: return decode_run<true>(Uniform<1>(range), in, n, out);
        case 2: return decode_run<true>(Uniform<2>(range), in, n, out);
        case 3: return decode_run<true>(Uniform<3>(range), in, n, out);
        case 4: return decode_run<true>(Uniform<4>(range), in, n, out);
        case 5: return decode_run<true>(Uniform<5>(range), in, n, out);
        case 6: return decode_run<true>(Uniform<6>(range), in, n, out);
        case 7: return decode_run<true>(Uniform<7>(range), in, n, out);
        case 8: return decode_run<true>(Uniform<8>(range), in, n, out);
    }
}

// What a code stands for, without what only encoding needs.
template <int B>
struct FewValues {
    static constexpr int bits = B;

    FewValues(const float* from, float range) : range(range) {
        for (int j = 0; j < 1 << B; ++j) level.entries[j] = from[j];
    }
    f32 value(i32 code) const { return range * level[code]; }

    float range;
    Table<B> level;
};

template <int B>
struct ManyValues {
    static constexpr int bits = B;

    f32 value(i32 code) const { return range * gather(level, code); }

    const float* level;
    float range;
};

#if defined(__AVX512F__)
template <int B>
using SomeValues = FewValues<B>;
#else
template <int B>
struct SomeValues : ManyValues<B> {
    SomeValues(const float* level, float range) : ManyValues<B>{level, range} {}
};
#endif

template <class Rule>
void decode_by(const Rule& rule, const uint8_t* in, index n, bool add, float* out) {
    add ? decode_run<true>(rule, in, n, out) : decode_run<false>(rule, in, n, out);
}

void levels_value(const uint8_t* in, index n, int bits, const float* level, float range, bool add, float* out) {
    switch (bits) {
        case 1: return decode_by(FewValues<1>(level, range), in, n, add, out);
        case 2: return decode_by(FewValues<2>(level, range), in, n, add, out);
        case 3: return decode_by(FewValues<3>(level, range), in, n, add, out);
        case 4: return decode_by(FewValues<4>(level, range), in, n, add, out);
        case 5: return decode_by(FewValues<5>(level, range), in, n, add, out);
        case 6: return decode_by(SomeValues<6>(level, range), in, n, add, out);
        case 7: return decode_by(SomeValues<7>(level, range), in, n, add, out);
        case 8: return decode_by(ManyValues<8>{level, range}, in, n, add, out);
    }
}

}  // namespace

const QuantizeLoops quantize_loops = {uniform, levels, uniform_add, levels_value};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
