// The record of a vision tower that tower.py writes, read with every size checked.
#include "step/read.h"
#include "towers/tower.h"

namespace tk {
namespace {

Bounds read_bounds(const Record& r) {
    return {r.number("input_min"), r.number("input_max"), r.number("output_min"), r.number("output_max")};
}

void read_clips(const Record& r, TowerLayer& l) {
    const std::pair<const char*, Bounds*> all[] = {{"q", &l.q_clip}, {"k", &l.k_clip}, {"v", &l.v_clip}, {"o", &l.o_clip},
                                                   {"gate", &l.gate_clip}, {"up", &l.up_clip}, {"down", &l.down_clip}};
    for (const auto& [name, bounds] : all) *bounds = read_bounds(r.record(name));
    l.clipped = true;
    if (!l.mlp.gate.present()) r.fail("gate", "no linear that is clipped");
}

TowerLayer read_layer(const Record& r, int64_t hidden, bool bf16) {
    TowerLayer l;
    l.heads = r.integer("heads", 1, 4096);
    l.head_dim = r.integer("head_dim", 1, 4096);
    l.vpad = pad16(l.head_dim);
    if (r.has("far")) {
        const Record far = r.record("far");
        l.side = far.integer("side", 1, 4096);
        for (int k = 0; k < 2; k++) {
            l.far[k] = far.linear(k ? "columns" : "lines", 2 * l.side - 1, l.head_dim);
            if (l.far[k].w.format != DENSE) r.fail("far", "in integers");
        }
    }
    l.dpad = pad16(l.head_dim + 2 * l.side);
    l.turned = r.flag("turned");
    if (l.turned && l.head_dim % 2) r.fail("turned", "heads of an odd number of elements");
    l.norm_after = r.flag("norm_after");
    l.division = int(r.integer("division", 0, 1));
    l.cell = cell_layout(loaded_type(bf16), l.dpad);
    const int64_t width = l.heads * l.head_dim;
    l.norm1 = r.needed_norm("norm1", hidden);
    l.norm2 = r.needed_norm("norm2", hidden);
    l.after1 = r.norm("after1", hidden);
    l.after2 = r.norm("after2", hidden);
    l.by_head = r.has("by_head") && r.flag("by_head");
    l.scale = r.has("scale") ? r.number("scale") : 1.0f / std::sqrt(float(l.head_dim));
    l.q_norm = r.norm("q_norm", l.by_head ? l.head_dim : width);
    l.k_norm = r.norm("k_norm", l.by_head ? l.head_dim : width);
    l.v_norm = r.norm("v_norm", l.head_dim);
    l.q = r.linear("q", width, hidden);
    l.k = r.linear("k", width, hidden);
    l.v = r.linear("v", width, hidden);
    l.o = r.linear("o", hidden, width);
    l.scale1 = r.vector("scale1", hidden);
    l.scale2 = r.vector("scale2", hidden);
    l.in.width = hidden;
    for (Linear* x : {&l.q, &l.k, &l.v}) join(l.in, *x);
    l.out.width = width;
    join(l.out, l.o);
    Input in;
    in.width = hidden;
    l.mlp = read_one_mlp(r.record("mlp"), hidden, in);
    l.mlp.in = in;
    if (r.has("clips")) read_clips(r.record("clips"), l);
    return l;
}

TowerProduct read_product(const Record& r, int64_t inputs, int64_t outputs) {
    TowerProduct p;
    Mlp& m = p.pair;
    m.gate = r.maybe_linear("gate", outputs, inputs);
    m.up = r.linear("linear", outputs, inputs);
    if (!m.gate.present()) m.activation = -1;
    if (m.gate.present() && m.gate.w.format != m.up.w.format) r.fail("gate", "in another format than the linear");
    m.in.width = inputs;
    join(m.in, m.gate);
    join(m.in, m.up);
    if (m.gate.present() && m.gate.slot != m.up.slot) r.fail("gate", "quantized otherwise than the linear");
    return p;
}

TowerStage read_stage(const Record& r, bool bf16) {
    TowerStage s;
    s.inputs = r.integer("inputs", 1, LIMIT);
    s.outputs = r.integer("outputs", 1, LIMIT);
    if (r.has("product")) {
        s.what = read_product(r.record("product"), s.inputs, s.outputs);
        return s;
    }
    if (s.outputs != s.inputs) r.fail("outputs", "others than inputs");
    if (r.has("near")) {
        const Record near = r.record("near");
        TowerNear n;
        n.channels = s.inputs;
        n.kernel = near.integer("kernel", 1, 99);
        if (n.kernel % 2 == 0) near.fail("kernel", "even");
        n.weight = near.needed("weight", n.kernel * n.kernel * n.ld());
        n.bias = near.needed("bias", n.channels);
        s.what = n;
    } else if (r.has("norm")) s.what = r.needed_norm("norm", s.inputs);
    else if (r.has("layer")) s.what = read_layer(r.record("layer"), s.inputs, bf16);
    else s.what = TowerActivation{int32_t(r.integer("activation", SILU, QUICK_GELU))};
    return s;
}

}  // namespace

TowerProgram parse_tower(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                         bool bf16_dot) {
    Values all(names, values, count, tensors, tensors_size);
    const Record r(all);
    TowerProgram p;
    p.bf16 = r.flag("bfloat16") && bf16_dot;
    const int64_t stages = r.integer("stages", 1, 1 << 16);
    for (int64_t i = 0; i < stages; i++) p.stages.push_back(read_stage(r.entry("stages", i), p.bf16));
    all.finish();
    return p;
}

}  // namespace tk
