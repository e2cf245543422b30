// Attention and latent attention, read.
#include <algorithm>
#include <cmath>

#include "step/read.h"
#include "step/workspace.h"

namespace tk {
namespace {

// Its place in the blocks of its cache group.
void keep(Attention& a, const Record& r, Program& prog) {
    if (prog.lender) r.fail("group", "of a cache that is another model's");
    a.group = r.integer("group", 0, int64_t(prog.groups.size()) - 1);
    a.kv_type = r.has("cache_type") ? int32_t(r.integer("cache_type", KV_F32, KV_INT65)) : prog.kv_type;
    if (a.rows && turns(a.kv_type)) throw Error("program: rows that are key and value at once in fewer than 8 bits");
    a.cell = cell_layout(a.kv_type, a.head_dim, a.rows);
    a.head_bytes = prog.block_size / LANES * a.cell.bytes();
    Group& g = prog.groups[size_t(a.group)];
    if (g.state) r.fail("group", "one of states, not of tokens");
    if (g.window > 0 && (a.window == 0 || a.window > g.window)) r.fail("window", "sees further back than its cache group keeps");
    if (a.sink_tokens > g.sink_tokens) r.fail("sink_tokens", "more than its cache group keeps");
    a.layer_offset = g.block_bytes;
    g.block_bytes += a.kv_heads * a.head_bytes;
}

int64_t read_rope_of(const Record& r, const Program& prog, int64_t dims) {
    const int64_t rope = r.integer("rope", 0, int64_t(prog.ropes.size()) - 1);
    if (prog.ropes[size_t(rope)].rotary > dims) r.fail("rope", "turns more than the head has");
    return rope;
}

// Cosines and sines of the place from which sink tokens are seen, that of a query where they and a window are full.
void turn_for_sinks(Attention& a, const Program& prog) {
    if (!a.sink_tokens || a.rope < 0) return;
    const Rope& rope = prog.ropes[size_t(a.rope)];
    for (int64_t d = 0; d < rope.rotary / 2; d++) {
        const float angle = float(a.window + a.sink_tokens - 1) * rope.freq[0].data[d];
        a.sink_cos.push_back(cosf(angle) * rope.factor[0]);
        a.sink_sin.push_back(sinf(angle) * rope.factor[0]);
    }
}

void read_query_scale(const Record& r, Attention& a) {
    a.q_form = int(r.integer("form", 1, 2));
    a.q_length = r.integer("length", 1, LIMIT);
    a.q_offset = r.integer("offset", 0, LIMIT);
    a.q_factor = r.number("factor");
}

void read_heads(const Record& r, Attention& a) {
    a.heads = r.integer("heads", 1, 4096);
    a.kv_heads = r.integer("kv_heads", 1, a.heads);
    if (a.heads % a.kv_heads) r.fail("kv_heads", "no divisor of the heads");
    a.per_kv = a.heads / a.kv_heads;
    a.head_dim = a.value_dim = r.integer("head_dim", 1, 4096);
    a.dpad = a.vpad = pad16(a.head_dim);
}

// That a rank can make `count` numbers of `out` from `first` on into integers.
void check_codes(const Record& own, bool codes, const Input& out, int64_t first, int64_t count) {
    if (codes && (out.keys.size() != 1 || out.keys[0].perm || first % out.keys[0].group || count % out.keys[0].group))
        own.fail("codes", "o does not quantize heads by themselves");
}

// Of all heads those that are this rank's. `out`: what o reads.
void read_own(const Record& r, Attention& a, const Input& out) {
    if (!r.has("own")) return;
    const Record own = r.record("own");
    const int64_t heads = a.heads, kv_heads = a.kv_heads, per_kv = a.per_kv;
    a.first_head = own.integer("first_head", 0, heads - 1);
    a.heads = own.integer("heads", 1, heads - a.first_head);
    a.first_kv = own.integer("first_kv_head", 0, kv_heads - 1);
    a.kv_heads = own.integer("kv_heads", 1, kv_heads - a.first_kv);
    a.codes = own.flag("codes");
    a.per_kv = a.heads / a.kv_heads;
    // whole heads of keys with all that read them, or a part of those that read one
    const bool whole = a.per_kv == per_kv && a.first_head == a.first_kv * per_kv, part = a.kv_heads == 1 && a.first_head / per_kv == a.first_kv;
    if (a.heads % a.kv_heads || !(whole || (part && (a.first_head + a.heads - 1) / per_kv == a.first_kv))) own.fail("heads", "not those that read its keys");
    check_codes(own, a.codes, out, a.first_head * a.head_dim, a.heads * a.head_dim);
}

}  // namespace

Mixer read_attention(const Record& r, Program& prog) {
    Attention a;
    read_heads(r, a);
    a.rope = r.has("rope") ? read_rope_of(r, prog, a.head_dim) : -1;
    a.window = r.integer("window", 0, LIMIT);
    a.chunked = r.flag("chunked");
    if (a.chunked && !a.window) r.fail("chunked", "without a window");
    a.sink_tokens = r.integer("sink_tokens", 0, KV_TILE);
    if (a.sink_tokens && (!a.window || a.chunked)) r.fail("sink_tokens", "without a window that slides");
    turn_for_sinks(a, prog);
    prog.endless |= a.sink_tokens > 0;
    a.mutual = r.flag("mutual");
    a.strict = r.flag("strict");
    a.scale = r.number("scale");
    a.softcap = r.number("softcap");
    a.clip = r.number("clip");
    if (r.has("alibi")) {
        const Record alibi = r.record("alibi");
        a.alibi = alibi.needed("slopes", a.heads);
        a.alibi_rounded = alibi.number("rounded");
        if (a.softcap > 0) r.fail("alibi", "beside a softcap");
        if (a.mutual && a.alibi_rounded != 0.0f) r.fail("alibi", "rounded, of tokens that see each other");
    }
    if (r.has("position_bias")) {
        const Record bias = r.record("position_bias");
        a.bias_length = bias.integer("length", 1, 1 << 20);
        const int64_t numbers = a.bias_at(a.heads, 1 - a.bias_length);
        if (numbers > INT32_MAX) bias.fail("length", "of too many numbers");
        a.bias = bias.needed("rows", numbers);
        if (!a.mutual || a.alibi || a.softcap > 0) r.fail("position_bias", "beside alibi or a softcap, or of tokens that see none behind them");
    }
    a.norm_last = r.flag("norm_last");
    if (r.has("q_scale")) read_query_scale(r.record("q_scale"), a);
    if (a.sink_tokens && (a.norm_last || a.q_form || a.mutual || a.alibi_rounded != 0.0f))
        r.fail("sink_tokens", "beside what no query can have at two places");
    const int64_t hidden = prog.hidden;
    a.q = r.routed("q", a.heads * a.head_dim, hidden);
    a.k = r.routed("k", a.kv_heads * a.head_dim, hidden);
    if (r.has("v")) a.v = r.routed("v", a.kv_heads * a.head_dim, hidden);
    a.gate = r.maybe_linear("gate", a.heads * a.head_dim, hidden);
    a.o = r.routed("o", hidden, a.heads * a.head_dim);
    a.q_norm = r.norm("q_norm", a.head_dim, a.heads);
    a.k_norm = r.norm("k_norm", a.head_dim, a.kv_heads);
    a.v_norm = r.norm("v_norm", a.head_dim);
    if (!a.v.present() && (a.norm_last || a.wide(a.k_norm))) r.fail("v", "missing where keys are changed in place");
    a.sinks = r.vector("sinks", a.heads);
    a.key_mean = r.vector("key_mean", a.kv_heads * a.head_dim);
    if (a.key_mean && (a.sinks || a.softcap > 0 || a.sink_tokens)) r.fail("key_mean", "where it would change what tokens weigh");
    a.in.width = hidden;
    join(a.in, a.q);
    join(a.in, a.k);
    join(a.in, a.v);
    join(a.in, a.gate);
    a.out.width = a.heads * a.head_dim;
    a.out.norm = r.norm("o_norm", a.out.width);
    join(a.out, a.o);
    read_own(r, a, a.out);
    if (a.codes && a.out.norm.present()) r.fail("o_norm", "of what ranks hand on in integers");
    keep(a, r, prog);
    return a;
}

// Attention with queries of its own to the keys and values of a sublayer before it, or of the model whose cache is read.
Mixer read_reuse(const Record& r, Program& prog) {
    const std::vector<Sublayer>& before = (prog.lender ? *prog.lender : prog).sublayers;
    const int64_t source = r.integer("source", 0, int64_t(before.size()) - 1);
    const Attention* from = std::get_if<Attention>(&before[size_t(source)].mixer);
    if (!from || !from->k.present()) r.fail("source", "keeps no keys and values");
    if (from->alibi || from->sinks || from->clip > 0 || from->sink_tokens || from->q_form || from->gate.present() || from->norm_last)
        r.fail("source", "no plain attention");
    Attention a = *from;
    a.k = a.v = Linear();
    a.k_norm = a.v_norm = Norm();
    a.in = a.out = Input();
    a.key_mean = Vector();
    a.first_head = a.first_kv = 0;
    a.codes = false;
    read_heads(r, a);
    if (prog.lender) {
        a.window = r.integer("window", 0, LIMIT);
        if (from->window && (a.window == 0 || a.window > from->window)) r.fail("window", "sees further back than is kept");
        if (a.window != prog.groups[size_t(a.group)].window) r.fail("window", "not that of its cache group");
    }
    a.rope = r.has("rope") ? read_rope_of(r, prog, a.head_dim) : -1;
    a.q = r.linear("q", a.heads * a.head_dim, prog.hidden);
    a.o = r.linear("o", prog.hidden, a.heads * a.head_dim);
    a.q_norm = r.norm("q_norm", a.head_dim);
    a.in.width = prog.hidden;
    join(a.in, a.q);
    a.out.width = a.heads * a.head_dim;
    join(a.out, a.o);
    read_own(r, a, a.out);
    if (a.head_dim != from->head_dim || a.kv_heads != from->kv_heads || a.first_kv != from->first_kv) r.fail("source", "has other heads");
    return a;
}

Mixer read_cross(const Record& r, Program& prog) {
    Cross c;
    Attention& core = c.core;
    read_heads(r, core);
    core.scale = r.number("scale");
    core.softcap = 0;
    core.cell = cell_layout(loaded_type(prog.bf16), core.head_dim);
    c.q = r.linear("q", core.heads * core.head_dim, prog.hidden);
    c.k = r.linear("k", core.kv_heads * core.head_dim, prog.hidden);
    c.v = r.linear("v", core.kv_heads * core.head_dim, prog.hidden);
    c.o = r.linear("o", prog.hidden, core.heads * core.head_dim);
    c.q_norm = r.needed_norm("q_norm", core.head_dim);
    c.k_norm = r.needed_norm("k_norm", core.head_dim);
    c.in.width = c.rows.width = prog.hidden;
    c.out.width = core.heads * core.head_dim;
    join(c.in, c.q);
    join(c.rows, c.k);
    join(c.rows, c.v);
    join(c.out, c.o);
    read_own(r, core, c.out);
    c.at = prog.kept;
    prog.kept += core.kv_heads * core.cell.bytes();
    return c;
}

Mixer read_latent(const Record& r, Program& prog) {
    Latent a;
    Attention& core = a.core;
    core.heads = core.per_kv = r.integer("heads", 1, 4096);
    core.kv_heads = 1;
    a.nope_dim = r.integer("nope_dim", 1, 4096);
    a.rope_dim = r.integer("rope_dim", 1, 4096);
    a.v_dim = r.integer("v_dim", 1, 4096);
    core.value_dim = r.integer("kv_rank", 1, 4096);
    core.rope = read_rope_of(r, prog, a.rope_dim);
    core.scale = r.number("scale");
    core.softcap = 0;
    core.window = 0;
    core.head_dim = a.kv_rank() + a.rope_dim;
    core.dpad = pad16(core.head_dim);
    core.vpad = pad16(core.value_dim);
    core.rows = true;
    const int64_t hidden = prog.hidden, heads = core.heads;
    a.q_a = r.maybe_linear("q_a", 0, hidden);
    a.mid.width = a.q_a.present() ? a.q_a.w.rows : hidden;
    a.q_a_norm = r.norm("q_a_norm", a.mid.width);
    a.q = r.linear("q", heads * a.qk_dim(), a.mid.width);
    a.kv_a = r.linear("kv_a", core.head_dim, hidden);
    a.kv_a_norm = r.needed_norm("kv_a_norm", a.kv_rank());
    a.kv_b = r.linear("kv_b", heads * (a.nope_dim + a.v_dim), a.kv_rank());
    if (a.kv_b.w.format != DENSE || a.kv_b.bias) r.fail("kv_b", "expected a dense matrix without a bias");
    a.o = r.linear("o", hidden, heads * a.v_dim);
    a.in.width = hidden;
    join(a.q_a.present() ? a.mid : a.in, a.q);
    join(a.in, a.q_a);
    join(a.in, a.kv_a);
    a.out.width = heads * a.v_dim;
    join(a.out, a.o);
    if (r.has("own")) {
        const Record own = r.record("own");
        a.first_head = own.integer("first_head", 0, heads - 1);
        core.heads = core.per_kv = own.integer("heads", 1, heads - a.first_head);
        a.codes = own.flag("codes");
        check_codes(own, a.codes, a.out, a.first_head * a.v_dim, core.heads * a.v_dim);
    }
    keep(core, r, prog);
    return a;
}

}  // namespace tk
