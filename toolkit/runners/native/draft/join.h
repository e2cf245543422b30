// A linear by itself, which makes what a draft reads of what a model has computed: hidden states of its layers become one, or a state
// and an embedding do. Rows are float32 on both sides.
#pragma once

#include <algorithm>

#include "step/row_work.h"
#include "system/pool.h"

namespace tk {

constexpr int64_t JOIN_ROWS = 128;  // that go through it together, at most

struct JoinProgram {
    bool bf16;  // products of bfloat16
    Norm norm;  // of each part of a row, or of all together, before the linear; may be absent
    Linear linear;
    Input in;
};

JoinProgram parse_join(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                       bool bf16_dot);

class Join {
public:
    Join(JoinProgram program, const Ops* ops, int threads);
    // from [rows][in] -> to [rows][out]. Raises Error for an impossible number of rows.
    void run(const float* from, int64_t rows, float* to);

    struct Shared : Arena {
        explicit Shared(const JoinProgram& p);
        InputBuffer in;
        float* out;
        int64_t ld;
    };
    struct Scratch : Arena {
        Scratch(const JoinProgram& p, const Ops& ops) : linear(take<uint8_t>(std::max<int64_t>(64, ops.linear_scratch(p.linear.w)))) {}
        uint8_t* linear;
    };

    const JoinProgram program;
    const Ops* ops;
    Pool pool;
    Shared shared;
    std::vector<Scratch> scratch;  // of each thread
};

}  // namespace tk
