// A decoder as the executor sees it: layers with their matrices and norms. What each mixer is made of; program.cpp reads it.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "ops.h"

namespace tk {

// What the caller did wrong; becomes an error code and a message at the C boundary.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Range {
    int64_t first, last;
};

struct Vector {
    const float* data = nullptr;  // padded to a multiple of 16
    int64_t size = 0;
    explicit operator bool() const { return data != nullptr; }
};

// How an input is quantized for a linear: group 0 = not at all.
struct QuantKey {
    int64_t group = 0;
    const int32_t* perm = nullptr;
    bool operator==(const QuantKey& o) const { return group == o.group && perm == o.perm; }
};

constexpr int MAX_KEYS = 3;  // distinct quantizations of one input; a model with more is refused

struct Routed;

struct Linear {
    Matrix w;
    Vector bias;
    QuantKey key;
    int slot = 0;  // which of its input's quantizations it reads
    int site = -1;  // by which adapters name it; -1 = they do not
    bool turned = false;  // holds W H, H = the block Hadamard matrix (head and embedding alone)
    Range own{0, 0};      // tiles that this rank computes: all, unless the program says which
    std::shared_ptr<Routed> seen;  // what tokens of pictures have; null = the same
    bool present() const { return w.data != nullptr; }
};

// What a linear is for tokens of pictures: another one in its place, or scale * b(a(x)) besides.
struct Routed {
    Linear whole, a, b;
    float scale = 1;
    bool low() const { return a.present(); }
};

// RMS norm, or layer norm where `layer`, of `size` elements at once; `sets` of weights where heads have their own.
struct Norm {
    Vector weight, bias;
    int64_t size = 0, sets = 1;
    float eps = 0;
    bool layer = false;
    bool present() const { return bool(weight); }
};

// Distinct quantizations that the linears reading one input need.
struct Input {
    int64_t width = 0;
    bool turned = false;  // by the Hadamard matrix, before it is quantized
    std::vector<QuantKey> keys;
    Norm norm;  // of all of its numbers, before they are quantized; may be absent
    std::vector<QuantKey> more;  // of rows that are tokens of pictures: number i has slot MAX_KEYS - 1 - i
};

struct Attention {
    static constexpr int64_t PHASES = 10;  // of a run that one takes, at most (see Pool)
    Linear q, k, v, gate, o;  // gate: what multiplies results, by its sigmoid; may be absent, as k and v where another layer's are read
    Input in, out;
    int64_t heads, kv_heads, head_dim, dpad, per_kv;  // of this rank, all of which read the same number of queries a key
    int64_t first_head = 0, first_kv = 0;             // the model's heads that come before them
    bool codes = false;                               // ranks hand on results as `o` reads them, in integers
    int64_t value_dim, vpad;  // numbers of a head's result
    bool rows = false;        // the cache holds rows that are key and value at once
    int64_t rope;    // index into Program::ropes or -1
    int64_t window;  // 0 = none
    bool chunked = false;  // windows begin at multiples of `window`, they do not slide
    int64_t sink_tokens = 0;  // first positions that are seen beside a window, from the place right before it
    std::vector<float> sink_cos, sink_sin;  // how queries turn that look at those
    int64_t group;
    float scale, softcap;
    Vector alibi;            // slopes of heads, divided by `scale` unless rounded
    float alibi_rounded = 0; // what rounded products are multiplied by; 0 = they are not rounded
    Vector bias;             // of heads, by the place of keys from 1 - bias_length on, see bias_at; divided by `scale`
    int64_t bias_length = 0; // of the longest text
    bool mutual = false;     // tokens see those behind them too, within the window
    bool strict = false;     // none sees one behind it, whatever a step says
    float clip = 0;          // projections stay within it; 0 = none
    bool norm_last = false;  // q and k are normed when they are turned
    int q_form = 0;          // what queries are multiplied by, by position: 0 nothing, 1 "floor", 2 "log" (QueryScale)
    int64_t q_length = 0, q_offset = 0;
    float q_factor = 0;
    Norm q_norm, k_norm, v_norm;
    Vector sinks;
    Vector key_mean;  // of all heads: what is taken off keys before they are rounded, which leaves a softmax as it is
    int32_t kv_type = KV_F32;  // how the cache holds this layer
    CellLayout cell;
    int64_t layer_offset;  // of this layer in a block
    int64_t head_bytes;    // of one head in a block
    // The oldest position that one at `position` sees.
    int64_t oldest(int64_t position) const {
        if (!window) return 0;
        return chunked ? position / window * window : position < window + sink_tokens ? 0 : position - window + 1;
    }
    // Where in `bias` a head's number stands of a key `ahead` of the query, at 0 or behind it; cells of LANES are read whole.
    int64_t bias_at(int64_t head, int64_t ahead) const { return head * (2 * bias_length - 1 + LANES) + bias_length - 1 + ahead; }
    // Whether one at `position` sees the sink tokens apart from its window.
    bool sinks_apart(int64_t position) const { return sink_tokens && position >= window + sink_tokens; }
    bool wide(const Norm& n) const { return n.present() && n.size > head_dim; }  // over all heads at once
    bool settles() const { return clip > 0 || norm_last || wide(q_norm) || wide(k_norm); }  // all heads before each
};

// Attention to rows that are made of each token alone: kv_rank numbers that all heads' keys and values are made of by `kv_b`, then
// rope_dim of a key that they share.
struct Latent {
    static constexpr int64_t PHASES = 13;
    Linear q_a, q, kv_a, kv_b, o;
    Norm q_a_norm, kv_a_norm;
    Input in, mid, out;  // mid: of q, where it reads q_a's result
    int64_t nope_dim, rope_dim, v_dim;
    int64_t first_head = 0;  // the model's heads before those of `core`, which are this rank's
    bool codes = false;      // as of Attention
    Attention core;  // of queries that kv_b's key part multiplied, to the rows: one key head
    int64_t kv_rank() const { return core.value_dim; }
    int64_t qk_dim() const { return nope_dim + rope_dim; }
    // Columns of a token's row of projections where those of kv_a and of q begin.
    int64_t kv_at() const { return (q_a.present() ? q_a : q).w.tiles() * LANES; }
    int64_t q_at() const { return q_a.present() ? kv_at() + kv_a.w.tiles() * LANES : 0; }
    int64_t width() const { return kv_at() + (kv_a.w.tiles() + (q_a.present() ? q.w.tiles() : 0)) * LANES; }
};

// Attention to rows of pictures, whose keys and values are kept by picture (Kept), not by token.
struct Cross {
    static constexpr int64_t PHASES = 8;
    Linear q, k, v, o;
    Input in, rows, out;  // rows: of pictures, which k and v read
    Norm q_norm, k_norm;
    Attention core;  // of heads and their sizes
    int64_t at;      // of this layer in what is kept, by cell
};

struct Mlp {
    static constexpr int64_t PHASES = 6;
    Linear gate, up, down;
    Input in, mid;
    int32_t activation = SILU;  // -1 = xielu
    float gate_scale = 1;
    Vector curve[3];            // of xielu: alpha_p, alpha_n and beta; eps, -1e-6, does not show
    bool codes = false;  // ranks hand on `mid` as `down` reads it, in integers
    bool routed() const { return up.seen || down.seen; }
};

struct Moe {
    static constexpr int64_t PHASES = 11;
    Linear router, shared_gate;
    std::vector<Mlp> experts;  // all take `in` with the same keys
    Mlp shared;
    bool has_shared = false;
    int64_t top_k = 0;
    int64_t at = 0;  // which of the mixtures it is
    int scoring = 0;  // 0 softmax, 1 sigmoid, 2 sparsemixer
    bool norm_topk = true, weigh_input = false;
    float scale = 1, jitter = 0;
    bool codes = false;  // of all experts, as of an Mlp
    Vector correction;  // added to scores where experts are chosen
    int64_t groups = 1, top_groups = 1, group_best = 1;  // a group is as good as so many of its best
    float logit_scale = 1;
    Vector each;  // what weights are multiplied by in the end, an expert
    Input in;
    // Where the router, the experts and the shared one each read the residual by a norm of their own, and what experts and the shared
    // one give is normed before it is added.
    bool apart = false;
    Input router_in, shared_in;
    Norm router_norm, experts_norm, shared_norm, experts_out, shared_out;
};

// act(gate(x)) times columns of what layers are given of tokens (PerLayerTable), then `down`.
struct PerLayer {
    static constexpr int64_t PHASES = 7;
    Linear gate, down;
    Input in, mid;
    int32_t activation = SILU;
    int64_t at;  // the first of its columns
};

// What all layers are given of each token: a row of `table`, and what `projection` and `norm` make of the residual at its beginning.
struct PerLayerTable {
    Linear table, projection;
    Input in;
    Norm norm;  // of so many columns at a time
    float embed_scale, projection_scale, scale;
    int64_t pad;  // whose row tokens of pictures have
    int64_t columns() const { return projection.w.rows; }
    bool present() const { return table.present(); }
};

// Of each channel by itself, over the last tokens.
struct Conv {
    Vector weight, bias;  // weight: [kernel][ld], the newest token's last
    int64_t channels, kernel;
    int64_t group, at;  // its tail [kernel - 1][ld] in a slot, in numbers
    bool silu;
    Range own;  // this rank's, of a convolution whose channels are all alike
    int64_t ld() const { return pad16(channels); }
};

// A matrix a head [rows][cols] that tokens go through one after the other (StateRun). It lies in stripes of columns.
struct States {
    int64_t heads, rows, cols;
    int64_t group, at;  // of the first head in a slot, in numbers
    bool delta;
    Range own;  // heads that are this rank's
    int64_t tiles() const { return (cols + STATE_COLS - 1) / STATE_COLS; }
};

struct ShortConv {
    static constexpr int64_t PHASES = 7;
    Linear b, c, value, out;
    Input in, mid;
    Conv conv;
};

// The gated delta rule.
struct Delta {
    static constexpr int64_t PHASES = 8;
    Linear qkv, z, beta, fade, out;
    Input in, mid;
    Norm q_norm, k_norm, norm;
    Vector decay, dt_bias;
    int64_t k_heads;
    Conv conv;
    States states;
};

// Mamba-2.
struct Mamba {
    static constexpr int64_t PHASES = 9;
    Linear z, inner, dt, out;
    Input in, mid;
    Norm norm;  // of each group's numbers
    bool norm_first;
    bool norm_apart = false;  // ranks have parts of groups: they norm when they have all
    Vector decay, dt_bias, skip;
    float least, z_scale, dt_scale;
    int64_t groups;
    Conv conv;
    States states;
};

using Mixer = std::variant<Attention, Latent, Cross, ShortConv, Delta, Mamba, Mlp, Moe, PerLayer>;

struct Sublayer {
    Norm pre, post;
    Norm carry;  // in place of `pre`: what it gives becomes the residual
    float residual_scale = 1;
    bool beside = false;  // reads what the sublayers before it in the layer read, not what they made of it
    bool saves = false;   // what it reads is read beside it too
    bool sees = false;    // what it gives goes to tokens that look at pictures alone,
    float gate = 1;       // multiplied by this
    float factor = 1;     // what multiplies the residual behind it
    int64_t deep = 0;     // which rows of pictures are added behind it, counted from 1; 0 = none
    Mixer mixer;
    // How it attends to tokens that the cache keeps; null = it does not.
    const Attention* attends() const {
        if (const Latent* latent = std::get_if<Latent>(&mixer)) return &latent->core;
        return std::get_if<Attention>(&mixer);
    }
    // Whether its result waits beside the residual for what is done to it.
    bool apart() const { return post.present() || sees || factor != 1.0f; }
};

struct Rope {
    int64_t rotary;
    Vector axis;  // by which of a token's positions each frequency turns
    Vector freq[2];
    float factor[2];
    // Of tokens that turn by a length of their own; trained 0 = there are none.
    struct { double theta, factor, trained = 0; } ntk;
};

struct Group {
    bool state = false;  // its blocks are slots
    int64_t window = 0, sink_tokens = 0;
    int64_t block_bytes = 0;
    int64_t blocks = 0;
    uint8_t* data = nullptr;
};

struct Program {
    int64_t rank = 0, ranks = 1;        // which of those that run the model together it is
    int64_t vocab, hidden, block_size;  // the head may have fewer rows than the vocabulary
    int32_t kv_type;
    int64_t kept = 0;  // bytes of each 16 rows of a picture that are looked at
    int64_t mixtures = 0, most_chosen = 0;  // mixtures of experts, and the most that one of them chooses
    int64_t deep;  // branches whose rows stand beside those that take the places of tokens
    bool endless = false;  // texts may be far longer than what the model was trained for
    bool bf16;  // products of bfloat16: attention on such cells, linears with such weights
    Linear embed, head;
    Norm final_norm;
    float embed_scale, head_scale, softcap;
    Vector positions, types;     // rows that are added to embeddings, by position and by type of the token; may be absent
    PerLayerTable per_layer;     // may be absent
    Norm embed_norm;             // of the sum, with which the residual stream begins; may be absent
    int64_t offset = 0;          // which row is that of position 0
    int64_t chunk = 0;           // tokens that go through the layers together, at most
    Input head_in;
    std::vector<Linear> sites;     // linears by their sites
    std::vector<bool> of_experts;  // of each site whether it is one of an expert
    std::vector<Rope> ropes;
    std::vector<Sublayer> sublayers;
    std::vector<Group> groups;
    const Program* lender = nullptr;  // another model's, whose cache its layers read; it is not written
};

// A tensor as it comes through the boundary. kind: 0 float32 vector, 1 DENSE, 2 INT.
struct TensorRecord {
    const void* data;
    int64_t bytes;
    int64_t rows, cols;
    int64_t perm_size;
    const int32_t* perm;
    int32_t kind, dtype, bits, group, minima, turned, trellis;
};

// Reads and checks the record that program.py writes. `lender`: of Program, may be null. Raises Error.
Program parse_program(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                      bool bf16_dot, const Program* lender = nullptr);

}  // namespace tk
