// From a row of logits to what was asked of it: raw logits, a target's log-probability, the next token.
//
// The order of operations and the meaning of every parameter are those of SamplingBatch (toolkit/runners/step.py). Whatever
// the logits and parameters, a row gets a token of the vocabulary or is marked bad; what is infinite never meets a zero.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "step/run.h"

namespace tk {
namespace {

constexpr float NEVER = -1e30f;  // the logit of a token that the head has no row for

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

double depth(float logit, const Filter& f, float max) { return (double(max) - double(logit)) / f.temperature; }

double probability(const Candidate& c, const Filter& f, float max) { return std::exp(-depth(c.logit, f, max)); }

// 1 / temperature, for sum_exp: never infinite, or the maximum itself would weigh NaN.
float inverse(const Filter& f) { return float(std::min(1.0 / f.temperature, double(std::numeric_limits<float>::max()))); }

// How many of these (best first), of `mass` before them, belong to the smallest set whose mass reaches top_p of `total` and
// pass min_p. The very best always does: `first`, where they begin with it.
size_t cut(const std::vector<Candidate>& c, const Filter& f, float max, double total, double mass, bool first) {
    for (size_t i = 0; i < c.size(); i++) {
        const double p = probability(c[i], f, max);
        if (!(first && i == 0) && ((f.top_p < 1 && mass >= f.top_p * total) || p < f.min_p)) return i;
        mass += p;
    }
    return c.size();
}

// What top_p and min_p keep, ids ascending. No sort of the vocabulary: those near the maximum are shared out to buckets by
// their logits, and only the bucket in which the border lies is put in order. ids: room for n.
std::vector<Candidate> nucleus(const Ops& ops, const float* x, int64_t n, const Filter& f, float max, double total, int32_t* ids) {
    constexpr int BUCKETS = 512;
    for (double span = 8;; span *= 2) {
        const float low = std::nextafter(float(double(max) - span * f.temperature), -INFINITY);
        const auto bucket = [&](const Candidate& c) {  // bounded before it becomes an integer: the depth may be infinite
            return int(std::min(depth(c.logit, f, max) * (BUCKETS / span), double(BUCKETS - 1)));
        };
        std::vector<Candidate> found(size_t(ops.at_least(x, n, low, ids)));
        for (size_t i = 0; i < found.size(); i++) found[i] = {x[ids[i]], ids[i]};
        double masses[BUCKETS] = {};
        for (const Candidate& c : found) masses[bucket(c)] += probability(c, f, max);
        const double least = std::log(f.min_p);  // of (logit - max) / temperature; -infinity without min_p
        double mass = 0;
        int border = 0;
        while (border < BUCKETS && (f.top_p >= 1 || mass + masses[border] < f.top_p * total) &&
               -double(border + 1) * (span / BUCKETS) > least)
            mass += masses[border++];
        if (border == BUCKETS) {
            if (int64_t(found.size()) < n && span <= 1000) continue;
            return found;
        }
        std::vector<Candidate> inside;
        for (const Candidate& c : found)
            if (bucket(c) == border) inside.push_back(c);
        std::sort(inside.begin(), inside.end(), before);
        inside.resize(cut(inside, f, max, total, mass, border == 0));
        const auto kept = [&](const Candidate& c) {
            const int at = bucket(c);
            return at < border || (at == border && !inside.empty() && !before(inside.back(), c));
        };
        found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& c) { return !kept(c); }), found.end());
        return found;
    }
}

// Draws from candidates in ascending order of ids.
int32_t walk(const std::vector<Candidate>& c, const Filter& f, float max, double u) {
    std::vector<double> p(c.size());
    double mass = 0, at = 0;
    for (size_t i = 0; i < c.size(); i++) mass += p[i] = probability(c[i], f, max);
    for (size_t i = 0; i < c.size(); i++)
        if ((at += p[i]) > u * mass) return c[i].id;
    return c.back().id;
}

// All ids kept: find the block of 1024 that holds u, then the id in it.
int32_t walk_all(const Ops& ops, const float* x, int64_t n, const Filter& f, float max, double total, double u) {
    const float scale = inverse(f);
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
            const double p = std::exp(-depth(x[i], f, max));
            if (p > 0) last = int32_t(i);
            at += p;
            if (at > u * total) return int32_t(i);
        }
    }
    return last;
}

int32_t draw(const Ops& ops, const float* x, int64_t n, const Filter& f, float max, double u, int32_t* ids) {
    if (f.top_k == 0) {
        const double total = ops.sum_exp(x, n, max, inverse(f));
        if (f.top_p >= 1 && f.min_p <= 0) return walk_all(ops, x, n, f, max, total, u);
        return walk(nucleus(ops, x, n, f, max, total, ids), f, max, u);
    }
    std::vector<Candidate> kept = best_of(x, n, f.top_k);
    double total = 0;
    for (const Candidate& c : kept) total += probability(c, f, max);
    kept.resize(cut(kept, f, max, total, 0, true));
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    return walk(kept, f, max, u);
}

bool senseless(const StepArrays& in, int64_t i) {  // as SamplingBatch.senseless
    return !(in.temperature[i] >= 0 && in.temperature[i] <= std::numeric_limits<float>::max()) || !(in.top_p[i] >= 0) ||
           !(in.min_p[i] >= 0) || !(in.repetition[i] > 0) || in.top_k[i] < 0;
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
    std::fill(logits + p.head.w.rows, logits + p.vocab, NEVER);
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
    out.bad[i] = bad || !std::isfinite(max) || senseless(in, i);
    out.tokens[i] = int32_t(token);
    if (out.bad[i]) return;
    if (in.temperature[i] > 0) {
        const Filter f{double(in.temperature[i]), double(in.top_p[i]), double(in.min_p[i]), in.top_k[i]};
        out.tokens[i] = draw(ops, x, p.vocab, f, max, draw_uniform(in.seed[i], in.position[i]), own.ids);
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
