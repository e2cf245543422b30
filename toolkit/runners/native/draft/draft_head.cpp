#include "draft/draft_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tk {
namespace {

constexpr int64_t MOST_ROWS = int64_t(1) << 22;
constexpr int64_t PARTS = 4;        // of a thread's tiles: whoever has a slow core takes fewer
constexpr int64_t LAYER_PHASES = 11;
constexpr int64_t WORD_PHASES = 3;

int64_t parts_of(int64_t n, int64_t each) { return (n + each - 1) / each; }

// One thread's view of a call.
class DraftRun : RowWork {
public:
    DraftRun(DraftHead& h, int index)
        : RowWork(*h.ops, h.program.bf16, false, h.scratch[size_t(index)].linear), head(h), p(h.program), s(h.shared),
          own(h.scratch[size_t(index)]), per_kv(p.heads / p.kv_heads),
          query_bytes(p.dpad * (p.bf16 ? 2 : 4)), params{p.dpad, p.dpad, 1.0f / std::sqrt(float(p.head_dim)), 0.0f, read_type(*h.ops, KV_BF16, p.bf16)} {}

    void step(const DraftArrays& in) {
        for (int64_t first = 0; first < in.rows; first += DRAFT_ROWS) layer(in, first, std::min(DRAFT_ROWS, in.rows - first));
        for (int64_t first = 0; first < in.texts; first += DRAFT_TEXTS) words(in, first, std::min(DRAFT_TEXTS, in.texts - first));
    }

private:
    // The next phase: body(t) for each of n rows.
    template <class Body>
    void each_row(int64_t n, Body&& body) {
        head.pool.chunks(phase++, uint32_t(n), [&](uint32_t t) { body(int64_t(t)); });
    }
    // The next phase: body(tiles) for parts of so many tiles.
    template <class Body>
    void each_part(int64_t tiles, Body&& body) {
        const int64_t n = std::min(tiles, head.pool.size() * PARTS);
        head.pool.chunks(phase++, uint32_t(n), [&](uint32_t i) { body(Range{tiles * i / n, tiles * (i + 1) / n}); });
    }
    // The same of linears that read one input, their results one behind the other from `out` on.
    void products(std::initializer_list<const Linear*> linears, const InputBuffer& from, int64_t n, Store to) {
        int64_t total = 0;
        for (const Linear* l : linears) total += l->w.tiles();
        each_part(total, [&](Range part) {
            int64_t before = 0;
            for (const Linear* l : linears) {
                const int64_t tiles = l->w.tiles();
                Store mine = to;
                mine.out += before * LANES;
                linear(*l, from, 0, n, {std::clamp<int64_t>(part.first - before, 0, tiles), std::clamp<int64_t>(part.last - before, 0, tiles)}, mine);
                before += tiles;
            }
        });
    }

    void layer(const DraftArrays& in, int64_t first, int64_t n) {
        each_row(n, [&](int64_t t) {
            const float *word = in.words + (first + t) * p.hidden, *state = in.states + (first + t) * p.hidden;
            float *to = s.in.x + t * s.in.ldx, *x = s.x + t * s.x_ld;
            norm_row(p.word_norm, word, to);
            norm_row(p.state_norm, state, own.row);
            std::memcpy(to + p.hidden, own.row, size_t(p.hidden) * 4);
            std::memcpy(x, p.norm_before_residual ? own.row : state, size_t(p.hidden) * 4);
            prepare_row(p.in, Norm(), to, s.in, t);
        });
        Store to;
        to.out = s.qkv;
        to.ld = s.qkv_ld;
        products({&p.q, &p.k, &p.v}, s.in, n, to);
        each_row(n, [&](int64_t t) { turn_and_store(in, first, t, t + 1 == n); });
        attend(in, first, n);
        each_row(n, [&](int64_t t) { prepare_row(p.out, Norm(), s.out.x + t * s.out.ldx, s.out, t); });
        to.out = s.x;
        to.ld = s.x_ld;
        to.add = 1;
        products({&p.o}, s.out, n, to);
        each_row(n, [&](int64_t t) { prepare_row(p.mlp.in, p.mlp_norm, s.x + t * s.x_ld, s.mlp, t); });
        each_part(p.mlp.up.w.tiles(), [&](Range tiles) {
            gated(p.mlp, s.mlp, 0, n, tiles, s.mid.x + tiles.first * LANES, s.mid.ldx);
        });
        each_row(n, [&](int64_t t) { prepare_row(p.mlp.mid, Norm(), s.mid.x + t * s.mid.ldx, s.mid, t); });
        products({&p.mlp.down}, s.mid, n, to);
        each_row(n, [&](int64_t t) {
            const DraftHead::Row& row = head.rows[size_t(first + t)];
            if (!row.last) return;
            float* x = s.x + t * s.x_ld;
            if (p.norm_output) norm_row(p.last_norm, x, x);
            std::memcpy(in.out + row.text * p.hidden, x, size_t(p.hidden) * 4);
        });
    }

    uint8_t* query(int64_t kv_head, int64_t t) const { return s.queries + (kv_head * DRAFT_ROWS + t) * per_kv * query_bytes; }

    // A row's heads normed and turned, its keys and values into the cache.
    void turn_and_store(const DraftArrays& in, int64_t first, int64_t t, bool last) {
        const DraftHead::Row& row = head.rows[size_t(first + t)];
        const int64_t hd = p.head_dim, half = hd / 2, at = row.at, cell = at / LANES, lane = at % LANES;
        const int64_t place = in.places[row.text] + at - in.lengths[row.text];
        for (int64_t d = 0; d < half; d++) {
            const float angle = float(place) * p.freq.data[d];
            own.cos[d] = cosf(angle) * p.factor;
            own.sin[d] = sinf(angle) * p.factor;
        }
        const float *q = s.qkv + t * s.qkv_ld, *k = q + p.q.w.tiles() * LANES, *v = k + p.k.w.tiles() * LANES;
        float *turned = own.row, *value = own.row + p.dpad;
        std::memset(turned, 0, size_t(p.dpad) * 8);
        auto turn = [&](const float* from, const Norm& norm) {
            if (norm.present()) norm_row(norm, from, turned);
            else std::memcpy(turned, from, size_t(hd) * 4);
            ops.rope(turned, own.cos, own.sin, hd);
        };
        for (int64_t h = 0; h < p.kv_heads; h++) {
            for (int64_t i = 0; i < per_kv; i++) {
                turn(q + (h * per_kv + i) * hd, p.q_norm);
                uint8_t* to = query(h, t) + i * query_bytes;
                if (p.bf16) ops.to_bf16(turned, reinterpret_cast<uint16_t*>(to), p.dpad);
                else std::memcpy(to, turned, size_t(p.dpad) * 4);
            }
            turn(k + h * hd, p.k_norm);
            std::memcpy(value, v + h * hd, size_t(hd) * 4);
            ops.kv_write(KV_BF16, p.dpad, turned, value, keys(in, row.text, cell, h), values(in, row.text, cell, h), nullptr, nullptr, lane,
                         row.last || last);
        }
    }

    uint8_t* keys(const DraftArrays& in, int64_t text, int64_t cell, int64_t h) const {
        return in.keys[text] + (cell * p.kv_heads + h) * p.cell.k_cell;
    }
    uint8_t* values(const DraftArrays& in, int64_t text, int64_t cell, int64_t h) const {
        return in.values[text] + (cell * p.kv_heads + h) * p.cell.v_cell;
    }

    // Rows of the same text and one key head, as many as a state has room for, at a time.
    void attend(const DraftArrays& in, int64_t first, int64_t n) {
        head.pool.chunks(phase++, uint32_t(p.kv_heads), [&](uint32_t h) {
            for (int64_t t = 0, end; t < n; t = end) {
                const int64_t text = head.rows[size_t(first + t)].text;
                for (end = t + 1; end < n && head.rows[size_t(first + end)].text == text;) end++;
                const int64_t last = end * per_kv;
                for (int64_t q = t * per_kv; q < last; q += QUERY_ROWS) attend_some(in, first, int64_t(h), {q, std::min(q + QUERY_ROWS, last)});
            }
        });
    }

    // queries: those of rows, per_kv each, counted from the first row.
    void attend_some(const DraftArrays& in, int64_t first, int64_t h, Range queries) {
        const int64_t n = queries.last - queries.first;
        const DraftHead::Row& end = head.rows[size_t(first + (queries.last - 1) / per_kv)];
        for (int64_t tile = 0; tile * KV_TILE <= end.at; tile++) {
            KvTile kv;
            for (int64_t c = 0; c < KV_CELLS; c++) {
                const int64_t cell = std::min(tile * KV_CELLS + c, end.at / LANES);  // none lies behind the last
                kv.k[c] = keys(in, end.text, cell, h);
                kv.v[c] = values(in, end.text, cell, h);
                kv.kp[c] = kv.vp[c] = nullptr;
            }
            for (int64_t i = 0; i < n; i++) {
                const DraftHead::Row& row = head.rows[size_t(first + (queries.first + i) / per_kv)];
                own.lo[i] = 0;
                own.hi[i] = int32_t(std::clamp<int64_t>(row.at + 1 - tile * KV_TILE, 0, KV_TILE));
            }
            ops.attn_tile(params, kv, query(h, 0) + queries.first * query_bytes, n, own.lo, own.hi, tile ? own.part : own.running, own.scores);
            if (tile) ops.attn_merge(p.dpad, n, own.running, own.part);
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t q = queries.first + i;
            ops.attn_finish(p.dpad, own.running.m[i], own.running.l[i], own.running.acc + i * p.dpad, nullptr, own.row);
            std::memcpy(s.out.x + q / per_kv * s.out.ldx + (h * per_kv + q % per_kv) * p.head_dim, own.row, size_t(p.head_dim) * 4);
        }
    }

    void words(const DraftArrays& in, int64_t first, int64_t n) {
        each_row(n, [&](int64_t i) {
            prepare_row(p.last_in, p.norm_output ? Norm() : p.last_norm, in.out + (first + i) * p.hidden, s.last, i);
        });
        Store to;
        to.out = s.logits;
        to.ld = s.logits_ld;
        products({&p.vocabulary}, s.last, n, to);
        each_row(n, [&](int64_t i) {
            const float* row = s.logits + i * s.logits_ld;
            int64_t best = 0;
            int32_t nan = 0;
            const float most = ops.row_max(row, p.vocabulary.w.rows, &best, &nan);
            in.best[first + i] = best;
            in.sure[first + i] = nan || !std::isfinite(most) ? 0.0f : float(1.0 / ops.sum_exp(row, p.vocabulary.w.rows, most, 1.0f));
        });
    }

    DraftHead& head;
    const DraftProgram& p;
    DraftHead::Shared& s;
    DraftHead::Scratch& own;
    const int64_t per_kv, query_bytes;
    const AttnParams params;
    int64_t phase = 0;
};

struct Job {
    DraftHead& head;
    const DraftArrays& in;
};

void run_thread(void* arg, int index) {
    const Job& job = *static_cast<const Job*>(arg);
    DraftRun(job.head, index).step(job.in);
}

}  // namespace

DraftHead::Scratch::Scratch(const DraftProgram& p, const Ops& ops) {
    int64_t bytes = 64;
    for (const Linear* l : {&p.q, &p.k, &p.v, &p.o, &p.mlp.gate, &p.mlp.up, &p.mlp.down, &p.vocabulary})
        bytes = std::max(bytes, ops.linear_scratch(l->w));
    linear = take<uint8_t>(bytes);
    row = take<float>(std::max(pad16(p.hidden), 2 * p.dpad));
    cos = take<float>(p.head_dim / 2);
    sin = take<float>(p.head_dim / 2);
    scores = take<float>(attn_scratch(QUERY_ROWS, p.dpad));
    for (AttnState* s : {&running, &part}) *s = {take<float>(QUERY_ROWS), take<float>(QUERY_ROWS), take<float>(QUERY_ROWS * p.dpad)};
    lo = take<int32_t>(QUERY_ROWS);
    hi = take<int32_t>(QUERY_ROWS);
}

DraftHead::Shared::Shared(const DraftProgram& p)
    : x_ld(p.o.w.tiles() * LANES), qkv_ld((p.q.w.tiles() + p.k.w.tiles() + p.v.w.tiles()) * LANES), logits_ld(p.vocabulary.w.tiles() * LANES) {
    in = input(DRAFT_ROWS, p.in.width);
    out = input(DRAFT_ROWS, p.out.width);
    mlp = input(DRAFT_ROWS, p.mlp.in.width);
    mid = input(DRAFT_ROWS, p.mlp.up.w.tiles() * LANES);
    last = input(DRAFT_TEXTS, p.last_in.width);
    x = take<float>(DRAFT_ROWS * x_ld);
    qkv = take<float>(DRAFT_ROWS * qkv_ld);
    logits = take<float>(DRAFT_TEXTS * logits_ld);
    queries = take<uint8_t>(DRAFT_ROWS * p.heads * p.dpad * 4 + LANES * p.dpad * 4);
}

DraftHead::DraftHead(DraftProgram prog, const Ops* o, int threads) : program(std::move(prog)), ops(o), pool(threads), shared(program) {
    for (int i = 0; i < pool.size(); i++) scratch.emplace_back(program, *ops);
}

void DraftHead::step(const DraftArrays& in) {
    if (in.rows < 1 || in.rows > MOST_ROWS || in.texts < 1 || in.texts > in.rows) throw Error("draft head: bad number of rows or texts");
    rows.clear();
    for (int64_t i = 0; i < in.texts; i++) {
        if (in.counts[i] < 1 || in.counts[i] > in.rows || in.lengths[i] < 0) throw Error("draft head: bad length of a text");
        for (int64_t t = 0; t < in.counts[i]; t++) rows.push_back({i, in.lengths[i] + t, t + 1 == in.counts[i]});
    }
    if (int64_t(rows.size()) != in.rows) throw Error("draft head: texts do not hold all rows");
    Job job{*this, in};
    pool.run(run_thread, &job, LAYER_PHASES * parts_of(in.rows, DRAFT_ROWS) + WORD_PHASES * parts_of(in.texts, DRAFT_TEXTS));
}

}  // namespace tk
