// Mixers with a state of fixed size, read.
#include <algorithm>

#include "step/read.h"

namespace tk {
namespace {

int64_t read_group(const Record& r, const Program& prog) {
    const int64_t group = r.integer("group", 0, int64_t(prog.groups.size()) - 1);
    if (!prog.groups[size_t(group)].state) r.fail("group", "one of tokens, not of states");
    return group;
}

// Numbers of a slot from here on; they begin on a line.
int64_t keep(Program& prog, int64_t group, int64_t numbers) {
    Group& g = prog.groups[size_t(group)];
    const int64_t at = g.block_bytes / 4;
    g.block_bytes += pad16(numbers) * 4;
    return at;
}

Conv read_conv(const Record& r, Program& prog, int64_t group, int64_t channels, bool silu) {
    Conv c;
    c.channels = channels;
    c.kernel = r.integer("kernel", 2, 64);
    c.weight = r.needed("weight", c.kernel * c.ld());
    c.bias = r.vector("bias", channels);
    c.silu = silu;
    c.group = group;
    c.at = keep(prog, group, (c.kernel - 1) * c.ld());
    return c;
}

States keep_states(Program& prog, int64_t group, int64_t heads, int64_t rows, int64_t cols, bool delta) {
    States s{heads, rows, cols, group, 0, delta, {0, heads}};
    s.at = keep(prog, group, heads * s.tiles() * STATE_COLS * rows);
    return s;
}

Input input(int64_t width, std::initializer_list<Linear*> readers) {
    Input in;
    in.width = width;
    for (Linear* l : readers) join(in, *l);
    return in;
}

}  // namespace

Mixer read_short_conv(const Record& r, Program& prog) {
    ShortConv m;
    const int64_t hidden = prog.hidden, channels = r.integer("channels", 1, LIMIT);
    m.b = r.linear("b", channels, hidden);
    m.c = r.linear("c", channels, hidden);
    m.value = r.linear("value", channels, hidden);
    m.out = r.linear("out", hidden, channels);
    m.in = input(hidden, {&m.b, &m.c, &m.value});
    m.mid = input(channels, {&m.out});
    m.conv = read_conv(r.record("conv"), prog, read_group(r, prog), channels, false);
    m.conv.own = {m.b.own.first * LANES, std::min(m.b.own.last * LANES, channels)};
    for (const Linear* l : {&m.c, &m.value})
        if (l->own.first != m.b.own.first || l->own.last != m.b.own.last) r.fail("own", "of other channels than b");
    return m;
}

Mixer read_delta(const Record& r, Program& prog) {
    Delta m;
    const int64_t hidden = prog.hidden, heads = r.integer("heads", 1, 4096), k_dim = r.integer("k_dim", 1, 4096);
    const int64_t v_dim = r.integer("v_dim", 1, 4096);
    m.k_heads = r.integer("k_heads", 1, heads);
    if (heads % m.k_heads) r.fail("k_heads", "no divisor of the heads");
    const int64_t channels = 2 * m.k_heads * k_dim + heads * v_dim;
    m.qkv = r.linear("qkv", channels, hidden);
    m.z = r.linear("z", heads * v_dim, hidden);
    m.beta = r.linear("beta", heads, hidden);
    m.fade = r.linear("fade", heads, hidden);
    m.out = r.linear("out", hidden, heads * v_dim);
    m.in = input(hidden, {&m.qkv, &m.z, &m.beta, &m.fade});
    m.mid = input(heads * v_dim, {&m.out});
    m.q_norm = r.needed_norm("q_norm", k_dim);
    m.k_norm = r.needed_norm("k_norm", k_dim);
    m.norm = r.needed_norm("norm", v_dim);
    m.decay = r.needed("decay", heads);
    m.dt_bias = r.needed("dt_bias", heads);
    const int64_t group = read_group(r, prog);
    m.conv = read_conv(r.record("conv"), prog, group, channels, true);
    m.states = keep_states(prog, group, heads, k_dim, v_dim, true);
    m.states.own = r.own(heads);
    if (m.states.own.first % (heads / m.k_heads) || m.states.own.last % (heads / m.k_heads)) r.fail("own", "a part of what reads a key");
    return m;
}

Mixer read_mamba(const Record& r, Program& prog) {
    Mamba m;
    const int64_t hidden = prog.hidden, heads = r.integer("heads", 1, 4096), head_dim = r.integer("head_dim", 1, 4096);
    const int64_t size = r.integer("state_size", 1, 4096), width = heads * head_dim;
    m.groups = r.integer("groups", 1, heads);
    if (heads % m.groups) r.fail("groups", "no divisor of the heads");
    const int64_t channels = width + 2 * m.groups * size;
    m.z = r.linear("z", width, hidden);
    m.inner = r.linear("inner", channels, hidden);
    m.dt = r.linear("dt", heads, hidden);
    m.out = r.linear("out", hidden, width);
    m.in = input(hidden, {&m.z, &m.inner, &m.dt});
    m.mid = input(width, {&m.out});
    m.norm = r.norm("norm", width / m.groups, m.groups);
    m.norm_first = r.flag("norm_first") && m.norm.present();
    if (m.norm.present() && m.norm.size != width / m.groups) r.fail("norm", "of all groups at once");
    m.decay = r.needed("decay", heads);
    m.dt_bias = r.needed("dt_bias", heads);
    m.skip = r.needed("skip", heads);
    m.least = r.number("least");
    m.z_scale = r.number("z_scale");
    m.dt_scale = r.number("dt_scale");
    const int64_t group = read_group(r, prog);
    m.conv = read_conv(r.record("conv"), prog, group, channels, true);
    m.states = keep_states(prog, group, heads, size, head_dim, false);
    m.states.own = r.own(heads);
    const int64_t each = heads / m.groups;
    m.norm_apart = m.norm.present() && r.has("norm_apart") && r.flag("norm_apart");
    if (m.norm.present() && !m.norm_apart && (m.states.own.first % each || m.states.own.last % each)) r.fail("own", "a part of a group");
    return m;
}

}  // namespace tk
