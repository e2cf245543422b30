// Threads take parts of the rows through a layer and meet twice in it: before attention, which needs the keys of all, and behind.
#include "towers/tower_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tk {

void TowerRun::stages() {
    each_part([&](Range rows) {
        for (int64_t t = rows.first; t < rows.last; t++) memcpy(x + t * ld, in.in + t * in.inputs, size_t(in.inputs) * 4);
    });
    for (int64_t i = in.first; i < in.last; i++)
        std::visit([&](const auto& what) { apply(what); }, tower.program.stages[size_t(i)].what);
    each_part([&](Range rows) {
        for (int64_t t = rows.first; t < rows.last; t++) memcpy(in.out + t * in.outputs, x + t * ld, size_t(in.outputs) * 4);
    });
}

void TowerRun::apply(const Norm& n) {
    each_part([&](Range rows) {
        for (int64_t t = rows.first; t < rows.last; t++) norm_row(n, x + t * ld, x + t * ld);
    });
}

void TowerRun::apply(const TowerActivation& a) {
    each_part([&](Range rows) {
        for (int64_t t = rows.first; t < rows.last; t++) ops.activate(x + t * ld, ld, a.activation);
    });
}

// A line at a time, by the lines around it; zeros behind it let the last cells look ahead.
void TowerRun::apply(const TowerNear& n) {
    const int64_t lines = in.rows / in.across, half = n.kernel / 2, width = n.ld(), length = in.across + half;
    tower.pool.chunks(phase++, uint32_t(lines), [&](uint32_t line) {
        own.line.assign(size_t((2 * length + 2 * half) * width), 0.0f);
        float *from = own.line.data(), *to = from + length * width;
        ConvRun run{from, width, to, width, to + length * width, width, nullptr, width, nullptr, length, n.channels, n.kernel, 0};
        for (int64_t c = 0; c < in.across; c++) {
            memset(y + (line * in.across + c) * ld, 0, size_t(ld) * 4);
            ops.add_scaled(y + (line * in.across + c) * ld, n.bias.data, 1.0f, n.channels);
        }
        for (int64_t k = 0; k < n.kernel; k++) {
            const int64_t other = int64_t(line) + k - half;
            if (other < 0 || other >= lines) continue;
            for (int64_t c = 0; c < in.across; c++) memcpy(from + c * width, x + (other * in.across + c) * ld, size_t(n.channels) * 4);
            std::fill(run.tail, run.tail + 2 * half * width, 0.0f);
            run.w = n.weight.data + k * n.kernel * width;
            ops.convolve(run);
            for (int64_t c = 0; c < in.across; c++) ops.add_scaled(y + (line * in.across + c) * ld, to + (c + half) * width, 1.0f, n.channels);
        }
    });
    mark(P_OTHER);
    std::swap(x, y);
}

void TowerRun::apply(const TowerProduct& p) {
    each_part([&](Range rows) {
        for (int64_t t = rows.first; t < rows.last; t++) prepare_row(p.pair.in, Norm(), x + t * ld, own.in, t - rows.first);
        gated(p.pair, own.in, 0, rows.last - rows.first, {0, p.pair.up.w.tiles()}, y + rows.first * ld, ld);
    });
    std::swap(x, y);
}

void TowerRun::apply(const TowerLayer& l) {
    each_part([&](Range rows) { project(l, rows); });
    each_part([&](Range rows) {
        attend(l, rows);
        finish(l, rows);
    });
}

void TowerRun::norm_heads(const TowerLayer& l, const Norm& n, float* x) const {
    for (int64_t h = 0; h < l.heads; h++) norm_row(n, x + h * l.head_dim, x + h * l.head_dim);
}

// The rows as a linear with bounds reads them.
void TowerRun::ready(const TowerLayer& l, const Norm& norm, const Input& input, const Bounds& bounds, Range rows) {
    for (int64_t t = rows.first; t < rows.last; t++) {
        float* row = own.in.x + (t - rows.first) * own.in.ldx;
        if (l.norm_after) memcpy(row, x + t * ld, size_t(input.width) * 4);
        else norm_row(norm, x + t * ld, row);
        bounds.enter(row, input.width);
        quantize_row(input, own.in, t - rows.first);
    }
}

// As the first half of `project`, each linear with inputs of its own.
void TowerRun::project_clipped(const TowerLayer& l, Range rows) {
    const int64_t n = rows.last - rows.first;
    Store to;
    to.ld = own.qkv_ld;
    to.out = own.qkv;
    const std::pair<const Linear*, const Bounds*> parts[] = {{&l.q, &l.q_clip}, {&l.k, &l.k_clip}, {&l.v, &l.v_clip}};
    for (const auto& [part, bounds] : parts) {
        ready(l, l.norm1, l.in, *bounds, rows);
        linear(*part, own.in, 0, n, {0, part->w.tiles()}, to);
        for (int64_t t = 0; t < n; t++) bounds->leave(to.out + t * to.ld, part->w.rows);
        to.out += part->w.tiles() * LANES;
    }
    mark(P_QKV);
}

// Queries, keys and values of the rows to where all threads find them.
void TowerRun::project(const TowerLayer& l, Range rows) {
    const int64_t n = rows.last - rows.first;
    for (int64_t t = 0; !l.clipped && t < n; t++) {
        if (in.blank && in.blank[rows.first + t]) {
            memset(own.in.x + t * own.in.ldx, 0, size_t(l.in.width) * 4);
            quantize_row(l.in, own.in, t);
        } else {
            prepare_row(l.in, l.norm_after ? Norm() : l.norm1, x + (rows.first + t) * ld, own.in, t);
        }
    }
    mark(P_PREPARE);
    if (l.clipped) {
        project_clipped(l, rows);
    } else {
        Store to;
        to.ld = own.qkv_ld;
        to.out = own.qkv;
        for (const Linear* part : {&l.q, &l.k, &l.v}) {
            linear(*part, own.in, 0, n, {0, part->w.tiles()}, to);
            to.out += part->w.tiles() * LANES;
        }
        mark(P_QKV);
    }
    const int64_t width = l.q.w.tiles() * LANES;
    for (int64_t t = 0; t < n; t++) {
        float* q = own.qkv + t * own.qkv_ld;
        if (l.by_head) {
            norm_heads(l, l.q_norm, q);
            norm_heads(l, l.k_norm, q + width);
            if (l.v_norm.present()) norm_heads(l, l.v_norm, q + 2 * width);
        } else {
            if (l.q_norm.present()) norm_row(l.q_norm, q, q);
            if (l.k_norm.present()) norm_row(l.k_norm, q + width, q + width);
        }
        if (l.turned) turn(l, rows.first + t, q, q + width);
    }
    const Tower::Division& division = tower.divisions[l.division];
    auto put = [&](Range heads) {
        for (int64_t t = rows.first, end; t < rows.last; t = end) {
            const Tower::Segment& s = division.segments[size_t(division.of_row[size_t(t)])];
            end = std::min({s.first + ((t - s.first) / LANES + 1) * LANES, s.last, rows.last});
            for (int64_t h = heads.first; h < heads.last; h++) {
                put_queries(l, h, s, {t, end}, rows.first);
                put_keys(l, h, s, {t, end}, rows.first);
            }
        }
    };
    if (!l.side) put({0, l.heads});
    for (int64_t h = 0; l.side && h < l.heads; h++) {
        ask_far(l, h, n);
        put({h, h + 1});
    }
    mark(P_ROPE);
}

void TowerRun::turn(const TowerLayer& l, int64_t row, float* q, float* k) const {
    const int64_t half = l.head_dim / 2;
    for (float* of : {q, k})
        for (int64_t h = 0; h < l.heads; h++) ops.rope(of + h * l.head_dim, in.cos + row * half, in.sin + row * half, 2 * half);
}

// n rows of one head, [n][dpad] with zeros behind: where they lie, or copied to `to`.
const float* TowerRun::padded(const TowerLayer& l, const float* from, int64_t n, float* to, int64_t* ld_of) const {
    *ld_of = own.qkv_ld;
    if (l.dpad == l.head_dim) return from;
    *ld_of = l.dpad;
    for (int64_t t = 0; t < n; t++) {
        memcpy(to + t * l.dpad, from + t * own.qkv_ld, size_t(l.head_dim) * 4);
        memset(to + t * l.dpad + l.head_dim, 0, size_t(l.dpad - l.head_dim) * 4);
    }
    return to;
}

uint8_t* TowerRun::query(const TowerLayer& l, int64_t head, int64_t row) const {
    return tower.shared.queries.data() + (head * in.rows + row) * l.dpad * (tower.program.bf16 ? 2 : 4);
}

// The head's queries by all that is learned of distances.
void TowerRun::ask_far(const TowerLayer& l, int64_t head, int64_t rows) const {
    InputBuffer queries;
    queries.x = own.qkv + head * l.head_dim;
    queries.ldx = own.qkv_ld;
    Store to;
    to.ld = own.far_ld;
    to.out = own.far;
    for (const Linear& f : l.far) {
        linear(f, queries, 0, rows, {0, f.w.tiles()}, to);
        to.out += f.w.tiles() * LANES;
    }
}

// Behind each of the queries `to`, what their scores with keys of each line and of each column get: keys say there which line and
// column is theirs. Before scores are scaled.
void TowerRun::put_far(const TowerLayer& l, const Tower::Segment& s, Range rows, int64_t first_row, float* to) const {
    const float factor = std::sqrt(float(l.head_dim));
    for (int64_t t = rows.first; t < rows.last; t++, to += l.dpad) {
        const int64_t at[2] = {(t - s.first) / l.side, (t - s.first) % l.side};
        const float* far = own.far + (t - first_row) * own.far_ld;
        for (int k = 0; k < 2; k++, far += l.far[0].w.tiles() * LANES)
            for (int64_t j = 0; j < l.side; j++) to[l.head_dim + k * l.side + j] = far[at[k] - j + l.side - 1] * factor;
    }
}

void TowerRun::put_queries(const TowerLayer& l, int64_t head, const Tower::Segment& s, Range rows, int64_t first_row) const {
    int64_t stride;
    const float* q = own.qkv + (rows.first - first_row) * own.qkv_ld + head * l.head_dim;
    const float* from = padded(l, q, rows.last - rows.first, own.head, &stride);
    if (l.side) put_far(l, s, rows, first_row, own.head);
    for (int64_t t = rows.first; t < rows.last; t++, from += stride) {
        if (tower.program.bf16) ops.to_bf16(from, reinterpret_cast<uint16_t*>(query(l, head, t)), l.dpad);
        else memcpy(query(l, head, t), from, size_t(l.dpad) * 4);
    }
}

// Keys and values of rows that stand in one cell.
void TowerRun::put_keys(const TowerLayer& l, int64_t head, const Tower::Segment& s, Range rows, int64_t first_row) const {
    const int64_t n = rows.last - rows.first, lane = (rows.first - s.first) % LANES;
    const int64_t at = head * tower.divisions[l.division].cells + s.cell + (rows.first - s.first) / LANES;
    uint8_t *kc = tower.shared.keys.data() + at * l.cell.k_cell, *vc = tower.shared.values.data() + at * l.cell.v_cell;
    int64_t stride;
    const int64_t width = l.q.w.tiles() * LANES;
    const float* k = own.qkv + (rows.first - first_row) * own.qkv_ld + width + head * l.head_dim;
    const float* v = k + width;
    k = padded(l, k, n, own.head, &stride);
    for (int64_t t = 0; l.side && t < n; t++) {
        const int64_t at = rows.first + t - s.first;
        float* key = own.head + t * l.dpad + l.head_dim;
        key[at / l.side] = key[l.side + at % l.side] = 1.0f;
    }
    v = padded(l, v, n, own.head + LANES * l.dpad, &stride);
    if (n == LANES && tower.program.bf16) return ops.kv_cell(l.dpad, k, v, stride, kc, vc);
    const int32_t type = loaded_type(tower.program.bf16);
    for (int64_t t = 0; t < n; t++)
        ops.kv_write(type, l.dpad, k + t * stride, v + t * stride, kc, vc, nullptr, nullptr, lane + t, rows.first + t + 1 == s.last);
    // pairs of lanes behind the last row: whatever an earlier call left there is multiplied by 0
    const int64_t pair = l.cell.v_cell / (LANES / 2), used = (lane + n + 1) / 2;
    if (rows.last == s.last) memset(vc + used * pair, 0, size_t((LANES / 2 - used) * pair));
}

// Attention of the rows, each to its segment, into own.mid.
void TowerRun::attend(const TowerLayer& l, Range rows) {
    const Tower::Division& division = tower.divisions[l.division];
    for (int64_t first = rows.first; first < rows.last;) {
        const Tower::Segment& s = division.segments[size_t(division.of_row[size_t(first)])];
        const int64_t last = std::min(first < s.real ? s.real : s.last, rows.last);
        for (int64_t h = 0; h < l.heads; h++)
            for (int64_t t = first; t < last; t += QUERY_ROWS)
                attend_block(l, s, h, {t, std::min(t + QUERY_ROWS, last)}, own.mid.x + (t - rows.first) * own.mid.ldx + h * l.head_dim);
        first = last;
    }
    mark(P_ATTENTION);
}

// Rows of one segment and one head to what they see of it, tile after tile.
void TowerRun::attend_block(const TowerLayer& l, const Tower::Segment& s, int64_t head, Range block, float* out) {
    const int64_t n = block.last - block.first, length = (block.first < s.real ? s.last : s.real) - s.first;
    const int64_t first = head * tower.divisions[l.division].cells + s.cell, cells = (s.last - s.first + LANES - 1) / LANES;
    AttnParams params{l.dpad, l.vpad, l.scale, 0.0f, loaded_type(tower.program.bf16)};
    for (int64_t tile = 0; tile * KV_TILE < length; tile++) {
        KvTile kv;
        for (int64_t c = 0; c < KV_CELLS; c++) {
            const int64_t at = first + std::min(tile * KV_CELLS + c, cells - 1);
            kv.k[c] = tower.shared.keys.data() + at * l.cell.k_cell;
            kv.v[c] = tower.shared.values.data() + at * l.cell.v_cell;
        }
        for (int64_t r = 0; r < n; r++) {
            own.lo[r] = 0;
            own.hi[r] = int32_t(std::min(KV_TILE, length - tile * KV_TILE));
        }
        ops.attn_tile(params, kv, query(l, head, block.first), n, own.lo, own.hi, tile ? own.part : own.running, own.scores);
        if (tile) ops.attn_merge(l.vpad, n, own.running, own.part);
    }
    const AttnState& a = own.running;
    for (int64_t r = 0; r < n; r++, out += own.mid.ldx) {
        float* to = l.vpad == l.head_dim ? out : own.head;
        ops.attn_finish(l.vpad, a.m[r], a.l[r], a.acc + r * l.vpad, nullptr, to);
        if (to != out) memcpy(out, to, size_t(l.head_dim) * 4);
    }
}

// The linear that ends a half of the layer, from a thread's rows into the residual: normed and scaled where there is a norm, a scale.
void TowerRun::add(const Linear& l, const InputBuffer& from, const Norm& norm, const Vector& scale, const Bounds* bounds, Range rows) {
    const int64_t n = rows.last - rows.first;
    Store to;
    const bool plain = !scale && !norm.present() && !bounds;
    to.add = plain;
    to.out = to.add ? x + rows.first * ld : own.tmp;
    to.ld = to.add ? ld : own.tmp_ld;
    linear(l, from, 0, n, {0, l.w.tiles()}, to);
    for (int64_t t = 0; !plain && t < n; t++) {
        float* row = own.tmp + t * own.tmp_ld;
        if (bounds) bounds->leave(row, l.w.rows);
        if (norm.present()) norm_row(norm, row, row);
        if (scale) ops.multiply(row, scale.data, l.w.rows, -1);
        ops.add_scaled(x + (rows.first + t) * ld, row, 1.0f, l.w.rows);
    }
}

// As `gated` of the MLP, each linear with inputs of its own.
void TowerRun::gated_clipped(const TowerLayer& l, Range rows) {
    const int64_t n = rows.last - rows.first, inner = l.mlp.up.w.rows;
    auto make = [&](const Linear& part, const Bounds& bounds, float* out, int64_t out_ld) {
        ready(l, l.norm2, l.mlp.in, bounds, rows);
        Store to;
        to.ld = out_ld;
        to.out = out;
        linear(part, own.in, 0, n, {0, part.w.tiles()}, to);
        for (int64_t t = 0; t < n; t++) bounds.leave(out + t * out_ld, inner);
    };
    make(l.mlp.gate, l.gate_clip, own.gate, own.gate_ld);
    make(l.mlp.up, l.up_clip, own.mid.x, own.mid.ldx);
    for (int64_t t = 0; t < n; t++) {
        float* row = own.mid.x + t * own.mid.ldx;
        ops.multiply(row, own.gate + t * own.gate_ld, inner, l.mlp.activation);
        l.down_clip.enter(row, inner);
    }
}

void TowerRun::finish(const TowerLayer& l, Range rows) {
    const int64_t n = rows.last - rows.first;
    for (int64_t t = 0; t < n; t++) {
        if (l.clipped) l.o_clip.enter(own.mid.x + t * own.mid.ldx, l.out.width);
        quantize_row(l.out, own.mid, t);
    }
    add(l.o, own.mid, l.norm_after ? l.norm1 : l.after1, l.scale1, l.clipped ? &l.o_clip : nullptr, rows);
    mark(P_O);
    if (l.clipped) {
        gated_clipped(l, rows);
    } else {
        for (int64_t t = 0; t < n; t++) prepare_row(l.mlp.in, l.norm_after ? Norm() : l.norm2, x + (rows.first + t) * ld, own.in, t);
        mark(P_PREPARE);
        gated(l.mlp, own.in, 0, n, {0, l.mlp.up.w.tiles()}, own.mid.x, own.mid.ldx);
    }
    mark(P_GATED);
    for (int64_t t = 0; t < n; t++) quantize_row(l.mlp.mid, own.mid, t);
    mark(P_PREPARE);
    add(l.mlp.down, own.mid, l.norm_after ? l.norm2 : l.after2, l.scale2, l.clipped ? &l.down_clip : nullptr, rows);
    mark(P_DOWN);
}

}  // namespace tk
