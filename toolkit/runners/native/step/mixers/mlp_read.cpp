// MLPs and mixtures of them, read.
#include "step/read.h"

namespace tk {
namespace {

// What tokens of pictures have of a gated product.
void check_routed(const Record& r, const Mlp& m) {
    if (!m.gate.present() ? m.up.seen && m.up.seen->low() : bool(m.gate.seen) != bool(m.up.seen)) r.fail("up", "not routed as its gate");
    if (!m.gate.present() || !m.up.seen) return;
    const Routed &gate = *m.gate.seen, &up = *m.up.seen;
    if (gate.low() != up.low() || gate.whole.w.format != up.whole.w.format || gate.whole.slot != up.whole.slot)
        r.fail("gate", "routed otherwise than up");
    if (up.low() && (m.gate_scale != 1.0f || m.activation == SWIGLUOAI)) r.fail("activation", "not of each by itself");
}

void read_apart(const Record& r, Moe& m, int64_t hidden) {
    m.router_norm = r.needed_norm("router", hidden);
    m.experts_norm = r.needed_norm("experts", hidden);
    m.shared_norm = r.needed_norm("shared", hidden);
    m.experts_out = r.needed_norm("experts_out", hidden);
    m.shared_out = r.needed_norm("shared_out", hidden);
}

}  // namespace

Mlp read_one_mlp(const Record& r, int64_t hidden, Input& in, bool may_route) {
    auto linear = [&](const char* key, int64_t rows, int64_t cols) { return may_route ? r.routed(key, rows, cols) : r.linear(key, rows, cols); };
    Mlp m;
    m.activation = int32_t(r.integer("activation", -1, QUICK_GELU));
    if (r.has("curve")) {
        const Record curve = r.record("curve");
        m.curve[0] = curve.vector("alpha_p", 1);
        m.curve[1] = curve.vector("alpha_n", 1);
        m.curve[2] = curve.vector("beta", 1);
    }
    m.gate_scale = r.number("gate_scale");
    const int64_t width = r.integer("width", 1, LIMIT);
    if (r.has("gate")) m.gate = linear("gate", width, hidden);
    m.up = linear("up", width, hidden);
    m.down = linear("down", hidden, width);
    if (!m.gate.present() && m.activation == SWIGLUOAI) r.fail("activation", "one of two without a gate");
    if ((m.activation < 0) != bool(m.curve[0]) || (m.gate.present() && m.curve[0])) r.fail("curve", "not of xielu without a gate");
    if (m.gate.present() && m.gate.w.format != m.up.w.format) r.fail("gate", "in another format than up");
    join(in, m.gate);
    join(in, m.up);
    if (m.gate.present() && m.gate.slot != m.up.slot) r.fail("gate", "quantized otherwise than up");
    check_routed(r, m);
    m.mid.width = width;
    join(m.mid, m.down);
    if (m.gate.present() && (m.gate.own.first != m.up.own.first || m.gate.own.last != m.up.own.last)) r.fail("gate", "of other tiles than up");
    m.codes = r.has("codes") && r.flag("codes");
    if (m.codes && (m.mid.keys.size() != 1 || m.mid.keys[0].perm || m.up.own.first * LANES % m.mid.keys[0].group ||
                    (m.up.own.last != m.up.w.tiles() && m.up.own.last * LANES % m.mid.keys[0].group)))
        r.fail("codes", "down does not quantize its tiles by themselves");
    return m;
}

Mixer read_per_layer(const Record& r, Program& prog) {
    PerLayer m;
    if (!prog.per_layer.present()) r.fail("at", "without a table");
    m.activation = int32_t(r.integer("activation", SILU, QUICK_GELU));
    if (m.activation == SWIGLUOAI) r.fail("activation", "one of two");
    m.in.width = prog.hidden;
    m.mid.width = r.integer("width", 1, prog.per_layer.columns());
    m.at = r.integer("at", 0, prog.per_layer.columns() - m.mid.width);
    m.gate = r.linear("gate", m.mid.width, prog.hidden);
    m.down = r.linear("down", prog.hidden, m.mid.width);
    join(m.in, m.gate);
    join(m.mid, m.down);
    return m;
}

Mixer read_mlp(const Record& r, Program& prog) {
    Input in;
    in.width = prog.hidden;
    Mlp m = read_one_mlp(r, prog.hidden, in, true);
    m.in = in;
    m.mid.norm = r.norm("inner_norm", m.mid.width);
    if (m.codes && m.mid.norm.present()) r.fail("inner_norm", "of what ranks hand on in integers");
    return m;
}

Mixer read_moe(const Record& r, Program& prog) {
    const int64_t hidden = prog.hidden;
    Moe m;
    m.in.width = hidden;
    const int64_t experts = r.integer("experts", 1, 65536);
    m.top_k = r.integer("top_k", 1, experts);
    m.scoring = int(r.integer("scoring", 0, 2));
    m.norm_topk = r.flag("norm_topk");
    m.scale = r.number("scale");
    m.correction = r.vector("correction", experts);
    m.groups = r.integer("groups", 1, experts);
    m.top_groups = r.integer("top_groups", 1, m.groups);
    m.group_best = r.integer("group_score", 1, 2);
    const int64_t each = experts / m.groups;
    if (experts % m.groups || m.top_k > m.top_groups * each || m.group_best > each) r.fail("groups", "do not fit the experts");
    m.jitter = r.number("jitter");
    m.weigh_input = r.flag("weigh_input");
    m.logit_scale = r.number("logit_scale");
    m.each = r.vector("each", experts);
    m.router = r.linear("router", experts, hidden);
    m.apart = r.has("apart");
    m.router_in.width = m.shared_in.width = hidden;
    join(m.apart ? m.router_in : m.in, m.router);
    if (m.apart) read_apart(r.record("apart"), m, hidden);
    for (int64_t e = 0; e < experts; e++) m.experts.push_back(read_one_mlp(r.entry("experts", e), hidden, m.in));
    for (const Mlp& e : m.experts)
        if (e.mid.width != m.experts[0].mid.width) r.fail("experts", "of different widths");
    m.codes = r.has("codes") && r.flag("codes");
    for (const Mlp& e : m.experts)
        if (e.up.own.first != m.experts[0].up.own.first || e.up.own.last != m.experts[0].up.own.last || (m.codes && !e.codes))
            r.fail("experts", "shared out otherwise than the first");
    m.has_shared = r.has("shared");
    if (m.has_shared) {
        m.shared = read_one_mlp(r.record("shared"), hidden, m.apart ? m.shared_in : m.in);
        m.shared_gate = r.maybe_linear("shared_gate", 1, hidden);
        join(m.in, m.shared_gate);
        if (m.codes && !m.shared.codes) r.fail("shared", "shared out otherwise than the experts");
    }
    if (m.apart && (!m.has_shared || m.shared_gate.present() || m.weigh_input)) r.fail("apart", "without an MLP beside, or with its gate");
    return m;
}

}  // namespace tk
