// Latent attention, expanded: a sequence that brings many tokens has the keys and values of its heads made from the cached rows,
// tile by tile and head by head, and attends to them as to any others.
#include <algorithm>
#include <cstring>

#include "step/run.h"

namespace tk {

// Whether a sequence brings so many tokens that this costs less than absorbing kv_b (latent_step.cpp).
bool Run::expands(const Latent& a, int64_t seq) const {
    const int64_t begin = std::max<int64_t>(in.cu_seqlens[seq], first), end = std::min<int64_t>(in.cu_seqlens[seq + 1], first + count);
    return count > SMALL && end - begin > a.break_even;
}

// The cached rows of a tile as floats [KV_TILE][dpad], those of tokens before `length`.
void Run::load_rows(const Attention& core, int64_t seq, int64_t tile, int64_t length, float* out) {
    KvTile kv;
    find_cells(core, seq, 0, tile, {0, length}, &kv);
    const int64_t in_block = p.block_size / LANES;
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES, cell = at % p.block_size / LANES;
        if (at >= length) return;
        const uint8_t* from = static_cast<const uint8_t*>(kv.v[c]);
        const uint8_t* params = from + (in_block - cell) * core.cell.v_cell + cell * core.cell.v_params;
        float* to = out + c * LANES * core.dpad;
        if (core.kv_type == KV_F32) std::memcpy(to, from, size_t(LANES * core.dpad) * 4);
        else ops.kv_load(core.kv_type, core.dpad, nullptr, from, nullptr, params, 0, std::min(LANES, length - at), nullptr, to);
    }
}

// Keys and values of one head for a tile of rows, in cells that the attention kernel reads.
void Run::expand_tile(const Latent& a, const Change* c, int64_t head, int64_t tokens, KvTile* kv) {
    const Attention& core = a.core;
    ExpandScratch& e = own.expand;
    const int64_t row = (a.first_head + head) * (a.nope_dim + a.v_dim), d = a.expanded, part = d * LANES * (p.bf16 ? 2 : 4);
    const Range tiles{row / LANES, (row + a.nope_dim + a.v_dim + LANES - 1) / LANES};
    Rows x;
    x.x = e.rows;
    x.ldx = core.dpad;
    x.round = p.bf16;
    Store to;
    to.out = e.made;
    to.ld = (tiles.last - tiles.first) * LANES;
    ops.linear(part_of(kv_b(a, c).w, tiles), x, tokens, 0, tiles.last - tiles.first, to, own.linear);
    for (int64_t t = 0; c && t < tokens; t++) {
        float* made = e.made + t * to.ld;
        if (c->low()) add_part(*c, e.rows + t * core.dpad, a.kv_rank(), tiles, made);
        if (c->magnitudes) ops.multiply(made + row % LANES, c->magnitudes.data + row, a.nope_dim + a.v_dim, -1);
    }
    float *key = own.head_row, *value = own.head_row + d;
    std::fill(key, value + d, 0.0f);
    for (int64_t t = 0; t < tokens; t++) {
        const float* from = e.made + t * to.ld + row % LANES;
        std::memcpy(key, from, size_t(a.nope_dim) * 4);
        std::memcpy(key + a.nope_dim, e.rows + t * core.dpad + a.kv_rank(), size_t(a.rope_dim) * 4);
        std::memcpy(value, from + a.nope_dim, size_t(a.v_dim) * 4);
        ops.kv_write(loaded_type(p.bf16), d, key, value, e.keys + t / LANES * part, e.values + t / LANES * part, nullptr,
                     nullptr, t % LANES, t + 1 == tokens);
    }
    for (int64_t c = 0; c < KV_CELLS; c++) kv->k[c] = e.keys + c * part, kv->v[c] = e.values + c * part;
}

// One head of the chunk's tokens of one sequence, to their places in the input of o.
void Run::attend_expanded(const Latent& a, int64_t seq, int64_t head) {
    const Attention& core = a.core;
    ExpandScratch& e = own.expand;
    AttnScratch& s = own.attention;
    const int64_t begin = std::max<int64_t>(in.cu_seqlens[seq], first), end = std::min<int64_t>(in.cu_seqlens[seq + 1], first + count);
    const int64_t n = end - begin, d = a.expanded, vpad = pad16(a.v_dim), oldest = position_of(seq, begin), length = oldest + n;
    const int64_t half = p.ropes[size_t(core.rope)].rotary / 2, element = p.bf16 ? 2 : 4;
    const Change* changed_kv_b = change(a.kv_b, begin - first);
    float* row = own.head_row;
    std::fill(row, row + d, 0.0f);
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = begin - first + i;
        std::memcpy(row, w.qkv + t * w.qkv_ld + a.q_at() + (a.first_head + head) * a.qk_dim(), size_t(a.qk_dim()) * 4);
        ops.rope(row + a.nope_dim, w.cos[size_t(core.rope)] + t * half, w.sin[size_t(core.rope)] + t * half, 2 * half);
        if (p.bf16) ops.to_bf16(row, reinterpret_cast<uint16_t*>(e.queries + i * d * element), d);
        else std::memcpy(e.queries + i * d * element, row, size_t(d) * 4);
    }
    const AttnParams params{d, vpad, core.scale, 0, loaded_type(p.bf16)};
    for (int64_t base = 0; base < length; base += KV_TILE) {
        KvTile kv;
        load_rows(core, seq, base / KV_TILE, length, e.rows);
        expand_tile(a, changed_kv_b, head, std::min(KV_TILE, length - base), &kv);
        for (int64_t r = 0; r < n; r += QUERY_ROWS) {
            const int64_t rows = std::min(QUERY_ROWS, n - r);
            if (oldest + r + rows <= base) continue;
            for (int64_t i = 0; i < rows; i++) {
                s.lo[i] = 0;
                s.hi[i] = int32_t(std::clamp<int64_t>(oldest + r + i + 1 - base, 0, KV_TILE));
            }
            const AttnState into{e.running.m + r, e.running.l + r, e.running.acc + r * vpad};
            ops.attn_tile(params, kv, e.queries + r * d * element, rows, s.lo, s.hi, base ? s.part : into, s.scores);
            if (base) ops.attn_merge(vpad, rows, into, s.part);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        ops.attn_finish(vpad, e.running.m[i], e.running.l[i], e.running.acc + i * vpad, nullptr, s.row);
        std::memcpy(w.mid.x + (begin - first + i) * w.mid.ldx + (a.first_head + head) * a.v_dim, s.row, size_t(a.v_dim) * 4);
    }
}

}  // namespace tk
