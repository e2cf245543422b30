// The attention sublayer of a step: projections, rope, writing the cache, attending, output projection.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "run.h"

namespace tk {

void Run::project(const Sublayer& s) {
    const Attention& a = s.attention;
    Prepared x = prepare(a.in, s.pre, w.x, w.hidden_ld, count);
    const Linear* const parts[3] = {&a.q, &a.k, &a.v};
    int64_t total = 0;
    for (const Linear* l : parts) total += l->w.tiles();
    share(P_QKV, total, pair_unit(), [&](Range r) {
        const InputBuffer& rows = ready(x, a.in, s.pre, w.x, w.hidden_ld, count);
        int64_t start = 0;
        for (const Linear* l : parts) {
            const int64_t n = l->w.tiles();
            Store to;
            to.ld = w.qkv_ld;
            to.out = w.qkv + start * LANES;
            const Range tiles{std::clamp<int64_t>(r.first - start, 0, n), std::clamp<int64_t>(r.last - start, 0, n)};
            linear(*l, rows, 0, count, tiles, to);
            start += n;
        }
    });
}

const uint8_t* Run::query(const Attention& a, int64_t head, int64_t t) const {
    return w.queries + (head * CHUNK + t) * a.per_kv * a.dpad * (p.bf16 ? 2 : 4);
}

// One token's part of one kv head: its queries and key normed and turned, key and value written to the cache.
void Run::turn_and_store(const Attention& a, int64_t t, int64_t head) {
    const int64_t flat = first + t, seq = seq_of[size_t(t)], hd = a.head_dim;
    const float* q = w.qkv + t * w.qkv_ld;
    const float* k = q + a.q.w.tiles() * LANES;
    const float* v = k + a.k.w.tiles() * LANES;
    float *row = own.head_row, *value = own.head_row + a.dpad;
    std::memset(row, 0, size_t(a.dpad) * 8);
    const int64_t half = a.rope >= 0 ? p.ropes[size_t(a.rope)].rotary / 2 : 0;
    auto load = [&](const float* from, const Norm& norm) {
        if (norm.present()) ops.rms_norm(from, norm.weight.data, hd, norm.eps, row);
        else std::memcpy(row, from, size_t(hd) * 4);
        if (half) ops.rope(row, w.cos[size_t(a.rope)] + t * half, w.sin[size_t(a.rope)] + t * half, 2 * half);
        if (p.kv_type == KV_INT4) ops.hadamard(row, hd);
    };
    uint8_t* to = const_cast<uint8_t*>(query(a, head, t));
    for (int64_t i = 0; i < a.per_kv; i++, to += a.dpad * (p.bf16 ? 2 : 4)) {
        load(q + (head * a.per_kv + i) * hd, a.q_norm);
        if (p.bf16) ops.to_bf16(row, reinterpret_cast<uint16_t*>(to), a.dpad);
        else std::memcpy(to, row, size_t(a.dpad) * 4);
    }
    load(k + head * hd, a.k_norm);
    std::memcpy(value, v + head * hd, size_t(hd) * 4);
    const int64_t slot = in.slot_mapping[a.group][flat], cells = p.block_size / LANES;
    const int64_t cell = slot % p.block_size / LANES, lane = slot % LANES;
    const int32_t last = flat + 1 == in.cu_seqlens[seq + 1] || t + 1 == count;
    const Group& g = p.groups[size_t(a.group)];
    uint8_t* base = g.data + slot / p.block_size * g.block_bytes + a.layer_offset + head * a.head_bytes;
    uint8_t* vc = base + cells * a.cell.k_cell;
    uint8_t* kp = vc + cells * a.cell.v_cell;
    uint8_t* vp = kp + cells * a.cell.k_params;
    ops.kv_write(p.kv_type, a.dpad, row, value, base + cell * a.cell.k_cell, vc + cell * a.cell.v_cell,
                 kp + cell * a.cell.k_params, vp + cell * a.cell.v_params, lane, last);
}

// Tiles that tokens [t0, t1) of a sequence see.
Range Run::tiles_of(const Attention& a, int64_t seq, int64_t t0, int64_t t1) const {
    const int64_t from = a.window ? std::max<int64_t>(0, position_of(seq, t0) - a.window + 1) : 0;
    return {from / KV_TILE, position_of(seq, t1 - 1) / KV_TILE + 1};
}

// Pointers to a tile's cells in compute form; only cells with tokens in `tokens` (absolute) are looked up.
void Run::load_tile(const Attention& a, int64_t seq, int64_t head, int64_t tile, Range tokens, KvTile* to) {
    const Group& g = p.groups[size_t(a.group)];
    const int32_t* table = in.block_tables[a.group] + seq * in.table_width[a.group];
    const int64_t cells = p.block_size / LANES, element = p.bf16 ? 2 : 4;
    const bool direct = p.bf16 ? p.kv_type == KV_BF16 : p.kv_type == KV_F32;
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES;
        if (at >= tokens.last || at + LANES <= tokens.first) {
            to->k[c] = to->v[c] = w.dummy_cell;
            continue;
        }
        const int64_t cell = at % p.block_size / LANES;
        const uint8_t* base = g.data + table[at / p.block_size] * g.block_bytes + a.layer_offset + head * a.head_bytes;
        const uint8_t* kc = base + cell * a.cell.k_cell;
        const uint8_t* vc = base + cells * a.cell.k_cell + cell * a.cell.v_cell;
        to->k[c] = kc;
        to->v[c] = vc;
        if (direct) continue;
        const uint8_t* kp = base + cells * (a.cell.k_cell + a.cell.v_cell) + cell * a.cell.k_params;
        const uint8_t* vp = base + cells * (a.cell.k_cell + a.cell.v_cell + a.cell.k_params) + cell * a.cell.v_params;
        uint8_t* k = own.attention.keys + c * LANES * a.dpad * element;
        uint8_t* v = own.attention.values + c * LANES * a.dpad * element;
        ops.kv_load(p.kv_type, a.dpad, kc, vc, kp, vp, p.bf16, std::min(LANES, tokens.last - at), k, v);
        to->k[c] = k;
        to->v[c] = v;
    }
}

// Tokens [t0, t1) of one sequence and one kv head over one tile, into a fresh state.
void Run::attend_tile(const Attention& a, int64_t seq, int64_t head, int64_t t0, int64_t t1, int64_t tile,
                      const AttnState& to) {
    AttnScratch& s = own.attention;
    const int64_t base = tile * KV_TILE, end = position_of(seq, t1 - 1) + 1;
    const int64_t from = a.window ? std::max<int64_t>(0, position_of(seq, t0) - a.window + 1) : 0;
    KvTile kv;
    load_tile(a, seq, head, tile, {from, end}, &kv);
    for (int64_t t = t0; t < t1; t++) {
        const int64_t pos = position_of(seq, t), low = a.window ? pos - a.window + 1 - base : 0;
        for (int64_t i = 0; i < a.per_kv; i++) {
            const int64_t r = (t - t0) * a.per_kv + i;
            s.lo[r] = int32_t(std::clamp<int64_t>(low, 0, KV_TILE));
            s.hi[r] = int32_t(std::clamp<int64_t>(pos + 1 - base, 0, KV_TILE));
        }
    }
    const AttnParams params{a.dpad, a.scale, a.softcap, p.bf16};
    ops.attn_tile(params, kv, query(a, head, t0 - first), (t1 - t0) * a.per_kv, s.lo, s.hi, to, s.scores);
}

// State rows of one token and kv head, from `row` on, to their places in the token's output row.
void Run::finish_rows(const Attention& a, int64_t head, const AttnState& s, int64_t row, float* to) {
    for (int64_t i = 0; i < a.per_kv; i++) {
        const int64_t r = row + i, h = head * a.per_kv + i;
        const float* sink = a.sinks ? a.sinks.data + h : nullptr;
        if (a.dpad == a.head_dim) {
            ops.attn_finish(a.dpad, s.m[r], s.l[r], s.acc + r * a.dpad, sink, to + h * a.head_dim);
        } else {
            ops.attn_finish(a.dpad, s.m[r], s.l[r], s.acc + r * a.dpad, sink, own.attention.row);
            std::memcpy(to + h * a.head_dim, own.attention.row, size_t(a.head_dim) * 4);
        }
    }
}

void Run::attend_block(const Attention& a, const QueryBlock& b, int64_t head) {
    AttnScratch& s = own.attention;
    const int64_t rows = (b.last - b.first) * a.per_kv;
    const Range tiles = tiles_of(a, b.seq, b.first, b.last);
    attend_tile(a, b.seq, head, b.first, b.last, tiles.first, s.running);
    for (int64_t tile = tiles.first + 1; tile < tiles.last; tile++) {
        attend_tile(a, b.seq, head, b.first, b.last, tile, s.part);
        ops.attn_merge(a.dpad, rows, s.running, s.part);
    }
    for (int64_t t = b.first; t < b.last; t++)
        finish_rows(a, head, s.running, (t - b.first) * a.per_kv, w.mid.x + (t - first) * w.mid.ldx);
}

// Few tokens: the tiles of every token and head are items of their own, merged afterwards in the same order.
void Run::attend_split(const Attention& a) {
    int64_t items = 0;
    Range tiles[SMALL];
    for (int64_t t = 0; t < count; t++) {
        tiles[t] = tiles_of(a, seq_of[size_t(t)], first + t, first + t + 1);
        items += (tiles[t].last - tiles[t].first) * a.kv_heads;
    }
    const int64_t size = a.per_kv * (a.dpad + 2);
    float* partial = w.partial_pages.at<float>(0);
    share(P_ATTENTION, items, 1, [&](Range r) {
        for (int64_t item = r.first; item < r.last; item++) {
            int64_t t = 0, i = item;
            for (; i >= (tiles[t].last - tiles[t].first) * a.kv_heads; t++) i -= (tiles[t].last - tiles[t].first) * a.kv_heads;
            const int64_t n = tiles[t].last - tiles[t].first;
            float* s = partial + item * size;
            attend_tile(a, seq_of[size_t(t)], i / n, first + t, first + t + 1, tiles[t].first + i % n,
                        {s, s + a.per_kv, s + 2 * a.per_kv});
        }
    });
}

void Run::merge_split(const Attention& a) {
    const int64_t size = a.per_kv * (a.dpad + 2);
    float* partial = w.partial_pages.at<float>(0);
    AttnState& into = own.attention.running;
    for (int64_t t = 0; t < count; t++) {
        const Range tiles = tiles_of(a, seq_of[size_t(t)], first + t, first + t + 1);
        for (int64_t h = 0; h < a.kv_heads; h++) {
            for (int64_t tile = tiles.first; tile < tiles.last; tile++, partial += size) {
                const AttnState part{partial, partial + a.per_kv, partial + 2 * a.per_kv};
                if (tile == tiles.first) std::fill(into.m, into.m + a.per_kv, -INFINITY);
                ops.attn_merge(a.dpad, a.per_kv, into, part);
            }
            finish_rows(a, h, into, 0, own.mid.x + t * own.mid.ldx);
        }
        quantize_row(a.out, own.mid, t);
    }
}

void Run::attention(const Sublayer& s) {
    const Attention& a = s.attention;
    project(s);
    share(P_ROPE, count * a.kv_heads, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) turn_and_store(a, i / a.kv_heads, i % a.kv_heads);
    });
    if (count <= SMALL) {
        attend_split(a);
        bool merged = false;
        const Store to = residual(s);
        share(P_O, a.o.w.tiles(), 1, [&](Range tiles) {
            if (!merged) merge_split(a);
            merged = true;
            linear(a.o, own.mid, 0, count, tiles, to);
        });
        add_post(s);
        return;
    }
    const int64_t items = int64_t(blocks.size()) * a.kv_heads;
    share(P_ATTENTION, items, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) attend_block(a, blocks[size_t(i / a.kv_heads)], i % a.kv_heads);
    }, items);
    down(s, a.o, a.out, false, P_O);
}

}  // namespace tk
