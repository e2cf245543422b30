#include "row_work.h"

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
    for (size_t k = 0; k < in.keys.size(); k++) {
        const QuantKey& key = in.keys[k];
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

void RowWork::linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t count, Range tiles, Store to) const {
    if (tiles.first >= tiles.last || count <= 0) return;
    to.bias = l.bias.data;
    ops.linear(l.w, rows_of(in, l, first_row), count, tiles.first, tiles.last, to, scratch_);
}

Matrix part_of(Matrix m, Range tiles) {
    if (m.data) m.data += tiles.first * m.tile_bytes();
    m.rows = std::min(m.rows, tiles.last * LANES) - tiles.first * LANES;
    return m;
}

void RowWork::gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out,
                    int64_t ld) const {
    if (tiles.first >= tiles.last || rows <= 0) return;
    const int64_t at = tiles.first * LANES, n = tiles.last - tiles.first;
    const Linear& first_of = m.gate.present() ? m.gate : m.up;
    Store to;
    to.out = out;
    to.ld = ld;
    to.activation = m.activation;
    to.gate_scale = m.gate_scale;
    to.bias = first_of.bias.data ? first_of.bias.data + at : nullptr;
    to.bias_up = m.up.bias.data ? m.up.bias.data + at : nullptr;
    const Rows x = rows_of(in, m.up, first_row);
    const Matrix up = part_of(m.up.w, tiles);
    if (m.gate.present()) ops.gated(part_of(m.gate.w, tiles), up, x, rows, 0, n, to, scratch_);
    else ops.linear(up, x, rows, 0, n, to, scratch_);
}

}  // namespace tk
