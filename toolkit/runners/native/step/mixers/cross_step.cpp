// Layers that look at pictures: what is kept of a picture, and a step's tokens that attend to it. Pictures' rows are cut in tiles, each
// picture from its first row on; a token takes them in order, so its bits depend on nothing else in the batch.
#include <algorithm>
#include <cstring>

#include "step/run.h"

namespace tk {

// Keys and values of rows of a picture, the chunk's, into what is kept of it from row `from` on.
void Run::remember(const Kept& kept, int64_t from) {
    for (const Sublayer& s : p.sublayers) {
        const Cross* c = std::get_if<Cross>(&s.mixer);
        if (!c) continue;
        const Attention& core = c->core;
        const CellLayout& cell = core.cell;
        project(c->rows, Norm(), in.picture_rows + first * p.hidden, p.hidden, w.qkv, {&c->k, &c->v});
        share(P_ROPE, count * core.kv_heads, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) {
                const int64_t t = i / core.kv_heads, head = i % core.kv_heads, row = from + t;
                const float* k = w.qkv + t * w.qkv_ld + (core.first_kv + head) * core.head_dim;
                float *key = own.head_row, *value = own.head_row + core.dpad;
                std::memset(key, 0, size_t(core.dpad) * 8);
                norm_row(c->k_norm, k, key);
                std::memcpy(value, k + c->k.w.tiles() * LANES, size_t(core.head_dim) * 4);
                uint8_t* keys = kept.pages.data() + (c->at + head * cell.bytes()) * kept.cells;
                uint8_t* values = keys + cell.k_cell * kept.cells;
                ops.kv_write(loaded_type(p.bf16), core.dpad, key, value, keys + row / LANES * cell.k_cell,
                             values + row / LANES * cell.v_cell, nullptr, nullptr, row % LANES, 0);
            }
        });
    }
}

// The queries of one token and kv head.
void Run::ask(const Cross& c, int64_t t, int64_t head) {
    const Attention& core = c.core;
    uint8_t* to = const_cast<uint8_t*>(query(core, head, t));
    std::memset(own.head_row, 0, size_t(core.dpad) * 4);
    for (int64_t i = 0; i < core.per_kv; i++, to += core.dpad * (p.bf16 ? 2 : 4)) {
        norm_row(c.q_norm, w.qkv + t * w.qkv_ld + (core.first_head + head * core.per_kv + i) * core.head_dim, own.head_row);
        put_query(core, own.head_row, to);
    }
}

KvTile Run::kept_tile(const Cross& c, const Kept& kept, int64_t head, int64_t tile) const {
    const CellLayout& cell = c.core.cell;
    const uint8_t* keys = kept.pages.data() + (c.at + head * cell.bytes()) * kept.cells;
    KvTile to;
    for (int64_t i = 0; i < KV_CELLS; i++) {
        const int64_t at = tile * KV_CELLS + i;
        to.k[i] = at < kept.cells ? keys + at * cell.k_cell : w.dummy_cell;
        to.v[i] = at < kept.cells ? keys + kept.cells * cell.k_cell + at * cell.v_cell : w.dummy_cell;
    }
    return to;
}

// Tokens of one view and one kv head: all pictures that they see, tile after tile.
void Run::look(const Cross& c, const QueryBlock& block, int64_t head) {
    const Attention& core = c.core;
    AttnScratch& s = own.attention;
    const int64_t rows = (block.last - block.first) * core.per_kv;
    const AttnParams params{core.dpad, core.vpad, core.scale, 0, loaded_type(p.bf16)};
    bool begun = false;
    for (int32_t i = in.view_ptr[block.seq]; i < in.view_ptr[block.seq + 1]; i++) {
        const Kept& kept = model.pictures.at(in.seen[i]);
        KvTile kv = kept_tile(c, kept, head, 0), next;
        for (int64_t base = 0; base < kept.rows; base += KV_TILE) {
            const bool more = base + KV_TILE < kept.rows;
            if (more) next = kept_tile(c, kept, head, base / KV_TILE + 1);
            kv.next = more ? &next : nullptr;
            std::fill(s.lo, s.lo + rows, 0);
            std::fill(s.hi, s.hi + rows, int32_t(std::min(KV_TILE, kept.rows - base)));
            ops.attn_tile(params, kv, query(core, head, block.first - first), rows, s.lo, s.hi, begun ? s.part : s.running, s.scores);
            if (begun) ops.attn_merge(core.vpad, rows, s.running, s.part);
            begun = true;
            if (more) kv = next;
        }
    }
    for (int64_t t = block.first; t < block.last; t++)
        finish_rows(core, head, t - first, s.running, (t - block.first) * core.per_kv, result(core, t - first));
}

void Run::mix(const Sublayer& s, const Cross& c) {
    const Attention& core = c.core;
    const int64_t heads = core.kv_heads, n = int64_t(looks.size()) * heads;
    save(s);
    project(c.in, s.pre, source(s), w.hidden_ld, w.qkv, {&c.q});
    share(P_ROPE, count * heads, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++)
            if (view_of[size_t(i / heads)] >= 0) ask(c, i / heads, i % heads);
    });
    share(P_ATTENTION, n, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) look(c, looks[size_t(i / heads)], i % heads);
    }, n);
    gather_mid(c.o, c.out, core.codes, {core.first_head * core.head_dim, (core.first_head + core.heads) * core.head_dim});
    down(s, c.o, c.out, codes(c.o, core.codes), P_O);
}

// The same for a part of the chunk that a thread takes alone.
void Run::cross_rows(const Sublayer& s, const Cross& c, const RowPart& part) {
    const Range rows = part.rows;
    prepare_rows(s, c.in, rows);
    Store to;
    to.ld = w.qkv_ld;
    to.out = w.qkv + rows.first * w.qkv_ld;
    linear(c.q, w.in, rows.first, rows.last - rows.first, {0, c.q.w.tiles()}, to);
    mark(P_QKV);
    for (int64_t head = 0; head < c.core.kv_heads; head++) {
        for (int64_t t = rows.first; t < rows.last; t++)
            if (view_of[size_t(t)] >= 0) ask(c, t, head);
        for (int64_t i = part.first_look; i < part.last_look; i++) look(c, looks[size_t(i)], head);
    }
    mark(P_ATTENTION);
    for (int64_t t = rows.first; t < rows.last; t++) quantize_row(c.out, w.mid, t);
    down_rows(s, c.o, rows, P_O);
}

}  // namespace tk
