// The mixture-of-experts sublayer: route tokens, run each expert on its rows, add the results in ascending order of experts.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "run.h"

namespace tk {
namespace {

// The top_k experts of one token, ascending by expert, and their weights.
void pick(const Moe& m, const float* logits, int64_t n, int32_t* expert, float* weight) {
    std::vector<float> score(logits, logits + n);
    if (m.sigmoid) {
        for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
    } else {
        const float max = *std::max_element(score.begin(), score.end());
        float total = 0;
        for (float& s : score) total += s = std::exp(s - max);
        for (float& s : score) s /= total;
    }
    std::vector<int32_t> order(size_t(n), 0);
    for (int64_t e = 0; e < n; e++) order[size_t(e)] = int32_t(e);
    std::partial_sort(order.begin(), order.begin() + m.top_k, order.end(), [&](int32_t a, int32_t b) {
        const float x = score[size_t(a)], y = score[size_t(b)];
        return x > y || (x == y && a < b);
    });
    std::sort(order.begin(), order.begin() + m.top_k);
    float total = 0;
    for (int64_t k = 0; k < m.top_k; k++) total += score[size_t(order[size_t(k)])];
    for (int64_t k = 0; k < m.top_k; k++) {
        expert[k] = order[size_t(k)];
        const float s = score[size_t(expert[k])];
        weight[k] = (m.norm_topk && total > 0 ? s / total : s) * m.scale;
    }
}

// Pairs (token, k) sorted by expert.
void group_pairs(ExpertRows& r, int64_t experts) {
    const int64_t n = int64_t(r.expert.size());
    r.start.assign(size_t(experts + 1), 0);
    r.pair.resize(size_t(n));
    r.place.resize(size_t(n));
    for (int32_t e : r.expert) r.start[size_t(e + 1)]++;
    for (int64_t e = 0; e < experts; e++) r.start[size_t(e + 1)] += r.start[size_t(e)];
    std::vector<int32_t> next(r.start.begin(), r.start.end() - 1);
    for (int64_t i = 0; i < n; i++) {
        const int32_t at = next[size_t(r.expert[size_t(i)])]++;
        r.pair[size_t(at)] = int32_t(i);
        r.place[size_t(i)] = at;
    }
}

}  // namespace

void Run::route(const Moe& m, const InputBuffer& x) {
    Store to;
    to.out = w.router;
    to.ld = w.router_ld;
    linear(m.router, x, 0, count, mine(m.router.w.tiles()), to);
    sync(P_MOE);
    ExpertRows& r = w.experts;
    if (thread == 0) {
        r.expert.resize(size_t(count * m.top_k));
        r.weight.resize(size_t(count * m.top_k));
        for (int64_t t = 0; t < count; t++)
            pick(m, w.router + t * w.router_ld, m.router.w.rows, r.expert.data() + t * m.top_k, r.weight.data() + t * m.top_k);
        group_pairs(r, m.router.w.rows);
    }
    sync(P_MOE);
}

void Run::gather_pairs(const Moe& m, const InputBuffer& x) {
    const Range r = mine(int64_t(w.experts.pair.size()));
    for (int64_t i = r.first; i < r.last; i++) {
        const int64_t t = w.experts.pair[size_t(i)] / m.top_k;
        std::memcpy(w.pairs_in.x + i * w.pairs_in.ldx, x.x + t * x.ldx, size_t(m.in.width) * 4);
        for (size_t k = 0; k < m.in.keys.size(); k++) {
            const size_t groups = size_t(m.in.width / m.in.keys[k].group);
            std::memcpy(w.pairs_in.q[k] + i * w.pairs_in.ldq, x.q[k] + t * x.ldq, size_t(m.in.width));
            std::memcpy(w.pairs_in.scale[k] + i * w.pairs_in.lds, x.scale[k] + t * x.lds, groups * 4);
            std::memcpy(w.pairs_in.sum[k] + i * w.pairs_in.lds, x.sum[k] + t * x.lds, groups * 4);
        }
    }
    sync(P_MOE);
}

void Run::experts(const Moe& m) {
    const ExpertRows& r = w.experts;
    const int64_t n = m.router.w.rows;
    auto each = [&](auto&& run) {
        for (int64_t e = 0; e < n; e++)
            if (r.start[size_t(e + 1)] > r.start[size_t(e)]) run(m.experts[size_t(e)], r.start[size_t(e)], r.start[size_t(e + 1)]);
    };
    each([&](const Mlp& e, int64_t a, int64_t b) {
        const Range tiles = mine(e.up.w.tiles());
        if (tiles.first >= tiles.last) return;
        Store to;
        to.out = w.pairs_mid.x + a * w.pairs_mid.ldx;
        to.ld = w.pairs_mid.ldx;
        to.activation = e.activation;
        to.bias = (e.gate.present() ? e.gate : e.up).bias.data;
        to.bias_up = e.up.bias.data;
        const Rows rows = w.pairs_in.rows(e.up, a);
        if (e.gate.present()) ops.gated(e.gate.w, e.up.w, rows, b - a, tiles.first, tiles.last, to, own.linear);
        else ops.linear(e.up.w, rows, b - a, tiles.first, tiles.last, to, own.linear);
    });
    sync(P_MOE);
    const Range mid = mine(int64_t(r.pair.size()));
    for (int64_t i = mid.first; i < mid.last; i++)
        quantize_row(m.experts[size_t(r.expert[size_t(r.pair[size_t(i)])])].mid, w.pairs_mid, i);
    sync(P_MOE);
    each([&](const Mlp& e, int64_t a, int64_t b) {
        Store to;
        to.out = w.pairs_out + a * w.hidden_ld;
        to.ld = w.hidden_ld;
        linear(e.down, w.pairs_mid, a, b - a, mine(e.down.w.tiles()), to);
    });
    sync(P_MOE);
}

// Leaves the shared expert's output in w.tmp.
void Run::shared_expert(const Moe& m, const InputBuffer& x) {
    const Mlp& e = m.shared;
    const Range tiles = mine(e.up.w.tiles());
    Store to;
    to.out = w.mid.x;
    to.ld = w.mid.ldx;
    to.activation = e.activation;
    to.bias = (e.gate.present() ? e.gate : e.up).bias.data;
    to.bias_up = e.up.bias.data;
    if (tiles.first < tiles.last) {
        if (e.gate.present()) ops.gated(e.gate.w, e.up.w, x.rows(e.up), count, tiles.first, tiles.last, to, own.linear);
        else ops.linear(e.up.w, x.rows(e.up), count, tiles.first, tiles.last, to, own.linear);
    }
    if (m.shared_gate.present() && thread == 0) {
        Store gate;
        gate.out = w.router;  // routing is done: its buffer is free
        gate.ld = w.router_ld;
        linear(m.shared_gate, x, 0, count, {0, m.shared_gate.w.tiles()}, gate);
    }
    sync(P_MOE);
    const InputBuffer& h = prepare_mid(e.mid, count);
    Store result;
    result.out = w.tmp;
    result.ld = w.hidden_ld;
    linear(e.down, h, 0, count, mine(e.down.w.tiles()), result);
    sync(P_MOE);
}

void Run::combine(const Sublayer& s) {
    const Moe& m = s.moe;
    const Range r = mine(count);
    for (int64_t t = r.first; t < r.last; t++) {
        float *y = own.mid.x, *x = w.x + t * w.hidden_ld;
        std::memset(y, 0, size_t(p.hidden) * 4);
        for (int64_t k = 0; k < m.top_k; k++) {
            const int64_t i = t * m.top_k + k;
            ops.add_scaled(y, w.pairs_out + w.experts.place[size_t(i)] * w.hidden_ld, w.experts.weight[size_t(i)], p.hidden);
        }
        if (m.has_shared) {
            const float gate = m.shared_gate.present() ? 1.0f / (1.0f + std::exp(-w.router[t * w.router_ld])) : 1.0f;
            ops.add_scaled(y, w.tmp + t * w.hidden_ld, gate, p.hidden);
        }
        if (s.post.present()) ops.rms_norm(y, s.post.weight.data, p.hidden, s.post.eps, y);
        ops.add_scaled(x, y, s.residual_scale, p.hidden);
    }
    sync(P_MOE);
}

void Run::moe(const Sublayer& s) {
    const InputBuffer& x = prepare(s.moe.in, s.pre, w.x, w.hidden_ld, count);
    route(s.moe, x);
    gather_pairs(s.moe, x);
    experts(s.moe);
    if (s.moe.has_shared) shared_expert(s.moe, x);
    combine(s);
}

}  // namespace tk
