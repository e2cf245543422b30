// The CPU operations: plain structures, plain pointers, one table of functions per instruction set.
//
// The kernels know no model, request or config. Rows of activations are tokens; a matrix W [rows, cols] acts as
// y = x W^T. Every function works on the part of the output it is told to (tiles, rows, items), so that callers split work
// over threads by output only, and an output element is always made by the same sequence of float operations.
#pragma once

#include <stdint.h>

namespace tk {

enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, ONES = 3 };  // ONES: of scales that are all 1 and stand nowhere
enum Format : int32_t { DENSE = 1, INT = 2 };
// Those with two digits have keys and values of so many bits.
enum KvType : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2, KV_INT8 = 3, KV_INT64 = 4, KV_INT44 = 5, KV_INT55 = 6, KV_INT54 = 7, KV_INT65 = 8 };
constexpr int32_t TRELLIS_VERSION = 1;  // Matrix::trellis, of linear/trellis_tables.h: whatever packs by other tables has another number
inline int key_bits(int32_t type) { return type == KV_INT8 ? 8 : type == KV_INT64 || type == KV_INT65 ? 6 : type == KV_INT44 ? 4 : 5; }
inline int value_bits(int32_t type) { return type == KV_INT8 ? 8 : type == KV_INT55 || type == KV_INT65 ? 5 : 4; }
// Whether keys (and queries with them) and values are turned by a Hadamard matrix before they are rounded. Results of values
// are turned back.
inline bool turns(int32_t type) { return type > KV_INT8; }
// Not as cells are stored, but as some instruction sets read codes: bytes, four of a lane side by side. K cell [d/4][16 tokens][4],
// V cell [4][d][4 tokens].
constexpr int32_t KV_BYTES = 16;
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SWIGLUOAI = 4, RELU2 = 5, SIGMOID = 6, QUICK_GELU = 7 };

constexpr int64_t LANES = 16;     // rows of a weight tile; tokens of a cache cell
constexpr int64_t KV_TILE = 128;  // tokens of one attention tile: tiles start at multiples of it
constexpr int64_t STATE_COLS = 32;  // columns of a head's state that lie together
constexpr int64_t KV_CELLS = KV_TILE / LANES;

constexpr int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

// A weight, packed in tiles of 16 rows (the last one filled up with zeros).
//
// DENSE   tile = [cols][16 rows] elements of `dtype`.
// INT     tile = for each group of `group` columns: a header, then the codes.
//         header: 16 scales of `dtype`, then 16 minima of `dtype` or 16 uint8 zeros; padded to 64 bytes (128 for F32). With ONES
//         there is none: codes of 8 bits without minima.
//         codes, 4 bits: for each 8 columns 64 bytes, byte 4r+j = code(r, k+j) | code(r, k+4+j) << 4
//         codes, 8 bits: for each 4 columns 64 bytes, byte 4r+j = code(r, k+j)
//         w = (code - zero) * scale, or code * scale + minimum. 8-bit codes without minima have zero 128 throughout.
//         trellis, 2 to 4 bits: header: 16 float16 scales, then of each row the byte of its stream before the group. Codes: for each
//         8 columns the rows' next `bits` bytes. w = table[the last 8 bits of the stream] * scale (linear/trellis_tables.h).
struct Matrix {
    int32_t format = 0;
    int32_t dtype = 0;
    int32_t bits = 0;
    int32_t group = 0;
    int32_t minima = 0;
    int32_t trellis = 0;
    int64_t rows = 0;
    int64_t cols = 0;
    const uint8_t* data = nullptr;

    int64_t tiles() const { return (rows + LANES - 1) / LANES; }
    int64_t groups() const { return cols / group; }
    int64_t header_bytes() const { return trellis ? 48 : dtype == ONES ? 0 : dtype == F32 ? 128 : 64; }
    int64_t group_bytes() const { return header_bytes() + int64_t(group) * LANES * bits / 8; }
    int64_t tile_bytes() const {
        return format == INT ? groups() * group_bytes() : cols * LANES * (dtype == F32 ? 4 : 2);
    }
    int64_t bytes() const { return data ? tiles() * tile_bytes() : 0; }
};

// Activations: float rows for DENSE weights; int8 with a scale and a sum for every (token, group) for INT ones.
struct Rows {
    const float* x = nullptr;
    int64_t ldx = 0;
    const int8_t* q = nullptr;
    int64_t ldq = 0;
    const float* scale = nullptr;
    const int32_t* sum = nullptr;
    int64_t lds = 0;
    int32_t round = 0;  // x may be rounded to bfloat16 beside weights that are
    int32_t loose = 0;  // and sums be in the order that is fastest for many rows, here for any number

    // From token t on, of quantized ones.
    Rows from(int64_t t) const {
        Rows rest = *this;
        rest.q += t * ldq;
        rest.scale += t * lds;
        rest.sum += t * lds;
        return rest;
    }
};

// Memory that later work reads, `bytes` from each place on: a linear may fetch it while it computes.
struct Later {
    const uint8_t* at;
    int64_t bytes;
};

// Where a linear's result goes: out[t * ld + row] = y, or += alpha * y where `add`; y includes the bias.
struct Store {
    float* out = nullptr;
    int64_t ld = 0;
    const float* bias = nullptr;     // [tiles * 16]
    const float* bias_up = nullptr;  // of the second matrix of a gated pair
    int32_t add = 0;
    float alpha = 1.0f;
    int32_t activation = -1;  // gated pair, or a plain linear followed by an activation
    float gate_scale = 1.0f;  // of the first of a gated pair, its bias included
    const Later* later = nullptr;
    int64_t laters = 0;

    Store from(int64_t t) const {
        Store rest = *this;
        rest.out += t * ld;
        return rest;
    }
};

// Keys and values of one head in one block, in cells of 16 tokens. Sizes in bytes.
// floats   K cell: [d/2][16 tokens][2] for 16-bit types, [d][16] for F32; V cell: [8 token pairs][d][2], or [16][d]
// int8     K cell: [d][16] codes; V cell: [16][d] codes
// fewer    K cell: [d/2][16] low four bits, then of 6 bits [d/4][16] high two of four d, of 5 [d/8][16] high ones of eight,
//          ascending; V cell: [16] rows of d/2 bytes of low bits and, of 5 bits, d/8 of high ones
//          a byte of low bits holds d even (low nibble) and d odd (high)
// integers carry (scale, minimum) as two float16 a token after the codes: x = code * scale + minimum
// d is head_dim padded to a multiple of 16 with zeros.
//
// Rows that are key and value at once (latent attention; `rows`) are stored as values alone; key_cell makes keys of them.
struct CellLayout {
    int64_t k_cell, v_cell, k_params, v_params;  // bytes of one cell of each part
    int64_t bytes() const { return k_cell + v_cell + k_params + v_params; }
};

inline CellLayout cell_layout(int32_t type, int64_t head_dim, bool rows = false) {
    const int64_t d = pad16(head_dim);
    if (rows) {
        const CellLayout both = cell_layout(type, head_dim);
        return {0, both.v_cell, 0, both.v_params};
    }
    if (type == KV_F32) return {d * 64, d * 64, 0, 0};
    if (type >= KV_INT8) return {d * 2 * key_bits(type), d * 2 * value_bits(type), 64, 64};
    return {d * 32, d * 32, 0, 0};
}

// Fetches a line into the second-level cache: what is read much later would push the first level's own lines out.
inline void fetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// One tile of keys and values as the attention kernel reads it: see read_type.
struct KvTile {
    const void* k[KV_CELLS];
    const void* v[KV_CELLS];
    const uint8_t* kp[KV_CELLS];  // scales and minima, of KV_INT8 and KV_BYTES alone
    const uint8_t* vp[KV_CELLS];
    const KvTile* next = nullptr;  // read after this one: its lines may be fetched meanwhile
};

// Attention state of query rows: maximum, sum and weighted values; rows are merged tile after tile.
struct AttnState {
    float* m;    // [rows]
    float* l;    // [rows]
    float* acc;  // [rows][vpad]
};

// Of cells that are made for attention, beside queries of bfloat16 or else of floats.
inline int32_t loaded_type(bool bf16) { return bf16 ? KV_BF16 : KV_F32; }


// Bytes of a query, by the form of the cells that it meets: floats or bfloat16, or of KV_BYTES what query_codes makes.
inline int64_t query_bytes(int32_t read, bool bf16, int64_t dpad) { return read == KV_BYTES ? 2 * dpad + 8 : dpad * (bf16 ? 2 : 4); }

// Of scores, of probabilities in bfloat16, and of a tile of values in it.
constexpr int64_t attn_scratch(int64_t rows, int64_t dpad) { return rows * KV_TILE * 2 + KV_TILE * dpad / 2; }

struct AttnParams {
    int64_t dpad;  // of queries and cells
    int64_t vpad;  // of results: the first so many columns of values
    float scale;
    float softcap;  // 0 = none
    int32_t type;   // of the cells: KV_F32, KV_BF16 (queries are bfloat16 too where Ops::bf16_dot), KV_INT8 (where not), KV_BYTES
    // ALiBi; null = none. Row r's score of token t of the tile is raised by slope[r] * (from[r] + t), before it is scaled, or
    // where `rounded` by rounded * bfloat16(slope[r] * bfloat16(from[r] + t)); where `both`, lowered by slope[r] * |from[r] + t|.
    const float* slope = nullptr;
    const int32_t* from = nullptr;
    float rounded = 0.0f;
    int32_t both = 0;
    // In place of ALiBi; null = none. Row r's score of token t is raised by bias[from[r] + t], before it is scaled.
    const float* bias = nullptr;
};

// Causal convolution of channels over one sequence's tokens: out[t] = sum of w[k] * x[t - kernel + 1 + k] + bias, then silu
// where asked for. What stands before the first token is `tail`, which then takes the last inputs.
struct ConvRun {
    const float* x;  // [tokens][channels]
    int64_t ldx;
    float* out;  // [tokens][channels]
    int64_t ldo;
    float* tail;  // [kernel - 1][channels], oldest first
    int64_t ld_tail;
    const float* w;  // [kernel][channels], the newest token's last
    int64_t ldw;
    const float* bias;  // null = none
    int64_t tokens, channels, kernel;
    int32_t silu;
};

// Some columns of one head's state S over one sequence's tokens: S = keep * S + key m, then out = query S; m = weight * value, or
// by the delta rule weight * (value - key (keep * S)).
struct StateRun {
    float* state;  // [rows][STATE_COLS]
    const float *key, *query;  // [tokens][rows]
    int64_t ld;
    const float* value;  // [tokens][cols]
    int64_t ldv;
    float* out;  // [tokens][cols]
    int64_t ldo;
    const float *keep, *weight;  // [tokens]
    int64_t tokens, rows, cols;  // cols: up to STATE_COLS
    int32_t delta;
};

// Weights rounded to integers in groups of columns, of a multiple of 16: x = w * columns / divisor of the row.
// 8 bits: scale = max|x| / 127, code = round(x / scale) + 128; 4 bits: scale = (max - min) / 15 of x and 0, zero = round(-min / scale),
// code = round(x / scale) + zero. Scales are float16; x is divided by what that holds, 2^-24 at least. Where
// a group holds NaN its scale is NaN.
struct RoundRun {
    const void* w;  // [rows][cols]
    int64_t rows, cols;
    const float* columns;   // [cols]; null = ones
    const float* divisors;  // [rows]; null = ones
    uint8_t* codes;         // [rows][cols]
    uint16_t* scales;       // [rows][cols / group]
    uint8_t* zeros;         // likewise; written for 4 bits alone
    int32_t dtype, bits, group;
    int32_t turned;  // x is turned by `hadamard` before it is rounded
    const float* sizes;  // [cols]; null = no errors are asked for
    float* errors;       // [rows]: the sum of sizes * (what codes stand for / columns - w)^2; not where turned or divided
};

// A matrix of an adapter to codes of 8 bits, in tiles. The columns are in the order of a linear's input and have a step for each row's
// group, a bfloat16 no less than max|x| / 127, as an INT matrix has them; or, where there are `steps`, each has one, of max|x| / 127, and
// the codes are those of a matrix with ONES. Codes are x * (1 / step), rounded, + 128.
// Both sides are filled up with zeros.
struct CodeRun {
    const void* x;        // [rows][cols]
    const int32_t* perm;   // column k is perm[k] of x; null = itself, as with `steps`
    const float* factors;  // of each column of x, as x has them; with `steps` of each row, in place of `factor`; null = none
    uint8_t* codes;
    float* steps;  // [pad16(cols)]
    int64_t rows, cols;
    float factor;  // of x, with `steps`
    float error;   // comes back: by how much codes differ from x, root mean square, of that of x; no number where x is not finite
    int32_t dtype, group;
};

// The sum of squares of each row of a weight, a column's counted `sizes` times; columns are a multiple of 16.
struct SquaresRun {
    const void* w;  // [rows][cols]
    int64_t rows, cols;
    const float* sizes;  // [cols]; null = ones
    float* out;          // [rows]
    int32_t dtype;
};

// Scales by which groups of floats become small integers with the least squared error, each value's counted w times.
// Without lows x = code * scale, codes -levels … levels - 1; with lows x = code * scale + low, codes 0 … levels.
struct FitRun {
    const float *x, *w;  // [groups][group]
    int64_t groups;
    float *scales, *lows;  // [groups]
    int32_t group;  // up to 32
    int32_t levels;
    int32_t negative;  // lows are at most 0
};

// Rows of a weight, some columns of them, rounded to a trellis (quantize/trellis.cpp). The value of a column is table[the last 8 bits of its
// row's stream] * its group's scale; each column adds `bits` bits, at the top.
//
// An error of column k moves what column j > k wants by -back[k][j] times it, and column k costs its error's square times weights[k].
struct TrellisRun {
    static constexpr int64_t WIDEST = 272;  // columns

    const float* x;  // [rows], ld apart
    int64_t ld, rows, width;
    const int8_t* table;   // [256]
    const float* back;     // [width][width]
    const float* weights;  // [width]
    float* scales;         // of a row's groups, ld_scales apart
    int64_t ld_scales, first, group;  // column j is of group (first + j) / group
    uint8_t* state;  // [rows], of the last 8 bits those that stay; moved on
    uint8_t* out;    // [rows][keep]: the last 8 bits at the first `keep` columns; the others show the way
    int64_t keep;
    const float* tried;  // [rows][tries]: scales of which the cheapest becomes scales[row]; nothing else is done then
    int64_t tries;
    int32_t bits;  // 2, 3 or 4
};

struct Ops {
    const char* name;
    int32_t bf16_dot;     // it multiplies bfloat16
    int32_t reads_codes;  // attention multiplies codes of the cache as integers: kv_bytes, query_codes

    // scratch bytes that linear and gated need for this matrix
    int64_t (*linear_scratch)(const Matrix& w);
    // tiles [t0, t1) of y = x W^T for `count` rows
    void (*linear)(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
    // tiles [t0, t1) of act(x G^T) * (x U^T)
    void (*gated)(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                  const Store& to, void* scratch);
    // y = x V, V the rows in tiles [t0, t1) of a DENSE matrix: x[count][rows of the tiles], out[count][cols]
    void (*linear_back)(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, float* out, int64_t ldo);
    // row `row` of the matrix, dequantized, times scale
    void (*matrix_row)(const Matrix& w, int64_t row, float scale, float* out);
    // x[K] (gathered by perm where given) to int8 by groups g0..g1
    void (*quantize)(const float* x, const int32_t* perm, int64_t group, int64_t g0, int64_t g1, int8_t* q, float* scale,
                     int32_t* sum);
    // rows [r0, r1) of a weight; scratch: a row of floats
    void (*round_rows)(const RoundRun& r, int64_t r0, int64_t r1, float* scratch);
    void (*code_rows)(CodeRun& r);
    // rows [r0, r1)
    void (*squares)(const SquaresRun& r, int64_t r0, int64_t r1);
    // groups [g0, g1)
    void (*fit_scales)(const FitRun& r, int64_t g0, int64_t g1);
    // rows [r0, r1)
    void (*trellis_rows)(const TrellisRun& r, int64_t r0, int64_t r1);
    // out = x / rms(x) * w; n elements, w padded like out to a multiple of 16 with zeros
    void (*rms_norm)(const float* x, const float* w, int64_t n, float eps, float* out);
    // out = (x - mean) / std * w + b; b null = none
    void (*layer_norm)(const float* x, const float* w, const float* b, int64_t n, float eps, float* out);
    // y += alpha * x
    void (*add_scaled)(float* y, const float* x, float alpha, int64_t n);
    // x[:rotary] turned by cos/sin [rotary/2], half-split layout
    void (*rope)(float* x, const float* cos, const float* sin, int64_t rotary);
    void (*hadamard)(float* x, int64_t n);
    void (*activate)(float* x, int64_t n, int32_t activation);
    // x = above x^2 + slope x where it is above 0, else below (exp(x) - 1 - x) + slope x
    void (*xielu)(float* x, int64_t n, float above, float below, float slope);
    // y *= act(x); activation -1 = x as it is
    void (*multiply)(float* y, const float* x, int64_t n, int32_t activation);
    void (*to_bf16)(const float* x, uint16_t* out, int64_t n);
    // write one token's key (null = none) and value (padded to dpad) of one head; cell parts at their pointers; lane 0..15.
    // clear_next zeroes the following value lane where pairs share storage.
    void (*kv_write)(int32_t type, int64_t dpad, const float* k, const float* v, uint8_t* kc, uint8_t* vc, uint8_t* kp,
                     uint8_t* vp, int64_t lane, int32_t clear_next);
    // write keys and values of one head of 16 tokens, rows `ld` apart, as bfloat16
    void (*kv_cell)(int64_t dpad, const float* k, const float* v, int64_t ld, uint8_t* kc, uint8_t* vc);
    // cells of `type` to float32 or bfloat16 cells; k_out null = values alone
    void (*kv_load)(int32_t type, int64_t dpad, const uint8_t* kc, const uint8_t* vc, const uint8_t* kp, const uint8_t* vp,
                    int32_t to_bf16, int64_t tokens, void* k_out, void* v_out);
    // cells of codes to KV_BYTES
    void (*kv_bytes)(int32_t type, int64_t dpad, const uint8_t* kc, const uint8_t* vc, int64_t tokens, uint8_t* k_out, uint8_t* v_out);
    // a query to two bytes a number, its factor and its sum
    void (*query_codes)(const float* x, int64_t dpad, uint8_t* out);
    // keys of a float32 or bfloat16 cell whose values they are
    void (*key_cell)(int64_t dpad, int32_t bf16, const void* values, void* keys);
    // one tile: rows of q, of query_bytes each, over tokens [lo[r], hi[r]) of the tile; writes a fresh state.
    // scratch: attn_scratch floats.
    void (*attn_tile)(const AttnParams& p, const KvTile& tile, const void* q, int64_t rows, const int32_t* lo,
                      const int32_t* hi, const AttnState& out, float* scratch);
    // into = into merged with part, row by row
    void (*attn_merge)(int64_t vpad, int64_t rows, const AttnState& into, const AttnState& part);
    // out[d] = acc / (l + exp(sink - m)); sink null = none
    void (*attn_finish)(int64_t vpad, float m, float l, const float* acc, const float* sink, float* out);
    void (*convolve)(const ConvRun& r);
    void (*recur)(const StateRun& r);
    // maximum of x[n], its lowest index, and whether x holds a NaN
    float (*row_max)(const float* x, int64_t n, int64_t* index, int32_t* has_nan);
    // ids of those of x[n] that are at least `low`, ascending, into ids[n]; returns how many
    int64_t (*at_least)(const float* x, int64_t n, float low, int32_t* ids);
    // sum of exp((x - max) * scale) in double, ascending in blocks
    double (*sum_exp)(const float* x, int64_t n, float max, float scale);
    // softcap * tanh(x * scale / softcap), or x * scale where softcap is 0
    void (*scale_logits)(float* x, int64_t n, float scale, float softcap);
    // a loop of nothing but products of int8 and their sums, to measure what the processor makes of them at most; returns how many
    // multiplications and additions it did
    int64_t (*int_products)(int64_t rounds);
};

// The form in which attention reads cells of `type`, as they are stored where it can, beside queries of bfloat16 or else of floats.
inline int32_t read_type(const Ops& ops, int32_t type, bool bf16) {
    if (type >= KV_INT8 && ops.reads_codes) return KV_BYTES;
    const bool stored = !ops.bf16_dot && (type == KV_BF16 || type == KV_INT8);
    return stored ? type : loaded_type(bf16);
}

// The table for an instruction set (toolkit/runners/native/build.py has their names), or null where this processor or this
// build lacks it; empty name = the best. `reason` says why null.
const Ops* select_ops(const char* name, const char** reason);

// Whether a core reads memory faster in few places at a time than in many: AMD's do (measured on Zen 4), Intel's do not.
bool few_places();

}  // namespace tk
