// One step: every thread runs the same function over its share of output rows, tokens or attention items.
//
// Work is split over outputs only, so a result does not depend on the number of threads. Up to SMALL tokens every
// thread prepares the inputs of linears for itself, which saves a barrier; above that tokens are shared out, and with many of
// them threads take parts through whole layers (rows_step.cpp).
#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "profile.h"
#include "run.h"

namespace tk {

void Profile::print() {
    static const char* const names[PHASES] = {"other", "embed", "prepare", "qkv", "rope+kv", "attention",
                                              "o", "gate+up", "down", "moe", "head", "sample"};
    double total = 0;
    for (double s : spent_) total += s;
    if (!steps_ || total <= 0) return;
    fprintf(stderr, "native: %lld steps, %.3f ms a step\n", (long long)steps_, 1e3 * total / double(steps_));
    for (int i = 0; i < PHASES; i++)
        if (spent_[i] > 0)
            fprintf(stderr, "  %-10s %8.3f ms  %5.1f %%\n", names[i], 1e3 * spent_[i] / double(steps_), 100 * spent_[i] / total);
    for (double& s : spent_) s = 0;
    steps_ = 0;
}

int64_t phases_of(const Program& p, int64_t head_blocks) {
    int64_t n = 4 + head_blocks * 4;
    constexpr int64_t each[] = {10, 6, 14, 13};  // by kind
    for (const Sublayer& s : p.sublayers) n += each[s.kind];
    return n;
}

// `head`: whose weights, where heads have their own.
void Run::norm_row(const Norm& n, const float* from, float* out, int64_t head) const {
    const int64_t at = n.sets > 1 ? head * n.size : 0;
    if (!n.layer) ops.rms_norm(from, n.weight.data + at, n.size, n.eps, out);
    else ops.layer_norm(from, n.weight.data + at, n.bias ? n.bias.data + at : nullptr, n.size, n.eps, out);
}

// Rows of the residual that sublayers beside this one read when it has added to them.
void Run::save_rows(const Sublayer& s, Range rows) const {
    if (s.saves && rows.last > rows.first)
        memcpy(w.block + rows.first * w.hidden_ld, w.x + rows.first * w.hidden_ld, size_t(rows.last - rows.first) * size_t(w.hidden_ld) * 4);
}

void Run::save(const Sublayer& s) {
    if (s.saves) share(P_OTHER, count, 1, [&](Range r) { save_rows(s, r); });
}

void Run::prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const {
    float* x = to.x + t * to.ldx;
    if (norm.present()) norm_row(norm, from, x);
    else if (from != x) memcpy(x, from, size_t(in.width) * 4);
    if (in.turned) ops.hadamard(x, in.width);
    quantize_row(in, to, t);
}

void Run::quantize_row(const Input& in, InputBuffer& to, int64_t t) const {
    for (size_t k = 0; k < in.keys.size(); k++) {
        const QuantKey& key = in.keys[k];
        ops.quantize(to.x + t * to.ldx, key.perm, key.group, 0, in.width / key.group, to.q[k] + t * to.ldq,
                     to.scale[k] + t * to.lds, to.sum[k] + t * to.lds);
    }
}

Run::Prepared Run::prepare(const Input& in, const Norm& norm, const float* from, int64_t ld, int64_t rows) {
    InputBuffer& shared = from == w.mid.x ? w.mid : w.in;
    if (rows <= SMALL) return {&shared == &w.mid ? &own.mid : &own.in, false};
    if (norm.present() || !in.keys.empty() || from != shared.x)
        share(P_PREPARE, rows, 1, [&](Range r) {
            for (int64_t t = r.first; t < r.last; t++) prepare_row(in, norm, from + t * ld, shared, t);
        });
    return {&shared, true};
}

const InputBuffer& Run::ready(Prepared& p, const Input& in, const Norm& norm, const float* from, int64_t ld,
                              int64_t rows) const {
    if (!p.ready)
        for (int64_t t = 0; t < rows; t++) prepare_row(in, norm, from + t * ld, *p.buffer, t);
    p.ready = true;
    return *p.buffer;
}

Rows Run::rows_of(const InputBuffer& in, const Linear& l, int64_t first_row) const {
    Rows rows = in.rows(l, first_row);
    rows.round = p.bf16;
    return rows;
}

void Run::linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t count, Range tiles, Store to) const {
    if (tiles.first >= tiles.last || count <= 0) return;
    to.bias = l.bias.data;
    ops.linear(l.w, rows_of(in, l, first_row), count, tiles.first, tiles.last, to, own.linear);
}

Matrix part_of(Matrix m, Range tiles) {
    if (m.data) m.data += tiles.first * m.tile_bytes();
    m.rows = std::min(m.rows, tiles.last * LANES) - tiles.first * LANES;
    return m;
}

// Output tiles `tiles` of a gated pair (or of a plain linear with its activation), the first of them at `out`.
void Run::gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out,
                int64_t ld) const {
    if (tiles.first >= tiles.last || rows <= 0) return;
    const int64_t at = tiles.first * LANES, n = tiles.last - tiles.first;
    const Linear& first_of = m.gate.present() ? m.gate : m.up;
    Store to;
    to.out = out;
    to.ld = ld;
    to.activation = m.activation;
    to.bias = first_of.bias.data ? first_of.bias.data + at : nullptr;
    to.bias_up = m.up.bias.data ? m.up.bias.data + at : nullptr;
    const Rows x = rows_of(in, m.up, first_row);
    const Matrix up = part_of(m.up.w, tiles);
    if (m.gate.present()) ops.gated(part_of(m.gate.w, tiles), up, x, rows, 0, n, to, own.linear);
    else ops.linear(up, x, rows, 0, n, to, own.linear);
}

Store Run::residual(const Sublayer& s) const {
    Store to;
    to.ld = w.hidden_ld;
    to.out = s.post.present() ? w.tmp : w.x;
    to.add = s.post.present() ? 0 : 1;
    to.alpha = s.residual_scale;
    return to;
}

void Run::add_post_rows(const Sublayer& s, Range rows) {
    for (int64_t t = rows.first; t < rows.last; t++) {
        float* y = w.tmp + t * w.hidden_ld;
        norm_row(s.post, y, y);
        ops.add_scaled(w.x + t * w.hidden_ld, y, s.residual_scale, p.hidden);
    }
}

void Run::add_post(const Sublayer& s) {
    if (s.post.present()) share(P_OTHER, count, 1, [&](Range r) { add_post_rows(s, r); });
}

// The linear that ends a sublayer, from the shared middle rows (already quantized or not) into the residual.
void Run::down(const Sublayer& s, const Linear& l, const Input& mid, bool quantized, Phase phase) {
    Prepared x = quantized || mid.keys.empty() ? Prepared{&w.mid, true} : prepare(mid, Norm(), w.mid.x, w.mid.ldx, count);
    const Store to = residual(s);
    share(phase, l.w.tiles(), pair_unit(), [&](Range tiles) {
        linear(l, ready(x, mid, Norm(), w.mid.x, w.mid.ldx, count), 0, count, tiles, to);
    });
    add_post(s);
}

void Run::embed_rows(Range r) {
    for (int64_t t = r.first; t < r.last; t++) {
        const int64_t at = first + t;
        const int32_t prev = in.from_previous[at];
        const int64_t id = prev >= 0 ? model.previous[size_t(prev)] : in.token_ids[at];
        ops.matrix_row(p.embed.w, id, p.embed_scale, w.x + t * w.hidden_ld);
        if (p.embed.turned) ops.hadamard(w.x + t * w.hidden_ld, p.hidden);
    }
    for (int64_t i = 0; i < in.embeds_size; i++) {
        const int64_t t = in.embed_index[i] - first;
        if (t >= r.first && t < r.last) memcpy(w.x + t * w.hidden_ld, in.embeds + i * p.hidden, size_t(p.hidden) * 4);
    }
    for (size_t i = 0; i < p.ropes.size(); i++) turn_table(i, r);
}

// Cosines and sines of a rope for tokens r.
void Run::turn_table(size_t i, Range r) const {
    const Rope& rope = p.ropes[i];
    const int64_t half = rope.rotary / 2;
    for (int64_t t = r.first; t < r.last; t++) {
        const int set = in.rope_set[seq_of[size_t(t)]];
        const int32_t* at = in.positions + first + t;
        for (int64_t d = 0; d < half; d++) {
            const int64_t axis = in.axes == 1 || d < rope.ends[0] ? 0 : d < rope.ends[1] ? 1 : 2;
            const float angle = float(at[axis * in.tokens]) * rope.freq[set].data[d];
            w.cos[i][t * half + d] = cosf(angle) * rope.factor[set];
            w.sin[i][t * half + d] = sinf(angle) * rope.factor[set];
        }
    }
}

// Whether the columns of a gated product are quantized right behind it, a stripe at a time: the next input has one plain
// quantization.
bool Run::stripes(const Mlp& m) const {
    return m.mid.keys.size() == 1 && !m.mid.keys[0].perm && m.mid.keys[0].group <= STRIPE;
}

// Output tiles `tiles` of a gated product for the rows, into the middle rows: quantized in stripes, or all as floats.
void Run::gated_rows(const Mlp& m, const InputBuffer& in, Range rows, Range tiles, bool fused) {
    const int64_t n = rows.last - rows.first;
    if (!fused) return gated(m, in, rows.first, n, tiles, w.mid.x + rows.first * w.mid.ldx + tiles.first * LANES, w.mid.ldx);
    const int64_t group = m.mid.keys[0].group, unit = group / LANES, step = std::max<int64_t>(1, 4 / unit) * unit;
    for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += step) {
        const int64_t t1 = std::min(t0 + step, tiles.last), g0 = t0 / unit, ld = (t1 - t0) * LANES;
        gated(m, in, rows.first, n, {t0, t1}, own.stripe, ld);
        for (int64_t i = 0; i < n; i++) {
            const int64_t t = rows.first + i;
            ops.quantize(own.stripe + i * ld, nullptr, group, 0, (t1 - t0) / unit, w.mid.q[0] + t * w.mid.ldq + t0 * LANES,
                         w.mid.scale[0] + t * w.mid.lds + g0, w.mid.sum[0] + t * w.mid.lds + g0);
        }
    }
}

void Run::mlp(const Sublayer& s) {
    const Mlp& m = s.mlp;
    const float* from = source(s);
    save(s);
    Prepared x = prepare(m.in, s.pre, from, w.hidden_ld, count);
    const bool fused = stripes(m) && m.mid.width / m.mid.keys[0].group >= 2 * threads;
    share(P_GATED, m.up.w.tiles(), fused ? m.mid.keys[0].group / LANES : pair_unit(), [&](Range tiles) {
        gated_rows(m, ready(x, m.in, s.pre, from, w.hidden_ld, count), {0, count}, tiles, fused);
    });
    down(s, m.down, m.mid, fused, P_DOWN);
}

void Run::layers() {
    if (parts.empty()) {
        share(P_EMBED, count, 1, [&](Range r) { embed_rows(r); });
        for (const Sublayer& s : p.sublayers) {
            if (s.kind == 0) attention(s);
            else if (s.kind == 1) mlp(s);
            else if (s.kind == 2) moe(s);
            else latent(s);
        }
    } else {
        layers_by_parts();
    }
    // rows that someone asks for leave the chunk, normed
    share(P_OTHER, int64_t(plan.rows.size()), 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) {
            const int64_t t = plan.rows[size_t(i)] - first;
            if (t >= 0 && t < count)
                norm_row(p.final_norm, w.x + t * w.hidden_ld, plan.hidden + i * w.hidden_ld);
        }
    });
}

void Run::heads() {
    share(P_OTHER, in.hidden_size, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++)
            memcpy(out.hidden + i * p.hidden, plan.hidden + plan.hidden_row[size_t(i)] * w.hidden_ld, size_t(p.hidden) * 4);
    });
    for (int64_t base = 0; base < plan.logit_rows; base += w.logit_rows) {
        const int64_t n = std::min(w.logit_rows, plan.logit_rows - base);
        const float* from = plan.hidden + base * w.hidden_ld;
        Prepared x = prepare(p.head_in, Norm(), from, w.hidden_ld, n);
        Store to;
        to.out = w.logits;
        to.ld = w.vocab_ld;
        share(P_HEAD, p.head.w.tiles(), 2, [&](Range tiles) {
            linear(p.head, ready(x, p.head_in, Norm(), from, w.hidden_ld, n), 0, n, tiles, to);
        });
        share(P_SAMPLE, n, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) finish_row(base + i, w.logits + i * w.vocab_ld);
        });
    }
}

namespace {

// The flat tokens whose logits or hidden states are needed, ascending, and where each request for one finds it.
Plan make_plan(const StepArrays& in) {
    Plan plan;
    std::vector<uint8_t> wanted(size_t(in.tokens), 0);  // 1 = hidden only, 2 = logits
    for (int64_t i = 0; i < in.hidden_size; i++) wanted[size_t(in.hidden_index[i])] |= 1;
    for (int64_t i = 0; i < in.rows; i++) wanted[size_t(in.sample_index[i])] |= 2;
    for (int64_t i = 0; i < in.logits_size; i++) wanted[size_t(in.logits_index[i])] |= 2;
    for (int64_t i = 0; i < in.target_size; i++) wanted[size_t(in.target_index[i])] |= 2;
    std::vector<int64_t> row(size_t(in.tokens), -1);
    for (int64_t t = 0; t < in.tokens; t++)
        if (wanted[size_t(t)] & 2) {
            row[size_t(t)] = int64_t(plan.rows.size());
            plan.rows.push_back(t);
        }
    plan.logit_rows = int64_t(plan.rows.size());
    for (int64_t t = 0; t < in.tokens; t++)
        if (wanted[size_t(t)] == 1) {
            row[size_t(t)] = int64_t(plan.rows.size());
            plan.rows.push_back(t);
        }
    for (int64_t i = 0; i < in.hidden_size; i++) plan.hidden_row.push_back(row[size_t(in.hidden_index[i])]);
    auto users = [&](const int32_t* index, int64_t n) {
        std::vector<std::pair<int64_t, int64_t>> u;
        for (int64_t i = 0; i < n; i++) u.emplace_back(row[size_t(index[i])], i);
        std::sort(u.begin(), u.end());
        return u;
    };
    plan.samples = users(in.sample_index, in.rows);
    plan.logits = users(in.logits_index, in.logits_size);
    plan.targets = users(in.target_index, in.target_size);
    return plan;
}

void copy_blocks(Model& m, const StepArrays& in) {
    for (int64_t g = 0; g < in.groups; g++) {
        const Group& group = m.program.groups[size_t(g)];
        const int64_t n = in.copies_size[g];
        std::vector<uint8_t> held(size_t(n * group.block_bytes));
        for (int64_t i = 0; i < n; i++)
            memcpy(held.data() + i * group.block_bytes, group.data + in.copies[g][2 * i] * group.block_bytes, size_t(group.block_bytes));
        for (int64_t i = 0; i < n; i++)
            memcpy(group.data + in.copies[g][2 * i + 1] * group.block_bytes, held.data() + i * group.block_bytes, size_t(group.block_bytes));
    }
}

// What all threads share while a step runs.
struct Job {
    Model* model;
    const StepArrays* in;
    const StepResults* out;
    Plan* plan;
    int64_t first, count;
    Cut cut;
    bool heads;
};

void run_thread(void* arg, int index) {
    Job& job = *static_cast<Job*>(arg);
    Run run(*job.model, *job.in, *job.out, *job.plan, job.cut, job.first, job.count, index);
    if (job.heads) run.heads();
    else run.layers();
}

// Parts of the chunk for threads that take rows through whole layers; none where there are too few rows for that.
void cut_parts(Job& job, const Program& p, int64_t threads) {
    job.cut.parts.clear();
    if (job.count < threads * PART / 2) return;
    for (const Sublayer& s : p.sublayers)
        if (s.kind >= 2) return;
    const int64_t n = ((job.count + PART - 1) / PART + threads - 1) / threads * threads;
    for (int64_t i = 0; i < n; i++) job.cut.parts.push_back({{job.count * i / n, job.count * (i + 1) / n}, 0, 0});
}

// Positions that the tokens of a block see, in all.
int64_t cost(const StepArrays& in, const QueryBlock& b) {
    return (in.seq_lens[b.seq] - (in.cu_seqlens[b.seq + 1] - b.last)) * (b.last - b.first);
}

// Query blocks of flat tokens [first, last): whole rows of one sequence, about QUERY_ROWS query rows each.
void cut_blocks(Job& job, int64_t first, int64_t last, int64_t tokens) {
    const StepArrays& in = *job.in;
    for (int64_t t = first; t < last;) {
        const int64_t s = job.cut.seq_of[size_t(t - job.first)], end = std::min<int64_t>({in.cu_seqlens[s + 1], last, t + tokens});
        job.cut.blocks.push_back({s, t, end});
        t = end;
    }
}

// Runs of sequences with a token each, for threads to read their caches in one go: the longest left to the thread that has
// the least. None where there are too few, or one is too long.
void cut_runs(Job& job, int64_t threads) {
    const StepArrays& in = *job.in;
    std::vector<QueryBlock>& blocks = job.cut.blocks;
    if (int64_t(blocks.size()) != job.count || job.count < 4 * threads) return;
    int64_t total = 0;
    for (const QueryBlock& b : blocks) {
        if (in.cu_seqlens[b.seq + 1] - in.cu_seqlens[b.seq] != 1) return;  // many heads a key: a prompt's blocks are as small
        total += cost(in, b);
    }
    if (cost(in, blocks[0]) * threads > total) return;
    std::vector<std::vector<QueryBlock>> runs(static_cast<size_t>(threads));
    std::vector<int64_t> sums(size_t(threads), 0);
    for (const QueryBlock& b : blocks) {
        const size_t i = size_t(std::min_element(sums.begin(), sums.end()) - sums.begin());
        runs[i].push_back(b);
        sums[i] += cost(in, b);
    }
    blocks.clear();
    job.cut.runs.push_back(0);
    for (const std::vector<QueryBlock>& run : runs) {
        blocks.insert(blocks.end(), run.begin(), run.end());
        job.cut.runs.push_back(int64_t(blocks.size()));
    }
}

// Sequences, parts, query blocks and runs of the chunk. Long ones first: threads take them as they get free.
void cut_chunk(Job& job, const Program& p, int64_t per_kv, int64_t threads) {
    const StepArrays& in = *job.in;
    const int64_t tokens = std::max<int64_t>(1, QUERY_ROWS / per_kv), end = job.first + job.count;
    job.cut.seq_of.assign(size_t(job.count), 0);
    job.cut.blocks.clear();
    for (int64_t s = 0; s < in.seqs; s++)
        for (int64_t t = std::max<int64_t>(in.cu_seqlens[s], job.first); t < std::min<int64_t>(in.cu_seqlens[s + 1], end); t++)
            job.cut.seq_of[size_t(t - job.first)] = s;
    job.cut.runs.clear();
    cut_parts(job, p, threads);
    if (job.cut.parts.empty()) {
        cut_blocks(job, job.first, end, tokens);
        std::stable_sort(job.cut.blocks.begin(), job.cut.blocks.end(),
                         [&](const QueryBlock& a, const QueryBlock& b) { return cost(in, a) > cost(in, b); });
        cut_runs(job, threads);
        return;
    }
    for (RowPart& part : job.cut.parts) {
        part.first_block = int64_t(job.cut.blocks.size());
        cut_blocks(job, job.first + part.rows.first, job.first + part.rows.last, tokens);
        part.last_block = int64_t(job.cut.blocks.size());
    }
    auto total = [&](const RowPart& part) {
        int64_t sum = 0;
        for (int64_t i = part.first_block; i < part.last_block; i++) sum += cost(in, job.cut.blocks[size_t(i)]);
        return sum;
    };
    std::stable_sort(job.cut.parts.begin(), job.cut.parts.end(), [&](const RowPart& a, const RowPart& b) { return total(a) > total(b); });
}

// Room for the partial states of the widest layer when the chunk has few tokens (attend_split).
int64_t partial_floats(const Program& p, const Job& job) {
    int64_t tiles = 0, widest = 0;
    if (job.count > SMALL) return 0;
    for (int64_t t = 0; t < job.count; t++) tiles += job.in->seq_lens[job.cut.seq_of[size_t(t)]] / KV_TILE + 1;
    for (const Sublayer& s : p.sublayers)
        if (const Attention* a = s.attends()) widest = std::max(widest, a->heads * (a->vpad + 2));
    return tiles * widest;
}

}  // namespace

void Model::step(const StepArrays& in, const StepResults& out) {
    check_step(program, in, out, int64_t(previous.size()));
    if (profile) profile->start();
    copy_blocks(*this, in);
    if (in.tokens == 0) {
        previous.clear();
        return;
    }
    Plan plan = make_plan(in);
    plan.hidden = work->hidden_rows(int64_t(plan.rows.size()));
    int64_t per_kv = 1;
    for (const Sublayer& s : program.sublayers)
        if (const Attention* a = s.attends()) per_kv = std::max(per_kv, a->per_kv);
    Job job{this, &in, &out, &plan, 0, 0, {}, false};
    for (int64_t t = 0; t < in.tokens; t += CHUNK) {
        job.first = t;
        job.count = std::min(CHUNK, in.tokens - t);
        cut_chunk(job, program, per_kv, pool.size());
        work->partials(partial_floats(program, job));
        pool.run(run_thread, &job, phases_of(program, 0));
    }
    job.heads = true;
    if (!plan.rows.empty()) pool.run(run_thread, &job, phases_of(program, plan.logit_rows / work->logit_rows + 1));
    previous.assign(out.tokens, out.tokens + in.rows);
}

Model::Model(Program prog, const Ops* o, int threads)
    : program(std::move(prog)), ops(o), pool(threads), work(std::make_unique<Workspace>(program, *o, pool.size())) {}

Model::~Model() = default;

void Model::allocate_cache(const int64_t* blocks, int64_t groups) {
    if (groups != int64_t(program.groups.size()))
        throw Error("num_blocks: expected " + std::to_string(program.groups.size()) + " counts, found " + std::to_string(groups));
    release_cache();
    for (int64_t g = 0; g < groups; g++) {
        Group& group = program.groups[size_t(g)];
        if (blocks[g] < 1 || blocks[g] > (int64_t(1) << 40) / std::max<int64_t>(group.block_bytes, 1))
            throw Error("num_blocks: expected a count above 0 that fits the memory, found " + std::to_string(blocks[g]));
        cache.emplace_back(blocks[g] * group.block_bytes);
        group.blocks = blocks[g];
        group.data = cache.back().data();
    }
}

void Model::release_cache() {
    for (Group& g : program.groups) {
        g.data = nullptr;
        g.blocks = 0;
    }
    cache.clear();
}

}  // namespace tk
