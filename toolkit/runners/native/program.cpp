// The flat description that program.py writes, read back with every index and size checked.
#include <algorithm>

#include "parser.h"
#include "workspace.h"

namespace tk {
namespace {

constexpr int64_t MAGIC = 0x746b3035;  // "tk05"

void join(Input& in, Linear& l) {
    if (!l.present() || l.w.format != INT) return;
    for (size_t i = 0; i < in.keys.size(); i++)
        if (in.keys[i] == l.key) {
            l.slot = int(i);
            return;
        }
    if (in.keys.size() == MAX_KEYS) throw Error("program: one input is quantized in more than 3 ways");
    l.slot = int(in.keys.size());
    in.keys.push_back(l.key);
}

Mlp read_mlp(Parser& p, int64_t hidden, Input& in) {
    Mlp m;
    m.activation = int32_t(p.integer("activation", SILU, SWIGLUOAI));
    const int64_t width = p.integer("mlp width", 1, LIMIT);
    m.gate = p.linear("gate", width, hidden, false);
    m.up = p.linear("up", width, hidden);
    m.down = p.linear("down", hidden, width);
    if (!m.gate.present() && m.activation == SWIGLUOAI) throw Error("program: an activation of two without a gate");
    if (m.gate.present() && m.gate.w.format != m.up.w.format) throw Error("program: gate and up in different formats");
    join(in, m.gate);
    join(in, m.up);
    if (m.gate.present() && m.gate.slot != m.up.slot) throw Error("program: gate and up are quantized differently");
    m.mid.width = width;
    join(m.mid, m.down);
    return m;
}

// Its place in the blocks of its cache group.
void keep(Attention& a, Program& prog) {
    a.cell = cell_layout(prog.kv_type, a.head_dim, a.rows);
    a.head_bytes = prog.block_size / LANES * a.cell.bytes();
    Group& g = prog.groups[a.group];
    if (g.window > 0 && (a.window == 0 || a.window > g.window))
        throw Error("program: a layer sees further back than its cache group keeps");
    a.layer_offset = g.block_bytes;
    g.block_bytes += a.kv_heads * a.head_bytes;
}

Attention read_attention(Parser& p, Program& prog) {
    Attention a;
    a.heads = p.integer("heads", 1, 4096);
    a.kv_heads = p.integer("kv_heads", 1, a.heads);
    if (a.heads % a.kv_heads) throw Error("program: heads is no multiple of kv_heads");
    a.per_kv = a.heads / a.kv_heads;
    a.head_dim = p.integer("head_dim", 1, 4096);
    a.dpad = pad16(a.head_dim);
    a.rope = p.integer("rope", -1, int64_t(prog.ropes.size()) - 1);
    if (a.rope >= 0 && prog.ropes[a.rope].rotary > a.head_dim) throw Error("program: rope turns more than the head");
    a.window = p.integer("window", 0, LIMIT);
    a.chunked = p.integer("chunked", 0, a.window ? 1 : 0) == 1;
    a.group = p.integer("cache group", 0, int64_t(prog.groups.size()) - 1);
    a.scale = p.number("attention scale");
    a.softcap = p.number("attention softcap");
    a.clip = p.number("clip");
    a.alibi = p.vector("alibi", a.heads);
    a.alibi_rounded = p.number("alibi rounded");
    if (a.alibi && a.softcap > 0) throw Error("program: alibi beside a softcap");
    a.norm_last = p.integer("norms last", 0, 1) == 1;
    a.q_form = int(p.integer("query scale", 0, 2));
    a.q_length = p.integer("query scale's length", 1, LIMIT);
    a.q_offset = p.integer("query scale's offset", 0, LIMIT);
    a.q_factor = p.number("query scale's factor");
    const int64_t hidden = prog.hidden;
    a.q = p.linear("q", a.heads * a.head_dim, hidden);
    a.k = p.linear("k", a.kv_heads * a.head_dim, hidden);
    a.v = p.linear("v", a.kv_heads * a.head_dim, hidden);
    a.o = p.linear("o", hidden, a.heads * a.head_dim);
    a.q_norm = p.norm("q_norm", a.head_dim, a.heads);
    a.k_norm = p.norm("k_norm", a.head_dim, a.kv_heads);
    a.sinks = p.vector("sinks", a.heads);
    a.in.width = hidden;
    join(a.in, a.q);
    join(a.in, a.k);
    join(a.in, a.v);
    a.out.width = a.heads * a.head_dim;
    join(a.out, a.o);
    a.value_dim = a.head_dim;
    a.vpad = a.dpad;
    keep(a, prog);
    return a;
}

Latent read_latent(Parser& p, Program& prog) {
    Latent a;
    Attention& core = a.core;
    core.heads = core.per_kv = p.integer("heads", 1, 4096);
    core.kv_heads = 1;
    a.nope_dim = p.integer("nope_dim", 1, 4096);
    a.rope_dim = p.integer("rope_dim", 1, 4096);
    a.v_dim = p.integer("v_dim", 1, 4096);
    core.value_dim = p.integer("kv_rank", 1, 4096);
    core.rope = p.integer("rope", 0, int64_t(prog.ropes.size()) - 1);
    if (prog.ropes[core.rope].rotary > a.rope_dim) throw Error("program: rope turns more than the key has");
    core.group = p.integer("cache group", 0, int64_t(prog.groups.size()) - 1);
    core.scale = p.number("attention scale");
    core.softcap = 0;
    core.window = 0;
    core.head_dim = a.kv_rank() + a.rope_dim;
    core.dpad = pad16(core.head_dim);
    core.vpad = pad16(core.value_dim);
    core.rows = true;
    a.expanded = pad16(std::max(a.qk_dim(), a.v_dim));
    // by the products of a query and a key in either form, and those that make a key and its value
    const int64_t made = a.nope_dim + a.v_dim, saved = 2 * a.kv_rank() - made;
    a.break_even = saved > 0 ? a.kv_rank() * made / saved : CHUNK;
    if (prog.kv_type == KV_INT4) throw Error("program: rows that are key and value at once in 4 bits");
    const int64_t hidden = prog.hidden, heads = core.heads;
    a.q_a = p.linear("q_a", 0, hidden, false);
    a.mid.width = a.q_a.present() ? a.q_a.w.rows : hidden;
    a.q_a_norm = p.norm("q_a_norm", a.mid.width);
    a.q = p.linear("q", heads * a.qk_dim(), a.mid.width);
    a.kv_a = p.linear("kv_a", core.head_dim, hidden);
    a.kv_a_norm = p.norm("kv_a_norm", a.kv_rank());
    if (!a.kv_a_norm.present()) throw Error("program: kv_a_norm is missing");
    a.kv_b = p.linear("kv_b", heads * (a.nope_dim + a.v_dim), a.kv_rank());
    if (a.kv_b.w.format != DENSE || a.kv_b.bias) throw Error("program: kv_b: expected a dense matrix without a bias");
    a.o = p.linear("o", hidden, heads * a.v_dim);
    a.in.width = hidden;
    join(a.q_a.present() ? a.mid : a.in, a.q);
    join(a.in, a.q_a);
    join(a.in, a.kv_a);
    a.out.width = heads * a.v_dim;
    join(a.out, a.o);
    keep(core, prog);
    return a;
}

Moe read_moe(Parser& p, int64_t hidden) {
    Moe m;
    m.in.width = hidden;
    const int64_t experts = p.integer("experts", 1, 65536);
    m.top_k = p.integer("top_k", 1, experts);
    m.scoring = int(p.integer("scoring", 0, 2));
    m.norm_topk = p.integer("norm_topk", 0, 1) == 1;
    m.scale = p.number("moe scale");
    m.correction = p.vector("correction", experts);
    m.groups = p.integer("groups", 1, experts);
    m.top_groups = p.integer("top_groups", 1, m.groups);
    m.group_best = p.integer("group_score", 1, 2);
    const int64_t each = experts / m.groups;
    if (experts % m.groups || m.top_k > m.top_groups * each || m.group_best > each) throw Error("program: groups of experts do not fit");
    m.jitter = p.number("jitter");
    m.weigh_input = p.integer("weigh_input", 0, 1) == 1;
    m.router = p.linear("router", experts, hidden);
    join(m.in, m.router);
    for (int64_t e = 0; e < experts; e++) m.experts.push_back(read_mlp(p, hidden, m.in));
    for (const Mlp& e : m.experts)
        if (e.mid.width != m.experts[0].mid.width) throw Error("program: experts of different widths");
    m.has_shared = p.integer("shared expert", 0, 1) == 1;
    if (m.has_shared) {
        m.shared = read_mlp(p, hidden, m.in);
        m.shared_gate = p.linear("shared gate", 1, hidden, false);
        join(m.in, m.shared_gate);
    }
    return m;
}

}  // namespace

Program parse_program(const int64_t* ints, int64_t ints_size, const double* floats, int64_t floats_size,
                      const TensorRecord* tensors, int64_t tensors_size, bool bf16_dot) {
    Parser p(ints, ints_size, floats, floats_size, tensors, tensors_size);
    Program prog;
    if (p.integer("magic", 0, LIMIT) != MAGIC) throw Error("program: made by another version of the package");
    prog.vocab = p.integer("vocabulary", 1, LIMIT);
    prog.hidden = p.integer("hidden size", 1, LIMIT);
    prog.block_size = p.integer("block size", 16, 1 << 16);
    if (prog.block_size & (prog.block_size - 1)) throw Error("program: block size is no power of two");
    prog.kv_type = int32_t(p.integer("cache type", KV_F32, KV_INT4));
    prog.bf16 = p.integer("bfloat16 products", 0, 1) == 1 && bf16_dot;
    const int64_t groups = p.integer("cache groups", 1, 64);
    for (int64_t g = 0; g < groups; g++) {
        Group group;
        group.window = p.integer("group window", 0, LIMIT);
        prog.groups.push_back(group);
    }
    const int64_t ropes = p.integer("ropes", 0, 64);
    for (int64_t r = 0; r < ropes; r++) {
        Rope rope;
        rope.rotary = p.integer("rotary_dim", 2, 4096);
        rope.ends[0] = p.integer("section", 0, rope.rotary / 2);
        rope.ends[1] = p.integer("section", rope.ends[0], rope.rotary / 2);
        for (int s = 0; s < 2; s++) {
            rope.freq[s] = p.vector("inv_freq", rope.rotary / 2);
            if (!rope.freq[s]) throw Error("program: inv_freq is missing");
            rope.factor[s] = p.number("rope factor");
        }
        prog.ropes.push_back(rope);
    }
    prog.embed_scale = p.number("embedding scale");
    prog.head_scale = p.number("head scale");
    prog.softcap = p.number("logit softcap");
    prog.embed = p.linear("embedding", prog.vocab, prog.hidden, true, true);
    const int64_t layers = p.integer("sublayers", 0, 1 << 16);
    for (int64_t i = 0; i < layers; i++) {
        Sublayer s;
        s.kind = int(p.integer("kind", 0, 3));
        s.pre = p.norm("pre_norm", prog.hidden);
        s.post = p.norm("post_norm", prog.hidden);
        s.residual_scale = p.number("residual scale");
        s.beside = p.integer("beside", 0, i ? 1 : 0) == 1;
        if (s.beside && !prog.sublayers.back().beside) prog.sublayers.back().saves = true;
        if (s.kind == 0) s.attention = read_attention(p, prog);
        if (s.kind == 1) {
            s.mlp.in.width = prog.hidden;
            Input in = s.mlp.in;
            s.mlp = read_mlp(p, prog.hidden, in);
            s.mlp.in = in;
        }
        if (s.kind == 2) s.moe = read_moe(p, prog.hidden);
        if (s.kind == 3) s.latent = read_latent(p, prog);
        prog.sublayers.push_back(std::move(s));
    }
    prog.final_norm = p.norm("final norm", prog.hidden);
    prog.head = p.linear("head", prog.vocab, prog.hidden, true, true);
    prog.head_in.width = prog.hidden;
    prog.head_in.turned = prog.head.turned;
    join(prog.head_in, prog.head);
    p.finish();
    return prog;
}

}  // namespace tk
