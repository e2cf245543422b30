// Rows rounded to a trellis: each value is looked up by the last 8 bits of its row's stream, so that a row is a path through 2^(8 - bits)
// states, and the cheapest path is found. See TrellisRun.
//
// GPTQ's feedback hangs on what was rounded before, so that every path carries errors of its own: the Viterbi algorithm with
// survivors that go on by themselves (Raheli, Polydoros and Tzou, "Per-Survivor Processing", 1995). Columns are decided some steps
// behind; paths that disagree are dropped then.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr float NEVER = 1e30f;
constexpr int DECIDED = 8;  // columns that are decided at once
// The most that are not, by so many: paths of few bits run side by side for long. Twice as many lose 1 % less.
constexpr int undecided(int bits) { return bits == 2 ? 8 : bits == 3 ? 6 : 5; }

#if defined(__AVX512F__)
// t[index], of N
template <int N>
TK_INLINE F lookup(const float* t, I index) {
    if (N == 16) return _mm512_permutexvar_ps(index, fload(t));
    const F low = _mm512_permutex2var_ps(fload(t), index, fload(t + 16));
    if (N == 32) return low;
    const F high = _mm512_permutex2var_ps(fload(t + 32), index, fload(t + 48));
    return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(index, iset1(32)), high);
}
// best = cost, and its error and origin, in the lanes where cost is less
TK_INLINE void take_less(F cost, F error, I origin, F* best, F* best_error, I* best_origin) {
    const __mmask16 less = _mm512_cmp_ps_mask(cost, *best, _CMP_LT_OQ);
    *best = fmin(cost, *best);
    *best_error = _mm512_mask_mov_ps(*best_error, less, error);
    *best_origin = _mm512_mask_mov_epi32(*best_origin, less, origin);
}
#else
template <int N>
TK_INLINE F lookup(const float* t, I index) {
    int32_t at[16];
    float out[16];
    istore(at, index);
    for (int i = 0; i < 16; i++) out[i] = t[at[i]];
    return fload(out);
}
TK_INLINE void take_less(F cost, F error, I origin, F* best, F* best_error, I* best_origin) {
    const I less = isub(izero(), iand(ishr(as_i(fsub(cost, *best)), 31), iset1(1)));
    const auto pick = [&](I yes, I no) { return ior(iand(less, yes), iand(isub(iset1(-1), less), no)); };
    *best = fmin(cost, *best);
    *best_error = as_f(pick(as_i(error), as_i(*best_error)));
    *best_origin = pick(origin, *best_origin);
}
#endif

// Of one bit width: S states, B ways into each, V vectors of states. State n is entered from (n << BITS & S - 1) + b, and the last 8 bits of
// the stream are then (n << BITS) + b.
template <int BITS>
struct Trellis {
    static constexpr int S = 1 << (8 - BITS), B = 1 << BITS, V = S / 16;
    float values[B][S];  // by b and n
    float from[B][16];   // states as bits of floats: those that n, n + 16, … are entered from

    explicit Trellis(const int8_t* table) {
        for (int b = 0; b < B; b++) {
            for (int n = 0; n < S; n++) values[b][n] = float(table[(n << BITS) + b]);
            int32_t states[16];
            for (int i = 0; i < 16; i++) states[i] = (i << BITS & (S - 1)) + b;
            memcpy(from[b], states, 64);
        }
    }
    // All states' costs by one more column: what they want there, its scale and weight. Where each comes from, and its error.
    inline __attribute__((always_inline)) void step(float* cost, const float* wanted, float scale, float weight, I* origin, F* error) const {
        F best[V];
        TK_EACH(v, V, best[v] = fset1(2 * NEVER); error[v] = fzero(); origin[v] = izero(););
        for (int b = 0; b < B; b++) {
            const I states = as_i(fload(from[b]));
            const F before = lookup<S>(cost, states), want = lookup<S>(wanted, states);
            TK_EACH(v, V, {
                const F off = fma(fload(values[b] + 16 * v), fset1(-scale), want);
                take_less(fma(fmul(off, off), fset1(weight), before), off, states, &best[v], &error[v], &origin[v]);
            });
        }
        TK_EACH(v, V, fstore(cost + 16 * v, best[v]););
    }
    // The cheapest state; its cost is taken off all.
    inline __attribute__((always_inline)) int cheapest(float* cost, double* total) const {
        int n = 0;
        for (int i = 1; i < S; i++)
            if (cost[i] < cost[n]) n = i;
        *total += double(cost[n]);
        const F least = fset1(cost[n]);
        TK_EACH(v, V, fstore(cost + 16 * v, fsub(fload(cost + 16 * v), least)););
        return n;
    }
    static void begin(float* cost, int state) {
        for (int i = 0; i < S; i++) cost[i] = i == state ? 0.0f : NEVER;
    }
};

// What a row costs by a scale, were its columns not to make up for each other.
template <int BITS>
float row_cost(const Trellis<BITS>& t, const TrellisRun& r, const float* x, float scale, int state) {
    constexpr int S = Trellis<BITS>::S, V = Trellis<BITS>::V;
    float cost[S], wanted[S];
    double total = 0;
    t.begin(cost, state);
    for (int64_t j = 0; j < r.width; j++) {
        I origin[V];
        F error[V];
        TK_EACH(v, V, fstore(wanted + 16 * v, fset1(x[j])););
        t.step(cost, wanted, scale, r.weights[j], origin, error);
        if (j % 16 == 15) t.cheapest(cost, &total);
    }
    t.cheapest(cost, &total);
    return float(total);
}

template <int BITS>
void row_scale(const Trellis<BITS>& t, const TrellisRun& r, int64_t row) {
    const float* x = r.x + row * r.ld;
    float least = NEVER, best = r.tried[0];
    for (int64_t i = 0; i < r.tries; i++) {
        const float scale = r.tried[row * r.tries + i], cost = row_cost(t, r, x, scale, r.state[row]);
        if (i == 0 || cost < least) least = cost, best = scale;
    }
    r.scales[row * r.ld_scales] = best;
}

template <int BITS>
struct Survivors {
    static constexpr int S = Trellis<BITS>::S, V = Trellis<BITS>::V, RUNS = undecided(BITS), DEPTH = RUNS * DECIDED;
    float cost[S], wanted[S];
    float errors[2][DEPTH][S];  // of columns that are not decided, by column and state
    float homes[2][RUNS][S];    // states they were in behind each run of columns that is decided at once, as bits of floats
    uint8_t origins[TrellisRun::WIDEST][S];
    float x[TrellisRun::WIDEST];

    void row(const Trellis<BITS>& t, const TrellisRun& r, int64_t row);
};

template <int BITS>
void Survivors<BITS>::row(const Trellis<BITS>& t, const TrellisRun& r, int64_t row) {
    const int64_t width = r.width;
    memcpy(x, r.x + row * r.ld, size_t(width) * 4);
    t.begin(cost, r.state[row]);
    double total = 0;
    int64_t decided = 0;
    for (int64_t j = 0; j < width; j++) {
        const int now = j & 1, then = now ^ 1;
        F want[V];
        TK_EACH(v, V, want[v] = fset1(x[j]););
        for (int64_t k = decided; k < j; k++) {
            const F back = fset1(-r.back[k * width + j]);
            TK_EACH(v, V, want[v] = fma(fload(errors[now][k % DEPTH] + 16 * v), back, want[v]););
        }
        TK_EACH(v, V, fstore(wanted + 16 * v, want[v]););
        I origin[V];
        F error[V];
        t.step(cost, wanted, r.scales[row * r.ld_scales + (r.first + j) / r.group], r.weights[j], origin, error);
        TK_EACH(v, V, store_s8((int8_t*)origins[j] + 16 * v, origin[v]););
        for (int64_t k = decided; k < j; k++)
            TK_EACH(v, V, fstore(errors[then][k % DEPTH] + 16 * v, lookup<S>(errors[now][k % DEPTH], origin[v])););
        for (int i = 0; i < RUNS; i++) TK_EACH(v, V, fstore(homes[then][i] + 16 * v, lookup<S>(homes[now][i], origin[v])););
        TK_EACH(v, V, fstore(errors[then][j % DEPTH] + 16 * v, error[v]););
        if (j % DECIDED == DECIDED - 1) {
            int32_t home[S];
            for (int i = 0; i < S; i++) home[i] = i;
            memcpy(homes[then][j / DECIDED % RUNS], home, sizeof home);
        }
        const int best = t.cheapest(cost, &total);
        const bool last = j == width - 1;
        if (j - decided < DEPTH - 1 && !last) continue;
        const int64_t upto = last ? j : decided + DECIDED - 1;
        for (int64_t k = j, state = best; k >= decided; k--) {
            const int origin = origins[k][state];
            if (k <= upto && k < r.keep) r.out[row * r.keep + k] = uint8_t((state << BITS) + (origin & (Trellis<BITS>::B - 1)));
            state = origin;
        }
        if (last) break;
        const float* home = homes[then][upto / DECIDED % RUNS];
        int32_t kept, other;
        memcpy(&kept, home + best, 4);
        for (int i = 0; i < S; i++) {
            memcpy(&other, home + i, 4);
            if (other != kept) cost[i] = NEVER;
        }
        for (int64_t k = decided; k <= upto; k++) {
            const float lost = errors[then][k % DEPTH][best];
            for (int64_t i = j + 1; i < width; i++) x[i] -= lost * r.back[k * width + i];
        }
        decided = upto + 1;
    }
    r.state[row] = r.out[row * r.keep + r.keep - 1] >> BITS;
}

template <int BITS>
void rows_of(const TrellisRun& r, int64_t r0, int64_t r1) {
    const Trellis<BITS> t(r.table);
    if (r.tries) {
        for (int64_t row = r0; row < r1; row++) row_scale(t, r, row);
        return;
    }
    Survivors<BITS> s;
    for (int64_t row = r0; row < r1; row++) s.row(t, r, row);
}

}  // namespace

void trellis_rows(const TrellisRun& r, int64_t r0, int64_t r1) { (r.bits == 2 ? rows_of<2> : r.bits == 3 ? rows_of<3> : rows_of<4>)(r, r0, r1); }

}  // namespace TK_ISA
}  // namespace tk
