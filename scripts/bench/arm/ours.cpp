// Single operations of our library, a number of times: LIBRARY ISA TIMES linear BITS GROUP TRELLIS ROWS, or LIBRARY ISA TIMES attention KV_TYPE
// ROWS TOKENS DIM, where ROWS are queries of one KV head, whose keys are written first each time. Values are arbitrary.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ops.h"

namespace {

constexpr int64_t WIDTH = 2048;  // of a linear, both ways

std::vector<float> numbers(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    uint32_t state = 1;
    for (float& x : out) x = float(int32_t((state = state * 1664525u + 1013904223u) >> 16) % 2001 - 1000) / 1000;
    return out;
}

template <class Fn>
Fn* symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) fprintf(stderr, "%s: not in the library\n", name), exit(1);
    return reinterpret_cast<Fn*>(found);
}

}  // namespace

int main(int count, char** argument) {
    if (count < 9) return 2;
    void* library = dlopen(argument[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const char* isa = argument[2];
    const auto number = [&](int i) { return atol(argument[i]); };
    const long times = number(3);
    if (std::string(argument[4]) == "linear") {
        using Quantize = int(const char*, const float*, const int32_t*, int64_t, int64_t, int8_t*, float*, int32_t*);
        using Linear = int(const char*, const tk::Matrix*, const tk::Rows*, int64_t, int64_t, int64_t, const tk::Store*);
        const auto quantize = symbol<Quantize>(library, "tk_op_quantize");
        const auto linear = symbol<Linear>(library, "tk_op_linear");
        tk::Matrix w;
        w.format = tk::INT;
        w.dtype = tk::F16;
        w.bits = int32_t(number(5));
        w.group = int32_t(number(6));
        w.trellis = int32_t(number(7));
        w.rows = w.cols = WIDTH;
        const int64_t rows = number(8), groups = w.groups();
        std::vector<uint8_t> data(size_t(w.tiles() * w.tile_bytes() + 64), 0x21);  // as float16 about 0.01
        w.data = data.data();
        std::vector<float> x = numbers(rows * WIDTH), out(x.size()), scale(size_t(rows * groups));
        std::vector<int8_t> q(x.size());
        std::vector<int32_t> sum(scale.size());
        tk::Rows in;
        in.q = q.data(), in.ldq = WIDTH, in.scale = scale.data(), in.sum = sum.data(), in.lds = groups;
        tk::Store to;
        to.out = out.data(), to.ld = WIDTH;
        for (long i = 0; i < times; i++) {
            for (int64_t r = 0; r < rows; r++)
                quantize(isa, x.data() + r * WIDTH, nullptr, w.group, groups, q.data() + r * WIDTH, scale.data() + r * groups,
                         sum.data() + r * groups);
            if (linear(isa, &w, &in, rows, 0, w.tiles(), &to)) return 1;
        }
    } else {
        using Attention = int(const char*, int32_t, int32_t, int64_t, int64_t, const float*, const float*, int64_t, const float*, const int64_t*,
                              const int64_t*, float, float, const float*, float*);
        const auto attention = symbol<Attention>(library, "tk_op_attention");
        const int64_t rows = number(6), tokens = number(7), dim = number(8);
        const std::vector<float> keys = numbers(tokens * dim), queries = numbers(rows * dim);
        std::vector<float> out(queries.size());
        const std::vector<int64_t> from(size_t(rows), 0), to(size_t(rows), tokens);
        for (long i = 0; i < times; i++)
            if (attention(isa, int32_t(number(5)), 1, dim, tokens, keys.data(), keys.data(), rows, queries.data(), from.data(), to.data(),
                          0.125f, 0, nullptr, out.data()))
                return 1;
    }
}
