// The mixture-of-experts sublayer: route tokens, run each expert on its rows, add the results in ascending order of experts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "step/run.h"

namespace tk {
namespace {

constexpr int64_t MOE_PARTS = 32;  // parts a thread of which the work of experts is shared

// The `n` best of `order`, which come first then, best first; ties go to the lower.
void best_first(const std::vector<float>& rank, std::vector<int32_t>& order, int64_t n) {
    std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](int32_t a, int32_t b) {
        const float x = rank[size_t(a)], y = rank[size_t(b)];
        return x > y || (x == y && a < b);
    });
}

std::vector<int32_t> counted(int64_t n) {
    std::vector<int32_t> order(size_t(n), 0);
    for (int64_t i = 0; i < n; i++) order[size_t(i)] = int32_t(i);
    return order;
}

// The experts of the groups that may be chosen from.
std::vector<int32_t> eligible(const Moe& m, const std::vector<float>& rank) {
    const int64_t n = int64_t(rank.size()), each = n / m.groups;
    if (m.groups == 1) return counted(n);
    std::vector<float> good(size_t(m.groups), 0);
    for (int64_t g = 0; g < m.groups; g++) {
        std::vector<float> of(rank.begin() + g * each, rank.begin() + (g + 1) * each);
        std::partial_sort(of.begin(), of.begin() + m.group_best, of.end(), std::greater<float>());
        for (int64_t i = 0; i < m.group_best; i++) good[size_t(g)] += of[size_t(i)];
    }
    std::vector<int32_t> order = counted(m.groups), found;
    best_first(good, order, m.top_groups);
    for (int64_t i = 0; i < m.top_groups; i++)
        for (int64_t e = order[size_t(i)] * each; e < (order[size_t(i)] + 1) * each; e++) found.push_back(int32_t(e));
    return found;
}

// One expert after another, each weighed by the softmax over those left that are near it (MoeSpec's "sparsemixer").
void mix(const Moe& m, const float* logits, int64_t n, int32_t* expert, float* weight) {
    std::vector<float> left(logits, logits + n);
    for (int64_t k = 0; k < m.top_k; k++) {
        const int64_t at = std::max_element(left.begin(), left.end()) - left.begin();
        const float best = left[size_t(at)];
        float total = 0;
        for (int64_t e = 0; e < n; e++)
            if (left[size_t(e)] > -INFINITY && !((best - logits[e]) / std::max(std::fabs(logits[e]), best) > 2 * m.jitter))
                total += std::exp(left[size_t(e)] - best);
        expert[k] = int32_t(at);
        weight[k] = m.scale / total;
        left[size_t(at)] = -INFINITY;
    }
    if (expert[0] > expert[1]) std::swap(expert[0], expert[1]), std::swap(weight[0], weight[1]);
}

// The best by their scores, each for itself.
void choose(const Moe& m, std::vector<float>& score, int64_t n, int32_t* expert, float* weight) {
    if (m.scoring == 1) {
        for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
    } else {
        const float max = *std::max_element(score.begin(), score.end());
        float total = 0;
        for (float& s : score) total += s = std::exp(s - max);
        for (float& s : score) s /= total;
    }
    std::vector<float> rank = score;
    for (int64_t e = 0; m.correction && e < n; e++) rank[size_t(e)] += m.correction.data[e];
    std::vector<int32_t> order = eligible(m, rank);
    best_first(rank, order, m.top_k);
    std::sort(order.begin(), order.begin() + m.top_k);
    float total = 0;
    for (int64_t k = 0; k < m.top_k; k++) total += score[size_t(order[size_t(k)])];
    for (int64_t k = 0; k < m.top_k; k++) {
        expert[k] = order[size_t(k)];
        const float s = score[size_t(expert[k])];
        weight[k] = (m.norm_topk && total > 0 ? s / total : s) * m.scale;
    }
}

// The top_k experts of one token, ascending by expert, and their weights.
void pick(const Moe& m, const float* logits, int64_t n, int32_t* expert, float* weight) {
    std::vector<float> score(logits, logits + n);
    for (float& s : score) s *= m.logit_scale;
    if (m.scoring == 2) mix(m, score.data(), n, expert, weight);
    else choose(m, score, n, expert, weight);
    for (int64_t k = 0; m.each && k < m.top_k; k++) weight[k] *= m.each.data[expert[k]];
}

// Pairs (token, k) sorted by expert.
void group_pairs(ExpertRows& r, int64_t n, int64_t experts) {
    r.start.assign(size_t(experts + 1), 0);
    r.pair.resize(size_t(n));
    r.place.resize(size_t(n));
    for (int64_t i = 0; i < n; i++) r.start[size_t(r.expert[size_t(i)]) + 1]++;
    for (int64_t e = 0; e < experts; e++) r.start[size_t(e + 1)] += r.start[size_t(e)];
    std::vector<int32_t> next(r.start.begin(), r.start.end() - 1);
    for (int64_t i = 0; i < n; i++) {
        const int32_t at = next[size_t(r.expert[size_t(i)])]++;
        r.pair[size_t(at)] = int32_t(i);
        r.place[size_t(i)] = at;
    }
    r.active.clear();
    for (int64_t e = 0; e < experts; e++)
        if (r.start[size_t(e + 1)] > r.start[size_t(e)]) r.active.push_back(int32_t(e));
}

}  // namespace

void Run::route(const Sublayer& s, const Moe& m) {
    // Rows are gathered for the experts afterwards, so they are always prepared in the shared buffer.
    const float* from = source(s);
    save(s);
    share(P_MOE, count, 1, [&](Range r) {
        const Input& in = m.apart ? m.router_in : m.in;
        for (int64_t t = r.first; t < r.last; t++) prepare_row(in, m.apart ? m.router_norm : s.pre, from + t * w.hidden_ld, w.in, t);
    });
    const int64_t tiles = m.router.w.tiles();
    share(P_MOE, tiles + m.shared_gate.w.tiles(), 1, [&](Range r) {
        Store to;
        to.out = w.router;
        to.ld = w.router_ld;
        linear(m.router, w.in, 0, count, {r.first, std::min(r.last, tiles)}, to);
        to.out += tiles * LANES;
        if (r.last > tiles) linear(m.shared_gate, w.in, 0, count, {0, 1}, to);
    });
    if (m.apart)
        share(P_MOE, count, 1, [&](Range r) {
            for (int64_t t = r.first; t < r.last; t++) {
                prepare_row(m.in, m.experts_norm, from + t * w.hidden_ld, w.in, t);
                prepare_row(m.shared_in, m.shared_norm, from + t * w.hidden_ld, w.beside, t);
            }
        });
    ExpertRows& r = w.experts;
    auto pick_all = [&](Range tokens) {
        for (int64_t t = tokens.first; t < tokens.last; t++)
            pick(m, w.router + t * w.router_ld, m.router.w.rows, r.expert.data() + t * m.top_k, r.weight.data() + t * m.top_k);
    };
    if (count > SMALL) share(P_MOE, count, 1, pick_all);
    share(P_MOE, 1, 1, [&](Range) {
        if (count <= SMALL) pick_all({0, count});
        if (in.routes_size) tell_routes(m);
        group_pairs(r, count * m.top_k, m.router.w.rows);
        r.adapters.clear();
        if (!adapters.empty())
            for (const int32_t pair : r.pair) r.adapters.push_back(adapters[size_t(pair / m.top_k)]);
    });
}

// Which experts were chosen, for those tokens of the chunk that somebody asks about; ties go to the lower.
void Run::tell_routes(const Moe& m) const {
    for (int64_t i = 0; i < in.routes_size; i++) {
        const int64_t t = in.routes_index[i] - first;
        if (t < 0 || t >= count) continue;
        const int32_t* expert = w.experts.expert.data() + t * m.top_k;
        const float* weight = w.experts.weight.data() + t * m.top_k;
        std::vector<int32_t> order = counted(m.top_k);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight[a] > weight[b]; });
        uint16_t* to = out.routes + (i * p.mixtures + m.at) * p.most_chosen;
        for (int64_t k = 0; k < m.top_k; k++) to[k] = uint16_t(expert[order[size_t(k)]]);
        std::fill(to + m.top_k, to + p.most_chosen, NO_EXPERT);
    }
}

void Run::gather_pairs(const Moe& m) {
    const InputBuffer& x = w.in;
    share(P_MOE, count * m.top_k, 1, [&](Range r) {
        for (int64_t i = r.first; i < r.last; i++) {
            const int64_t t = w.experts.pair[size_t(i)] / m.top_k;
            float* row = w.pairs_in.x + i * w.pairs_in.ldx;
            std::memcpy(row, x.x + t * x.ldx, size_t(m.in.width) * 4);
            for (size_t k = 0; k < m.in.keys.size(); k++) {
                const size_t groups = size_t(m.in.width / m.in.keys[k].group);
                std::memcpy(w.pairs_in.q[k] + i * w.pairs_in.ldq, x.q[k] + t * x.ldq, size_t(m.in.width));
                std::memcpy(w.pairs_in.scale[k] + i * w.pairs_in.lds, x.scale[k] + t * x.lds, groups * 4);
                std::memcpy(w.pairs_in.sum[k] + i * w.pairs_in.lds, x.sum[k] + t * x.lds, groups * 4);
            }
            if (!m.weigh_input) continue;
            const float weight = w.experts.weight[size_t(w.experts.pair[size_t(i)])];  // above 0: codes stay as they are
            std::for_each(row, row + m.in.width, [&](float& v) { v *= weight; });
            for (size_t k = 0; k < m.in.keys.size(); k++) {
                float* scale = w.pairs_in.scale[k] + i * w.pairs_in.lds;
                std::for_each(scale, scale + m.in.width / m.in.keys[k].group, [&](float& v) { v *= weight; });
            }
        }
    });
}

// body(expert, rows, tiles) for the tiles of the shared expert, which takes all tokens, and of those that have rows, cut into
// parts of as much work. How much that is is known inside a chunk only: a thread that comes late to a phase must count the same
// chunks as the others.
template <class Body>
void Run::each_expert(const Moe& m, bool down, Body&& body) {
    const ExpertRows& all = w.experts;
    const int64_t parts = MOE_PARTS * threads, most = std::min(count * m.top_k, m.router.w.rows);
    auto own = [&](const Mlp& e) { return (down ? e.down : e.up).own; };
    auto tile_bytes = [&](const Mlp& e) {
        return down ? e.down.w.tile_bytes() : (e.gate.present() ? e.gate.w.tile_bytes() : 0) + e.up.w.tile_bytes();
    };
    auto bytes = [&](const Mlp& e) { return e.up.present() ? (own(e).last - own(e).first) * tile_bytes(e) : 0; };
    share_tiles(P_MOE, parts, 1, bytes(m.shared) + most * bytes(m.experts[0]), [&](Range r) {
        const int64_t shared = m.has_shared ? 1 : 0, n = shared + int64_t(all.active.size());
        auto expert = [&](int64_t i) -> const Mlp& { return i < shared ? m.shared : m.experts[size_t(all.active[size_t(i - shared)])]; };
        auto rows = [&](int64_t i) {
            if (i < shared) return Range{0, count};
            const size_t e = size_t(all.active[size_t(i - shared)]);
            return Range{all.start[e], all.start[e + 1]};
        };
        auto tile_work = [&](int64_t i) {  // to read it takes as long as to multiply it by some rows
            const Linear& l = down ? expert(i).down : expert(i).up;
            return l.w.cols * (8 + rows(i).last - rows(i).first);
        };
        auto tiles = [&](int64_t i) { return own(expert(i)).last - own(expert(i)).first; };
        int64_t total = 0, at = 0;
        for (int64_t i = 0; i < n; i++) total += tiles(i) * tile_work(i);
        const int64_t begin = total * r.first / parts, end = total * r.last / parts;
        for (int64_t i = 0; i < n && at < end; at += tiles(i) * tile_work(i), i++) {
            auto tile_at = [&](int64_t work) { return std::clamp<int64_t>((work - at + tile_work(i) - 1) / tile_work(i), 0, tiles(i)); };
            const Range some{begin > at ? tile_at(begin) : 0, tile_at(end)};
            const int64_t at_first = own(expert(i)).first;
            if (some.first < some.last) body(expert(i), rows(i), Range{at_first + some.first, at_first + some.last});
        }
    });
}

// Leaves what experts make of their rows in w.pairs_out, and what the shared one makes of all in w.tmp.
void Run::experts(const Moe& m) {
    const bool one = count == 1 && !m.weigh_input && adapters.empty();  // then all rows are the same
    if (!one) gather_pairs(m);
    each_expert(m, false, [&](const Mlp& e, Range rows, Range tiles) {
        const InputBuffer& read = &e == &m.shared && m.apart ? w.beside : w.in;
        const InputBuffer &from = one || &e == &m.shared ? read : w.pairs_in, &to = &e == &m.shared ? w.mid : w.pairs_mid;
        float* out = to.x + rows.first * to.ldx + tiles.first * LANES;
        use_pairs(m, e);
        gated(e, from, one ? 0 : rows.first, rows.last - rows.first, tiles, out, to.ldx);
    });
    const ExpertRows& r = w.experts;
    const int64_t pairs = count * m.top_k;
    gather_pairs_mid(m);
    if (!codes(m)) share(P_MOE, pairs + (m.has_shared ? count : 0), 1, [&](Range rows) {
        for (int64_t i = rows.first; i < rows.last; i++)
            if (i < pairs) quantize_row(m.experts[size_t(r.expert[size_t(r.pair[size_t(i)])])].mid, w.pairs_mid, i);
            else quantize_row(m.shared.mid, w.mid, i - pairs);
    });
    each_expert(m, true, [&](const Mlp& e, Range rows, Range tiles) {
        Store to;
        to.out = (&e == &m.shared ? w.tmp : w.pairs_out) + rows.first * w.hidden_ld;
        to.ld = w.hidden_ld;
        use_pairs(m, e);
        linear(e.down, &e == &m.shared ? w.mid : w.pairs_mid, rows.first, rows.last - rows.first, tiles, to);
    });
}

// What the other ranks have made of the rows of experts, and of the shared one's.
void Run::gather_pairs_mid(const Moe& m) {
    const Mlp& e = m.experts[0];
    const int64_t pairs = count * m.top_k;
    const Range own = in_tiles(e.up.own, e.mid.width);
    const Range shared = m.has_shared ? in_tiles(m.shared.up.own, m.shared.mid.width) : Range{0, 0};
    std::vector<Columns> parts;
    if (!codes(m)) {
        parts.push_back(floats(w.pairs_mid.x, pairs, w.pairs_mid.ldx, e.mid.width, own));
        if (m.has_shared) parts.push_back(floats(w.mid.x, count, w.mid.ldx, m.shared.mid.width, shared));
        return gather(parts);
    }
    add_codes(parts, w.pairs_mid, pairs, e.mid.width, e.mid.keys[0].group, own);
    if (m.has_shared) add_codes(parts, w.mid, count, m.shared.mid.width, m.shared.mid.keys[0].group, shared);
    gather(parts, [&](int64_t t) {
        if (t < pairs) quantize_own(w.pairs_mid, t, e.mid.keys[0].group, own);
        if (m.has_shared && t < count) quantize_own(w.mid, t, m.shared.mid.keys[0].group, shared);
    });
}

// This rank's columns of what experts give each token, added up, in w.tmp; then all ranks' to the residual.
void Run::combine_own(const Sublayer& s, const Moe& m) {
    const float* gates = w.router + m.router.w.tiles() * LANES;
    const Range own_columns = in_tiles(m.experts[0].down.own, p.hidden);
    const int64_t at = own_columns.first, n = own_columns.last - at;
    share(P_MOE, count, 1, [&](Range r) {
        for (int64_t t = r.first; t < r.last; t++) {
            float *y = own.mid.x, *out = w.tmp + t * w.hidden_ld + at;
            std::memset(y, 0, size_t(n) * 4);
            for (int64_t k = 0; k < m.top_k; k++) {
                const int64_t i = t * m.top_k + k;
                const float weight = m.weigh_input ? 1.0f : w.experts.weight[size_t(i)];
                ops.add_scaled(y, w.pairs_out + w.experts.place[size_t(i)] * w.hidden_ld + at, weight, n);
            }
            if (m.apart) out = w.beside.x + t * w.beside.ldx + at;  // beside what the shared one has made
            else if (m.has_shared) {
                const float gate = m.shared_gate.present() ? 1.0f / (1.0f + std::exp(-gates[t * w.router_ld])) : 1.0f;
                ops.add_scaled(y, out, gate, n);
            }
            std::memcpy(out, y, size_t(n) * 4);
        }
    });
    std::vector<Columns> made{floats(w.tmp, count, w.hidden_ld, p.hidden, own_columns)};
    if (m.apart) made.push_back(floats(w.beside.x, count, w.beside.ldx, p.hidden, own_columns));
    gather(made);
    share(P_MOE, count, 1, [&](Range r) {
        for (int64_t t = r.first; t < r.last; t++) {
            float* y = w.tmp + t * w.hidden_ld;
            if (m.apart) add_apart(m, w.beside.x + t * w.beside.ldx, y), y = w.beside.x + t * w.beside.ldx;
            end_row(s, t, y);
        }
    });
}

// What experts have made of a token, normed, and to it what the shared one has.
void Run::add_apart(const Moe& m, float* of_experts, float* of_shared) const {
    norm_row(m.experts_out, of_experts, of_experts);
    norm_row(m.shared_out, of_shared, of_shared);
    ops.add_scaled(of_experts, of_shared, 1.0f, p.hidden);
}

// Adapters of the rows that the expert reads: pairs have their tokens'.
void Run::use_pairs(const Moe& m, const Mlp& e) {
    static const Adapters none;
    if (adapters.empty()) return;
    if (&e == &m.shared) use_adapters(adapters);
    else if (model.adapters.changes_experts) use_adapters(w.experts.adapters, 0, p.chunk);
    else use_adapters(none);
}

void Run::combine(const Sublayer& s, const Moe& m) {
    if (p.ranks > 1) return combine_own(s, m);
    const float* gates = w.router + m.router.w.tiles() * LANES;
    share(P_MOE, count, 1, [&](Range r) {
        for (int64_t t = r.first; t < r.last; t++) {
            float *y = own.mid.x;
            std::memset(y, 0, size_t(p.hidden) * 4);
            for (int64_t k = 0; k < m.top_k; k++) {
                const int64_t i = t * m.top_k + k;
                const float weight = m.weigh_input ? 1.0f : w.experts.weight[size_t(i)];
                ops.add_scaled(y, w.pairs_out + w.experts.place[size_t(i)] * w.hidden_ld, weight, p.hidden);
            }
            if (m.apart) add_apart(m, y, w.tmp + t * w.hidden_ld);
            else if (m.has_shared) {
                const float gate = m.shared_gate.present() ? 1.0f / (1.0f + std::exp(-gates[t * w.router_ld])) : 1.0f;
                ops.add_scaled(y, w.tmp + t * w.hidden_ld, gate, p.hidden);
            }
            end_row(s, t, y);
        }
    });
}

void Run::mix(const Sublayer& s, const Moe& m) {
    use_adapters(adapters);
    route(s, m);
    experts(m);
    use_adapters(adapters);
    combine(s, m);
}

}  // namespace tk
