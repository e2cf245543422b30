// The linears by tiles alone, under the names that the library has for linears: compiled without AMX, tiles are modelled.
#include <vector>

#include "amx/linear.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace tk;

EXPORT int tk_op_linear(const char*, const Matrix* w, const Rows* in, int64_t count, int64_t t0, int64_t t1, const Store* to) {
    if (!TK_ISA::tiled(*w, count)) return 1;
    std::vector<uint8_t> scratch(size_t(TK_ISA::tiled_scratch(*w)));
    TK_ISA::linear_tiled(*w, *in, count, t0, t1, *to, scratch.data());
    return 0;
}

EXPORT int tk_op_gated(const char*, const Matrix* gate, const Matrix* up, const Rows* in, int64_t count, int64_t t0, int64_t t1,
                       const Store* to) {
    if (!TK_ISA::tiled(*gate, count)) return 1;
    std::vector<uint8_t> scratch(size_t(TK_ISA::tiled_scratch(*gate)));
    TK_ISA::gated_tiled(*gate, *up, *in, count, t0, t1, *to, scratch.data());
    return 0;
}
