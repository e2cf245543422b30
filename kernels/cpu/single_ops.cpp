// Every operation alone, for tests and measurements: C functions that take an instruction set by name.
//
// They check nothing but the name; the executor's boundary (toolkit/runners/native/step/check.cpp) is the guarded one.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "linear/trellis_tables.h"
#include "ops.h"

#define TK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const tk::Ops* find(const char* isa) {
    const char* reason;
    return tk::select_ops(isa, &reason);
}

// work(i0, i1) for all of [0, count), so many at a time, by so many threads.
template <typename Work>
void split(int64_t threads, int64_t count, int64_t step, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto some = [&] {
        for (int64_t i; (i = next.fetch_add(step)) < count;) work(i, std::min(i + step, count));
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < std::min(threads, count / step); i++) others.emplace_back(some);
    some();
    for (std::thread& t : others) t.join();
}

}  // namespace

// Sizes for packers: bytes of a packed matrix.
TK_EXPORT int64_t tk_op_matrix_bytes(const tk::Matrix* w) { return w->tiles() * w->tile_bytes(); }

TK_EXPORT int tk_op_linear(const char* isa, const tk::Matrix* w, const tk::Rows* in, int64_t count, int64_t t0, int64_t t1,
                           const tk::Store* to) {
    const tk::Ops* ops = find(isa);
    if (!ops) return 1;
    std::vector<uint8_t> scratch(size_t(ops->linear_scratch(*w)));
    ops->linear(*w, *in, count, t0, t1, *to, scratch.data());
    return 0;
}

TK_EXPORT int tk_op_gated(const char* isa, const tk::Matrix* gate, const tk::Matrix* up, const tk::Rows* in, int64_t count,
                          int64_t t0, int64_t t1, const tk::Store* to) {
    const tk::Ops* ops = find(isa);
    if (!ops) return 1;
    std::vector<uint8_t> scratch(size_t(std::max(ops->linear_scratch(*gate), ops->linear_scratch(*up))));
    ops->gated(*gate, *up, *in, count, t0, t1, *to, scratch.data());
    return 0;
}

TK_EXPORT int tk_op_linear_back(const char* isa, const tk::Matrix* w, const tk::Rows* in, int64_t count, int64_t t0, int64_t t1,
                                float* out) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->linear_back(*w, *in, count, t0, t1, out, w->cols);
    return !ops;
}

// Whole weights by so many threads.
TK_EXPORT int tk_op_round(const char* isa, const tk::RoundRun* r, int64_t threads) {
    const tk::Ops* ops = find(isa);
    if (!ops) return 1;
    split(threads, r->rows, 16, [&](int64_t r0, int64_t r1) {
        std::vector<float> scratch(size_t(r->cols));
        ops->round_rows(*r, r0, r1, scratch.data());
    });
    return 0;
}

// All rows by so many threads.
TK_EXPORT int tk_op_squares(const char* isa, const tk::SquaresRun* r, int64_t threads) {
    const tk::Ops* ops = find(isa);
    if (ops) split(threads, r->rows, 16, [&](int64_t r0, int64_t r1) { ops->squares(*r, r0, r1); });
    return !ops;
}

// So many matrices by so many threads.
TK_EXPORT int tk_op_code_rows(const char* isa, tk::CodeRun* runs, int64_t count, int64_t threads) {
    const tk::Ops* ops = find(isa);
    if (ops) split(threads, count, 1, [&](int64_t i, int64_t) { ops->code_rows(runs[i]); });
    return !ops;
}

// All groups by so many threads.
TK_EXPORT int tk_op_fit_scales(const char* isa, const tk::FitRun* r, int64_t threads) {
    const tk::Ops* ops = find(isa);
    if (ops) split(threads, r->groups, 1024, [&](int64_t g0, int64_t g1) { ops->fit_scales(*r, g0, g1); });
    return !ops;
}

TK_EXPORT const int8_t* tk_trellis_table(int32_t bits) { return tk::trellis_table(bits); }

// All rows by so many threads.
TK_EXPORT int tk_op_trellis(const char* isa, const tk::TrellisRun* r, int64_t threads) {
    const tk::Ops* ops = find(isa);
    if (ops) split(threads, r->rows, 16, [&](int64_t r0, int64_t r1) { ops->trellis_rows(*r, r0, r1); });
    return !ops;
}

TK_EXPORT int tk_op_matrix_row(const char* isa, const tk::Matrix* w, int64_t row, float scale, float* out) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->matrix_row(*w, row, scale, out);
    return !ops;
}

TK_EXPORT int tk_op_quantize(const char* isa, const float* x, const int32_t* perm, int64_t group, int64_t groups, int8_t* q,
                             float* scale, int32_t* sum) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->quantize(x, perm, group, 0, groups, q, scale, sum);
    return !ops;
}

TK_EXPORT int tk_op_rms_norm(const char* isa, const float* x, const float* w, int64_t n, float eps, float* out) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->rms_norm(x, w, n, eps, out);
    return !ops;
}

TK_EXPORT int tk_op_layer_norm(const char* isa, const float* x, const float* w, const float* b, int64_t n, float eps, float* out) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->layer_norm(x, w, b, n, eps, out);
    return !ops;
}

TK_EXPORT int tk_op_rope(const char* isa, float* x, const float* cos, const float* sin, int64_t rotary) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->rope(x, cos, sin, rotary);
    return !ops;
}

TK_EXPORT int tk_op_hadamard(const char* isa, float* x, int64_t n) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->hadamard(x, n);
    return !ops;
}

TK_EXPORT int tk_op_activate(const char* isa, float* x, int64_t n, int32_t activation) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->activate(x, n, activation);
    return !ops;
}

TK_EXPORT int tk_op_xielu(const char* isa, float* x, int64_t n, float above, float below, float slope) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->xielu(x, n, above, below, slope);
    return !ops;
}

TK_EXPORT int tk_op_multiply(const char* isa, float* y, const float* x, int64_t n, int32_t activation) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->multiply(y, x, n, activation);
    return !ops;
}

TK_EXPORT int tk_op_convolve(const char* isa, const tk::ConvRun* r) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->convolve(*r);
    return !ops;
}

TK_EXPORT int tk_op_recur(const char* isa, const tk::StateRun* r) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->recur(*r);
    return !ops;
}

TK_EXPORT int tk_op_scale_logits(const char* isa, float* x, int64_t n, float scale, float softcap) {
    const tk::Ops* ops = find(isa);
    if (ops) ops->scale_logits(x, n, scale, softcap);
    return !ops;
}

TK_EXPORT int tk_op_row_stats(const char* isa, const float* x, int64_t n, float* max, int64_t* index, int32_t* nan,
                              double* sum_exp) {
    const tk::Ops* ops = find(isa);
    if (!ops) return 1;
    *max = ops->row_max(x, n, index, nan);
    *sum_exp = ops->sum_exp(x, n, *max, 1.0f);
    return 0;
}

TK_EXPORT int tk_op_int_products(const char* isa, int64_t rounds, int64_t* operations) {
    const tk::Ops* ops = find(isa);
    if (ops) *operations = ops->int_products(rounds);
    return !ops;
}

// Attention of `rows` queries [rows][head_dim] over keys and values [tokens][head_dim] of one head, through the cache's stored form:
// row r sees tokens [lo[r], hi[r]). hadamard as the executor applies it for int4 keys. values null: keys are the values too.
TK_EXPORT int tk_op_attention(const char* isa, int32_t kv_type, int32_t bf16, int64_t head_dim, int64_t tokens, const float* keys,
                              const float* values, int64_t rows, const float* queries, const int64_t* lo, const int64_t* hi,
                              float scale, float softcap, const float* sinks, float* out) {
    const tk::Ops* ops = find(isa);
    if (!ops) return 1;
    const int64_t d = tk::pad16(head_dim), cells = (tokens + 15) / 16, tiles = (tokens + tk::KV_TILE - 1) / tk::KV_TILE;
    const int32_t half = bf16 && ops->bf16_dot;
    const bool rows_alone = !values;
    const int32_t read = rows_alone ? tk::loaded_type(half) : tk::read_type(*ops, kv_type, half);
    const bool as_stored = kv_type == read;
    const tk::CellLayout cell = tk::cell_layout(kv_type, head_dim, rows_alone);
    std::vector<uint8_t> store(size_t(cells * cell.bytes() + 64)), dummy(size_t(d * 64));
    auto part = [&](int64_t c, int which) {
        const int64_t offset[] = {0, cell.k_cell, cell.k_cell + cell.v_cell, cell.k_cell + cell.v_cell + cell.k_params};
        return store.data() + c * cell.bytes() + offset[which];
    };
    std::vector<float> row(size_t(2 * d)), q(size_t(rows * d));
    for (int64_t t = 0; t < tokens; t++) {
        std::fill(row.begin(), row.end(), 0.0f);
        std::memcpy(row.data(), keys + t * head_dim, size_t(head_dim) * 4);
        std::memcpy(row.data() + d, (rows_alone ? keys : values) + t * head_dim, size_t(head_dim) * 4);
        if (tk::turns(kv_type)) ops->hadamard(row.data(), head_dim), ops->hadamard(row.data() + d, head_dim);
        ops->kv_write(kv_type, d, rows_alone ? nullptr : row.data(), row.data() + d, part(t / 16, 0), part(t / 16, 1), part(t / 16, 2), part(t / 16, 3),
                      t % 16, t + 1 == tokens);
    }
    const int64_t query = tk::query_bytes(read, half, d);
    std::vector<uint8_t> queries_read(size_t(rows * query));
    for (int64_t r = 0; r < rows; r++) {
        std::memcpy(q.data() + r * d, queries + r * head_dim, size_t(head_dim) * 4);
        if (tk::turns(kv_type)) ops->hadamard(q.data() + r * d, head_dim);
        uint8_t* to = queries_read.data() + r * query;
        if (read == tk::KV_BYTES) ops->query_codes(q.data() + r * d, d, to);
        else if (half) ops->to_bf16(q.data() + r * d, reinterpret_cast<uint16_t*>(to), d);
        else std::memcpy(to, q.data() + r * d, size_t(query));
    }
    std::vector<float> states(size_t(2 * rows * (d + 2))), scores(size_t(tk::attn_scratch(rows, d)));
    tk::AttnState into{states.data(), states.data() + rows, states.data() + 2 * rows};
    float* second = states.data() + rows * (d + 2);
    tk::AttnState next{second, second + rows, second + 2 * rows};
    std::vector<uint8_t> loaded(size_t(2 * tk::KV_TILE * d * 4));
    std::vector<int32_t> l(static_cast<size_t>(rows)), h(static_cast<size_t>(rows));
    for (int64_t tile = 0; tile < tiles; tile++) {
        tk::KvTile kv;
        for (int64_t c = 0; c < tk::KV_CELLS; c++) {
            const int64_t at = tile * tk::KV_CELLS + c;
            kv.k[c] = kv.v[c] = kv.kp[c] = kv.vp[c] = dummy.data();
            if (at >= cells) continue;
            kv.k[c] = part(at, 0);
            kv.v[c] = part(at, 1);
            kv.kp[c] = part(at, 2);
            kv.vp[c] = part(at, 3);
            if (as_stored && !rows_alone) continue;
            uint8_t *k = loaded.data() + c * d * 64, *v = loaded.data() + tk::KV_TILE * d * 4 + c * d * 64;
            if (read == tk::KV_BYTES) {
                ops->kv_bytes(kv_type, d, part(at, 0), part(at, 1), std::min<int64_t>(tokens - at * 16, 16), k, v);
                kv.v[c] = v;
            } else if (!as_stored) {
                ops->kv_load(kv_type, d, part(at, 0), part(at, 1), part(at, 2), part(at, 3), half,
                             tokens - at * 16 < 16 ? tokens - at * 16 : 16, rows_alone ? nullptr : k, v);
                kv.v[c] = v;
            }
            if (rows_alone) ops->key_cell(d, half, kv.v[c], k);
            kv.k[c] = k;
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t a = lo[r] - tile * tk::KV_TILE, b = hi[r] - tile * tk::KV_TILE;
            l[size_t(r)] = int32_t(a < 0 ? 0 : a > tk::KV_TILE ? tk::KV_TILE : a);
            h[size_t(r)] = int32_t(b < 0 ? 0 : b > tk::KV_TILE ? tk::KV_TILE : b);
        }
        const tk::AttnParams params{d, d, scale, softcap, read};
        ops->attn_tile(params, kv, queries_read.data(), rows, l.data(), h.data(), tile ? next : into, scores.data());
        if (tile) ops->attn_merge(d, rows, into, next);
    }
    for (int64_t r = 0; r < rows; r++) {
        ops->attn_finish(d, into.m[r], into.l[r], into.acc + r * d, sinks ? sinks + r : nullptr, row.data());
        if (tk::turns(kv_type)) ops->hadamard(row.data(), head_dim);
        std::memcpy(out + r * head_dim, row.data(), size_t(head_dim) * 4);
    }
    return 0;
}
