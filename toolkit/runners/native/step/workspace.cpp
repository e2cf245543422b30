#include "step/workspace.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tk {

Pages::Pages(int64_t bytes) : size_(std::max<int64_t>(bytes, 1)) {
    void* p = mmap(nullptr, size_t(size_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, size_t(size_), MADV_HUGEPAGE);
    data_ = static_cast<uint8_t*>(p);
}

Pages::~Pages() {
    if (data_) munmap(data_, size_t(size_));
}

Pages::Pages(Pages&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; }

Pages& Pages::operator=(Pages&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    return *this;
}

InputBuffer Arena::input(int64_t rows, int64_t width) {
    InputBuffer b;
    b.ldx = pad16(width);
    b.ldq = (width + 63) / 64 * 64;
    b.lds = pad16(width) / 16;
    b.x = take<float>(rows * b.ldx);
    for (int i = 0; i < MAX_KEYS; i++) {
        b.q[i] = take<int8_t>(rows * b.ldq);
        b.scale[i] = take<float>(rows * b.lds);
        b.sum[i] = take<int32_t>(rows * b.lds);
    }
    return b;
}

namespace {

struct Widths {
    int64_t in, mid, qkv = 16, spread = 0, queries = 16, heads = 1, dpad = 16, kv_cell = 0, scratch = 64, experts = 16, top_k = 0,
                     moe = 16;
    int64_t low = 0;
    bool saves = false, apart = false;
    void linear(const Ops& ops, const Linear& l) {
        if (l.present()) scratch = std::max(scratch, ops.linear_scratch(l.w));
        if (!l.seen) return;
        for (const Linear* of : {&l.seen->whole, &l.seen->a, &l.seen->b}) linear(ops, *of);
        low = std::max(low, l.seen->a.w.tiles() * LANES);
    }
    void side_by_side(std::initializer_list<const Linear*> parts) {
        int64_t total = 0;
        for (const Linear* l : parts) total += l->w.tiles() * LANES;
        qkv = std::max(qkv, total);
    }
    void attention(const Attention& a) {
        queries = std::max(queries, (a.sink_tokens ? 2 : 1) * a.heads * a.dpad);
        heads = std::max(heads, a.heads);
        dpad = std::max(dpad, a.dpad);
    }
    void mixer(const Ops& ops, const Attention& a) {
        for (const Linear* l : {&a.q, &a.k, &a.v, &a.gate, &a.o}) linear(ops, *l);
        mid = std::max(mid, a.out.width);
        side_by_side({&a.q, &a.k, &a.v, &a.gate});
        attention(a);
    }
    void mixer(const Ops& ops, const Latent& a) {
        for (const Linear* l : {&a.q_a, &a.q, &a.kv_a, &a.kv_b, &a.o}) linear(ops, *l);
        in = std::max(in, a.mid.width);
        mid = std::max(mid, a.out.width);
        qkv = std::max(qkv, a.width());
        spread = std::max(spread, a.core.heads * a.kv_rank());
        attention(a.core);
    }
    void mixer(const Ops& ops, const Cross& c) {
        for (const Linear* l : {&c.q, &c.k, &c.v, &c.o}) linear(ops, *l);
        mid = std::max(mid, c.out.width);
        side_by_side({&c.q});
        side_by_side({&c.k, &c.v});
        attention(c.core);
    }
    void mixer(const Ops& ops, const ShortConv& m) {
        for (const Linear* l : {&m.b, &m.c, &m.value, &m.out}) linear(ops, *l);
        side_by_side({&m.b, &m.c, &m.value});
        mid = std::max(mid, m.mid.width);
    }
    void mixer(const Ops& ops, const Delta& m) {
        for (const Linear* l : {&m.qkv, &m.z, &m.beta, &m.fade, &m.out}) linear(ops, *l);
        side_by_side({&m.qkv, &m.z, &m.beta, &m.fade});
        spread = std::max(spread, m.conv.ld());
        mid = std::max(mid, m.mid.width);
    }
    void mixer(const Ops& ops, const Mamba& m) {
        for (const Linear* l : {&m.z, &m.inner, &m.dt, &m.out}) linear(ops, *l);
        side_by_side({&m.z, &m.inner, &m.dt});
        spread = std::max(spread, m.conv.ld());
        mid = std::max(mid, m.mid.width);
    }
    void mixer(const Ops& ops, const Mlp& m) {
        mid = std::max(mid, m.mid.width);
        for (const Linear* l : {&m.gate, &m.up, &m.down}) linear(ops, *l);
    }
    void mixer(const Ops& ops, const PerLayer& m) {
        mid = std::max(mid, m.mid.width);
        for (const Linear* l : {&m.gate, &m.down}) linear(ops, *l);
    }
    void mixer(const Ops& ops, const Moe& m) {
        apart |= m.apart;
        linear(ops, m.router);
        linear(ops, m.shared_gate);
        for (const Mlp& e : m.experts) mixer(ops, e);
        if (m.has_shared) mixer(ops, m.shared);
        experts = std::max(experts, pad16(m.router.w.rows) + LANES);  // and the gate of the shared one
        top_k = std::max(top_k, m.top_k);
        moe = std::max(moe, m.experts[0].mid.width);
    }
};

Widths measure(const Program& p, const Ops& ops) {
    Widths w;
    w.in = w.mid = p.hidden;
    w.linear(ops, p.head);
    w.linear(ops, p.per_layer.projection);
    for (const Sublayer& s : p.sublayers) {
        w.saves |= s.saves;
        std::visit([&](const auto& m) { w.mixer(ops, m); }, s.mixer);
    }
    return w;
}

}  // namespace

Workspace::Workspace(const Program& p, const Ops& ops, int thread_count) : threads(size_t(thread_count)) {
    const Widths w = measure(p, ops);
    hidden_ld = pad16(p.hidden);
    qkv_ld = w.qkv;
    vocab_ld = pad16(p.vocab);
    logit_rows = std::clamp<int64_t>(LOGIT_BYTES / (vocab_ld * 4), 8, 64);
    router_ld = w.experts;
    moe_width = w.moe;
    moe_pairs = p.chunk * w.top_k;
    experts.expert.resize(size_t(moe_pairs));
    experts.weight.resize(size_t(moe_pairs));
    // floats, which take more than codes with what belongs to them
    gathered = 4 * std::max({p.chunk * pad16(std::max(w.mid, p.hidden)) + std::max(moe_pairs * pad16(w.moe), w.apart ? p.chunk * hidden_ld : 0),
                             logit_rows * vocab_ld});
    const int64_t rows = std::max(QUERY_ROWS, w.heads);
    x = take<float>(p.chunk * hidden_ld);
    tmp = take<float>(p.chunk * hidden_ld);
    if (w.saves) block = take<float>(p.chunk * hidden_ld);
    qkv = take<float>(p.chunk * qkv_ld);
    spread_ld = w.spread;
    if (spread_ld) spread = take<float>(p.chunk * spread_ld);
    logits = take<float>(logit_rows * vocab_ld);
    router = take<float>(p.chunk * router_ld);
    queries_ld = w.queries;
    queries = take<uint8_t>(p.chunk * queries_ld * 4);
    in = input(p.chunk, w.in);
    mid = input(p.chunk, w.mid);
    if (w.apart) beside = input(p.chunk, p.hidden);
    if (p.per_layer.present()) {
        given_ld = pad16(p.per_layer.columns());
        given = take<float>(p.chunk * given_ld);
    }
    if (w.top_k) {
        pairs_in = input(moe_pairs, p.hidden);
        pairs_mid = input(moe_pairs, w.moe);
        pairs_out = take<float>(moe_pairs * hidden_ld);
    }
    for (const Rope& r : p.ropes) {
        cos.push_back(take<float>(p.chunk * r.rotary / 2));
        sin.push_back(take<float>(p.chunk * r.rotary / 2));
    }
    dummy_cell = take<uint8_t>(w.dpad * 64);
    for (ThreadScratch& t : threads) {
        t.linear = take<uint8_t>(w.scratch);
        if (w.low) {
            t.low.ld = w.low;
            for (LowScratch::Rows& made : t.low.made) made.x = take<float>(p.chunk * w.low);
            t.low.gate = take<float>(p.chunk * STRIPE);
        }
        t.stripe = take<float>(p.chunk * STRIPE);
        t.in = input(SMALL, w.in);
        t.mid = input(SMALL, w.mid);
        t.head_row = take<float>(2 * w.dpad);
        t.keep = take<float>(p.chunk);
        t.weight = take<float>(p.chunk);
        t.logits = take<float>(vocab_ld);
        t.ids = take<int32_t>(vocab_ld);
        AttnScratch& a = t.attention;
        a.rows = rows;
        for (AttnState* s : {&a.running, &a.part})
            *s = {take<float>(rows), take<float>(rows), take<float>(rows * w.dpad)};
        a.lo = take<int32_t>(rows);
        a.hi = take<int32_t>(rows);
        a.from = take<int32_t>(rows);
        a.slope = take<float>(rows);
        a.scores = take<float>(attn_scratch(rows, w.dpad));
        a.keys = take<uint8_t>(KV_TILE * w.dpad * 4);
        a.values = take<uint8_t>(KV_TILE * w.dpad * 4);
        a.row = take<float>(w.dpad);
    }
}

float* Workspace::partials(int64_t floats) {
    if (partial_pages.size() < floats * 4) partial_pages = Pages(floats * 4 * 2);
    return partial_pages.at<float>(0);
}

float* Workspace::hidden_rows(int64_t rows) {
    const int64_t bytes = rows * hidden_ld * 4 + 64;
    if (hidden_pages.size() < bytes) hidden_pages = Pages(bytes * 2);
    return hidden_pages.at<float>(0);
}

}  // namespace tk
