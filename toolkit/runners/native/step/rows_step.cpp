// Long prompts: every thread takes a part of the tokens through whole layers, so that what one linear writes the next one
// finds in the same core's cache. Parts meet once a layer, where attention needs the keys of all.
//
// The operations on a row are those of run.cpp, mlp_step.cpp and attention_step.cpp, in the same order: results are equal bit for bit.
#include <algorithm>

#include "step/run.h"

namespace tk {

void Run::mark(Phase name) {
    if (thread == 0 && model.profile) model.profile->tick(name);
}

void Run::prepare_rows(const Sublayer& s, const Input& in, Range rows) {
    save_rows(s, rows);
    for (int64_t t = rows.first; t < rows.last; t++) prepare_row(in, s.pre, source(s) + t * w.hidden_ld, w.in, t);
    mark(P_PREPARE);
}

// Queries, keys and values of the rows, and the keys and values into the cache.
void Run::project_rows(const Sublayer& s, const Attention& a, Range rows) {
    prepare_rows(s, a.in, rows);
    Store to;
    to.ld = w.qkv_ld;
    to.out = w.qkv + rows.first * w.qkv_ld;
    for (const Linear* l : {&a.q, &a.k, &a.v, &a.gate}) {
        linear(*l, w.in, rows.first, rows.last - rows.first, {0, l->w.tiles()}, to);
        to.out += l->w.tiles() * LANES;
    }
    mark(P_QKV);
    for (int64_t t = rows.first; t < rows.last; t++) {
        settle_row(a, t);
        for (int64_t h = 0; h < a.kv_heads; h++) turn_and_store(a, t, h);
    }
    mark(P_ROPE);
}

// The linear that ends a sublayer, from the middle rows into the residual.
void Run::down_rows(const Sublayer& s, const Linear& l, Range rows, Phase phase) {
    Store to = residual(s);
    to.out += rows.first * to.ld;
    linear(l, w.mid, rows.first, rows.last - rows.first, {0, l.w.tiles()}, to);
    if (s.apart()) add_post_rows(s, rows);
    mark(phase);
}

void Run::attend_rows(const Sublayer& s, const Attention& a, const RowPart& part) {
    for (int64_t h = 0; h < a.kv_heads; h++) attend_blocks(a, blocks.data() + part.first_block, blocks.data() + part.last_block, {h, h + 1});
    mark(P_ATTENTION);
    for (int64_t t = part.rows.first; t < part.rows.last; t++) quantize_row(a.out, w.mid, t);
    mark(P_PREPARE);
    down_rows(s, a.o, part.rows, P_O);
}

void Run::mlp_rows(const Sublayer& s, const Mlp& m, Range rows) {
    prepare_rows(s, m.in, rows);
    gated_rows(m, w.in, rows, {0, m.up.w.tiles()}, stripes(m));
    for (int64_t t = rows.first; !stripes(m) && t < rows.last; t++) quantize_row(m.mid, w.mid, t);
    mark(P_GATED);
    down_rows(s, m.down, rows, P_DOWN);
}

void Run::layers_by_parts() {
    const size_t n = p.sublayers.size();
    auto attention = [&](size_t k) { return std::get_if<Attention>(&p.sublayers[k].mixer); };
    size_t from = 0;  // first sublayer of this phase; an attention sublayer has its keys in the cache by now
    bool attend = false;
    for (bool more = true; more;) {
        size_t end = from + (attend ? 1 : 0);
        while (end < n && !attention(end)) end++;
        more = end < n;
        model.pool.chunks(phase++, uint32_t(parts.size()), [&](uint32_t i) {
            const RowPart& part = parts[i];
            hand = part.rows;  // other threads may be at a layer of other heads
            if (from == 0 && !attend) embed_rows(part.rows);
            if (from == 0 && !attend && p.per_layer.present()) give_rows(part.rows);
            for (size_t k = from; k < end; k++) {
                const Sublayer& s = p.sublayers[k];
                if (!attention(k)) tap(k, part.rows);
                if (s.sees && part.first_look == part.last_look) save_rows(s, part.rows);
                else if (const Attention* a = attention(k)) attend_rows(s, *a, part);
                else if (const Cross* c = std::get_if<Cross>(&s.mixer)) cross_rows(s, *c, part);
                else if (const PerLayer* m = std::get_if<PerLayer>(&s.mixer)) per_layer_rows(s, *m, part.rows);
                else mlp_rows(s, std::get<Mlp>(s.mixer), part.rows);
                if (s.deep) add_deep(s, part.rows);
            }
            if (more) tap(end, part.rows);
            if (more) project_rows(p.sublayers[end], *attention(end), part.rows);
        });
        mark(P_OTHER);
        from = end;
        attend = true;
    }
}

}  // namespace tk
