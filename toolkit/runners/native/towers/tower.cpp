#include "towers/tower.h"

#include <algorithm>
#include <cstring>

#include "towers/tower_run.h"

namespace tk {
namespace {

constexpr int64_t MOST_ROWS = int64_t(1) << 22;

const TowerLayer* layer_of(const TowerStage& s) { return std::get_if<TowerLayer>(&s.what); }

void run_thread(void* arg, int index) {
    auto& [tower, in] = *static_cast<std::pair<Tower*, const TowerArrays*>*>(arg);
    TowerRun(*tower, *in, index).stages();
}

}  // namespace

Tower::Scratch::Scratch(const TowerProgram& p, const Ops& ops) {
    int64_t in_width = 16, mid_width = 16, dpad = 16, linear_bytes = 64;
    auto measure = [&](std::initializer_list<const Linear*> linears) {
        for (const Linear* l : linears)
            if (l->present()) linear_bytes = std::max(linear_bytes, ops.linear_scratch(l->w));
    };
    for (const TowerStage& s : p.stages) {
        in_width = std::max(in_width, s.inputs);
        if (const TowerProduct* product = std::get_if<TowerProduct>(&s.what)) measure({&product->pair.gate, &product->pair.up});
        const TowerLayer* l = layer_of(s);
        if (!l) continue;
        measure({&l->q, &l->k, &l->v, &l->o, &l->mlp.gate, &l->mlp.up, &l->mlp.down});
        mid_width = std::max({mid_width, l->out.width, l->mlp.mid.width});
        qkv_ld = std::max(qkv_ld, 3 * l->q.w.tiles() * LANES);
        tmp_ld = std::max(tmp_ld, pad16(s.outputs));
        dpad = std::max(dpad, l->dpad);
        if (l->clipped) gate_ld = std::max(gate_ld, l->mlp.up.w.tiles() * LANES);
        for (const Linear& f : l->far) measure({&f}), far_ld = std::max(far_ld, 2 * f.w.tiles() * LANES);
    }
    linear = take<uint8_t>(linear_bytes);
    in = input(TOWER_PART, in_width);
    mid = input(TOWER_PART, mid_width);
    qkv = take<float>(TOWER_PART * qkv_ld);
    tmp = take<float>(TOWER_PART * tmp_ld);
    if (gate_ld) gate = take<float>(TOWER_PART * gate_ld);
    if (far_ld) far = take<float>(TOWER_PART * far_ld);
    head = take<float>(2 * LANES * dpad);
    scores = take<float>(attn_scratch(QUERY_ROWS, dpad));
    for (AttnState* s : {&running, &part}) *s = {take<float>(QUERY_ROWS), take<float>(QUERY_ROWS), take<float>(QUERY_ROWS * dpad)};
    lo = take<int32_t>(QUERY_ROWS);
    hi = take<int32_t>(QUERY_ROWS);
}

Tower::Tower(TowerProgram prog, const Ops* o, int threads) : program(std::move(prog)), ops(o), pool(threads) {
    for (int i = 0; i < pool.size(); i++) scratch.emplace_back(program, *ops);
}

void Tower::check(const TowerArrays& in) const {
    const int64_t stages = int64_t(program.stages.size());
    if (in.first < 0 || in.first >= in.last || in.last > stages) throw Error("tower: no such stages");
    if (in.rows < 1 || in.rows > MOST_ROWS || !in.in || !in.out) throw Error("tower: bad number of rows");
    int64_t width = in.inputs;
    for (int64_t i = in.first; i < in.last; i++) {
        const TowerStage& s = program.stages[size_t(i)];
        if (s.inputs != width) throw Error("tower: stage " + std::to_string(i) + " takes rows of " + std::to_string(s.inputs) + ", found " + std::to_string(width));
        width = s.outputs;
        const TowerLayer* l = layer_of(s);
        if (l && l->turned && (!in.cos || !in.sin)) throw Error("tower: cosines and sines are missing");
        if (l && in.segments[l->division] < 1) throw Error("tower: rows are not divided");
    }
    if (width != in.outputs) throw Error("tower: rows of " + std::to_string(width) + " leave, found " + std::to_string(in.outputs));
    for (int64_t i = in.first; i < in.last; i++) {
        const TowerStage& s = program.stages[size_t(i)];
        if (std::holds_alternative<TowerNear>(s.what) && (in.across < 1 || in.rows % in.across)) throw Error("tower: bad number of columns");
        const TowerLayer* l = layer_of(s);
        for (int64_t k = 0; l && l->side && k < in.segments[l->division]; k++)
            if (in.lengths[l->division][k] != l->side * l->side) throw Error("tower: a segment is no square of the layer's side");
    }
    for (int d = 0; d < 2; d++) {
        if (in.segments[d] == 0) continue;
        int64_t total = 0;
        for (int64_t i = 0; i < in.segments[d]; i++) {
            if (in.lengths[d][i] < 1 || in.lengths[d][i] > in.rows) throw Error("tower: bad length of a segment");
            total += in.lengths[d][i];
            if (d == 0 && in.real && (in.real[i] < 1 || in.real[i] > in.lengths[d][i])) throw Error("tower: bad number of rows that stand for something");
        }
        if (total != in.rows) throw Error("tower: segments do not hold all rows");
    }
}

void Tower::divide(const TowerArrays& in) {
    for (int d = 0; d < 2; d++) {
        Division& division = divisions[d];
        division.segments.clear();
        division.of_row.clear();
        division.cells = 0;
        int64_t first = 0;
        for (int64_t i = 0; i < in.segments[d]; i++) {
            const int64_t last = first + in.lengths[d][i];
            division.segments.push_back({first, last, d == 0 && in.real ? first + in.real[i] : last, division.cells});
            division.of_row.insert(division.of_row.end(), size_t(last - first), int32_t(i));
            division.cells += (last - first + LANES - 1) / LANES;
            first = last;
        }
    }
    const int64_t threads = pool.size(), most = (in.rows + TOWER_PART - 1) / TOWER_PART;
    const int64_t n = std::min((most + threads - 1) / threads * threads, (in.rows + LANES - 1) / LANES);
    parts.clear();
    for (int64_t i = 0; i < n; i++) parts.push_back({in.rows * i / n, in.rows * (i + 1) / n});
}

void Tower::grow(const TowerArrays& in) {
    auto fit = [](Pages& pages, int64_t bytes) {
        if (pages.size() < bytes) pages = Pages(bytes);
    };
    shared.ld = 16;  // of this call: rows before a merge are many and narrow, those behind few and wide
    for (int64_t i = in.first; i < in.last; i++) {
        const TowerStage& s = program.stages[size_t(i)];
        shared.ld = std::max({shared.ld, pad16(s.inputs), pad16(s.outputs)});
    }
    fit(shared.x, in.rows * shared.ld * 4 + 128);
    fit(shared.y, in.rows * shared.ld * 4 + 128);
    for (int64_t i = in.first; i < in.last; i++)
        if (const TowerLayer* l = layer_of(program.stages[size_t(i)])) {
            const int64_t cells = divisions[l->division].cells;
            fit(shared.queries, (l->heads * in.rows + LANES) * l->dpad * (program.bf16 ? 2 : 4) + 128);
            fit(shared.keys, l->heads * cells * l->cell.k_cell + 128);
            fit(shared.values, l->heads * cells * l->cell.v_cell + 128);
        }
}

void Tower::run(const TowerArrays& in) {
    check(in);
    divide(in);
    grow(in);
    if (profile) profile->start();
    std::pair<Tower*, const TowerArrays*> job{this, &in};
    pool.run(run_thread, &job, TowerRun::phases(in));
}

}  // namespace tk
