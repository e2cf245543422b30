// Linears as processors take them that split codes once for many tokens, under the names that the library has for them.
#include <vector>

#include "ops_isa.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace tk;

namespace tk {
bool few_places() { return false; }
}  // namespace tk

EXPORT int tk_op_linear(const char*, const Matrix* w, const Rows* in, int64_t count, int64_t t0, int64_t t1, const Store* to) {
    std::vector<uint8_t> scratch(size_t(TK_ISA::linear_int_scratch(*w)));
    TK_ISA::linear_int(*w, *in, count, t0, t1, *to, scratch.data());
    return 0;
}

EXPORT int tk_op_gated(const char*, const Matrix* gate, const Matrix* up, const Rows* in, int64_t count, int64_t t0, int64_t t1,
                       const Store* to) {
    std::vector<uint8_t> scratch(size_t(TK_ISA::linear_int_scratch(*gate)));
    TK_ISA::gated_int(*gate, *up, *in, count, t0, t1, *to, scratch.data());
    return 0;
}
