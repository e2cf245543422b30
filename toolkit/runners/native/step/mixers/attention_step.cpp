// The attention sublayer of a step: projections, rope, writing the cache, attending, output projection.
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
    return w.queries + (hand.first * w.queries_ld + (head * rows + t - hand.first) * a.per_kv * a.dpad) * (p.bf16 ? 2 : 4);
}

// Of those that look at sink tokens apart; they lie behind the others.
const uint8_t* Run::sink_query(const Attention& a, int64_t head, int64_t t) const {
    return query(a, a.kv_heads + head, t);
}

void Run::put_query(const Attention& a, const float* row, uint8_t* to) const {
    if (p.bf16) ops.to_bf16(row, reinterpret_cast<uint16_t*>(to), a.dpad);
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
    const float* v = k + a.k.w.tiles() * LANES;
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
    for (int64_t i = 0; i < a.per_kv; i++) {
        const int64_t h = a.first_head + head * a.per_kv + i, at = i * a.dpad * (p.bf16 ? 2 : 4);
        load(q + h * hd, a.q_norm, h, cos, sin);
        if (a.q_form) std::for_each(row, row + hd, [&](float& x) { x *= factor; });
        put_query(a, row, to + at);
        if (!apart) continue;
        load(q + h * hd, a.q_norm, h, a.sink_cos.data(), a.sink_sin.data());
        put_query(a, row, from_sinks + at);
    }
    const int64_t at = (a.first_kv + head) * hd;
    load(k + at, a.k_norm, a.first_kv + head, cos, sin, a.key_mean && turns(a.kv_type) ? a.key_mean.data + at : nullptr);
    std::memcpy(value, v + at, size_t(hd) * 4);
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

// Tiles that tokens [t0, t1) of a sequence see; where sink tokens are seen apart the one before the first stands for them.
Range Run::tiles_of(const Attention& a, int64_t seq, int64_t t0, int64_t t1) const {
    const int64_t apart = a.sinks_apart(position_of(seq, t1 - 1));
    return {a.oldest(position_of(seq, t0)) / KV_TILE - apart, (reach(a, seq, t1 - 1) - 1) / KV_TILE + 1};
}

// Where a tile's cells lie in the cache; only cells with tokens in `tokens` (absolute) are looked up.
void Run::find_cells(const Attention& a, int64_t seq, int64_t head, int64_t tile, Range tokens, KvTile* to) const {
    const Group& g = p.groups[size_t(a.group)];
    const int32_t* table = in.block_tables[a.group] + seq * in.table_width[a.group];
    const int64_t cells = p.block_size / LANES;
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES;
        to->k[c] = to->v[c] = to->kp[c] = to->vp[c] = w.dummy_cell;
        if (at >= tokens.last || at + LANES <= tokens.first) continue;
        const int64_t cell = at % p.block_size / LANES;
        const uint8_t* base = g.data + table[at / p.block_size] * g.block_bytes + a.layer_offset + head * a.head_bytes;
        const uint8_t *values = base + cells * a.cell.k_cell, *params = values + cells * a.cell.v_cell;
        to->v[c] = values + cell * a.cell.v_cell;
        to->k[c] = a.rows ? to->v[c] : base + cell * a.cell.k_cell;
        to->kp[c] = params + cell * a.cell.k_params;
        to->vp[c] = params + cells * a.cell.k_params + cell * a.cell.v_params;
    }
}

// Cells as they are stored to the form that the attention kernel reads, where that is another; meanwhile those of `ahead` (or
// null) are fetched.
void Run::load_cells(const Attention& a, int64_t tile, Range tokens, const KvTile* ahead, KvTile* cells) {
    const int64_t element = p.bf16 ? 2 : 4;
    const bool as_stored = a.kv_type == loaded_type(p.bf16);
    auto fetch = [](const void* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) fetch_to_l2(static_cast<const uint8_t*>(from) + i);
    };
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES;
        if (ahead) fetch(ahead->k[c], a.cell.k_cell), fetch(ahead->v[c], a.cell.v_cell);
        if (cells->k[c] == w.dummy_cell) continue;
        const uint8_t* kc = static_cast<const uint8_t*>(cells->k[c]);
        const uint8_t* vc = static_cast<const uint8_t*>(cells->v[c]);
        uint8_t* k = own.attention.keys + c * LANES * a.dpad * element;
        uint8_t* v = own.attention.values + c * LANES * a.dpad * element;
        if (!as_stored) {
            ops.kv_load(a.kv_type, a.dpad, kc, vc, cells->kp[c], cells->vp[c], p.bf16, std::min(LANES, tokens.last - at),
                        a.rows ? nullptr : k, v);
            cells->v[c] = v;
        }
        if (a.rows) ops.key_cell(a.dpad, p.bf16, cells->v[c], k);
        cells->k[c] = k;
    }
}

// Whether the attention kernel reads cells where they lie.
bool Run::reads_stored(const Attention& a) const {
    return !a.rows && reads_cells(a.kv_type, p.bf16, ops.bf16_dot);
}

// Whether a piece is that of sink tokens seen apart; what it sees, as absolute positions, and in which tile of them.
Run::Sight Run::sight(const Attention& a, const Piece& piece) const {
    const int64_t oldest = a.oldest(position_of(piece.seq, piece.first));
    if (piece.tile < oldest / KV_TILE) return {true, {0, a.sink_tokens}, 0};
    return {false, {oldest, reach(a, seq_of[size_t(piece.last - 1 - first)], piece.last - 1)}, piece.tile};
}

// One piece of attention into a fresh state; `next` is the one that this thread takes on afterwards, or null.
void Run::attend_tile(const Attention& a, const Piece& piece, const Piece* next, const AttnState& to) {
    const int64_t seq = piece.seq, head = piece.head, t0 = piece.first, t1 = piece.last;
    AttnScratch& s = own.attention;
    const auto [apart, tokens, tile] = sight(a, piece);
    const int64_t base = tile * KV_TILE;
    KvTile kv, ahead;
    find_cells(a, seq, head, tile, tokens, &kv);
    if (next) {
        const Sight then = sight(a, *next);
        find_cells(a, next->seq, next->head, then.tile, then.tokens, &ahead);
    }
    const bool stored = reads_stored(a);
    if (stored) kv.next = next ? &ahead : nullptr;
    else load_cells(a, tile, tokens, next && t1 - t0 == 1 ? &ahead : nullptr, &kv);
    for (int64_t t = t0; t < t1; t++) {
        const int64_t of = seq_of[size_t(t - first)], pos = position_of(of, t), low = apart ? 0 : a.oldest(pos) - base;
        const int64_t high = !apart ? reach(a, of, t) - base : a.sinks_apart(pos) ? a.sink_tokens : 0;
        for (int64_t i = 0; i < a.per_kv; i++) {
            const int64_t r = (t - t0) * a.per_kv + i;
            s.lo[r] = int32_t(std::clamp<int64_t>(low, 0, KV_TILE));
            s.hi[r] = int32_t(std::clamp<int64_t>(high, 0, KV_TILE));
            if (!a.alibi) continue;
            s.slope[r] = a.alibi.data[a.first_head + head * a.per_kv + i];
            s.from[r] = int32_t(a.alibi_rounded != 0.0f ? base : base - (apart ? a.window + a.sink_tokens - 1 : pos));
        }
    }
    AttnParams params{a.dpad, a.vpad, a.scale, a.softcap, stored ? a.kv_type : loaded_type(p.bf16)};
    if (a.alibi) params.slope = s.slope, params.from = s.from, params.rounded = a.alibi_rounded, params.both = a.mutual;
    ops.attn_tile(params, kv, apart ? sink_query(a, head, t0 - first) : query(a, head, t0 - first), (t1 - t0) * a.per_kv, s.lo, s.hi, to, s.scores);
}

// State rows of one token and kv head, from `row` on, to their places in the token's output row.
void Run::finish_rows(const Attention& a, int64_t head, int64_t t, const AttnState& s, int64_t row, float* to) {
    const float* gate = w.qkv + t * w.qkv_ld + (a.q.w.tiles() + a.k.w.tiles() + a.v.w.tiles()) * LANES;
    for (int64_t i = 0; i < a.per_kv; i++) {
        const int64_t r = row + i, h = a.first_head + head * a.per_kv + i;
        const float* sink = a.sinks ? a.sinks.data + h : nullptr;
        if (a.vpad == a.value_dim) {
            ops.attn_finish(a.vpad, s.m[r], s.l[r], s.acc + r * a.vpad, sink, to + h * a.value_dim);
        } else {
            ops.attn_finish(a.vpad, s.m[r], s.l[r], s.acc + r * a.vpad, sink, own.attention.row);
            std::memcpy(to + h * a.value_dim, own.attention.row, size_t(a.value_dim) * 4);
        }
        if (turns(a.kv_type)) ops.hadamard(to + h * a.value_dim, a.value_dim);
        if (a.gate.present()) ops.multiply(to + h * a.value_dim, gate + h * a.value_dim, a.value_dim, SIGMOID);
    }
}

// Query blocks [first, last) of the chunk, all kv heads `heads` of each: tile after tile, and in a tile head after head, as
// they lie in the cache.
void Run::attend_blocks(const Attention& a, Range which, Range heads) {
    AttnScratch& s = own.attention;
    const int64_t count_heads = heads.last - heads.first;
    Piece piece, next;
    auto at = [&](int64_t block, int64_t i) {  // piece i of a block
        const QueryBlock& b = blocks[size_t(block)];
        return Piece{b.seq, heads.first + i % count_heads, b.first, b.last, tiles_of(a, b.seq, b.first, b.last).first + i / count_heads};
    };
    next = at(which.first, 0);
    for (int64_t block = which.first; block < which.last; block++) {
        const QueryBlock& b = blocks[size_t(block)];
        const int64_t rows = (b.last - b.first) * a.per_kv;
        const Range tiles = tiles_of(a, b.seq, b.first, b.last);
        const int64_t pieces = (tiles.last - tiles.first) * count_heads;
        for (int64_t i = 0; i < pieces; i++) {
            piece = next;
            const bool more = i + 1 < pieces || block + 1 < which.last;
            if (more) next = i + 1 < pieces ? at(block, i + 1) : at(block + 1, 0);
            const int64_t row = i % count_heads * rows;
            const AttnState into{s.running.m + row, s.running.l + row, s.running.acc + row * a.vpad};
            attend_tile(a, piece, more ? &next : nullptr, i < count_heads ? into : s.part);
            if (i >= count_heads) ops.attn_merge(a.vpad, rows, into, s.part);
        }
        for (int64_t t = b.first; t < b.last; t++)
            for (int64_t h = heads.first; h < heads.last; h++)
                finish_rows(a, h, t - first, s.running, (h - heads.first) * rows + (t - b.first) * a.per_kv, result(a, t - first));
    }
}

// Query blocks that begin alike, one kv head of them: the tiles in common first, for all of them together, then each one's own.
void Run::attend_shared(const Attention& a, const SharedPrefix& prefix, int64_t head) {
    AttnScratch& s = own.attention;
    const QueryBlock &front = in_order[size_t(prefix.first)], &back = in_order[size_t(prefix.last - 1)];
    int64_t block = prefix.first - 1;
    Piece next{front.seq, head, front.first, back.last, -1};
    int64_t end = prefix.tiles;
    auto advance = [&] {
        if (++next.tile < end) return true;
        if (++block == prefix.last) return false;
        const QueryBlock& b = in_order[size_t(block)];
        next = {b.seq, head, b.first, b.last, prefix.tiles};
        end = tiles_of(a, b.seq, b.first, b.last).last;
        return true;
    };
    for (bool more = advance(); more;) {
        const Piece piece = next;
        more = advance();
        const int64_t row = (piece.first - front.first) * a.per_kv;
        const AttnState into{s.running.m + row, s.running.l + row, s.running.acc + row * a.vpad};
        attend_tile(a, piece, more ? &next : nullptr, piece.tile ? s.part : into);
        if (piece.tile) ops.attn_merge(a.vpad, (piece.last - piece.first) * a.per_kv, into, s.part);
    }
    for (int64_t t = front.first; t < back.last; t++)
        finish_rows(a, head, t - first, s.running, (t - front.first) * a.per_kv, result(a, t - first));
}

// Few tokens: the tiles of every query block and head are items of their own, merged afterwards in the same order. They are taken
// tile after tile, as they lie in the cache; a tile is read once for all tokens of a block.
void Run::attend_split(const Attention& a) {
    int64_t items = 0;
    for (const QueryBlock& b : blocks) items += split_items(a, b);
    struct Item {
        Piece piece;
        AttnState state;
    };
    auto at = [&](int64_t i) {
        float* partial = w.partial_pages.at<float>(0);
        const QueryBlock* b = blocks.data();
        for (int64_t n; i >= (n = split_items(a, *b)); i -= n) partial += n * split_floats(a, *b++);
        const int64_t tile = tiles_of(a, b->seq, b->first, b->last).first + i / a.kv_heads;
        return Item{{b->seq, i % a.kv_heads, b->first, b->last, tile}, split_state(a, *b, partial, i)};
    };
    share(P_ATTENTION, items, 1, [&](Range r) {
        Item item, next = at(r.first);
        for (int64_t i = r.first; i < r.last; i++) {
            item = next;
            if (i + 1 < r.last) next = at(i + 1);
            attend_tile(a, item.piece, i + 1 < r.last ? &next.piece : nullptr, item.state);
        }
    });
}

// What the tiles of one head gave for the rows [row, row + rows) of its part of a block, merged into `into`.
void Run::merge_tiles(const Attention& a, const QueryBlock& b, const float* partial, int64_t head, int64_t row, int64_t rows, const AttnState& into) {
    const Range tiles = tiles_of(a, b.seq, b.first, b.last);
    std::fill(into.m, into.m + rows, -INFINITY);
    for (int64_t tile = 0; tile < tiles.last - tiles.first; tile++) {
        const AttnState s = split_state(a, b, const_cast<float*>(partial), tile * a.kv_heads + head);
        ops.attn_merge(a.vpad, rows, into, {s.m + row, s.l + row, s.acc + row * a.vpad});
    }
}

// What the tiles of `heads` gave, merged, into `to`.
void Run::merge_split(const Attention& a, InputBuffer& to, Range heads) {
    const float* partial = w.partial_pages.at<float>(0);
    AttnState& into = own.attention.running;
    for (const QueryBlock& b : blocks) {
        for (int64_t t = b.first; t < b.last; t++)
            for (int64_t h = heads.first; h < heads.last; h++) {
                merge_tiles(a, b, partial, h, (t - b.first) * a.per_kv, a.per_kv, into);
                finish_rows(a, h, t - first, into, 0, to.x + (t - first) * to.ldx);
            }
        partial += split_items(a, b) * split_floats(a, b);
    }
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

// More than a few tokens: their query blocks, whose results each thread finishes itself. `skipped`: sequences left out, if any.
void Run::attend_all(const Attention& a, const std::vector<uint8_t>& skipped) {
    const int64_t n = int64_t(blocks.size()) * a.kv_heads, prefixes = int64_t(shared.size()) * a.kv_heads;
    if (prefixes && !a.window && skipped.empty())
        share(P_ATTENTION, prefixes, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) attend_shared(a, shared[size_t(i / a.kv_heads)], i % a.kv_heads);
        }, prefixes);
    else if (runs.empty())
        share(P_ATTENTION, n, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++)
                if (skipped.empty() || !skipped[size_t(blocks[size_t(i / a.kv_heads)].seq)])
                    attend_blocks(a, {i / a.kv_heads, i / a.kv_heads + 1}, {i % a.kv_heads, i % a.kv_heads + 1});
        }, n);
    else
        share(P_ATTENTION, threads, 1, [&](Range r) { attend_blocks(a, {runs[size_t(r.first)], runs[size_t(r.last)]}, {0, a.kv_heads}); });
}

}  // namespace tk
