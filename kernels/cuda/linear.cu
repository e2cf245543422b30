// All linear kernels by name: for nvcc one entry point each, for g++ a table of functions that run a grid on the CPU.

#include "expand.cuh"
#include "linear_ahead.cuh"
#include "linear_few.cuh"

// KERNEL(name, dynamic shared bytes, least blocks a multiprocessor, function)
#define TK_FEW(KERNEL, T, t, BITS, SPAN, NT)                                                               \
    KERNEL(few_##t##_w##BITS##_s##SPAN##_n##NT, (tk::LinearFew<tk::T, BITS, SPAN, NT>::SHARED), 2,        \
           (tk::linear_few<tk::T, BITS, SPAN, NT>))
#define TK_TILE(KERNEL, T, t, BITS, SPAN, NT)                                                              \
    KERNEL(tile_##t##_w##BITS##_s##SPAN##_n##NT, (tk::LinearTile<tk::T, BITS, SPAN, NT>::SHARED),          \
           (BITS == 4 || NT == 4 ? 2 : 1),                                                                 \
           (tk::linear_tile<tk::T, BITS, SPAN, NT>))
#define TK_AHEAD(KERNEL, T, t, NT) \
    KERNEL(ahead_##t##_w4_s64_n##NT, (tk::LinearAhead<tk::T, 4, 64, NT>::SHARED), 1, (tk::linear_ahead<tk::T, 4, 64, NT>))
#define TK_EXPAND(KERNEL, T, t, BITS) KERNEL(expand_##t##_w##BITS, 0, 2, (tk::expand<tk::T, BITS>))
#define TK_BITS(KERNEL, T, t, BITS, SPAN)                                                     \
    TK_FEW(KERNEL, T, t, BITS, SPAN, 1) TK_FEW(KERNEL, T, t, BITS, SPAN, 2)                   \
    TK_TILE(KERNEL, T, t, BITS, SPAN, 4) TK_TILE(KERNEL, T, t, BITS, SPAN, 8)
#define TK_SPANS(KERNEL, T, t, SPAN)                                                          \
    TK_BITS(KERNEL, T, t, 4, SPAN) TK_BITS(KERNEL, T, t, 8, SPAN) TK_TILE(KERNEL, T, t, 4, SPAN, 16)
#define TK_TYPE(KERNEL, T, t)                                                              \
    TK_SPANS(KERNEL, T, t, 0) TK_SPANS(KERNEL, T, t, 32) TK_SPANS(KERNEL, T, t, 64)        \
    TK_TILE(KERNEL, T, t, 8, 0, 16) TK_TILE(KERNEL, T, t, 8, 64, 16) /* groups of 32: too many registers */ \
    TK_AHEAD(KERNEL, T, t, 8) TK_AHEAD(KERNEL, T, t, 16) TK_EXPAND(KERNEL, T, t, 4) TK_EXPAND(KERNEL, T, t, 8)
#define TK_KERNELS(KERNEL) TK_TYPE(KERNEL, Half, float16) TK_TYPE(KERNEL, Bf16, bfloat16)

#ifdef __CUDACC__

#define TK_ENTRY(NAME, SHARED, BLOCKS, FUNCTION)                                                                    \
    extern "C" __global__ void __launch_bounds__(tk::THREADS, BLOCKS) NAME(const __grid_constant__ tk::Linear p) {  \
        extern __shared__ __align__(16) unsigned char shared[];                                                     \
        FUNCTION(p, shared);                                                                                        \
    }
TK_KERNELS(TK_ENTRY)

#else

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>

namespace {

struct Entry {
    int shared;
    void (*run)(const tk::Linear&, unsigned char*);
};

const std::map<std::string, Entry>& entries() {
#define TK_ROW(NAME, SHARED, BLOCKS, FUNCTION) {#NAME, {SHARED, FUNCTION}},
    static const std::map<std::string, Entry> table{TK_KERNELS(TK_ROW)};
    return table;
}

template <class T, int BITS>
void fragments(const uint32_t* words, int count, uint32_t first, uint32_t second, uint32_t* out) {
    for (int i = 0; i < count; ++i) {
        uint32_t a[4];
        tk::Codes<T, BITS>::fragment(a, words + i * tk::Codes<T, BITS>::WORDS, tk::Codes<T, BITS>::prepare(first | second << 8, 0));
        std::copy(a, a + 4, out + 4 * i);
    }
}

}  // namespace

extern "C" {

// Bytes of shared memory of a kernel; -1 for a name that is not there.
int tk_host_shared(const char* name) {
    const auto found = entries().find(name);
    return found == entries().end() ? -1 : found->second.shared;
}

// Runs all blocks of a grid one after another; `seed` shuffles them (0: as numbered), odd seeds run lanes backwards;
// `dependent`: as if the kernel before still ran. 1: no such kernel, 2: lanes wait for each other for ever, 3: memory of
// the kernel before is touched too early.
int tk_host_run(const char* name, const tk::Linear* p, int grid_x, int grid_y, int grid_z, unsigned seed, int dependent) {
    const auto found = entries().find(name);
    if (found == entries().end()) return 1;
    std::vector<int> order(size_t(grid_x) * grid_y * grid_z);
    std::iota(order.begin(), order.end(), 0);
    if (seed) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    tk::host::Block block;
    block.threads = tk::THREADS, block.grid_x = grid_x, block.grid_y = grid_y, block.grid_z = grid_z, block.backwards = seed % 2;
    block.kernel = [&](unsigned char* shared) { found->second.run(*p, shared); };
    const size_t outputs = size_t(p->tokens) * p->n_out, wide = p->flags & tk::WIDE ? 4 : 2;
    if (dependent)  // of what plain loads and stores reach, as partial sums, nothing is known
        block.late = {{p->x, size_t(p->tokens) * size_t(p->stride_x) * 2},
                      {p->out, outputs * wide},
                      {p->arrivals, p->arrivals ? size_t(grid_x) * grid_z * 4 : 0}};
    for (int at : order) {
        block.x = at % grid_x, block.y = at / grid_x % grid_y, block.z = at / grid_x / grid_y;
        if (!tk::host::run(block, found->second.shared)) return 2;
        if (block.early) return 3;
    }
    return 0;
}

// Operands of `count` x `words` codes, for tests over all inputs. type: 0 float16, 1 bfloat16.
int tk_host_fragments(int type, int bits, const uint32_t* words, int count, uint32_t first, uint32_t second, uint32_t* out) {
    if (bits == 4)
        (type ? fragments<tk::Bf16, 4> : fragments<tk::Half, 4>)(words, count, first, second, out);
    else
        (type ? fragments<tk::Bf16, 8> : fragments<tk::Half, 8>)(words, count, first, second, out);
    return 0;
}

}  // extern "C"

#endif
