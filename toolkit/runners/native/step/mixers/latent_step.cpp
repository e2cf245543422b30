// The latent attention sublayer of a step, absorbed: kv_b's key part multiplies queries, which then attend to the cached rows
// themselves, and its value part multiplies what that gives; head after head, so that a head's part of kv_b is read once. Making keys
// and values of the rows would take fewer products for prompts, but it rounds otherwise: bits would depend on how a prompt is cut.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step/run.h"

namespace tk {
namespace {

constexpr int64_t TOGETHER = 64;  // tokens of one item, at most

// Tokens of one item: so many rows of `width` numbers fit the thread's stripe.
int64_t tokens_together(int64_t width) { return std::clamp<int64_t>(CHUNK * STRIPE / width, 1, TOGETHER); }

// Tiles of kv_b that hold rows [first, first + n).
Range tiles_with(int64_t first, int64_t n) { return {first / LANES, (first + n + LANES - 1) / LANES}; }

}  // namespace

// The row of a token into the cache: its latent normed, then the shared key turned.
void Run::store_row(const Latent& a, int64_t t) {
    const Attention& core = a.core;
    const int64_t half = p.ropes[size_t(core.rope)].rotary / 2, rank = a.kv_rank();
    const float* from = w.qkv + t * w.qkv_ld + a.kv_at();
    float* row = own.head_row;
    norm_row(a.kv_a_norm, from, row);
    std::memcpy(row + rank, from + rank, size_t(a.rope_dim) * 4);
    std::fill(row + core.head_dim, row + core.dpad, 0.0f);
    ops.rope(row + rank, w.cos[size_t(core.rope)] + t * half, w.sin[size_t(core.rope)] + t * half, 2 * half);
    store(core, t, 0, nullptr, row);
}

// What makes keys and values of rows, but for what a change adds and multiplies.
const Linear& Run::kv_b(const Latent& a, const Change* c) const { return c && c->whole.present() ? c->whole : a.kv_b; }

// Queries of one head for the tokens `rows`, which have one kv_b, as they attend to cached rows.
void Run::absorb(const Latent& a, int64_t head, Range rows) {
    const Attention& core = a.core;
    const int64_t half = p.ropes[size_t(core.rope)].rotary / 2, rank = a.kv_rank(), n = rows.last - rows.first;
    const int64_t row = (a.first_head + head) * (a.nope_dim + a.v_dim), before = row % LANES;
    const Range tiles = tiles_with(row, a.nope_dim);
    const int64_t width = (tiles.last - tiles.first) * LANES;
    float *x = own.stripe, *inner = own.stripe + n * width;
    Rows queries;
    queries.x = x;
    queries.ldx = width;
    queries.round = p.bf16;
    const float* q = w.qkv + rows.first * w.qkv_ld + a.q_at() + (a.first_head + head) * a.qk_dim();
    std::memset(x, 0, size_t(n * width) * 4);
    const Change* c = change(a.kv_b, rows.first);
    for (int64_t i = 0; i < n; i++) {
        float* key = x + i * width + before;
        std::memcpy(key, q + i * w.qkv_ld, size_t(a.nope_dim) * 4);
        if (c && c->magnitudes) ops.multiply(key, c->magnitudes.data + row, a.nope_dim, -1);
    }
    ops.linear_back(kv_b(a, c).w, queries, n, tiles.first, tiles.last, inner, rank);
    if (c && c->low()) add_back(*c, queries, n, tiles, inner, rank);
    float* whole = own.head_row;
    std::fill(whole + core.head_dim, whole + core.dpad, 0.0f);
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = rows.first + i;
        std::memcpy(whole, inner + i * rank, size_t(rank) * 4);
        std::memcpy(whole + rank, q + i * w.qkv_ld + a.nope_dim, size_t(a.rope_dim) * 4);
        ops.rope(whole + rank, w.cos[size_t(core.rope)] + t * half, w.sin[size_t(core.rope)] + t * half, 2 * half);
        put_query(core, whole, const_cast<uint8_t*>(query(core, 0, t)) + head * core.dpad * (p.bf16 ? 2 : 4));
    }
}

// Few tokens: what a head's tiles gave for the tokens `rows` (attend_split), merged.
void Run::merge_head(const Latent& a, int64_t head, Range rows) {
    const Attention& core = a.core;
    const AttnState& into = own.attention.running;
    const float* partial = w.partial_pages.at<float>(0);
    for (const QueryBlock& b : blocks) {
        for (int64_t t = std::max(b.first, first + rows.first); t < std::min(b.last, first + rows.last); t++) {
            merge_tiles(core, b, partial, 0, (t - b.first) * core.per_kv + head, 1, into);
            ops.attn_finish(core.vpad, into.m[0], into.l[0], into.acc, nullptr, own.attention.row);
            std::memcpy(result(core, t - first) + head * a.kv_rank(), own.attention.row, size_t(a.kv_rank()) * 4);
        }
        partial += split_items(core, b) * split_floats(core, b);
    }
}

// What one head gave for the tokens `rows`, which have one kv_b, to its values, in the input of o.
void Run::give_values(const Latent& a, int64_t head, Range rows) {
    const int64_t row = (a.first_head + head) * (a.nope_dim + a.v_dim) + a.nope_dim, before = row % LANES, n = rows.last - rows.first;
    const Range tiles = tiles_with(row, a.v_dim);
    const Change* c = change(a.kv_b, rows.first);
    Rows x;
    x.x = result(a.core, rows.first) + head * a.kv_rank();
    x.ldx = w.spread_ld;
    x.round = p.bf16;
    Store to;
    float* out = w.mid.x + rows.first * w.mid.ldx + (a.first_head + head) * a.v_dim;
    const bool whole = before == 0 && a.v_dim % LANES == 0 && !c;
    to.ld = whole ? w.mid.ldx : (tiles.last - tiles.first) * LANES;
    to.out = whole ? out : own.stripe;
    ops.linear(part_of(kv_b(a, c).w, tiles), x, n, 0, tiles.last - tiles.first, to, own.linear);
    for (int64_t i = 0; !whole && i < n; i++) {
        float* made = own.stripe + i * to.ld;
        if (c && c->low()) add_part(*c, x.x + i * x.ldx, a.kv_rank(), tiles, made);
        if (c && c->magnitudes) ops.multiply(made + before, c->magnitudes.data + row, a.v_dim, -1);
        std::memcpy(out + i * w.mid.ldx, made + before, size_t(a.v_dim) * 4);
    }
}

void Run::mix(const Sublayer& s, const Latent& a) {
    const Attention& core = a.core;
    save(s);
    project(a.in, s.pre, source(s), w.hidden_ld, w.qkv, {a.q_a.present() ? &a.q_a : &a.q, &a.kv_a});
    if (a.q_a.present()) project(a.mid, a.q_a_norm, w.qkv, w.qkv_ld, w.qkv + a.q_at(), {&a.q});
    // heads and, of many tokens, some at a time
    auto each_head = [&](int64_t width, auto&& body) {
        const int64_t together = tokens_together(width), parts = (count + together - 1) / together;
        share(P_ROPE, core.heads * parts, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) {
                const Range rows{i % parts * together, std::min(count, (i % parts + 1) * together)};
                for (int64_t t = rows.first, end; t < rows.last; t = end) {  // tokens that have one kv_b together
                    for (end = t + 1; end < rows.last && change(a.kv_b, end) == change(a.kv_b, t);) end++;
                    body(i / parts, Range{t, end});
                }
            }
        });
    };
    each_head(a.nope_dim + a.kv_rank() + 2 * LANES, [&](int64_t head, Range rows) {
        for (int64_t t = rows.first; head == 0 && t < rows.last; t++) store_row(a, t);
        absorb(a, head, rows);
    });
    if (count <= SMALL) attend_split(core);
    else attend_all(core);
    each_head(a.v_dim + 2 * LANES, [&](int64_t head, Range rows) {
        if (count <= SMALL) merge_head(a, head, rows);
        give_values(a, head, rows);
    });
    gather_mid(a.o, a.out, a.codes, {a.first_head * a.v_dim, (a.first_head + core.heads) * a.v_dim});
    down(s, a.o, a.out, codes(a.o, a.codes), P_O);
}

}  // namespace tk
