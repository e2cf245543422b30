// Mixers with a state of fixed size: short convolution, the gated delta rule, Mamba-2. A sequence's state lies in its slot, where
// the step began it (model.cpp); tokens go through it one by one, in every regime by the same operations. So how a prompt was
// cut shows in no bit. (Chunks as products of matrices take as many operations, and would round otherwise.)
#include <algorithm>
#include <cmath>

#include "step/run.h"

namespace tk {
namespace {

constexpr int64_t COLUMNS = 64;  // channels of a convolution that are one item

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

float* Run::slot(int64_t group, int64_t seq) const {
    const Group& g = p.groups[size_t(group)];
    return reinterpret_cast<float*>(g.data + in.block_tables[group][seq * in.table_width[group] + 1] * g.block_bytes);
}

// body(span, i) for `each` items of every sequence of the chunk.
template <class Body>
void Run::each_span(int64_t each, Body&& body) {
    share(P_STATE, int64_t(spans.size()) * each, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) body(spans[size_t(i / each)], i % each);
    }, UNEVEN);
}

// Channels `c` of a sequence's tokens, from `x` to `out`: their rows in the chunk's.
void Run::convolve(const Conv& conv, const QueryBlock& span, Range c, const float* x, int64_t ldx, float* out, int64_t ldo) const {
    ConvRun r;
    r.x = x + c.first;
    r.ldx = ldx;
    r.out = out + c.first;
    r.ldo = ldo;
    r.tail = slot(conv.group, span.seq) + conv.at + c.first;
    r.w = conv.weight.data + c.first;
    r.ldw = r.ld_tail = conv.ld();
    r.bias = conv.bias ? conv.bias.data + c.first : nullptr;
    r.tokens = span.last - span.first;
    r.channels = c.last - c.first;
    r.kernel = conv.kernel;
    r.silu = conv.silu;
    ops.convolve(r);
}

// One head of a sequence's tokens: keys and queries [tokens][rows] and values among the chunk's rows of w.spread, from their
// columns on; `keep` and `weight` of each token. The result into w.mid.
void Run::recur(const States& s, const QueryBlock& span, int64_t head, int64_t key, int64_t query, int64_t value) const {
    const float* rows = w.spread + (span.first - first) * w.spread_ld;
    StateRun r;
    r.ld = r.ldv = w.spread_ld;
    r.key = rows + key;
    r.query = rows + query;
    r.ldo = w.mid.ldx;
    r.keep = own.keep;
    r.weight = own.weight;
    r.tokens = span.last - span.first;
    r.rows = s.rows;
    r.delta = s.delta;
    for (int64_t c = 0; c < s.cols; c += STATE_COLS) {
        r.state = slot(s.group, span.seq) + s.at + (head * s.tiles() * STATE_COLS + c) * s.rows;
        r.value = rows + value + c;
        r.out = w.mid.x + (span.first - first) * w.mid.ldx + head * s.cols + c;
        r.cols = std::min(STATE_COLS, s.cols - c);
        ops.recur(r);
    }
}

void Run::mix(const Sublayer& s, const ShortConv& m) {
    save(s);
    project(m.in, s.pre, source(s), w.hidden_ld, w.qkv, {&m.b, &m.c, &m.value});
    const int64_t n = m.conv.channels, c = m.b.w.tiles() * LANES, value = c + m.c.w.tiles() * LANES;
    each_span((n + COLUMNS - 1) / COLUMNS, [&](const QueryBlock& span, int64_t i) {
        const Range at{i * COLUMNS, std::min(n, (i + 1) * COLUMNS)};
        for (int64_t t = span.first - first; t < span.last - first; t++) {
            float* row = w.qkv + t * w.qkv_ld + at.first;
            ops.multiply(row + value, row, at.last - at.first, -1);
        }
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, at, w.qkv + t0 * w.qkv_ld + value, w.qkv_ld, w.mid.x + t0 * w.mid.ldx, w.mid.ldx);
        for (int64_t t = t0; t < span.last - first; t++)
            ops.multiply(w.mid.x + t * w.mid.ldx + at.first, w.qkv + t * w.qkv_ld + c + at.first, at.last - at.first, -1);
    });
    down(s, m.out, m.mid, false, P_O);
}

void Run::mix(const Sublayer& s, const Delta& m) {
    const States& states = m.states;
    const int64_t n = m.conv.channels, keys = m.k_heads * states.rows, cols = states.cols, per_key = states.heads / m.k_heads;
    const int64_t z = m.qkv.w.tiles() * LANES, beta = z + m.z.w.tiles() * LANES, fade = beta + m.beta.w.tiles() * LANES;
    save(s);
    project(m.in, s.pre, source(s), w.hidden_ld, w.qkv, {&m.qkv, &m.z, &m.beta, &m.fade});
    each_span((n + states.rows - 1) / states.rows, [&](const QueryBlock& span, int64_t i) {
        const Range at{i * states.rows, std::min(n, (i + 1) * states.rows)};
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, at, w.qkv + t0 * w.qkv_ld, w.qkv_ld, w.spread + t0 * w.spread_ld, w.spread_ld);
        for (int64_t t = t0; i < 2 * m.k_heads && t < span.last - first; t++) {
            float* row = w.spread + t * w.spread_ld + at.first;
            norm_row(i < m.k_heads ? m.q_norm : m.k_norm, row, row);
        }
    });
    each_span(states.heads, [&](const QueryBlock& span, int64_t head) {
        const int64_t t0 = span.first - first, end = span.last - first, q = head / per_key * states.rows;
        for (int64_t t = t0; t < end; t++) {
            const float* row = w.qkv + t * w.qkv_ld + head;
            own.keep[t - t0] = std::exp(m.decay.data[head] * softplus(row[fade] + m.dt_bias.data[head]));
            own.weight[t - t0] = 1.0f / (1.0f + std::exp(-row[beta]));
        }
        recur(states, span, head, keys + q, q, 2 * keys + head * cols);
        for (int64_t t = t0; t < end; t++) {
            float* y = w.mid.x + t * w.mid.ldx + head * cols;
            norm_row(m.norm, y, y);
            ops.multiply(y, w.qkv + t * w.qkv_ld + z + head * cols, cols, SILU);
        }
    });
    down(s, m.out, m.mid, false, P_O);
}

void Run::mix(const Sublayer& s, const Mamba& m) {
    const States& states = m.states;
    const int64_t n = m.conv.channels, cols = states.cols, width = states.heads * cols, per_group = states.heads / m.groups;
    const int64_t inner = m.z.w.tiles() * LANES, dt = inner + m.inner.w.tiles() * LANES;
    save(s);
    project(m.in, s.pre, source(s), w.hidden_ld, w.qkv, {&m.z, &m.inner, &m.dt});
    each_span((n + COLUMNS - 1) / COLUMNS, [&](const QueryBlock& span, int64_t i) {
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, {i * COLUMNS, std::min(n, (i + 1) * COLUMNS)}, w.qkv + t0 * w.qkv_ld + inner, w.qkv_ld,
                 w.spread + t0 * w.spread_ld, w.spread_ld);
    });
    each_span(states.heads, [&](const QueryBlock& span, int64_t head) {
        const int64_t t0 = span.first - first, end = span.last - first, b = width + head / per_group * states.rows;
        for (int64_t t = t0; t < end; t++) {
            const float step = softplus(w.qkv[t * w.qkv_ld + dt + head] * m.dt_scale + m.dt_bias.data[head]);
            own.weight[t - t0] = std::max(step, m.least);
            own.keep[t - t0] = std::exp(m.decay.data[head] * own.weight[t - t0]);
        }
        recur(states, span, head, b, b + m.groups * states.rows, head * cols);
        for (int64_t t = t0; t < end; t++) {
            float *y = w.mid.x + t * w.mid.ldx + head * cols, *z = w.qkv + t * w.qkv_ld + head * cols;
            ops.add_scaled(y, w.spread + t * w.spread_ld + head * cols, m.skip.data[head], cols);
            for (int64_t i = 0; m.z_scale != 1.0f && i < cols; i++) z[i] *= m.z_scale;
            if (!m.norm_first) ops.multiply(y, z, cols, SILU);
        }
    });
    const int64_t part = width / m.groups;
    if (m.norm.present())
        share(P_STATE, count * m.groups, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) {
                const int64_t t = i / m.groups, g = i % m.groups;
                float* y = w.mid.x + t * w.mid.ldx + g * part;
                norm_row(m.norm, y, y, g);
                if (m.norm_first) ops.multiply(y, w.qkv + t * w.qkv_ld + g * part, part, SILU);
            }
        });
    down(s, m.out, m.mid, false, P_O);
}

}  // namespace tk
