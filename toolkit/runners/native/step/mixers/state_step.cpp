// Mixers with a state of fixed size: short convolution, the gated delta rule, Mamba-2. A sequence's state lies in its slot, where
// the step began it (model.cpp); tokens go through it one by one, in every regime by the same operations. So how a prompt was
// cut shows in no bit. (Chunks as products of matrices take as many operations, and would round otherwise.)
#include <algorithm>
#include <cmath>

#include "step/run.h"

namespace tk {
namespace {

constexpr int64_t COLUMNS = 64;  // channels of a convolution that are one item

// Tiles that hold these rows of a matrix.
Range tiles_with(Range rows) { return {rows.first / LANES, (rows.last + LANES - 1) / LANES}; }

// Of `tiles` those behind the last of `parts`, which are of the same matrix and come before them: no tile is computed twice.
template <class Parts>
Range merged(const Parts& parts, Range tiles) {
    const int64_t begin = parts.empty() ? tiles.first : std::max(tiles.first, parts.back().tiles.last);
    return {begin, std::max(begin, tiles.last)};
}

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
    const int64_t c = m.b.w.tiles() * LANES, value = c + m.c.w.tiles() * LANES;
    const Range mine = m.conv.own;
    each_span((mine.last - mine.first + COLUMNS - 1) / COLUMNS, [&](const QueryBlock& span, int64_t i) {
        const Range at{mine.first + i * COLUMNS, std::min(mine.last, mine.first + (i + 1) * COLUMNS)};
        for (int64_t t = span.first - first; t < span.last - first; t++) {
            float* row = w.qkv + t * w.qkv_ld + at.first;
            ops.multiply(row + value, row, at.last - at.first, -1);
        }
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, at, w.qkv + t0 * w.qkv_ld + value, w.qkv_ld, w.mid.x + t0 * w.mid.ldx, w.mid.ldx);
        for (int64_t t = t0; t < span.last - first; t++)
            ops.multiply(w.mid.x + t * w.mid.ldx + at.first, w.qkv + t * w.qkv_ld + c + at.first, at.last - at.first, -1);
    });
    gather_mid(m.out, m.mid, false, mine);
    down(s, m.out, m.mid, false, P_O);
}

void Run::mix(const Sublayer& s, const Delta& m) {
    const States& states = m.states;
    const int64_t keys = m.k_heads * states.rows, cols = states.cols, per_key = states.heads / m.k_heads;
    const Range mine = states.own, k_mine{mine.first / per_key, mine.last / per_key}, values{2 * keys + mine.first * cols, 2 * keys + mine.last * cols};
    const int64_t own_keys = k_mine.last - k_mine.first;
    const int64_t z = m.qkv.w.tiles() * LANES, beta = z + m.z.w.tiles() * LANES, fade = beta + m.beta.w.tiles() * LANES;
    save(s);
    std::vector<Projection> parts;
    for (const Range columns : {Range{k_mine.first * states.rows, k_mine.last * states.rows},
                                Range{keys + k_mine.first * states.rows, keys + k_mine.last * states.rows}, values})
        parts.push_back({&m.qkv, merged(parts, tiles_with(columns)), 0});
    parts.push_back({&m.z, m.z.own, z});
    parts.push_back({&m.beta, m.beta.own, beta});
    parts.push_back({&m.fade, m.fade.own, fade});
    project(m.in, s.pre, source(s), w.hidden_ld, w.qkv, parts);
    each_span(2 * own_keys + (values.last - values.first + states.rows - 1) / states.rows, [&](const QueryBlock& span, int64_t i) {
        const int64_t begin = i < 2 * own_keys ? (i / own_keys) * keys + (k_mine.first + i % own_keys) * states.rows
                                               : values.first + (i - 2 * own_keys) * states.rows;
        const Range at{begin, i < 2 * own_keys ? begin + states.rows : std::min(values.last, begin + states.rows)};
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, at, w.qkv + t0 * w.qkv_ld, w.qkv_ld, w.spread + t0 * w.spread_ld, w.spread_ld);
        for (int64_t t = t0; i < 2 * own_keys && t < span.last - first; t++) {
            float* row = w.spread + t * w.spread_ld + at.first;
            norm_row(i < own_keys ? m.q_norm : m.k_norm, row, row);
        }
    });
    each_span(mine.last - mine.first, [&](const QueryBlock& span, int64_t i) {
        const int64_t head = mine.first + i;
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
    gather_mid(m.out, m.mid, false, {mine.first * cols, mine.last * cols});
    down(s, m.out, m.mid, false, P_O);
}

void Run::mix(const Sublayer& s, const Mamba& m) {
    const States& states = m.states;
    const int64_t cols = states.cols, width = states.heads * cols, per_group = states.heads / m.groups;
    const Range mine = states.own, groups{mine.first / per_group, (mine.last + per_group - 1) / per_group};
    const int64_t inner = m.z.w.tiles() * LANES, dt = inner + m.inner.w.tiles() * LANES;
    save(s);
    // channels that this rank's heads read: their own, and what belongs to their groups
    std::vector<Range> channels{{mine.first * cols, mine.last * cols}};
    for (const int64_t at : {width, width + m.groups * states.rows}) channels.push_back({at + groups.first * states.rows, at + groups.last * states.rows});
    std::vector<Projection> parts;
    for (const Range& c : channels) parts.push_back({&m.inner, merged(parts, tiles_with(c)), inner});
    parts.push_back({&m.z, m.z.own, 0});
    parts.push_back({&m.dt, m.dt.own, dt});
    project(m.in, s.pre, source(s), w.hidden_ld, w.qkv, parts);
    std::vector<Range> items;
    for (const Range& c : channels)
        for (int64_t at = c.first; at < c.last; at += COLUMNS) items.push_back({at, std::min(c.last, at + COLUMNS)});
    each_span(int64_t(items.size()), [&](const QueryBlock& span, int64_t i) {
        const int64_t t0 = span.first - first;
        convolve(m.conv, span, items[size_t(i)], w.qkv + t0 * w.qkv_ld + inner, w.qkv_ld,
                 w.spread + t0 * w.spread_ld, w.spread_ld);
    });
    each_span(mine.last - mine.first, [&](const QueryBlock& span, int64_t i) {
        const int64_t head = mine.first + i;
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
            if (m.norm_first) continue;
            for (int64_t i = 0; m.z_scale != 1.0f && i < cols; i++) z[i] *= m.z_scale;
            ops.multiply(y, z, cols, SILU);
        }
    });
    const int64_t part = width / m.groups;
    const Range numbers{mine.first * cols, mine.last * cols}, normed = m.norm_apart ? Range{0, m.groups} : groups;
    if (m.norm_apart) gather_mid(m.out, m.mid, false, numbers);
    if (m.norm.present())
        share(P_STATE, count * (normed.last - normed.first), 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) {
                const int64_t each = normed.last - normed.first, t = i / each, g = normed.first + i % each;
                float* y = w.mid.x + t * w.mid.ldx + g * part;
                norm_row(m.norm, y, y, g);
                if (!m.norm_first) continue;
                float* z = w.qkv + t * w.qkv_ld + g * part;
                for (int64_t j = 0; m.z_scale != 1.0f && j < part; j++) z[j] *= m.z_scale;
                ops.multiply(y, z, part, SILU);
            }
        });
    if (!m.norm_apart) gather_mid(m.out, m.mid, false, numbers);
    down(s, m.out, m.mid, false, P_O);
}

}  // namespace tk
