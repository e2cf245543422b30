#include "step/adapters.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "step/record.h"
#include "step/step.h"

namespace tk {
namespace {

constexpr int64_t MOST_RANK = 1 << 14;
constexpr int64_t EACH = 5;  // tensors of a site

Linear read(const Record& r, const TensorRecord& t, const char* what, int32_t format) {
    Linear l;
    if (!t.data) return l;
    l.w = r.matrix(t);
    if (l.w.format != format || t.perm) r.fail(what, format == INT ? "not of codes" : "not of floats");
    return l;
}

void expect(const Record& r, const char* what, const Linear& l, int64_t rows, int64_t cols) {
    if (l.w.rows != rows || l.w.cols != cols)
        r.fail(what, "expected " + std::to_string(rows) + " x " + std::to_string(cols) + ", found " + std::to_string(l.w.rows) + " x " +
                         std::to_string(l.w.cols));
}

// magnitude / |row of W + b a|, by rows of W, column k counting weights[k] (null: 1).
void find_factors(const Ops& ops, const Linear& base, const Change& c, const float* magnitude, const float* weights, float* out) {
    const int64_t cols = base.w.cols, rank = c.low() ? c.b.w.cols : 0, ld = pad16(cols);
    std::vector<uint8_t> scratch(c.low() ? size_t(ops.linear_scratch(c.a.w)) : 0);
    std::vector<float> w(size_t(ld) + LANES), added(size_t(ld) + LANES), b(size_t(pad16(rank)) + LANES);
    for (int64_t row = 0; row < base.w.rows; row++) {
        ops.matrix_row(base.w, row, 1.0f, w.data());
        if (c.low()) {
            ops.matrix_row(c.b.w, row, 1.0f, b.data());
            Rows x;
            x.x = b.data();
            x.ldx = int64_t(b.size());
            Store to;
            to.out = added.data();
            to.ld = ld;
            ops.linear(c.a.w, x, 1, 0, c.a.w.tiles(), to, scratch.data());
        }
        double sum = 0;
        for (int64_t k = 0; k < cols; k++) {
            const int64_t from = base.key.perm ? base.key.perm[k] : k;
            const double v = (double(w[size_t(k)]) + double(added[size_t(from)])) * (weights ? double(weights[from]) : 1.0);
            sum += v * v;
        }
        out[row] = magnitude[row] / float(std::sqrt(sum));
    }
}

}  // namespace

void Lowered::grow(int64_t rows, int64_t rank) {
    if (rows <= rows_ && rank <= ld_) return;
    Lowered made;  // where memory does not hold it this one stays as it is
    made.serial_ = serial_;
    made.rows_ = std::max(rows, rows_);
    made.ld_ = std::max(pad16(rank), ld_);
    made.numbers_ = Pages(PLACES * made.rows_ * made.ld_ * 4 + 128);
    made.codes_ = Pages(PLACES * made.rows_ * made.ld_ + 128);
    made.scales_ = Pages(PLACES * made.rows_ * made.groups() * 4 + 128);
    made.sums_ = Pages(PLACES * made.rows_ * made.groups() * 4 + 128);
    made.states_ = std::make_unique<std::atomic<uint64_t>[]>(size_t(PLACES * made.rows_));
    *this = std::move(made);
}

InputBuffer Lowered::rows(int site, int64_t row) const {
    const int64_t at = site % PLACES * rows_ + row;
    InputBuffer found;
    found.x = numbers_.at<float>(at * ld_ * 4);
    found.ldx = found.ldq = ld_;
    found.q[0] = codes_.at<int8_t>(at * ld_);
    found.lds = groups();
    found.scale[0] = scales_.at<float>(at * groups() * 4);
    found.sum[0] = sums_.at<int32_t>(at * groups() * 4);
    return found;
}

bool Lowered::claim(uint64_t serial, int site, int64_t row) {
    std::atomic<uint64_t>& s = state(site, row);
    uint64_t found = s.load(std::memory_order_relaxed);
    return found >> 1 != mark(serial, site) >> 1 && s.compare_exchange_strong(found, mark(serial, site), std::memory_order_relaxed);
}

void Lowered::made(uint64_t serial, int site, int64_t row) { state(site, row).store(mark(serial, site) | 1, std::memory_order_release); }

void Lowered::wait(uint64_t serial, int site, int64_t row) const {
    constexpr int PATIENCE = 2000;  // looks before the core is left to others: whoever makes it may want this one
    for (int i = 0; state(site, row).load(std::memory_order_acquire) != (mark(serial, site) | 1); i++)
        if (i > PATIENCE) sched_yield();
}

void AdapterTable::put(const Program& p, const Ops& ops, int64_t count_threads, int64_t slot, const int32_t* sites,
                       const TensorRecord* tensors, int64_t count) {
    if (slot < 0 || slot >= SLOTS) throw Error("adapter: slot " + std::to_string(slot) + " does not exist");
    Values none("", nullptr, 0, tensors, EACH * count);
    auto made = std::make_unique<Adapter>();
    made->changes.resize(p.sites.size());
    int64_t room = 0, widest = rank, held = 0, widest_input = 0;
    for (int64_t i = 0; i < count; i++)
        if (tensors[EACH * i + 2].data) held += pad16(tensors[EACH * i + 2].rows);
    made->held.resize(size_t(held));
    float* factors = made->held.data();
    bool experts = changes_experts;
    for (int64_t i = 0; i < count; i++) {
        const int32_t site = sites[i];
        const Record r(none, "adapter.sites." + std::to_string(site) + ".");
        if (site < 0 || size_t(site) >= p.sites.size() || !p.sites[size_t(site)].present()) r.fail("site", "does not exist");
        const Linear& base = p.sites[size_t(site)];
        const bool embeds = site == p.embed.site;
        const TensorRecord* t = tensors + EACH * i;
        auto c = std::make_unique<Change>();
        const int32_t format = t[0].data ? t[0].kind : DENSE;
        c->a = read(r, t[0], "a", format);
        c->b = read(r, t[1], "b", format);
        c->whole = read(r, t[3], "whole", DENSE);
        if (c->a.present() != c->b.present() || c->a.present() == c->whole.present()) r.fail("a", "expected two matrices, or one in its place");
        if (c->low()) {
            const int64_t rank_here = c->b.w.cols;
            if (rank_here > MOST_RANK) r.fail("b", "of a rank above " + std::to_string(MOST_RANK));
            if (c->coded()) expect(r, "a", c->a, rank_here, base.w.cols);
            else expect(r, "a", c->a, embeds ? base.w.rows : base.w.cols, rank_here);
            expect(r, "b", c->b, embeds ? base.w.cols : base.w.rows, rank_here);
            widest_input = std::max(widest_input, base.w.cols);
            widest = std::max(widest, rank_here);
        } else {
            expect(r, "whole", c->whole, base.w.rows, base.w.cols);
        }
        for (const Linear* l : {&c->a, &c->b, &c->whole})
            if (l->present()) room = std::max(room, ops.linear_scratch(l->w));
        if (c->coded()) {
            if (embeds || base.w.format != INT || c->a.w.group != base.w.group) r.fail("a", "its linear reads no such codes");
            if (t[2].kind != 0 || t[2].rows != c->b.w.cols || t[2].bytes < t[2].rows * 4 || !t[2].data || t[2].rows % LANES)
                r.fail("steps", "do not fit");
            c->steps = {static_cast<const float*>(t[2].data), t[2].rows};
        } else if (t[2].data) {
            if (t[2].kind != 0 || t[2].rows != base.w.rows || t[2].bytes < pad16(base.w.rows) * 4 || embeds || !c->low() || base.turned)
                r.fail("magnitudes", "do not fit");
            if (t[4].data && (t[4].kind != 0 || t[4].rows != base.w.cols || t[4].bytes < base.w.cols * 4))
                r.fail("weights of columns", "do not fit");
            find_factors(ops, base, *c, static_cast<const float*>(t[2].data), static_cast<const float*>(t[4].data), factors);
            c->magnitudes = {factors, base.w.rows};
            factors += pad16(base.w.rows);
        }
        experts |= size_t(site) < p.of_experts.size() && p.of_experts[size_t(site)];
        made->changes[size_t(site)] = std::move(c);
    }
    int64_t most = 0;
    for (const Sublayer& s : p.sublayers)
        if (const Moe* m = std::get_if<Moe>(&s.mixer)) most = std::max(most, m->top_k);
    lowered.grow(p.chunk * (1 + (experts ? most : 0)), widest);
    rank = widest;
    changes_experts = experts;
    threads.resize(size_t(count_threads));
    for (Scratch& s : threads) {
        if (int64_t(s.linear.size()) < room + 128) s.linear.resize(size_t(room + 128));
        if (int64_t(s.padded.size()) < pad16(widest_input)) s.padded.resize(size_t(pad16(widest_input)));
        if (!s.half.data()) s.half = Pages(2 * p.chunk * STRIPE * 4 + 128);
    }
    if (int64_t(slots.size()) <= slot) slots.resize(size_t(slot) + 1);
    slots[size_t(slot)] = std::move(made);
}

void AdapterTable::drop(int64_t slot) {
    if (slot >= 0 && slot < int64_t(slots.size())) slots[size_t(slot)].reset();
}

Adapters AdapterTable::of_rows(const StepArrays& in, int64_t first, int64_t count) const {
    Adapters found;
    if (!in.adapter) return found;
    for (int64_t s = 0; s < in.seqs; s++) {
        const int32_t slot = in.adapter[s];
        if (slot < 0) continue;
        if (slot >= int64_t(slots.size()) || !slots[size_t(slot)]) throw Error("adapter: slot " + std::to_string(slot) + " is empty");
        found.resize(size_t(count), nullptr);
        for (int64_t t = std::max<int64_t>(in.cu_seqlens[s], first); t < std::min<int64_t>(in.cu_seqlens[s + 1], first + count); t++)
            found[size_t(t - first)] = slots[size_t(slot)].get();
    }
    if (std::all_of(found.begin(), found.end(), [](const Adapter* a) { return !a; })) found.clear();
    return found;
}

}  // namespace tk
