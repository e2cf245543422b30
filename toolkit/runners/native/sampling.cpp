// From a row of logits to what was asked of it: raw logits, a target's log-probability, the next token.
//
// The order of operations and the meaning of every parameter are those of SamplingBatch (toolkit/runners/step.py).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "run.h"

namespace tk {
namespace {

struct Candidate {
    float logit;
    int32_t id;
};

// More probable first; of equals the lowest id.
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// The k best of n, best first.
std::vector<Candidate> best_of(const float* x, int64_t n, int64_t k) {
    k = std::min(k, n);
    std::vector<Candidate> heap;  // the worst on top
    heap.reserve(size_t(k));
    int64_t i = 0;
    for (; i < k; i++) heap.push_back({x[i], int32_t(i)});
    std::make_heap(heap.begin(), heap.end(), before);
    if (k > 0)
        for (; i < n; i++)
            if (x[i] > heap.front().logit) {
                std::pop_heap(heap.begin(), heap.end(), before);
                heap.back() = {x[i], int32_t(i)};
                std::push_heap(heap.begin(), heap.end(), before);
            }
    std::sort(heap.begin(), heap.end(), before);
    return heap;
}

// Everything within `span` of the maximum, best first.
std::vector<Candidate> near_top(const float* x, int64_t n, float max, double span) {
    std::vector<Candidate> found;
    for (int64_t i = 0; i < n; i++)
        if (double(x[i]) >= double(max) - span) found.push_back({x[i], int32_t(i)});
    std::sort(found.begin(), found.end(), before);
    return found;
}

double draw_uniform(uint64_t seed, int64_t position) {  // step.uniform
    uint64_t z = seed + 0x9E3779B97F4A7C15ull * (uint64_t(position) + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return double(z >> 40) * (1.0 / double(1 << 24));
}

struct Filter {
    double temperature, top_p, min_p;
    int64_t top_k;
};

// Cuts candidates (best first) to the smallest set whose mass reaches top_p of `total`, and to min_p; whether the
// mass was reached, so that no candidate further down can belong to the set.
bool cut(std::vector<Candidate>& c, const Filter& f, float max, double total) {
    double mass = 0;
    for (size_t i = 0; i < c.size(); i++) {
        const double p = std::exp((double(c[i].logit) - double(max)) / f.temperature);
        if (i > 0 && ((f.top_p < 1 && mass >= f.top_p * total) || p < f.min_p)) {
            c.resize(i);
            return true;
        }
        mass += p;
    }
    return f.top_p < 1 && mass >= f.top_p * total;
}

int32_t walk(std::vector<Candidate>& c, const Filter& f, float max, double u) {
    std::sort(c.begin(), c.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    double mass = 0, at = 0;
    for (const Candidate& x : c) mass += std::exp((double(x.logit) - double(max)) / f.temperature);
    for (const Candidate& x : c) {
        at += std::exp((double(x.logit) - double(max)) / f.temperature);
        if (at > u * mass) return x.id;
    }
    return c.back().id;
}

// All ids kept: find the block of 1024 that holds u, then the id in it.
int32_t walk_all(const Ops& ops, const float* x, int64_t n, const Filter& f, float max, double total, double u) {
    const float scale = float(1.0 / f.temperature);
    double at = 0;
    int32_t last = 0;
    for (int64_t b = 0; b < n; b += 1024) {
        const int64_t size = std::min<int64_t>(1024, n - b);
        const double block = ops.sum_exp(x + b, size, max, scale);
        if (at + block <= u * total && b + size < n) {
            at += block;
            continue;
        }
        for (int64_t i = b; i < b + size; i++) {
            const double p = std::exp((double(x[i]) - double(max)) / f.temperature);
            if (p > 0) last = int32_t(i);
            at += p;
            if (at > u * total) return int32_t(i);
        }
    }
    return last;
}

int32_t draw(const Ops& ops, const float* x, int64_t n, const Filter& f, float max, double u) {
    const double total = ops.sum_exp(x, n, max, float(1.0 / f.temperature));
    if (f.top_k == 0 && f.top_p >= 1 && f.min_p <= 0) return walk_all(ops, x, n, f, max, total, u);
    std::vector<Candidate> kept;
    if (f.top_k > 0) {
        kept = best_of(x, n, f.top_k);
        cut(kept, f, max, total);
    } else {
        for (double span = 8;; span *= 2) {
            kept = near_top(x, n, max, span * f.temperature);
            const bool all = int64_t(kept.size()) == n || span > 1000;
            if (cut(kept, f, max, total) || all) break;
        }
    }
    return walk(kept, f, max, u);
}

void ban_by_grammar(float* x, int64_t n, const int32_t* mask) {
    for (int64_t word = 0; word * 32 < n; word++) {
        const uint32_t bits = uint32_t(mask[word]);
        if (bits == 0xffffffffu) continue;
        for (int64_t i = word * 32; i < std::min(n, word * 32 + 32); i++)
            if (!(bits >> (i & 31) & 1)) x[i] = -INFINITY;
    }
}

using Users = std::vector<std::pair<int64_t, int64_t>>;

// Those who asked for `row`: [first, second) of the sorted list.
std::pair<Users::const_iterator, Users::const_iterator> users_of(const Users& users, int64_t row) {
    return {std::lower_bound(users.begin(), users.end(), std::make_pair(row, int64_t(-1))),
            std::lower_bound(users.begin(), users.end(), std::make_pair(row + 1, int64_t(-1)))};
}

}  // namespace

void Run::finish_row(int64_t row, float* logits) {
    if (p.head_scale != 1.0f || p.softcap > 0) ops.scale_logits(logits, w.vocab_ld, p.head_scale, p.softcap);
    for (auto [u, end] = users_of(plan.logits, row); u != end; ++u)
        std::memcpy(out.logits + u->second * p.vocab, logits, size_t(p.vocab) * 4);
    auto [target, last_target] = users_of(plan.targets, row);
    if (target != last_target) {
        int64_t index;
        int32_t nan;
        const float max = ops.row_max(logits, p.vocab, &index, &nan);
        const double norm = double(max) + std::log(ops.sum_exp(logits, p.vocab, max, 1.0f));
        for (; target != last_target; ++target)
            out.target_logprobs[target->second] = nan ? NAN : float(double(logits[in.target_ids[target->second]]) - norm);
    }
    for (auto [u, end] = users_of(plan.samples, row); u != end; ++u) sample(u->second, logits);
}

void Run::sample(int64_t i, const float* raw) {
    const bool penalized = in.history_ptr[i + 1] > in.history_ptr[i] &&
                           (in.repetition[i] != 1 || in.presence[i] != 0 || in.frequency[i] != 0);
    const bool biased = in.bias_ptr[i + 1] > in.bias_ptr[i];
    const float* x = raw;
    if (penalized || biased || in.grammar) {
        float* y = own.logits;
        std::memcpy(y, raw, size_t(p.vocab) * 4);
        if (penalized)
            for (int64_t j = in.history_ptr[i]; j < in.history_ptr[i + 1]; j++) {
                float& l = y[in.history_ids[j]];
                l = l > 0 ? l / in.repetition[i] : l * in.repetition[i];
                const float n = float(in.history_count[j]);
                l -= in.frequency[i] * n + in.presence[i] * (n > 0 ? 1.0f : 0.0f);
            }
        for (int64_t j = in.bias_ptr[i]; j < in.bias_ptr[i + 1]; j++) y[in.bias_ids[j]] += in.bias_values[j];
        if (in.grammar) ban_by_grammar(y, p.vocab, in.grammar + i * ((p.vocab + 31) / 32));
        x = y;
    }
    int64_t token;
    int32_t bad;
    const float max = ops.row_max(x, p.vocab, &token, &bad);
    out.logprob[i] = NAN;
    for (int64_t j = 0; j < out.top_width; j++) {
        out.top_ids[i * out.top_width + j] = -1;
        out.top_logprobs[i * out.top_width + j] = -INFINITY;
    }
    out.bad[i] = bad || !std::isfinite(max);
    out.tokens[i] = int32_t(token);
    if (out.bad[i]) return;
    if (in.temperature[i] > 0) {
        const Filter f{double(in.temperature[i]), double(in.top_p[i]), double(in.min_p[i]), in.top_k[i]};
        out.tokens[i] = draw(ops, x, p.vocab, f, max, draw_uniform(in.seed[i], in.position[i]));
    }
    if (in.logprobs[i] < 0) return;
    const double norm = double(max) + std::log(ops.sum_exp(x, p.vocab, max, 1.0f));
    out.logprob[i] = float(double(x[out.tokens[i]]) - norm);
    const std::vector<Candidate> top = best_of(x, p.vocab, std::min<int64_t>(in.logprobs[i], out.top_width));
    for (size_t j = 0; j < top.size(); j++) {
        out.top_ids[i * out.top_width + int64_t(j)] = top[j].id;
        out.top_logprobs[i * out.top_width + int64_t(j)] = float(double(top[j].logit) - norm);
    }
}

}  // namespace tk
