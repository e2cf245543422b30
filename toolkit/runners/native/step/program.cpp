// The record that program.py writes, read with every index and size checked; mixers have readers of their own (read.h).
#include "step/program.h"

#include "step/plan.h"
#include "step/read.h"
#include "step/workspace.h"

namespace tk {
namespace {

constexpr struct {
    const char* kind;
    Mixer (*read)(const Record&, Program&);
} READERS[] = {
    {"attention", read_attention},
    {"reuse", read_reuse},
    {"latent", read_latent},
    {"cross", read_cross},
    {"short_conv", read_short_conv},
    {"delta", read_delta},
    {"mamba", read_mamba},
    {"mlp", read_mlp},
    {"moe", read_moe},
    {"per_layer", read_per_layer},
};

Mixer read_mixer(const Record& r, Program& prog) {
    for (const auto& reader : READERS)
        if (r.has(reader.kind)) return reader.read(r.record(reader.kind), prog);
    r.fail("mixer", "none of a kind that is known");
}

Rope read_rope(const Record& r) {
    Rope rope;
    rope.rotary = r.integer("rotary_dim", 2, 4096);
    rope.axis = r.needed("axis", rope.rotary / 2);
    for (int64_t i = 0; i < rope.axis.size; i++)
        if (const float axis = rope.axis.data[i]; axis != 0 && axis != 1 && axis != 2) r.fail("axis", "none of 0, 1 and 2");
    for (int s = 0; s < 2; s++) {
        const Record set = r.record(s ? "long" : "short");
        rope.freq[s] = set.needed("inv_freq", rope.rotary / 2);
        rope.factor[s] = set.number("factor");
    }
    if (r.has("ntk")) {
        const Record own = r.record("ntk");
        rope.ntk.trained = double(own.integer("trained", 1, int64_t(1) << 30));
        const Vector numbers = own.needed("numbers", 2);
        rope.ntk.theta = double(numbers.data[0]), rope.ntk.factor = double(numbers.data[1]);
        if (!(rope.ntk.theta > 0) || !(rope.ntk.factor >= 1) || rope.rotary < 4) own.fail("numbers", "none that can turn");
    }
    return rope;
}

Sublayer read_sublayer(const Record& r, Program& prog) {
    Sublayer s;
    s.pre = r.norm("pre_norm", prog.hidden);
    s.post = r.norm("post_norm", prog.hidden);
    if (r.flag("carries")) {
        if (!s.pre.present()) r.fail("carries", "without a norm");
        std::swap(s.pre, s.carry);
    }
    s.residual_scale = r.number("residual_scale");
    s.beside = r.flag("beside");
    s.deep = r.integer("deep", 0, prog.deep);
    if (s.beside && prog.sublayers.empty()) r.fail("beside", "nothing stands before it");
    if (s.beside && !prog.sublayers.back().beside) prog.sublayers.back().saves = true;
    s.mixer = read_mixer(r, prog);
    if (r.has("factor")) s.factor = r.needed("factor", 1).data[0];
    if (r.has("gate")) {
        s.sees = true;
        s.gate = std::tanh(r.needed("gate", 1).data[0]);
        if (s.post.present()) r.fail("post_norm", "beside a gate");
        if (!std::holds_alternative<Mlp>(s.mixer) && !std::holds_alternative<Cross>(s.mixer)) r.fail("gate", "of such a mixer");
    }
    if (std::holds_alternative<Cross>(s.mixer) && !s.sees) r.fail("cross", "without a gate");
    return s;
}

void read_table(const Record& r, Program& prog) {
    PerLayerTable& t = prog.per_layer;
    const int64_t columns = r.integer("columns", 1, CHUNK * STRIPE);
    t.table = r.linear("table", r.integer("rows", prog.vocab, LIMIT), columns, true);
    t.projection = r.linear("projection", columns, prog.hidden);
    t.in.width = prog.hidden;
    join(t.in, t.projection);
    t.norm = r.norm("norm", r.record("norm").integer("size", 1, columns));
    if (!t.norm.present() || columns % t.norm.size) r.fail("norm", "no divisor of the columns");
    t.embed_scale = r.number("embed_scale");
    t.projection_scale = r.number("projection_scale");
    t.scale = r.number("scale");
    t.pad = r.integer("pad", 0, t.table.w.rows - 1);
}

void check_ways(const Input& in) {
    if (in.keys.size() + in.more.size() == MAX_KEYS) throw Error("program: one input is quantized in more than 3 ways");
}

void join_own(Input& in, Linear& l) {
    if (!l.present() || l.w.format != INT) return;
    for (size_t i = 0; i < in.keys.size(); i++)
        if (in.keys[i] == l.key) {
            l.slot = int(i);
            return;
        }
    check_ways(in);
    l.slot = int(in.keys.size());
    in.keys.push_back(l.key);
}

// The same of one that only tokens of pictures have.
void join_more(Input& in, Linear& l) {
    if (l.w.format != INT) return;
    for (size_t i = 0; i < in.keys.size(); i++)
        if (in.keys[i] == l.key) {
            l.slot = int(i);
            return;
        }
    size_t i = 0;
    while (i < in.more.size() && !(in.more[i] == l.key)) i++;
    if (i == in.more.size()) {
        check_ways(in);
        in.more.push_back(l.key);
    }
    l.slot = MAX_KEYS - 1 - int(i);
}

}  // namespace

void join(Input& in, Linear& l) {
    join_own(in, l);
    if (l.seen && l.seen->whole.present()) join_more(in, l.seen->whole);
}

namespace {

// The cache of another model, whose blocks are laid out as it has them.
void borrow(const Record& r, const Program& from, Program& prog) {
    if (prog.ranks > 1 || from.ranks > 1) r.fail("ranks", "more than one, which share no cache with another model");
    if (prog.groups.size() != from.groups.size() || prog.block_size != from.block_size || prog.bf16 != from.bf16)
        r.fail("groups", "not those of the model whose cache is read");
    for (size_t g = 0; g < prog.groups.size(); g++) {
        if (from.groups[g].state || prog.groups[g].state) r.fail("groups", "one of states, which only their own model reads");
        prog.groups[g].block_bytes = from.groups[g].block_bytes;
    }
    prog.lender = &from;
}

}  // namespace

Program parse_program(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                      bool bf16_dot, const Program* lender) {
    Values all(names, values, count, tensors, tensors_size);
    const Record r(all);
    Program prog;
    prog.ranks = r.integer("ranks", 1, 4096);
    prog.rank = r.integer("rank", 0, prog.ranks - 1);
    prog.vocab = r.integer("vocabulary", 1, LIMIT);
    prog.hidden = r.integer("hidden", 1, LIMIT);
    prog.block_size = r.integer("block_size", 16, 1 << 16);
    if (prog.block_size & (prog.block_size - 1)) r.fail("block_size", "no power of two");
    prog.kv_type = int32_t(r.integer("cache_type", KV_F32, KV_INT65));
    prog.deep = r.integer("deep", 0, 1 << 16);
    prog.bf16 = r.flag("bfloat16") && bf16_dot;
    const int64_t groups = r.integer("groups", 1, 64);
    for (int64_t g = 0; g < groups; g++) {
        Group group;
        const Record entry = r.entry("groups", g);
        group.window = entry.integer("window", 0, LIMIT);
        group.sink_tokens = entry.integer("sink_tokens", 0, KV_TILE);
        group.state = entry.flag("state");
        prog.groups.push_back(group);
    }
    if (lender) borrow(r, *lender, prog);
    const int64_t ropes = r.integer("ropes", 0, 64);
    for (int64_t i = 0; i < ropes; i++) prog.ropes.push_back(read_rope(r.entry("ropes", i)));
    prog.embed_scale = r.number("embed_scale");
    prog.head_scale = r.number("head_scale");
    prog.softcap = r.number("softcap");
    prog.embed = r.linear("embed", prog.vocab, prog.hidden, true);
    prog.chunk = r.integer("chunk", CHUNK, 1 << 20);
    if (r.has("encoder")) {
        const Record added = r.record("encoder");
        prog.positions = added.vector("positions", added.integer("position_rows", 0, LIMIT) * prog.hidden);
        prog.types = added.vector("types", added.integer("type_rows", 0, LIMIT) * prog.hidden);
        prog.offset = added.integer("offset", 0, LIMIT);
        prog.embed_norm = added.norm("norm", prog.hidden);
    }
    if (r.has("per_layer")) read_table(r.record("per_layer"), prog);
    const int64_t sublayers = r.integer("sublayers", 0, 1 << 16);
    for (int64_t i = 0; i < sublayers; i++) prog.sublayers.push_back(read_sublayer(r.entry("sublayers", i), prog));
    for (Sublayer& s : prog.sublayers)
        if (Moe* m = std::get_if<Moe>(&s.mixer)) {
            m->at = prog.mixtures++;
            prog.most_chosen = std::max(prog.most_chosen, m->top_k);
        }
    prog.final_norm = r.needed_norm("final_norm", prog.hidden);
    prog.head = r.linear("head", r.integer("head_rows", 1, prog.vocab), prog.hidden, true);
    prog.head_in.width = prog.hidden;
    prog.head_in.turned = prog.head.turned;
    join(prog.head_in, prog.head);
    all.finish();
    prog.sites = all.sites();
    prog.of_experts.resize(prog.sites.size());
    for (const Sublayer& s : prog.sublayers)
        if (const Moe* m = std::get_if<Moe>(&s.mixer))
            for (const Mlp& e : m->experts)
                for (const Linear* l : {&e.gate, &e.up, &e.down})
                    if (l->site >= 0) prog.of_experts[size_t(l->site)] = true;
    return prog;
}

}  // namespace tk
