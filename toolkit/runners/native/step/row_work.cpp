#include "step/row_work.h"

#include <algorithm>
#include <cstring>

namespace tk {

void RowWork::norm_row(const Norm& n, const float* from, float* out, int64_t head) const {
    const int64_t at = n.sets > 1 ? head * n.size : 0;
    if (!n.layer) ops.rms_norm(from, n.weight.data + at, n.size, n.eps, out);
    else ops.layer_norm(from, n.weight.data + at, n.bias ? n.bias.data + at : nullptr, n.size, n.eps, out);
}

void RowWork::prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const {
    float* x = to.x + t * to.ldx;
    if (norm.present()) norm_row(norm, from, x);
    else if (from != x) memcpy(x, from, size_t(in.width) * 4);
    if (in.turned) ops.hadamard(x, in.width);
    quantize_row(in, to, t);
}

void RowWork::quantize_row(const Input& in, InputBuffer& to, int64_t t) const {
    if (in.norm.present()) norm_row(in.norm, to.x + t * to.ldx, to.x + t * to.ldx);
    for (size_t k = 0; k < in.keys.size(); k++) {
        const QuantKey& key = in.keys[k];
        ops.quantize(to.x + t * to.ldx, key.perm, key.group, 0, in.width / key.group, to.q[k] + t * to.ldq,
                     to.scale[k] + t * to.lds, to.sum[k] + t * to.lds);
    }
    for (size_t i = 0; i < in.more.size() && kinds_.seen && kinds_.seen[t]; i++) {
        const QuantKey& key = in.more[i];
        const size_t k = MAX_KEYS - 1 - i;
        ops.quantize(to.x + t * to.ldx, key.perm, key.group, 0, in.width / key.group, to.q[k] + t * to.ldq,
                     to.scale[k] + t * to.lds, to.sum[k] + t * to.lds);
    }
}

Rows RowWork::rows_of(const InputBuffer& in, const Linear& l, int64_t first_row) const {
    Rows rows = in.rows(l, first_row);
    rows.round = round_;
    rows.loose = loose_;
    return rows;
}

void RowWork::one(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t count, Range tiles, Store to) const {
    to.bias = l.bias.data;
    ops.linear(l.w, rows_of(in, l, first_row), count, tiles.first, tiles.last, to, scratch_);
}

void RowWork::linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t count, Range tiles, Store to) const {
    if (tiles.first >= tiles.last || count <= 0) return;
    if (adapted(l, first_row, count)) return changed(l, in, first_row, count, tiles, to);
    if (!splits(l)) return one(l, in, first_row, count, tiles, to);
    each_run(first_row, count, [&](int64_t row, int64_t n, bool seen) {
        Store part = to;
        part.out += (row - first_row) * to.ld;
        if (!seen) one(l, in, row, n, tiles, part);
        else if (l.seen->low()) with_low(l, in, row, n, tiles, part);
        else one(l.seen->whole, in, row, n, tiles, part);
    });
}

// a(x) of the rows, which lie at their places. A thread that comes to other tiles of the same linear finds them made.
InputBuffer RowWork::lowered(const Routed& r, const InputBuffer& in, int64_t first_row, int64_t rows, int which) const {
    LowScratch::Rows& made = kinds_.low->made[which];
    const int64_t ld = kinds_.low->ld;
    if (made.of != &r || made.rows.first != first_row || made.rows.last != first_row + rows) {
        Store to;
        to.out = made.x + first_row * ld;
        to.ld = ld;
        one(r.a, in, first_row, rows, {0, r.a.w.tiles()}, to);
        made.of = &r;
        made.rows = {first_row, first_row + rows};
    }
    InputBuffer low;
    low.x = made.x;
    low.ldx = ld;
    return low;
}

// A linear with what is added for tokens of pictures.
void RowWork::with_low(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to, int which) const {
    one(l, in, first_row, rows, tiles, to);
    to.alpha = (to.add ? to.alpha : 1.0f) * l.seen->scale;
    to.add = 1;
    one(l.seen->b, lowered(*l.seen, in, first_row, rows, which), first_row, rows, tiles, to);
}

Matrix part_of(Matrix m, Range tiles) {
    if (m.data) m.data += tiles.first * m.tile_bytes();
    m.rows = std::min(m.rows, tiles.last * LANES) - tiles.first * LANES;
    return m;
}

void RowWork::pair(const Linear& gate, const Linear& up, const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles,
                   float* out, int64_t ld) const {
    const int64_t at = tiles.first * LANES, n = tiles.last - tiles.first;
    const Linear& first_of = gate.present() ? gate : up;
    Store to;
    to.out = out;
    to.ld = ld;
    to.activation = m.activation;
    to.gate_scale = m.gate_scale;
    to.bias = first_of.bias.data ? first_of.bias.data + at : nullptr;
    to.bias_up = up.bias.data ? up.bias.data + at : nullptr;
    const Rows x = rows_of(in, up, first_row);
    const Matrix part = part_of(up.w, tiles);
    if (gate.present()) ops.gated(part_of(gate.w, tiles), part, x, rows, 0, n, to, scratch_);
    else ops.linear(part, x, rows, 0, n, to, scratch_);
    if (m.curve[0]) for (int64_t i = 0; i < rows; i++) bend(m, out + i * ld, n * LANES);
}

// As `pair`, each half with what is added to it, some tiles at a time.
void RowWork::pair_with_low(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const {
    constexpr int64_t STEP = STRIPE / LANES;
    for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += STEP) {
        const Range part{t0, std::min(t0 + STEP, tiles.last)};
        const int64_t width = std::min(m.up.w.rows, part.last * LANES) - t0 * LANES, back = t0 * LANES;
        Store gate, up;
        gate.out = kinds_.low->gate - back;  // products lie where the matrix has their rows
        gate.ld = STRIPE;
        up.out = out - tiles.first * LANES;
        up.ld = ld;
        with_low(m.gate, in, first_row, rows, part, gate, 1);
        with_low(m.up, in, first_row, rows, part, up);
        for (int64_t i = 0; i < rows; i++) ops.multiply(up.out + i * ld + back, kinds_.low->gate + i * STRIPE, width, m.activation);
    }
}

void RowWork::gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out,
                    int64_t ld) const {
    if (tiles.first >= tiles.last || rows <= 0) return;
    if (adapted(m.up, first_row, rows) || adapted(m.gate, first_row, rows)) return gated_changed(m, in, first_row, rows, tiles, out, ld);
    if (!splits(m.up)) return pair(m.gate, m.up, m, in, first_row, rows, tiles, out, ld);
    each_run(first_row, rows, [&](int64_t row, int64_t n, bool seen) {
        float* to = out + (row - first_row) * ld;
        if (!seen) pair(m.gate, m.up, m, in, row, n, tiles, to, ld);
        else if (m.up.seen->low()) pair_with_low(m, in, row, n, tiles, to, ld);
        else pair(m.gate.present() ? m.gate.seen->whole : m.gate, m.up.seen->whole, m, in, row, n, tiles, to, ld);
    });
}

}  // namespace tk
