// The flat description that program.py writes, read back with every index and size checked.
#include <cmath>

#include "model.h"

namespace tk {
namespace {

constexpr int64_t MAGIC = 0x746b3034;  // "tk04"
constexpr int64_t LIMIT = int64_t(1) << 31;

class Parser {
public:
    Parser(const int64_t* ints, int64_t ni, const double* floats, int64_t nf, const TensorRecord* tensors, int64_t nt)
        : ints_(ints), floats_(floats), tensors_(tensors), ni_(ni), nf_(nf), nt_(nt) {}

    int64_t integer(const char* what, int64_t low, int64_t high) {
        if (i_ >= ni_) throw Error(std::string("program: ends before ") + what);
        const int64_t v = ints_[i_++];
        if (v < low || v > high)
            throw Error(std::string("program: ") + what + ": expected " + std::to_string(low) + " to " +
                        std::to_string(high) + ", found " + std::to_string(v));
        return v;
    }

    float number(const char* what) {
        if (f_ >= nf_) throw Error(std::string("program: ends before ") + what);
        return float(floats_[f_++]);
    }

    const TensorRecord* tensor(const char* what) {  // may be absent: -1
        const int64_t i = integer(what, -1, nt_ - 1);
        return i < 0 ? nullptr : tensors_ + i;
    }

    Vector vector(const char* what, int64_t size) {
        const TensorRecord* t = tensor(what);
        if (!t) return {};
        if (t->kind != 0 || t->rows != size || t->bytes < pad16(size) * 4 || !t->data)
            throw Error(std::string("program: ") + what + ": expected a float32 vector of " + std::to_string(size));
        return {static_cast<const float*>(t->data), size};
    }

    // A matrix with its bias; rows or cols 0 = any.
    Linear linear(const char* what, int64_t rows, int64_t cols, bool required = true, bool may_turn = false) {
        const TensorRecord* t = tensor(what);
        Linear l;
        if (t) {
            l.w = matrix(what, *t);
            if ((rows && l.w.rows != rows) || (cols && l.w.cols != cols))
                throw Error(std::string("program: ") + what + ": expected a matrix of " + std::to_string(rows) + " x " +
                            std::to_string(cols) + ", found " + std::to_string(l.w.rows) + " x " + std::to_string(l.w.cols));
            if (l.w.format == INT) l.key = {l.w.group, t->perm};
            l.turned = t->turned != 0;
            if (l.turned && (!may_turn || l.w.format != INT)) throw Error(std::string("program: ") + what + ": turned by a Hadamard matrix");
        } else if (required) {
            throw Error(std::string("program: ") + what + ": the matrix is missing");
        }
        l.bias = vector(what, t ? l.w.rows : 0);
        return l;
    }

    // Of `heads` times `width` elements: all at once, or each head by itself with the same weights or its own.
    Norm norm(const char* what, int64_t width, int64_t heads = 1) {
        Norm n;
        n.size = integer(what, 0, LIMIT);
        n.sets = integer(what, 1, LIMIT);
        n.layer = integer(what, 0, 1) == 1;
        const bool each = n.size == width && (n.sets == 1 || n.sets == heads), whole = n.size == width * heads && n.sets == 1;
        if (n.size && !each && !whole)
            throw Error(std::string("program: ") + what + ": expected " + std::to_string(heads) + " x " + std::to_string(width) +
                        " elements, found " + std::to_string(n.sets) + " x " + std::to_string(n.size));
        n.weight = vector(what, n.size * n.sets);
        if (n.size && !n.weight) throw Error(std::string("program: ") + what + ": the weight is missing");
        n.bias = vector(what, n.size * n.sets);
        n.eps = number(what);
        return n;
    }

    void finish() const {
        if (i_ != ni_ || f_ != nf_) throw Error("program: longer than what it describes");
    }

private:
    static Matrix matrix(const char* what, const TensorRecord& t) {
        Matrix m;
        m.format = t.kind;
        m.dtype = t.dtype;
        m.bits = t.bits;
        m.group = t.group;
        m.minima = t.minima;
        m.rows = t.rows;
        m.cols = t.cols;
        m.data = static_cast<const uint8_t*>(t.data);
        const std::string name = std::string("program: ") + what + ": ";
        if (!m.data || (m.format != DENSE && m.format != INT)) throw Error(name + "not a packed matrix");
        if (m.dtype < F32 || m.dtype > F16 || m.rows < 1 || m.cols < 1 || m.rows > LIMIT || m.cols > LIMIT)
            throw Error(name + "bad dtype or shape");
        if (m.format == INT) {
            if ((m.bits != 4 && m.bits != 8) || m.group < 16 || m.group % 16 || m.cols % m.group)
                throw Error(name + "bad bits or group size");
            if (m.group * int64_t(m.bits == 8 ? 255 : 31) * 128 >= LIMIT) throw Error(name + "group too long for int32 sums");
        }
        if (t.bytes != m.tiles() * m.tile_bytes())
            throw Error(name + "expected " + std::to_string(m.tiles() * m.tile_bytes()) + " bytes, found " + std::to_string(t.bytes));
        if (t.perm) {
            if (t.perm_size != m.cols || m.format != INT) throw Error(name + "permutation of the wrong length");
            for (int64_t i = 0; i < t.perm_size; i++)
                if (t.perm[i] < 0 || t.perm[i] >= m.cols) throw Error(name + "permutation out of range");
        }
        return m;
    }

    const int64_t* ints_;
    const double* floats_;
    const TensorRecord* tensors_;
    int64_t ni_, nf_, nt_, i_ = 0, f_ = 0;
};

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
    a.cell = cell_layout(prog.kv_type, a.head_dim);
    a.head_bytes = prog.block_size / LANES * a.cell.bytes();
    Group& g = prog.groups[a.group];
    if (g.window > 0 && (a.window == 0 || a.window > g.window))
        throw Error("program: a layer sees further back than its cache group keeps");
    a.layer_offset = g.block_bytes;
    g.block_bytes += a.kv_heads * a.head_bytes;
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
        s.kind = int(p.integer("kind", 0, 2));
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
