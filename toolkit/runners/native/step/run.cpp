// One step: every thread runs the same function over its share of output rows, tokens or attention items.
//
// Work is split over outputs only, so a result does not depend on the number of threads. Up to SMALL tokens every
// thread prepares the inputs of linears for itself, which saves a barrier; above that tokens are shared out, and with many of
// them threads take parts through whole layers (rows_step.cpp).
#include "step/run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace tk {

int64_t phases_of(const Program& p, int64_t head_blocks) {
    int64_t n = 4 + MOST_AUX + (p.per_layer.present() ? 3 : 0) + head_blocks * 6;
    for (const Sublayer& s : p.sublayers)
        n += std::visit([](const auto& m) { return std::decay_t<decltype(m)>::PHASES; }, s.mixer) + (s.deep > 0) + (p.ranks > 1 ? 6 : 0);
    return n;
}

// What comes before a sublayer's input is prepared: where its norm's result becomes the residual, that; and rows of the residual
// that sublayers beside this one read when it has added to them.
void Run::save_rows(const Sublayer& s, Range rows) const {
    for (int64_t t = rows.first; s.carry.present() && t < rows.last; t++) norm_row(s.carry, w.x + t * w.hidden_ld, w.x + t * w.hidden_ld);
    if (s.saves && rows.last > rows.first)
        memcpy(w.block + rows.first * w.hidden_ld, w.x + rows.first * w.hidden_ld, size_t(rows.last - rows.first) * size_t(w.hidden_ld) * 4);
}

void Run::save(const Sublayer& s) {
    if (s.saves || s.carry.present()) share(P_OTHER, count, 1, [&](Range r) { save_rows(s, r); });
}

Run::Prepared Run::prepare(const Input& in, const Norm& norm, const float* from, int64_t ld, int64_t rows) {
    InputBuffer& shared = from == w.mid.x ? w.mid : w.in;
    if (rows <= SMALL) return {&shared == &w.mid ? &own.mid : &own.in, false};
    if (norm.present() || !plain(in) || from != shared.x)
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

Store Run::residual(const Sublayer& s) const {
    Store to;
    to.ld = w.hidden_ld;
    to.out = s.apart() ? w.tmp : w.x;
    to.add = s.apart() ? 0 : 1;
    to.alpha = s.residual_scale;
    return to;
}

void Run::add_post_rows(const Sublayer& s, Range rows) {
    for (int64_t t = rows.first; t < rows.last; t++) {
        if (s.sees && view_of[size_t(t)] < 0) continue;
        end_row(s, t, w.tmp + t * w.hidden_ld);
    }
}

// What a sublayer gives token t, to the residual.
void Run::end_row(const Sublayer& s, int64_t t, float* y) const {
    float* x = w.x + t * w.hidden_ld;
    if (s.post.present()) norm_row(s.post, y, y);
    ops.add_scaled(x, y, s.residual_scale * s.gate, p.hidden);
    if (s.factor != 1.0f) std::for_each(x, x + p.hidden, [&](float& v) { v *= s.factor; });
}

void Run::add_post(const Sublayer& s) {
    if (s.apart()) share(P_OTHER, count, 1, [&](Range r) { add_post_rows(s, r); });
}

// The linear that ends a sublayer, from the shared middle rows (already quantized or not) into the residual.
void Run::down(const Sublayer& s, const Linear& l, const Input& mid, bool quantized, Phase phase) {
    Prepared x = quantized || plain(mid) ? Prepared{&w.mid, true} : prepare(mid, Norm(), w.mid.x, w.mid.ldx, count);
    const Store to = residual(s);
    share_own(phase, l.own, pair_unit(), l.w.tile_bytes(), [&](Range tiles) {
        linear(l, ready(x, mid, Norm(), w.mid.x, w.mid.ldx, count), 0, count, tiles, to);
    });
    gather_hidden(s, l.own);
    add_post(s);
}

// What linears that end a sublayer have made of its result, by ranks.
void Run::gather_hidden(const Sublayer& s, Range tiles) {
    gather({floats(s.apart() ? w.tmp : w.x, count, w.hidden_ld, p.hidden, in_tiles(tiles, p.hidden))});
}

// Numbers `own` of row t to integers, by groups.
void Run::quantize_own(InputBuffer& of, int64_t t, int64_t group, Range own) const {
    const int64_t first_group = own.first / group;
    ops.quantize(of.x + t * of.ldx + own.first, nullptr, group, 0, own.last / group - first_group, of.q[0] + t * of.ldq + own.first,
                 of.scale[0] + t * of.lds + first_group, of.sum[0] + t * of.lds + first_group);
}

// Middle rows of which this rank has numbers `own`, for `l`: as it reads them, or as floats.
void Run::gather_mid(const Linear& l, const Input& mid, bool as_codes, Range own) {
    if (!codes(l, as_codes)) return gather({floats(w.mid.x, count, w.mid.ldx, mid.width, own)});
    const int64_t group = mid.keys[0].group;
    std::vector<Columns> parts;
    add_codes(parts, w.mid, count, mid.width, group, own);
    gather(parts, [&](int64_t t) { quantize_own(w.mid, t, group, own); });
}

void Run::embed_rows(Range r) {
    for (int64_t t = r.first; t < r.last; t++) {
        const int64_t at = first + t;
        const int32_t prev = in.from_previous[at];
        const int64_t id = prev >= 0 ? model.previous[size_t(prev)] : in.token_ids[at];
        float* x = w.x + t * w.hidden_ld;
        const Change* changed = change(p.embed, t);
        ops.matrix_row(changed && changed->whole.present() ? changed->whole.w : p.embed.w, id, p.embed_scale, x);
        if (p.embed.turned && !(changed && changed->whole.present())) ops.hadamard(x, p.hidden);
        if (changed && changed->low()) embed_low(*changed, id, p.embed_scale, x);
        if (p.types) ops.add_scaled(x, p.types.data + (in.types ? in.types[at] : 0) * p.hidden, 1.0f, p.hidden);
        if (p.positions) ops.add_scaled(x, p.positions.data + (in.positions[at] + p.offset) * p.hidden, 1.0f, p.hidden);
        if (p.embed_norm.present()) norm_row(p.embed_norm, x, x);
    }
    for (int64_t i = 0; i < in.embeds_size; i++) {
        const int64_t t = in.embed_index[i] - first;
        if (t >= r.first && t < r.last)
            memcpy(w.x + t * w.hidden_ld, in.embeds + i * p.hidden * (1 + p.deep), size_t(p.hidden) * 4);
    }
    for (size_t i = 0; i < p.ropes.size(); i++) turn_table(i, r);
}

// Whether the residual stream comes back as it is before sublayer k.
bool Run::tapped(size_t k) const {
    if (in.aux_size)
        for (int64_t i = 0; i < in.aux_sublayers_size; i++)
            if (in.aux_sublayers[i] == int64_t(k)) return true;
    return false;
}

void Run::tap(size_t k, Range rows) const {
    for (int64_t l = 0; l < in.aux_sublayers_size; l++) {
        if (in.aux_sublayers[l] != int64_t(k)) continue;
        for (int64_t i = 0; i < in.aux_size; i++) {
            const int64_t t = in.aux_index[i] - first;
            if (t >= rows.first && t < rows.last)
                memcpy(out.aux + (i * in.aux_sublayers_size + l) * p.hidden, w.x + t * w.hidden_ld, size_t(p.hidden) * 4);
        }
    }
}

// The same as a phase of its own.
void Run::tap_all(size_t k) {
    if (tapped(k)) share(P_OTHER, count, 1, [&](Range r) { tap(k, r); });
}

// Rows of pictures that are added behind this sublayer.
void Run::add_deep(const Sublayer& s, Range rows) {
    for (int64_t i = 0; i < in.embeds_size; i++) {
        const int64_t t = in.embed_index[i] - first;
        if (t >= rows.first && t < rows.last)
            ops.add_scaled(w.x + t * w.hidden_ld, in.embeds + (i * (1 + p.deep) + s.deep) * p.hidden, 1.0f, p.hidden);
    }
}

// Frequencies of dynamic rope that reaches `length`, as toolkit/models/rope.py has them.
static void stretched(const Rope& rope, int64_t length, std::vector<float>& freq) {
    const double dim = double(rope.rotary), stretch = rope.ntk.factor * double(length) / rope.ntk.trained - (rope.ntk.factor - 1);
    const double base = double(float(rope.ntk.theta * std::pow(stretch, dim / (dim - 2))));
    freq.resize(size_t(rope.rotary / 2));
    for (size_t d = 0; d < freq.size(); d++) freq[d] = 1.0f / float(std::pow(base, double(float(2 * d) / float(rope.rotary))));
}

// Cosines and sines of a rope for tokens r.
void Run::turn_table(size_t i, Range r) const {
    const Rope& rope = p.ropes[i];
    const int64_t half = rope.rotary / 2;
    // far into an endless text products of floats would be off by more than neighbours are apart
    auto far = [&](int32_t position) { return p.endless && position >= 1 << 18; };
    std::vector<float> own;  // frequencies of the length of the token before
    int64_t known = 0;
    for (int64_t t = r.first; t < r.last; t++) {
        const int set = in.rope_set[seq_of[size_t(t)]];
        const int32_t* at = in.positions + first + t;
        const float* freq = rope.freq[set].data;
        if (const int64_t length = in.rope_length ? in.rope_length[first + t] : 0; rope.ntk.trained > 0 && length > rope.ntk.trained) {
            if (length != known) stretched(rope, length, own), known = length;
            freq = own.data();
        }
        for (int64_t d = 0; d < half; d++) {
            const int64_t axis = in.axes == 1 ? 0 : int64_t(rope.axis.data[d]);
            const int32_t position = at[axis * in.tokens];
            float angle = float(position) * freq[d];
            if (far(position)) angle = float(std::remainder(double(position) * double(freq[d]), 2 * M_PI));
            w.cos[i][t * half + d] = cosf(angle) * rope.factor[set];
            w.sin[i][t * half + d] = sinf(angle) * rope.factor[set];
        }
    }
}

void Run::layers() {
    if (in.fills) {
        share(P_EMBED, count, 1, [&](Range r) { embed_rows(r); });
        for (const Sublayer& s : p.sublayers)
            if (const Attention* a = std::get_if<Attention>(&s.mixer)) fill(*a);
        return;
    }
    if (parts.empty()) {
        share(P_EMBED, count, 1, [&](Range r) { embed_rows(r); });
        if (p.per_layer.present()) give();
        for (const Sublayer& s : p.sublayers) {
            tap_all(size_t(&s - p.sublayers.data()));
            if (s.sees && looks.empty()) save(s);
            else std::visit([&](const auto& m) { mix(s, m); }, s.mixer);
            if (s.deep && in.embeds_size) share(P_OTHER, count, 1, [&](Range r) { add_deep(s, r); });
        }
    } else {
        layers_by_parts();
    }
    tap_all(p.sublayers.size());
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
        use_adapters(adapters, base, 0, uint64_t((plan.logit_rows - 1 - base) / w.logit_rows));
        Prepared x = prepare(p.head_in, Norm(), from, w.hidden_ld, n);
        Store to;
        to.out = w.logits;
        to.ld = w.vocab_ld;
        share_own(P_HEAD, p.head.own, 2, p.head.w.tile_bytes(), [&](Range tiles) {
            linear(p.head, ready(x, p.head_in, Norm(), from, w.hidden_ld, n), 0, n, tiles, to);
        });
        gather({floats(w.logits, n, w.vocab_ld, p.head.w.rows, in_tiles(p.head.own, p.head.w.rows))});
        share(P_SAMPLE, n, 1, [&](Range r) {
            for (int64_t i = r.first; i < r.last; i++) finish_row(base + i, w.logits + i * w.vocab_ld);
        });
    }
}

}  // namespace tk
