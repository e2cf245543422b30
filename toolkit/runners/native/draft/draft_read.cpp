// The record of a draft head that eagle3.py writes, read with every size checked.
#include "draft/draft_head.h"
#include "step/read.h"

namespace tk {
namespace {

// An input of `width` numbers that these linears read, turned where they are.
Input read_by(const Record& r, int64_t width, std::initializer_list<Linear*> linears) {
    Input in;
    in.width = width;
    in.turned = (*linears.begin())->turned;
    for (Linear* l : linears) {
        if (l->turned != in.turned) r.fail("turned", "some of the linears that read one input are");
        join(in, *l);
    }
    return in;
}

}  // namespace

DraftProgram parse_draft(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                         bool bf16_dot) {
    Values all(names, values, count, tensors, tensors_size);
    const Record r(all);
    DraftProgram p;
    p.bf16 = bf16_dot;
    p.hidden = r.integer("hidden", 1, LIMIT);
    p.heads = r.integer("heads", 1, 4096);
    p.kv_heads = r.integer("kv_heads", 1, p.heads);
    p.head_dim = r.integer("head_dim", 2, 4096);
    if (p.heads % p.kv_heads) r.fail("kv_heads", "no divisor of heads");
    if (p.head_dim % 2) r.fail("head_dim", "odd");
    p.dpad = pad16(p.head_dim);
    p.cell = cell_layout(KV_BF16, p.dpad);
    p.norm_before_residual = r.flag("norm_before_residual");
    p.norm_output = r.flag("norm_output");
    const int64_t h = p.hidden, q = p.heads * p.head_dim, kv = p.kv_heads * p.head_dim, inner = r.integer("inner", 1, LIMIT);
    p.word_norm = r.needed_norm("word_norm", h);
    p.state_norm = r.needed_norm("state_norm", h);
    p.mlp_norm = r.needed_norm("mlp_norm", h);
    p.last_norm = r.needed_norm("last_norm", h);
    p.q_norm = r.norm("q_norm", p.head_dim);
    p.k_norm = r.norm("k_norm", p.head_dim);
    p.freq = r.needed("freq", p.head_dim / 2);
    p.factor = r.number("factor");
    p.q = r.linear("q", q, 2 * h, true);
    p.k = r.linear("k", kv, 2 * h, true);
    p.v = r.linear("v", kv, 2 * h, true);
    p.o = r.linear("o", h, q, true);
    p.mlp.gate = r.linear("gate", inner, h, true);
    p.mlp.up = r.linear("up", inner, h, true);
    p.mlp.down = r.linear("down", h, inner, true);
    p.vocabulary = r.linear("vocabulary", 0, h, true);
    all.finish();
    p.in = read_by(r, 2 * h, {&p.q, &p.k, &p.v});
    p.out = read_by(r, q, {&p.o});
    p.mlp.in = read_by(r, h, {&p.mlp.gate, &p.mlp.up});
    p.mlp.mid = read_by(r, inner, {&p.mlp.down});
    p.last_in = read_by(r, h, {&p.vocabulary});
    if (p.mlp.gate.w.format != p.mlp.up.w.format || p.mlp.gate.slot != p.mlp.up.slot) r.fail("gate", "packed otherwise than up");
    return p;
}

}  // namespace tk
