// Exact selection of the k largest magnitudes, lowest index first among equals.
//
// 1. A sample says where the k-th largest key is about, and a floor somewhat below it is chosen.
// 2. One pass collects the elements at or above the floor: a few more than k.
// 3. Histograms over what was collected find the k-th largest key, the cut, to the bit.
// 4. What lies above the cut, and the first few equal to it, is the answer.
// Where the sample misleads or does not pay, step 3 runs over all elements: a handful of passes, whatever the data.
// What is owed is added by the pass of step 2, a stretch at a time, so that the sum is looked at while it is in the cache.
#include "simd/select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "blocks.h"
#include "sums.h"

namespace thinwire {
namespace {

using std::int32_t;
using std::uint32_t;
using Bins = std::array<uint32_t, bins_count>;

constexpr index smallest_sampled = 1 << 13;  // shorter inputs: the passes that a sample saves cost next to nothing
constexpr index largest_sample = 1 << 13;

// Where the selection ends: all above `key` are in, and the first `ties` equal to it.
struct Cut {
    uint32_t key;
    index ties;
};

// The cut that lets k through, given that at least k >= 1 keys lie in [low, high] and none above. fill(low, high, shift, bins)
// counts the keys of that range; each round looks into one bin of the last, so three rounds settle all 31 bits.
template <class Fill>
Cut find_cut(index k, uint32_t low, uint32_t high, const Fill& fill) {
    Bins bins;
    while (low < high) {
        const int shift = std::max(0, static_cast<int>(std::bit_width(high - low)) - bin_bits);
        bins.fill(0);
        fill(low, high, shift, bins.data());
        uint32_t bin = (high - low) >> shift;
        for (; static_cast<index>(bins[bin]) < k; --bin) k -= bins[bin];
        low += bin << shift;
        high = std::min(high, low + ((uint32_t{1} << shift) - 1));
    }
    return {low, k};
}

// One range's elements that reach the floor. The memory is not cleared: pages never written cost nothing.
struct Candidates {
    void clear(index wanted) {
        count = 0;
        if (wanted <= capacity) return;
        positions.reset(new int32_t[wanted + collect_slack]);
        keys.reset(new uint32_t[wanted + collect_slack]);
        capacity = wanted;
    }
    std::unique_ptr<int32_t[]> positions;
    std::unique_ptr<uint32_t[]> keys;
    index count = 0, capacity = 0;
};

// Kept by whoever selects, from one selection to the next: fresh pages cost more than what is written there.
std::vector<Candidates>& candidates(index ranges, index capacity) {
    thread_local std::vector<Candidates> kept;
    if (static_cast<index>(kept.size()) < ranges) kept.resize(ranges);
    for (index range = 0; range < static_cast<index>(kept.size()); ++range) kept[range].clear(range < ranges ? capacity : 0);
    return kept;
}

// Elements that one thread looks at.
struct Range {
    index begin, end;
};

// All elements of the stretches, in order: in as few ranges as gaps allow, and as keep every thread busy.
std::vector<Range> ranges_of(Stretches stretches, index n, int threads) {
    stretches.check(n);
    const index grain = std::max<index>(1 << 16, (n + threads - 1) / threads);
    std::vector<Range> found;
    for (index s = 0; s < stretches.count; ++s)
        for (index begin = stretches.begin(s), end; begin < stretches.end(s); begin = end) {
            if (!found.empty() && found.back().end == begin && found.back().end - found.back().begin < grain) {
                begin = found.back().begin;
                found.pop_back();
            }
            end = std::min(begin + grain, stretches.end(s));
            found.push_back({begin, end});
        }
    return found;
}

class Selection {
   public:
    Selection(const float* x, const float* owed, float* total, const float* weight, index n, Stretches stretches, index k,
              int32_t* out, int threads)
        : loops_(select_loops()), x_(x), owed_(owed), total_(total), weight_(weight), k_(k), out_(out),
          threads_(threads), ranges_(ranges_of(stretches, n, threads)) {
        for (const Range& range : ranges_) n_ += range.end - range.begin;
        require(k <= n_, "there are fewer elements than are to be selected");
    }

    void run() {
        if (k_ > 0 && n_ >= smallest_sampled && k_ <= n_ / 8 && run_sampled()) return;
        settle();
        if (k_ == 0) return;
        const Cut cut = find_cut(k_, 0, nan_key, [&](uint32_t low, uint32_t high, int shift, uint32_t* bins) {
            std::mutex merging;
            each_range([&](index, index begin, index end) {
                Bins own{};
                loops_.histogram(x_, weight_, begin, end, low, high, shift, own.data());
                const std::lock_guard lock(merging);
                for (index bin = 0; bin < bins_count; ++bin) bins[bin] += own[bin];
            });
        });
        emit(cut.key);
    }

   private:
    template <class Body>
    void each_range(const Body& body) const {
        parallel_for(static_cast<index>(ranges_.size()), 1, threads_,
                     [&](index number, index) { body(number, ranges_[number].begin, ranges_[number].end); });
    }

    // x = x + owed, in `total`, unless that was done.
    void settle() {
        if (!owed_) return;
        each_range([&](index, index begin, index end) {
            statistics_loops().add(x_ + begin, owed_ + begin, end - begin, total_ + begin);
        });
        settled();
    }

    void settled() {
        if (owed_) x_ = total_;
        owed_ = nullptr;
    }

    // Step 2 for one range.
    void collect(index begin, index end, uint32_t floor, Candidates& mine, index capacity) const {
        const auto look = [&](const float* x, index from, index to) {
            if (mine.count > capacity) return;
            mine.count += loops_.collect(x, weight_ ? weight_ + from : nullptr, to - from, from, floor,
                                         mine.positions.get() + mine.count, mine.keys.get() + mine.count,
                                         capacity - mine.count);
        };
        if (!owed_) return look(x_ + begin, begin, end);
        for_sums(x_ + begin, owed_ + begin, end - begin, total_ + begin, tile, n_, [&](const float* sums, index from, index count) {
            look(sums, begin + from, begin + from + count);
        });
    }

    // Steps 1 to 4. False: no place was written, and the sample was of no use.
    bool run_sampled() {
        const index samples = std::min(largest_sample, n_ / 16);
        std::vector<uint32_t> keys(samples);
        index looked_at = 0, sampled = 0;  // every range has its share of the sample
        for (const Range& range : ranges_) {
            looked_at += range.end - range.begin;
            const index share = looked_at * samples / n_ - sampled;
            loops_.sample(x_ + range.begin, owed_ ? owed_ + range.begin : nullptr, weight_ ? weight_ + range.begin : nullptr,
                          range.end - range.begin, share, keys.data() + sampled);
            sampled += share;
        }
        const double expected = static_cast<double>(k_) * samples / n_;
        const index rank = static_cast<index>(expected + 4 * std::sqrt(expected) + 4);  // 4 sigma: rarely too few
        if (rank >= samples) return false;
        std::nth_element(keys.begin(), keys.begin() + rank, keys.end(), std::greater<>());
        const uint32_t low = keys[rank];
        // Where one value fills much of the sample (zeros, above all) it need not be collected: its elements are all alike.
        const bool tied = std::count_if(keys.begin(), keys.end(), [&](uint32_t key) { return key >= low; }) > 2 * rank;
        const uint32_t floor = low + tied;
        if (floor > nan_key) return settle(), emit(low);
        const index capacity = std::min(n_, 2 * (rank + 1) * (n_ / samples + 1));
        std::vector<Candidates>& found = candidates(static_cast<index>(ranges_.size()), capacity);
        each_range([&](index range, index begin, index end) {
            collect(begin, end, floor, found[range], capacity);
        });
        settled();
        index count = 0;
        for (const Candidates& part : found) {
            if (part.count > capacity) return false;
            count += part.count;
        }
        if (count < k_) return tied && emit(low);
        const Cut cut = find_cut(k_, floor, largest(found), [&](uint32_t a, uint32_t b, int shift, uint32_t* bins) {
            for (const Candidates& part : found) loops_.histogram_of_keys(part.keys.get(), part.count, a, b, shift, bins);
        });
        write(found, cut);
        return true;
    }

    static uint32_t largest(const std::vector<Candidates>& found) {
        uint32_t top = 0;
        for (const Candidates& part : found)
            for (index i = 0; i < part.count; ++i) top = std::max(top, part.keys[i]);
        return top;
    }

    void write(const std::vector<Candidates>& found, Cut cut) const {
        index written = 0;  // every candidate is stored, and the next overwrites it unless it is in: no branch to mispredict
        for (const Candidates& part : found)
            for (index i = 0; i < part.count && written < k_; ++i) {
                const bool tie = part.keys[i] == cut.key && cut.ties > 0;
                cut.ties -= tie;
                out_[written] = part.positions[i];
                written += part.keys[i] > cut.key || tie;
            }
    }

    // The answer straight from x, if `key` is the k-th largest; else false, and nothing is written.
    bool emit(uint32_t key) const {
        struct Count { index above, equal; };
        std::vector<Count> counts(ranges_.size());
        each_range([&](index range, index begin, index end) {
            loops_.count(x_, weight_, begin, end, key, &counts[range].above, &counts[range].equal);
        });
        Count all{0, 0};
        for (const Count& part : counts) all = {all.above + part.above, all.equal + part.equal};
        if (all.above > k_ || all.above + all.equal < k_) return false;
        struct Share { index first, ties; };
        std::vector<Share> shares(ranges_.size());
        index first = 0, ties = k_ - all.above;
        for (std::size_t range = 0; range < ranges_.size(); ++range) {
            const index taken = std::min(ties, counts[range].equal);
            shares[range] = {first, taken};
            first += counts[range].above + taken;
            ties -= taken;
        }
        each_range([&](index range, index begin, index end) {
            loops_.emit(x_, weight_, begin, end, key, shares[range].ties, out_ + shares[range].first);
        });
        return true;
    }

    const SelectLoops& loops_;
    const float *x_, *owed_;
    float* const total_;
    const float* const weight_;
    const index k_;
    int32_t* const out_;
    const int threads_;
    const std::vector<Range> ranges_;
    index n_ = 0;  // elements of all ranges
};

}  // namespace

void bind_select(nb::module_& m) {
    m.def("top_k", [](address x, address owed, address total, address weight, index n, address bounds, index stretches,
                      index stride, index k, address out, int threads) {
        const index all[] = {0, n};
        const Stretches told = stretches < 0 ? Stretches{all, 1, 1} : Stretches{at<const index>(bounds), stretches, stride};
        Selection(at<const float>(x), at<const float>(owed), at<float>(total), at<const float>(weight), n, told, k,
                  at<int32_t>(out), threads).run();
    }, without_gil());
}

}  // namespace thinwire
