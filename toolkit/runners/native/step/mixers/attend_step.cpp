// A step's tokens attend to the cache: tile by tile, and who takes which.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step/run.h"

namespace tk {

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
    const int shift = __builtin_ctzll(uint64_t(cells));  // a power of two; divisions would take longer than the rest
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES;
        to->k[c] = to->v[c] = to->kp[c] = to->vp[c] = w.dummy_cell;
        if (at >= tokens.last || at + LANES <= tokens.first) continue;
        const int64_t cell = at / LANES & (cells - 1);
        const uint8_t* base = g.data + table[at / LANES >> shift] * g.block_bytes + a.layer_offset + head * a.head_bytes;
        const uint8_t *values = base + cells * a.cell.k_cell, *params = values + cells * a.cell.v_cell;
        to->v[c] = values + cell * a.cell.v_cell;
        to->k[c] = a.rows ? to->v[c] : base + cell * a.cell.k_cell;
        to->kp[c] = params + cell * a.cell.k_params;
        to->vp[c] = params + cells * a.cell.k_params + cell * a.cell.v_params;
    }
}

// Cells as they are stored to the form that the attention kernel reads; meanwhile those of `ahead` (or null) are fetched.
void Run::load_cells(const Attention& a, int64_t tile, Range tokens, const KvTile* ahead, KvTile* cells) {
    const int32_t read = reads(a);
    const int64_t element = read == KV_BYTES ? 1 : p.bf16 ? 2 : 4;
    auto fetch = [](const void* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) fetch_to_l2(static_cast<const uint8_t*>(from) + i);
    };
    for (int64_t c = 0; c < KV_CELLS; c++) {
        const int64_t at = tile * KV_TILE + c * LANES;
        if (ahead) {
            fetch(ahead->k[c], a.cell.k_cell), fetch(ahead->v[c], a.cell.v_cell);
            fetch(ahead->kp[c], a.cell.k_params), fetch(ahead->vp[c], a.cell.v_params);
        }
        if (cells->k[c] == w.dummy_cell) continue;
        const uint8_t* kc = static_cast<const uint8_t*>(cells->k[c]);
        const uint8_t* vc = static_cast<const uint8_t*>(cells->v[c]);
        uint8_t* k = own.attention.keys + c * LANES * a.dpad * element;
        uint8_t* v = own.attention.values + c * LANES * a.dpad * element;
        if (read == KV_BYTES) {
            ops.kv_bytes(a.kv_type, a.dpad, kc, vc, std::min(LANES, tokens.last - at), k, v);
            cells->v[c] = v;
        } else if (a.kv_type != read) {
            ops.kv_load(a.kv_type, a.dpad, kc, vc, cells->kp[c], cells->vp[c], p.bf16, std::min(LANES, tokens.last - at),
                        a.rows ? nullptr : k, v);
            cells->v[c] = v;
        }
        if (a.rows) ops.key_cell(a.dpad, p.bf16, cells->v[c], k);
        cells->k[c] = k;
    }
}

// The form of the cells that the attention kernel reads.
int32_t Run::reads(const Attention& a) const {
    return a.rows ? loaded_type(p.bf16) : read_type(ops, a.kv_type, p.bf16);
}

int64_t Run::query_bytes(const Attention& a) const { return tk::query_bytes(reads(a), p.bf16, a.dpad); }

// Whether a piece is that of sink tokens seen apart; what it sees, as absolute positions, and in which tile of them.
Run::Sight Run::sight(const Attention& a, const Piece& piece) const {
    const int64_t oldest = a.oldest(position_of(piece.seq, piece.first));
    if (piece.tile < oldest / KV_TILE) return {true, {0, a.sink_tokens}, 0};
    return {false, {oldest, reach(a, seq_of[size_t(piece.last - 1 - first)], piece.last - 1)}, piece.tile};
}

void Run::find_cells(const Attention& a, const Piece& piece, KvTile* to) const {
    const Sight seen = sight(a, piece);
    find_cells(a, piece.seq, piece.head, seen.tile, seen.tokens, to);
}

// One piece of attention into a fresh state; `kv` are its cells, `next` those of the one that this thread takes on afterwards, or null.
void Run::attend_tile(const Attention& a, const Piece& piece, KvTile& kv, const KvTile* next, const AttnState& to) {
    fetch_coming();
    const int64_t head = piece.head, t0 = piece.first, t1 = piece.last;
    AttnScratch& s = own.attention;
    const auto [apart, tokens, tile] = sight(a, piece);
    const int64_t base = tile * KV_TILE;
    const bool stored = !a.rows && reads(a) == a.kv_type;
    if (stored) kv.next = next;
    else load_cells(a, tile, tokens, t1 - t0 <= SMALL ? next : nullptr, &kv);
    for (int64_t t = t0; t < t1; t++) {
        const int64_t of = seq_of[size_t(t - first)], pos = position_of(of, t), low = apart ? 0 : a.oldest(pos) - base;
        const int64_t high = !apart ? reach(a, of, t) - base : a.sinks_apart(pos) ? a.sink_tokens : 0;
        for (int64_t i = 0; i < a.per_kv; i++) {
            const int64_t r = (t - t0) * a.per_kv + i;
            s.lo[r] = int32_t(std::clamp<int64_t>(low, 0, KV_TILE));
            s.hi[r] = int32_t(std::clamp<int64_t>(high, 0, KV_TILE));
            const int64_t h = a.first_head + head * a.per_kv + i;
            if (a.bias) s.from[r] = int32_t(a.bias_at(h, base - pos));
            if (!a.alibi) continue;
            s.slope[r] = a.alibi.data[h];
            s.from[r] = int32_t(a.alibi_rounded != 0.0f ? base : base - (apart ? a.window + a.sink_tokens - 1 : pos));
        }
    }
    AttnParams params{a.dpad, a.vpad, a.scale, a.softcap, reads(a)};
    if (a.alibi) params.slope = s.slope, params.from = s.from, params.rounded = a.alibi_rounded, params.both = a.mutual;
    if (a.bias) params.bias = a.bias.data, params.from = s.from;
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

// Pieces one after the other: `advance` finds the one that comes and where its result goes, `each` gets it with its cells and those
// of the one behind it, or null.
template <class Advance, class Each>
void Run::walk(const Attention& a, Advance advance, Each each) {
    Work work, next;
    KvTile tiles[2];  // of `work` and `next`, in turns
    bool more = advance(next);
    if (more) find_cells(a, next.piece, &tiles[0]);
    for (int64_t turn = 0; more; turn = 1 - turn) {
        KvTile &kv = tiles[turn], &ahead = tiles[1 - turn];
        work = next;
        more = advance(next);
        if (more) find_cells(a, next.piece, &ahead);
        each(work, kv, more ? &ahead : nullptr);
    }
}

// A piece into the state of its rows, the first of their pieces, or merged with what is there.
void Run::attend_more(const Attention& a, const Work& work, bool first_tile, KvTile& kv, const KvTile* next) {
    const AttnState& part = own.attention.part;
    attend_tile(a, work.piece, kv, next, first_tile ? work.into : part);
    if (!first_tile) ops.attn_merge(a.vpad, (work.piece.last - work.piece.first) * a.per_kv, work.into, part);
}

// Query blocks from `block` on, all kv heads `heads` of each: tile after tile, and in a tile head after head, as they lie in the
// cache.
void Run::attend_blocks(const Attention& a, const QueryBlock* block, const QueryBlock* last, Range heads) {
    AttnScratch& s = own.attention;
    int64_t head = heads.last - 1, tile = 0, end = 0;
    const QueryBlock* next_block = block;
    auto rows_of = [&](const QueryBlock& b) { return (b.last - b.first) * a.per_kv; };
    auto advance = [&](Work& to) {
        if (++head == heads.last) head = heads.first, tile++;
        if (tile >= end) {
            if (next_block == last) return false;
            block = next_block++;
            const Range seen = tiles_of(a, block->seq, block->first, block->last);
            tile = seen.first, end = seen.last;
        }
        to = {{block->seq, head, block->first, block->last, tile}, state_rows(a, (head - heads.first) * rows_of(*block))};
        return true;
    };
    walk(a, advance, [&](const Work& work, KvTile& kv, const KvTile* next) {
        const auto& [seq, of, t0, t1, at] = work.piece;
        const Range seen = tiles_of(a, seq, t0, t1);
        attend_more(a, work, at == seen.first, kv, next);
        if (at + 1 < seen.last || of + 1 < heads.last) return;
        const int64_t rows = (t1 - t0) * a.per_kv;
        for (int64_t t = t0; t < t1; t++)
            for (int64_t h = heads.first; h < heads.last; h++)
                finish_rows(a, h, t - first, s.running, (h - heads.first) * rows + (t - t0) * a.per_kv, result(a, t - first));
    });
}

// Query blocks that begin alike, one kv head of them: the tiles in common first, for all of them together, then each one's own.
void Run::attend_shared(const Attention& a, const SharedPrefix& prefix, int64_t head) {
    const QueryBlock &front = in_order[size_t(prefix.first)], &back = in_order[size_t(prefix.last - 1)];
    int64_t block = prefix.first - 1, end = prefix.tiles;
    Piece piece{front.seq, head, front.first, back.last, -1};
    auto advance = [&](Work& to) {
        if (++piece.tile == end) {
            if (++block == prefix.last) return false;
            const QueryBlock& b = in_order[size_t(block)];
            piece = {b.seq, head, b.first, b.last, prefix.tiles};
            end = tiles_of(a, b.seq, b.first, b.last).last;
        }
        to = {piece, state_rows(a, (piece.first - front.first) * a.per_kv)};
        return true;
    };
    walk(a, advance, [&](const Work& work, KvTile& kv, const KvTile* next) { attend_more(a, work, work.piece.tile == 0, kv, next); });
    for (int64_t t = front.first; t < back.last; t++)
        finish_rows(a, head, t - first, own.attention.running, (t - front.first) * a.per_kv, result(a, t - first));
}

// Few tokens: the tiles of every query block and head are items of their own, merged afterwards in the same order. They are taken
// tile after tile, as they lie in the cache; a tile is read once for all tokens of a block.
void Run::attend_split(const Attention& a) {
    int64_t items = 0;
    for (const QueryBlock& b : blocks) items += split_items(a, b);
    auto at = [&](int64_t i) {
        float* partial = w.partial_pages.at<float>(0);
        const QueryBlock* b = blocks.data();
        for (int64_t n; i >= (n = split_items(a, *b)); i -= n) partial += n * split_floats(a, *b++);
        const int64_t tile = tiles_of(a, b->seq, b->first, b->last).first + i / a.kv_heads;
        return Work{{b->seq, i % a.kv_heads, b->first, b->last, tile}, split_state(a, *b, partial, i)};
    };
    share(P_ATTENTION, items, 1, [&](Range r) {
        int64_t i = r.first;
        auto advance = [&](Work& to) {
            if (i == r.last) return false;
            to = at(i++);
            return true;
        };
        walk(a, advance, [&](const Work& work, KvTile& kv, const KvTile* next) { attend_tile(a, work.piece, kv, next, work.into); });
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

// Into how many parts of `tokens` each of `heads` is cut, so that threads which take them are done soonest.
static int64_t best_parts(int64_t tokens, int64_t heads, int64_t threads) {
    auto time = [&](int64_t parts) { return (heads * parts + threads - 1) / threads * ((tokens + parts - 1) / parts); };
    int64_t best = 1;
    for (int64_t parts = 2; parts <= std::min(tokens, threads); parts++)
        if (time(parts) < time(best)) best = parts;
    return best;
}

// More than a few tokens: their query blocks, whose results each thread finishes itself; first the longest, of whose heads there may be
// too few for the threads.
void Run::attend_all(const Attention& a) {
    const int64_t n = int64_t(blocks.size()) * a.kv_heads, prefixes = int64_t(shared.size()) * a.kv_heads;
    if (prefixes && !a.window)
        share(P_ATTENTION, prefixes, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) attend_shared(a, shared[size_t(i / a.kv_heads)], i % a.kv_heads);
        }, prefixes);
    else if (runs.empty()) {
        const QueryBlock& front = blocks[0];
        const int64_t tokens = front.last - front.first, parts = heavy ? best_parts(tokens, a.kv_heads, threads) : 1;
        const int64_t more = a.kv_heads * (parts - 1);
        share(P_ATTENTION, n + more, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) {
                QueryBlock b = blocks[size_t(std::max<int64_t>(i - more, 0) / a.kv_heads)];
                int64_t head = std::max<int64_t>(i - more, 0) % a.kv_heads;
                if (i < a.kv_heads * parts) {  // parts of a head side by side: what one of them reads the next finds in the processor's caches
                    head = i / parts;
                    b = {front.seq, front.first + tokens * (i % parts) / parts, front.first + tokens * (i % parts + 1) / parts};
                }
                attend_blocks(a, &b, &b + 1, {head, head + 1});
            }
        }, n + more);
    } else
        share(P_ATTENTION, threads, 1, [&](Range r) {
            attend_blocks(a, blocks.data() + runs[size_t(r.first)], blocks.data() + runs[size_t(r.last)], {0, a.kv_heads});
        });
}

}  // namespace tk
