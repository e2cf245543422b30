// One thread's view of a running step.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "step/model.h"
#include "step/row_work.h"

namespace tk {

// Phases that a run may have, for Pool::run.
int64_t phases_of(const Program& p, int64_t head_blocks);

class Run : RowWork {
public:
    Run(Model& m, const StepArrays& i, const StepResults& o, Plan& pl, const Cut& cut, int index)
        : RowWork(*m.ops, m.program.bf16, false, m.work->threads[size_t(index)].linear,
                  {cut.seen.empty() ? nullptr : cut.seen.data(), &m.work->threads[size_t(index)].low,
                   cut.adapters.empty() ? nullptr : cut.adapters.data(), &m.adapters, index, m.pool.size()}),
          model(m), p(m.program), w(*m.work), in(i), out(o), plan(pl), seq_of(cut.seq_of), view_of(cut.view_of), spans(cut.spans),
          blocks(cut.blocks), in_order(cut.in_order), shared(cut.shared), looks(cut.looks), parts(cut.parts), runs(cut.runs), heavy(cut.heavy), adapters(cut.adapters), first(cut.first), count(cut.count),
          thread(index), threads(m.pool.size()), own(m.work->threads[size_t(index)]) {
        for (LowScratch::Rows& made : own.low.made) made.of = nullptr;
    }

    void layers();
    void heads();
    uint32_t met() const { return meetings; }
    void remember(const Kept& kept, int64_t from);

private:
    static constexpr int64_t UNEVEN = 4;  // chunks a thread where their work may differ

    // The next phase: [0, n) cut into at most `grain` chunks a thread, of whole units; body(Range). One chunk reads its
    // weights in one run; whoever comes first takes it, so that a thread that is kept away holds up nobody.
    template <class Body>
    void share(Phase name, int64_t n, int64_t unit, Body&& body, int64_t grain = 1) {
        const int64_t units = (n + unit - 1) / unit, most = threads == 1 ? 1 : grain * threads;
        const int64_t chunks = units < most ? units : most;
        model.pool.chunks(phase++, uint32_t(chunks), [&](uint32_t i) {
            const int64_t a = units * i / chunks * unit, b = units * (i + 1) / chunks * unit;
            body(Range{a, b < n ? b : n});
        });
        if (thread == 0 && model.profile) model.profile->tick(name);
    }
    // The same for the tiles of linears, `bytes` of weights in all: with enough of them whoever is faster takes more.
    template <class Body>
    void share_tiles(Phase name, int64_t n, int64_t unit, int64_t bytes, Body&& body) {
        if (threads == 1 || threads > CUTS / 2 || bytes < 4 * threads * PART_BYTES) return share(name, n, unit, body);
        const int64_t units = (n + unit - 1) / unit;
        const Shares s = tapered(units, threads, (units * PART_BYTES + bytes - 1) / bytes);
        model.pool.chunks(phase++, uint32_t(s.parts), [&](uint32_t i) { body(Range{s.at[i] * unit, std::min(n, s.at[i + 1] * unit)}); });
        if (thread == 0 && model.profile) model.profile->tick(name);
    }
    // The same for the tiles of one linear, or of several that are cut alike, that are this rank's.
    template <class Body>
    void share_own(Phase name, Range tiles, int64_t unit, int64_t tile_bytes, Body&& body) {
        const int64_t n = tiles.last - tiles.first;
        share_tiles(name, n, unit, n * tile_bytes, [&](Range r) { body(Range{tiles.first + r.first, tiles.first + r.last}); });
    }

    // Of each of the first `rows` rows of an array this rank has made bytes `own` of `width`.
    struct Columns {
        void* data;
        int64_t rows, ld, width;  // the last two in bytes
        Range own;
    };
    // Numbers that are a matrix's rows in `tiles`.
    static Range in_tiles(Range tiles, int64_t width) { return {tiles.first * LANES, std::min(tiles.last * LANES, width)}; }
    // Rows of floats.
    static Columns floats(float* data, int64_t rows, int64_t ld, int64_t width, Range own) {
        return {data, rows, ld * 4, width * 4, {own.first * 4, own.last * 4}};
    }
    // Rows as a linear reads them that quantizes by `group`.
    static void add_codes(std::vector<Columns>& to, const InputBuffer& of, int64_t rows, int64_t width, int64_t group, Range own) {
        const Range numbers{own.first / group * 4, own.last / group * 4};
        to.push_back({of.q[0], rows, of.ldq, width, own});
        to.push_back({of.scale[0], rows, of.lds * 4, width / group * 4, numbers});
        to.push_back({of.sum[0], rows, of.lds * 4, width / group * 4, numbers});
    }
    bool tapped(size_t k) const;
    void tap(size_t k, Range rows) const;
    void tap_all(size_t k);
    void quantize_own(InputBuffer& of, int64_t t, int64_t group, Range own) const;
    // Of each array what the other ranks have made. `before`: what is first done to row t of all.
    template <class Before>
    void gather(const std::vector<Columns>& parts, Before&& before) {
        if (p.ranks == 1) return;
        int64_t rows = 0;
        for (const Columns& c : parts) rows = std::max(rows, c.rows);
        meetings++;
        const bool traced = thread == 0 && model.trace;
        const double begun = traced ? seconds() : 0;
        const uint32_t meeting = model.meetings + meetings;
        uint8_t* place = model.link->place(meeting);
        auto each = [&](int64_t t, auto&& copy) {
            int64_t at = 0;
            for (const Columns& c : parts) {
                if (t < c.rows) copy(c, static_cast<uint8_t*>(c.data) + t * c.ld, place + at + t * c.width);
                at += c.rows * c.width;
            }
        };
        const int64_t n = std::min<int64_t>(rows, threads);
        model.pool.chunks(
            phase++, uint32_t(n),
            [&](uint32_t i) {
                for (int64_t t = rows * i / n; t < rows * (i + 1) / n; t++) {
                    before(t);
                    each(t, [](const Columns& c, uint8_t* mine, uint8_t* all) {
                        std::memcpy(all + c.own.first, mine + c.own.first, size_t(c.own.last - c.own.first));
                    });
                }
            },
            [&] {
                Posted& mine = model.link->posted(meeting, p.rank);
                mine.count = 0;
                for (const Columns& c : parts) mine.parts[mine.count++] = {c.rows, c.width, c.own.first, c.own.last};
                model.link->arrive(meeting);
            });
        model.link->wait(meeting);
        if (traced) {
            int64_t bytes = 0;
            for (const Columns& c : parts) bytes += c.rows * (c.own.last - c.own.first);
            model.trace->push_back({begun, seconds(), double(bytes)});
        }
        share(P_GATHER, rows, 1, [&](Range r) {
            for (int64_t t = r.first; t < r.last; t++)
                each(t, [](const Columns& c, uint8_t* mine, const uint8_t* all) {
                    std::memcpy(mine, all, size_t(c.own.first));
                    std::memcpy(mine + c.own.last, all + c.own.last, size_t(c.width - c.own.last));
                });
        });
    }
    void gather(const std::vector<Columns>& parts) {
        gather(parts, [](int64_t) {});
    }
    // Whether what `l` reads travels in integers; what adapters read of it has to come as floats.
    bool codes(const Linear& l, bool wanted) const { return p.ranks > 1 && wanted && !splits(l) && adapters.empty(); }
    bool codes(const Moe& m) const { return p.ranks > 1 && m.codes && adapters.empty(); }
    void gather_mid(const Linear& l, const Input& mid, bool codes, Range own);
    void gather_hidden(const Sublayer& s, Range tiles);
    int64_t pair_unit() const { return count > SMALL ? 2 : 1; }

    // Inputs of linears. For many rows they are a phase of their own and lie in the shared buffer; for few, each thread that
    // takes part in the product makes its own copy when it takes its first chunk.
    struct Prepared {
        InputBuffer* buffer;
        bool ready;
    };
    const float* source(const Sublayer& s) const { return s.beside ? w.block : w.x; }
    void save_rows(const Sublayer& s, Range rows) const;
    void save(const Sublayer& s);
    Prepared prepare(const Input& in, const Norm& norm, const float* from, int64_t ld, int64_t rows);
    const InputBuffer& ready(Prepared& p, const Input& in, const Norm& norm, const float* from, int64_t ld, int64_t rows) const;
    Store residual(const Sublayer& s) const;
    void add_post(const Sublayer& s);
    void add_deep(const Sublayer& s, Range rows);
    void add_post_rows(const Sublayer& s, Range rows);
    void end_row(const Sublayer& s, int64_t t, float* y) const;
    bool stripes(const Mlp& m) const;
    void gated_rows(const Mlp& m, const InputBuffer& in, Range rows, Range tiles, bool fused);
    void down(const Sublayer& s, const Linear& l, const Input& mid, bool quantized, Phase phase);

    void embed_rows(Range rows);
    // per_layer_step.cpp
    void give();
    void give_rows(Range rows);
    void give_row(int64_t t);
    void mix(const Sublayer& s, const PerLayer& m);
    void per_layer_rows(const Sublayer& s, const PerLayer& m, Range rows);
    void gate_rows(const PerLayer& m, const InputBuffer& in, Range rows, Range tiles);
    void turn_table(size_t rope, Range tokens) const;
    void mix(const Sublayer& s, const Mlp& m);

    // attention_step.cpp, attend_step.cpp
    void mix(const Sublayer& s, const Attention& a);
    void fill(const Attention& a);
    // Tiles of a linear that are computed, and the column of a row of projections where its first would lie.
    struct Projection {
        const Linear* l;
        Range tiles;
        int64_t place;
    };
    static std::vector<Projection> side_by_side(std::initializer_list<const Linear*> linears);
    void project(const Input& in, const Norm& norm, const float* from, int64_t ld, float* out, const std::vector<Projection>& parts);
    void project(const Input& in, const Norm& norm, const float* from, int64_t ld, float* out, std::initializer_list<const Linear*> linears) {
        project(in, norm, from, ld, out, side_by_side(linears));
    }
    void settle_row(const Attention& a, int64_t t) const;
    void turn_row(const Attention& a, int64_t t, float* q, float* k) const;
    void turn_and_store(const Attention& a, int64_t t, int64_t head);
    void store(const Attention& a, int64_t t, int64_t head, const float* key, const float* value);
    int64_t position_of(int64_t seq, int64_t flat) const { return in.seq_lens[seq] - (in.cu_seqlens[seq + 1] - flat); }
    // The position behind the last that a token sees; rows are seen from behind alone.
    int64_t reach(const Attention& a, int64_t seq, int64_t flat) const {
        const int64_t at = position_of(seq, flat);
        if (!in.reach || a.rows || a.strict) return at + 1;
        return a.mutual && a.window ? std::min<int64_t>(in.reach[flat], at + a.window) : in.reach[flat];
    }
    Range tiles_of(const Attention& a, int64_t seq, int64_t t0, int64_t t1) const;
    // One tile, for tokens [first, last) and one kv head; of sequence `seq`, or of several that have the tile in common with it.
    struct Piece {
        int64_t seq, head, first, last, tile;
    };
    struct Work {
        Piece piece;
        AttnState into;  // of its rows
    };
    struct Sight {
        bool apart;
        Range tokens;
        int64_t tile;
    };
    Sight sight(const Attention& a, const Piece& piece) const;
    void find_cells(const Attention& a, int64_t seq, int64_t head, int64_t tile, Range tokens, KvTile* to) const;
    void find_cells(const Attention& a, const Piece& piece, KvTile* to) const;
    void load_cells(const Attention& a, int64_t tile, Range tokens, const KvTile* ahead, KvTile* cells);
    int32_t reads(const Attention& a) const;
    int64_t query_bytes(const Attention& a) const;
    void attend_tile(const Attention& a, const Piece& piece, KvTile& kv, const KvTile* next, const AttnState& to);
    // The state of the rows of this thread's piece, from `row` on.
    AttnState state_rows(const Attention& a, int64_t row) const {
        const AttnState& s = own.attention.running;
        return {s.m + row, s.l + row, s.acc + row * a.vpad};
    }
    template <class Advance, class Each>
    void walk(const Attention& a, Advance advance, Each each);
    void attend_more(const Attention& a, const Work& work, bool first_tile, KvTile& kv, const KvTile* next);
    void attend_blocks(const Attention& a, const QueryBlock* block, const QueryBlock* last, Range heads);
    void attend_shared(const Attention& a, const SharedPrefix& prefix, int64_t head);
    // Of few tokens: the tiles of a block's heads, a partial state each.
    int64_t split_items(const Attention& a, const QueryBlock& b) const {
        const Range tiles = tiles_of(a, b.seq, b.first, b.last);
        return (tiles.last - tiles.first) * a.kv_heads;
    }
    static int64_t split_floats(const Attention& a, const QueryBlock& b) { return (b.last - b.first) * a.per_kv * (a.vpad + 2); }
    static AttnState split_state(const Attention& a, const QueryBlock& b, float* partial, int64_t item) {
        float* s = partial + item * split_floats(a, b);
        const int64_t rows = (b.last - b.first) * a.per_kv;
        return {s, s + rows, s + 2 * rows};
    }
    void attend_split(const Attention& a);
    void merge_tiles(const Attention& a, const QueryBlock& b, const float* partial, int64_t head, int64_t row, int64_t rows, const AttnState& into);
    void merge_split(const Attention& a, InputBuffer& to, Range heads);
    void finish_rows(const Attention& a, int64_t head, int64_t t, const AttnState& s, int64_t row, float* to);
    const uint8_t* query(const Attention& a, int64_t head, int64_t t) const;
    const uint8_t* sink_query(const Attention& a, int64_t head, int64_t t) const;
    void put_query(const Attention& a, const float* row, uint8_t* to) const;
    float* result(const Attention& a, int64_t t) const { return a.rows ? w.spread + t * w.spread_ld : w.mid.x + t * w.mid.ldx; }
    void attend_all(const Attention& a);

    // latent_step.cpp
    void mix(const Sublayer& s, const Latent& a);
    void store_row(const Latent& a, int64_t t);
    const Linear& kv_b(const Latent& a, const Change* c) const;
    void absorb(const Latent& a, int64_t head, Range rows);
    void merge_head(const Latent& a, int64_t head, Range rows);
    void give_values(const Latent& a, int64_t head, Range rows);

    // cross_step.cpp
    void mix(const Sublayer& s, const Cross& c);
    void ask(const Cross& c, int64_t t, int64_t head);
    KvTile kept_tile(const Cross& c, const Kept& kept, int64_t head, int64_t tile) const;
    void look(const Cross& c, const QueryBlock& block, int64_t head);
    void cross_rows(const Sublayer& s, const Cross& c, const RowPart& part);

    // rows_step.cpp
    void mark(Phase name);
    void layers_by_parts();
    void prepare_rows(const Sublayer& s, const Input& in, Range rows);
    void project_rows(const Sublayer& s, const Attention& a, Range rows);
    void attend_rows(const Sublayer& s, const Attention& a, const RowPart& part);
    void mlp_rows(const Sublayer& s, const Mlp& m, Range rows);
    void down_rows(const Sublayer& s, const Linear& l, Range rows, Phase phase);

    // state_step.cpp
    void mix(const Sublayer& s, const ShortConv& m);
    void mix(const Sublayer& s, const Delta& m);
    void mix(const Sublayer& s, const Mamba& m);
    template <class Body>
    void each_span(int64_t each, Body&& body);
    float* slot(int64_t group, int64_t seq) const;
    void convolve(const Conv& conv, const QueryBlock& span, Range c, const float* x, int64_t ldx, float* out, int64_t ldo) const;
    void recur(const States& s, const QueryBlock& span, int64_t head, int64_t key, int64_t query, int64_t value) const;

    // moe_step.cpp
    void mix(const Sublayer& s, const Moe& m);
    void route(const Sublayer& s, const Moe& m);
    void tell_routes(const Moe& m) const;
    void gather_pairs(const Moe& m);
    template <class Body>
    void each_expert(const Moe& m, bool down, Body&& body);
    void experts(const Moe& m);
    void gather_pairs_mid(const Moe& m);
    void use_pairs(const Moe& m, const Mlp& e);
    void combine(const Sublayer& s, const Moe& m);
    void combine_own(const Sublayer& s, const Moe& m);
    void add_apart(const Moe& m, float* of_experts, float* of_shared) const;

    // sampling.cpp
    void finish_row(int64_t row, float* logits);
    void sample(int64_t i, const float* raw);

    Model& model;
    Program& p;
    Workspace& w;
    const StepArrays& in;
    const StepResults& out;
    Plan& plan;
    const std::vector<int64_t>& seq_of;
    const std::vector<int32_t>& view_of;
    const std::vector<QueryBlock>& spans;
    const std::vector<QueryBlock>& blocks;
    const std::vector<QueryBlock>& in_order;
    const std::vector<SharedPrefix>& shared;
    const std::vector<QueryBlock>& looks;
    const std::vector<RowPart>& parts;
    const std::vector<int64_t>& runs;
    const bool heavy;
    const Adapters& adapters;
    const int64_t first, count;  // the chunk's flat tokens
    Range hand{0, count};        // those that this thread has in hand: a part of their own, or all
    const int thread, threads;
    ThreadScratch& own;
    int64_t phase = 0;
    uint32_t meetings = 0;  // with other ranks
};

}  // namespace tk
