#include "rotated.h"

#include "bits.h"
#include "draws.h"

namespace thinwire::THINWIRE_INSTRUCTION_SET {
namespace {

using std::int16_t;
using std::int32_t;
using std::int8_t;
using std::uint32_t;
using std::uint8_t;

// The integer that u, in steps, is rounded to; see reference/rotated.py. A NaN becomes the lowest.
inline i32 rounded(f32 u, const Steps& steps, f32 draw) {
    return to_int(ceiling(at_most(at_least(u - steps.offset - draw, all(steps.low)), all(steps.high))));
}

template <class T>
void put(const i32 (&q)[4], T* out) {
    if constexpr (sizeof(T) == 1) {
        store_signed_bytes(q[0], q[1], q[2], q[3], out);
    } else {
        int32_t wide[4 * lanes];
        for (int k = 0; k < 4; ++k) store(q[k], wide + k * lanes);
        for (int i = 0; i < 4 * lanes; ++i) out[i] = static_cast<T>(wide[i]);
    }
}

template <class T, bool Keep>
void round_to(float* y, index n, float step, const Steps& steps, Draws draws, T* out) {
    const float inverse = 1.0f / step;
    u32 walk = draws.first + draws.step * lane_numbers();
    const u32 stride = u32{} + draws.step * lanes;
    for (index i = 0; i < n; i += 4 * lanes) {
        i32 q[4];
        for (int k = 0; k < 4; ++k) {
            q[k] = rounded(load<f32>(y + i + k * lanes) * inverse, steps, unit(walk));
            if (Keep) store(step * (to_float(q[k]) + steps.offset), y + i + k * lanes);
            walk += stride;
        }
        put(q, out + i);
    }
}

template <class T>
void round_as(float* y, index n, float step, const Steps& steps, Draws draws, T* out, bool keep) {
    if (step > 0)
        return keep ? round_to<T, true>(y, n, step, steps, draws, out) : round_to<T, false>(y, n, step, steps, draws, out);
    for (index i = 0; i < n; ++i) out[i] = static_cast<T>(steps.low);
    if (keep)
        for (index i = 0; i < n; ++i) y[i] = step * (steps.low + steps.offset);
}

void round(float* y, index n, float step, const Steps& steps, Draws draws, int size, void* out, bool keep) {
    switch (size) {
        case 1: return round_as(y, n, step, steps, draws, static_cast<int8_t*>(out), keep);
        case 2: return round_as(y, n, step, steps, draws, static_cast<int16_t*>(out), keep);
        default: return round_as(y, n, step, steps, draws, static_cast<int32_t*>(out), keep);
    }
}

template <class T>
void scale_from(const T* q, index n, float scale, float offset, float* y) {
    const float shift = offset * scale;
    for (index i = 0; i < n; ++i) y[i] = static_cast<float>(static_cast<int32_t>(q[i])) * scale + shift;
}

void scale(const void* q, index n, int size, float scale, float offset, float* y) {
    switch (size) {
        case 1: return scale_from(static_cast<const int8_t*>(q), n, scale, offset, y);
        case 2: return scale_from(static_cast<const int16_t*>(q), n, scale, offset, y);
        default: return scale_from(static_cast<const int32_t*>(q), n, scale, offset, y);
    }
}

void subtract(const float* x, const float* y, index n, float* out) {
    for (index i = 0; i < n; ++i) out[i] = x[i] - y[i];
}

void add(const float* y, index n, float weight, float* out) {
    for (index i = 0; i < n; ++i) out[i] += weight * y[i];
}

void positive(const float* y, index n, float* out) {
    for (index i = 0; i < n; ++i) out[i] = y[i] + 0.0f;
}

}  // namespace

const RotatedLoops rotated_loops = {round, scale, subtract, add, positive};

}  // namespace thinwire::THINWIRE_INSTRUCTION_SET
