// The MLP sublayer of a step.
#include <algorithm>

#include "step/run.h"

namespace tk {
namespace {

constexpr int64_t FEW = 8;  // rows of which whole shares fit a stripe: the more tiles at once, the more places a linear reads side by side

}  // namespace

// Whether the columns of a gated product are quantized right behind it, a stripe at a time: the next input has one plain
// quantization, and all rows the same.
bool Run::stripes(const Mlp& m) const {
    return !m.mid.norm.present() && !splits(m) && !reads_floats(m.down, 0, count) && m.mid.keys.size() == 1 && !m.mid.keys[0].perm && m.mid.keys[0].group <= STRIPE;
}

// Output tiles `tiles` of a gated product for the rows, into the middle rows: quantized in stripes, or all as floats.
void Run::gated_rows(const Mlp& m, const InputBuffer& in, Range rows, Range tiles, bool fused) {
    const int64_t n = rows.last - rows.first;
    if (!fused) return gated(m, in, rows.first, n, tiles, w.mid.x + rows.first * w.mid.ldx + tiles.first * LANES, w.mid.ldx);
    const int64_t group = m.mid.keys[0].group, unit = group / LANES;
    const int64_t most = n > FEW ? std::max<int64_t>(4, unit) : CHUNK * STRIPE / LANES / n, step = most / unit * unit;
    for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += step) {
        const int64_t t1 = std::min(t0 + step, tiles.last), g0 = t0 / unit, ld = (t1 - t0) * LANES;
        gated(m, in, rows.first, n, {t0, t1}, own.stripe, ld);
        for (int64_t i = 0; i < n; i++) {
            const int64_t t = rows.first + i;
            ops.quantize(own.stripe + i * ld, nullptr, group, 0, (t1 - t0) / unit, w.mid.q[0] + t * w.mid.ldq + t0 * LANES,
                         w.mid.scale[0] + t * w.mid.lds + g0, w.mid.sum[0] + t * w.mid.lds + g0);
        }
    }
}

void Run::mix(const Sublayer& s, const Mlp& m) {
    const float* from = source(s);
    save(s);
    Prepared x = prepare(m.in, s.pre, from, w.hidden_ld, count);
    const bool fused = stripes(m) && (p.ranks > 1 ? m.codes : m.mid.width / m.mid.keys[0].group >= 2 * threads);
    const int64_t unit = fused ? m.mid.keys[0].group / LANES : pair_unit();
    const int64_t both = (m.gate.present() ? m.gate.w.tile_bytes() : 0) + m.up.w.tile_bytes();
    share_own(P_GATED, m.up.own, unit, both, [&](Range tiles) {
        gated_rows(m, ready(x, m.in, s.pre, from, w.hidden_ld, count), {0, count}, tiles, fused);
    });
    const Range mine = in_tiles(m.up.own, m.mid.width);
    std::vector<Columns> parts;
    if (fused) add_codes(parts, w.mid, count, m.mid.width, m.mid.keys[0].group, mine);
    else parts.push_back(floats(w.mid.x, count, w.mid.ldx, m.mid.width, mine));
    gather(parts);
    down(s, m.down, m.mid, fused, P_DOWN);
}

}  // namespace tk
