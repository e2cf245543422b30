// A vision tower and its projector: stages from rows to rows, of which a call runs some. Rows stand for patches, and in a layer
// those of one segment attend to each other, both ways. What stands between stages (positions, the order of rows) is the
// caller's.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "system/pool.h"
#include "system/profile.h"
#include "step/row_work.h"

namespace tk {

// What a linear's inputs and outputs are kept within.
struct Bounds {
    float lowest = 0, highest = 0, least = 0, most = 0;
    void enter(float* x, int64_t n) const { keep(x, n, lowest, highest); }
    void leave(float* x, int64_t n) const { keep(x, n, least, most); }

private:
    static void keep(float* x, int64_t n, float low, float high) {
        for (int64_t i = 0; i < n; i++) x[i] = x[i] < low ? low : x[i] > high ? high : x[i];
    }
};

struct TowerLayer {
    Norm norm1, norm2, after1, after2;  // after: of what a half of the layer adds; may be absent
    Norm q_norm, k_norm, v_norm;        // of all heads at once, or of each (by_head); v_norm of each
    Linear q, k, v, o;
    // Of each linear, where `clipped`.
    Bounds q_clip, k_clip, v_clip, o_clip, gate_clip, up_clip, down_clip;
    bool clipped = false, by_head = false;
    float scale;  // of scores
    Input in, out;
    Mlp mlp;
    Vector scale1, scale2;  // what it adds is multiplied by; may be absent
    int64_t heads, head_dim, dpad, vpad;  // dpad: of queries and keys, vpad: of values
    // What is learned of how many lines and columns lie between a query and a key, [2 * side - 1, head_dim]: its product with a query
    // is added to the score. Segments are squares of `side` rows a side then. side 0 = none.
    Linear far[2];
    int64_t side = 0;
    bool turned;  // by cosines and sines of each row
    bool norm_after;  // norms are of what the layer adds, not of what it reads
    int division;
    CellLayout cell;
};

// A linear, or a gated pair (silu of the first) where it has a gate.
struct TowerProduct {
    Mlp pair;  // without `down`
};

struct TowerActivation {
    int32_t activation;
};

// Each channel by itself over neighbouring cells: the rows are those of a grid, line after line, zeros around it.
struct TowerNear {
    Vector weight, bias;  // weight: [kernel][kernel][ld]
    int64_t channels, kernel;
    int64_t ld() const { return pad16(channels); }
};

struct TowerStage {
    int64_t inputs, outputs;  // numbers of a row
    std::variant<Norm, TowerProduct, TowerActivation, TowerNear, TowerLayer> what;
};

struct TowerProgram {
    bool bf16;  // products of bfloat16
    std::vector<TowerStage> stages;
};

TowerProgram parse_tower(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                         bool bf16_dot);

// One call as it crosses the boundary.
struct TowerArrays {
    int64_t first, last;  // stages
    int64_t rows, inputs, outputs;
    const float* in;  // [rows][inputs]
    float* out;       // [rows][outputs]
    // Two divisions of the rows into segments, by their lengths; layers say which is theirs.
    int64_t segments[2];
    const int64_t* lengths[2];
    const float *cos, *sin;  // [rows][head_dim / 2]; null where nothing is turned
    // Of each segment of the first division how many rows all see; those behind them stand for nothing: they see the same, and not
    // each other, but are seen by the others. Null = all.
    const int64_t* real;
    const uint8_t* blank;  // [rows] whether a row is 0 to attention, however it stands in the residual; null = none is
    int64_t across;        // cells of a line, for stages over grids
};

class Tower {
public:
    Tower(TowerProgram program, const Ops* ops, int threads);
    // Raises Error where the arrays do not fit the stages.
    void run(const TowerArrays& in);

    struct Segment {
        int64_t first, last;  // rows
        int64_t real;         // the end of those that see all; those behind them see up to here
        int64_t cell;         // where its cells of 16 rows begin
    };
    struct Division {
        std::vector<Segment> segments;
        std::vector<int32_t> of_row;
        int64_t cells = 0;
    };
    // What a thread has of its own: a part of the rows on their way through a layer.
    struct Scratch : Arena {
        Scratch(const TowerProgram& p, const Ops& ops);
        uint8_t* linear;
        InputBuffer in, mid;
        float *qkv, *tmp, *head, *scores, *far = nullptr, *gate = nullptr;
        int64_t qkv_ld = 16, tmp_ld = 16, far_ld = 0, gate_ld = 0;
        std::vector<float> line;  // of a grid, before and after
        AttnState running, part;
        int32_t *lo, *hi;
    };
    // What threads share: rows before and after a stage, queries of all rows, keys and values in cells.
    struct Shared {
        Pages x, y, queries, keys, values;
        int64_t ld = 16;
    };

    const TowerProgram program;
    const Ops* ops;
    Pool pool;
    Shared shared;
    std::vector<Scratch> scratch;
    std::vector<Range> parts;
    Division divisions[2];
    std::unique_ptr<Profile> profile;

private:
    void check(const TowerArrays& in) const;
    void divide(const TowerArrays& in);
    void grow(const TowerArrays& in);
};

}  // namespace tk
