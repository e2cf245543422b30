// The attention sublayer of a step: projections, rope, writing the cache, output projection. Attending is in attend_step.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step/run.h"

namespace tk {

// Those that are there, one behind the other.
std::vector<Run::Projection> Run::side_by_side(std::initializer_list<const Linear*> linears) {
    std::vector<Projection> found;
    int64_t place = 0;
    for (const Linear* l : linears) {
        if (!l->present()) continue;
        found.push_back({l, l->own, place});
        place += l->w.tiles() * LANES;
    }
    return found;
}

// Linears that read one input, into rows of w.qkv from `out` on.
void Run::project(const Input& in, const Norm& norm, const float* from, int64_t ld, float* out, const std::vector<Projection>& parts) {
    Prepared x = prepare(in, norm, from, ld, count);
    int64_t total = 0, bytes = 0;
    for (const Projection& part : parts) {
        const int64_t n = part.tiles.last - part.tiles.first;
        total += n, bytes += n * part.l->w.tile_bytes();
    }
    share_tiles(P_QKV, total, pair_unit(), bytes, [&](Range r) {
        const InputBuffer& rows = ready(x, in, norm, from, ld, count);
        int64_t start = 0;
        for (const auto& [l, own, place] : parts) {
            const int64_t n = own.last - own.first;
            Store to;
            to.ld = w.qkv_ld;
            to.out = out + place;
            const Range tiles{std::clamp<int64_t>(r.first - start, 0, n), std::clamp<int64_t>(r.last - start, 0, n)};
            linear(*l, rows, 0, count, {own.first + tiles.first, own.first + tiles.last}, to);
            start += n;
        }
    });
}

const uint8_t* Run::query(const Attention& a, int64_t head, int64_t t) const {
    const int64_t rows = hand.last - hand.first;
    return w.queries + hand.first * w.queries_ld * 4 + (head * rows + t - hand.first) * a.per_kv * query_bytes(a);
}

// Of those that look at sink tokens apart; they lie behind the others.
const uint8_t* Run::sink_query(const Attention& a, int64_t head, int64_t t) const {
    return query(a, a.kv_heads + head, t);
}

void Run::put_query(const Attention& a, const float* row, uint8_t* to) const {
    if (reads(a) == KV_BYTES) ops.query_codes(row, a.dpad, to);
    else if (p.bf16) ops.to_bf16(row, reinterpret_cast<uint16_t*>(to), a.dpad);
    else std::memcpy(to, row, size_t(a.dpad) * 4);
}

// What is done to all heads of a token at once: its projections clipped, and norms that span heads.
void Run::settle_row(const Attention& a, int64_t t) const {
    float *q = w.qkv + t * w.qkv_ld, *k = q + a.q.w.tiles() * LANES;
    if (a.clip > 0)
        for (float* x = q; x < k + (a.k.w.tiles() + a.v.w.tiles()) * LANES; x++) *x = std::min(std::max(*x, -a.clip), a.clip);
    if (a.norm_last) turn_row(a, t, q, k);
    if (a.wide(a.q_norm)) norm_row(a.q_norm, q, q);
    if (a.wide(a.k_norm)) norm_row(a.k_norm, k, k);
}

void Run::turn_row(const Attention& a, int64_t t, float* q, float* k) const {
    if (a.rope < 0) return;
    const int64_t half = p.ropes[size_t(a.rope)].rotary / 2;
    const float *cos = w.cos[size_t(a.rope)] + t * half, *sin = w.sin[size_t(a.rope)] + t * half;
    // of other ranks too: what norms span
    for (int64_t at = 0; at < a.q.w.rows; at += a.head_dim) ops.rope(q + at, cos, sin, 2 * half);
    for (int64_t at = 0; at < a.k.w.rows; at += a.head_dim) ops.rope(k + at, cos, sin, 2 * half);
}

// What the queries of a position are multiplied by; see QueryScale.
static float query_scale(const Attention& a, int64_t position) {
    if (a.q_form == 0) return 1.0f;
    if (a.q_form == 1) return 1.0f + a.q_factor * std::log1p(float((position + a.q_offset) / a.q_length));
    return std::max(1.0f, std::log(float(position) + 1.0f) / std::log(float(a.q_length)));
}

// One token's part of one kv head: its queries and key normed and turned, key and value written to the cache.
void Run::turn_and_store(const Attention& a, int64_t t, int64_t head) {
    const int64_t flat = first + t, seq = seq_of[size_t(t)], hd = a.head_dim;
    const float* q = w.qkv + t * w.qkv_ld;
    const float* k = q + a.q.w.tiles() * LANES;
    const float* v = a.v.present() ? k + a.k.w.tiles() * LANES : k;  // else values are what keys were before all that follows
    float *row = own.head_row, *value = own.head_row + a.dpad;
    std::memset(row, 0, size_t(a.dpad) * 8);
    const int64_t half = a.rope >= 0 && !a.norm_last ? p.ropes[size_t(a.rope)].rotary / 2 : 0;
    const float factor = query_scale(a, position_of(seq, flat));
    const bool apart = a.sinks_apart(position_of(seq, flat));
    auto load = [&](const float* from, const Norm& norm, int64_t of_head, const float* cos, const float* sin, const float* mean = nullptr) {
        if (norm.present() && !a.wide(norm)) norm_row(norm, from, row, of_head);
        else std::memcpy(row, from, size_t(hd) * 4);
        if (half) ops.rope(row, cos, sin, 2 * half);
        for (int64_t i = 0; mean && i < hd; i++) row[i] -= mean[i];
        if (turns(a.kv_type)) ops.hadamard(row, hd);
    };
    const float *cos = half ? w.cos[size_t(a.rope)] + t * half : nullptr, *sin = half ? w.sin[size_t(a.rope)] + t * half : nullptr;
    uint8_t* to = const_cast<uint8_t*>(query(a, head, t));
    uint8_t* from_sinks = const_cast<uint8_t*>(sink_query(a, head, t));
    for (int64_t i = 0; i < a.per_kv && !in.fills; i++) {
        const int64_t h = a.first_head + head * a.per_kv + i, at = i * query_bytes(a);
        load(q + h * hd, a.q_norm, h, cos, sin);
        if (a.q_form) std::for_each(row, row + hd, [&](float& x) { x *= factor; });
        put_query(a, row, to + at);
        if (!apart) continue;
        load(q + h * hd, a.q_norm, h, a.sink_cos.data(), a.sink_sin.data());
        put_query(a, row, from_sinks + at);
    }
    if (!a.k.present()) return;  // another layer has stored them
    const int64_t at = (a.first_kv + head) * hd;
    load(k + at, a.k_norm, a.first_kv + head, cos, sin, a.key_mean && turns(a.kv_type) ? a.key_mean.data + at : nullptr);
    if (a.v_norm.present()) norm_row(a.v_norm, v + at, value);
    else std::memcpy(value, v + at, size_t(hd) * 4);
    if (turns(a.kv_type)) ops.hadamard(value, hd);
    store(a, t, head, row, value);
}

// Key (null where the row is both) and value of a token into the cache.
void Run::store(const Attention& a, int64_t t, int64_t head, const float* key, const float* value) {
    const int64_t flat = first + t, seq = seq_of[size_t(t)];
    const int64_t slot = in.slot_mapping[a.group][flat], cells = p.block_size / LANES;
    const int64_t cell = slot % p.block_size / LANES, lane = slot % LANES;
    const int32_t last = flat + 1 == in.cu_seqlens[seq + 1] || t + 1 == count;
    const Group& g = p.groups[size_t(a.group)];
    uint8_t* base = g.data + slot / p.block_size * g.block_bytes + a.layer_offset + head * a.head_bytes;
    uint8_t* vc = base + cells * a.cell.k_cell;
    uint8_t* kp = vc + cells * a.cell.v_cell;
    uint8_t* vp = kp + cells * a.cell.k_params;
    ops.kv_write(a.kv_type, a.dpad, key, value, base + cell * a.cell.k_cell, vc + cell * a.cell.v_cell,
                 kp + cell * a.cell.k_params, vp + cell * a.cell.v_params, lane, last);
}

// Keys and values of the residual stream's rows as they are, into the cache.
void Run::fill(const Attention& a) {
    std::vector<Projection> both = side_by_side({&a.q, &a.k, &a.v});
    both.erase(both.begin());
    project(a.in, Norm(), w.x, w.hidden_ld, w.qkv, both);
    share(P_ROPE, count * a.kv_heads, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) turn_and_store(a, i / a.kv_heads, i % a.kv_heads);
    });
}

void Run::mix(const Sublayer& s, const Attention& a) {
    save(s);
    project(a.in, s.pre, source(s), w.hidden_ld, w.qkv, {&a.q, &a.k, &a.v, &a.gate});
    if (a.settles())
        share(P_ROPE, count, 1, [&](Range r) {
            for (int64_t t = r.first; t < r.last; t++) settle_row(a, t);
        });
    share(P_ROPE, count * a.kv_heads, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) turn_and_store(a, i / a.kv_heads, i % a.kv_heads);
    });
    const Mlp* next = &s == &p.sublayers.back() ? nullptr : std::get_if<Mlp>(&(&s + 1)->mixer);
    expect({&a.o, next ? &next->gate : nullptr, next ? &next->up : nullptr}, count, int64_t(blocks.size()) * a.kv_heads / threads);
    if (count <= SMALL && p.ranks == 1) {
        attend_split(a);
        bool merged = false;
        const Store to = residual(s);
        share_tiles(P_O, a.o.w.tiles(), 1, a.o.w.bytes(), [&](Range tiles) {
            if (!merged) merge_split(a, own.mid, {0, a.kv_heads});
            for (int64_t t = 0; !merged && t < count; t++) quantize_row(a.out, own.mid, t);
            merged = true;
            linear(a.o, own.mid, 0, count, tiles, to);
        });
        add_post(s);
        return;
    }
    if (count <= SMALL) {
        attend_split(a);
        share(P_ATTENTION, a.kv_heads, 1, [&](Range heads) { merge_split(a, w.mid, heads); });
    } else {
        attend_all(a);
    }
    gather_mid(a.o, a.out, a.codes, {a.first_head * a.value_dim, (a.first_head + a.heads) * a.value_dim});
    down(s, a.o, a.out, codes(a.o, a.codes), P_O);
}

}  // namespace tk
