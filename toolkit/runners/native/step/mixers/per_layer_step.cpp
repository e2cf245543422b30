// Embeddings of each layer's own: what all layers are given of a token, and the sublayer that reads it.
#include <algorithm>
#include <cstring>

#include "step/run.h"

namespace tk {

// Of one token, whose projection stands in its row.
void Run::give_row(int64_t t) {
    const PerLayerTable& table = p.per_layer;
    const int64_t columns = table.columns(), size = table.norm.size, at = first + t;
    const int32_t prev = in.from_previous[at];
    int64_t id = prev >= 0 ? model.previous[size_t(prev)] : in.token_ids[at];
    for (int64_t i = 0; i < in.embeds_size; i++)
        if (in.embed_index[i] == at) id = table.pad;
    float *row = w.given + t * w.given_ld, *found = own.stripe;
    ops.matrix_row(table.table.w, id, table.embed_scale, found);
    if (table.table.turned) ops.hadamard(found, columns);
    std::for_each(row, row + columns, [&](float& v) { v *= table.projection_scale; });
    for (int64_t c = 0; c < columns; c += size) norm_row(table.norm, row + c, row + c);
    for (int64_t c = 0; c < columns; c++) row[c] = (row[c] + found[c]) * table.scale;
}

void Run::give() {
    const PerLayerTable& table = p.per_layer;
    const Linear& l = table.projection;
    Prepared x = prepare(table.in, Norm(), w.x, w.hidden_ld, count);
    share_tiles(P_OTHER, l.w.tiles(), pair_unit(), l.w.bytes(), [&](Range tiles) {
        Store to;
        to.out = w.given;
        to.ld = w.given_ld;
        linear(l, ready(x, table.in, Norm(), w.x, w.hidden_ld, count), 0, count, tiles, to);
    });
    share(P_OTHER, count, 1, [&](Range r) {
        for (int64_t t = r.first; t < r.last; t++) give_row(t);
    });
}

void Run::give_rows(Range rows) {
    const PerLayerTable& table = p.per_layer;
    for (int64_t t = rows.first; t < rows.last; t++) prepare_row(table.in, Norm(), w.x + t * w.hidden_ld, w.in, t);
    Store to;
    to.out = w.given + rows.first * w.given_ld;
    to.ld = w.given_ld;
    linear(table.projection, w.in, rows.first, rows.last - rows.first, {0, table.projection.w.tiles()}, to);
    for (int64_t t = rows.first; t < rows.last; t++) give_row(t);
}

// Columns of tiles `tiles` of the middle rows.
void Run::gate_rows(const PerLayer& m, const InputBuffer& from, Range rows, Range tiles) {
    const int64_t step = STRIPE / LANES;
    for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += step) {
        const Range some{t0, std::min(t0 + step, tiles.last)};
        const int64_t at = some.first * LANES, n = std::min(some.last * LANES, m.mid.width) - at;
        Store to;
        to.out = own.stripe - some.first * LANES;  // as if all tiles were there
        to.ld = (some.last - some.first) * LANES;
        linear(m.gate, from, rows.first, rows.last - rows.first, some, to);
        for (int64_t t = rows.first; t < rows.last; t++) {
            float* row = w.mid.x + t * w.mid.ldx + at;
            std::memcpy(row, w.given + t * w.given_ld + m.at + at, size_t(n) * 4);
            ops.multiply(row, own.stripe + (t - rows.first) * to.ld, n, m.activation);
            std::fill(row + n, row + to.ld, 0.0f);
        }
    }
}

void Run::mix(const Sublayer& s, const PerLayer& m) {
    const float* from = source(s);
    save(s);
    Prepared x = prepare(m.in, s.pre, from, w.hidden_ld, count);
    share_own(P_GATED, m.gate.own, pair_unit(), m.gate.w.tile_bytes(), [&](Range tiles) {
        gate_rows(m, ready(x, m.in, s.pre, from, w.hidden_ld, count), {0, count}, tiles);
    });
    gather_mid(m.down, m.mid, false, in_tiles(m.gate.own, m.mid.width));
    down(s, m.down, m.mid, false, P_DOWN);
}

void Run::per_layer_rows(const Sublayer& s, const PerLayer& m, Range rows) {
    prepare_rows(s, m.in, rows);
    gate_rows(m, w.in, rows, {0, m.gate.w.tiles()});
    for (int64_t t = rows.first; t < rows.last; t++) quantize_row(m.mid, w.mid, t);
    mark(P_GATED);
    down_rows(s, m.down, rows, P_DOWN);
}

}  // namespace tk
