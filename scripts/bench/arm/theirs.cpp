// The same operations of ggml: TIMES linear ROWS (Q4_0, repacked for the processor), or TIMES attention ROWS TOKENS DIM, where ROWS are
// queries of each of 32 heads that share 8 KV heads (float16).
#include <cstdlib>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-cpu/repack.h"

namespace {

constexpr int64_t WIDTH = 2048;

std::vector<float> numbers(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    uint32_t state = 1;
    for (float& x : out) x = float(int32_t((state = state * 1664525u + 1013904223u) >> 16) % 2001 - 1000) / 1000;
    return out;
}

void fill(ggml_tensor* x) {
    const std::vector<float> values = numbers(ggml_nelements(x));
    if (x->type == GGML_TYPE_F32) return ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    std::vector<char> bytes(ggml_nbytes(x));
    ggml_quantize_chunk(x->type, values.data(), bytes.data(), 0, ggml_nrows(x), x->ne[0], nullptr);
    ggml_backend_tensor_set(x, bytes.data(), 0, bytes.size());
}

}  // namespace

int main(int count, char** argument) {
    if (count < 4) return 2;
    const auto number = [&](int i) { return atol(argument[i]); };
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, 1);
    const ggml_init_params room{64 << 20, nullptr, true};
    ggml_context *weights = ggml_init(room), *rest = ggml_init(room);
    ggml_tensor* result;
    std::vector<ggml_tensor*> inputs;
    if (std::string(argument[2]) == "linear") {
        ggml_tensor* w = ggml_new_tensor_2d(weights, GGML_TYPE_Q4_0, WIDTH, WIDTH);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights, ggml_backend_cpu_repack_buffer_type());
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        fill(w);
        inputs = {ggml_new_tensor_2d(rest, GGML_TYPE_F32, WIDTH, number(3))};
        result = ggml_mul_mat(rest, w, inputs[0]);
    } else {
        const int64_t rows = number(3), tokens = number(4), dim = number(5);
        inputs = {ggml_new_tensor_3d(rest, GGML_TYPE_F32, dim, rows, 32), ggml_new_tensor_3d(rest, GGML_TYPE_F16, dim, tokens, 8),
                  ggml_new_tensor_3d(rest, GGML_TYPE_F16, dim, tokens, 8)};
        result = ggml_flash_attn_ext(rest, inputs[0], inputs[1], inputs[2], nullptr, 0.125f, 0, 0);
    }
    ggml_cgraph* graph = ggml_new_graph(rest);
    ggml_build_forward_expand(graph, result);
    ggml_backend_alloc_ctx_tensors(rest, cpu);
    for (ggml_tensor* x : inputs) fill(x);
    for (long i = 0; i < number(1); i++)
        if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) return 1;
}
