#include "step/alone.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace tk {
namespace {

constexpr int64_t ALONE = 1 << 19;  // bytes of weights that one thread is done with before another has begun
constexpr int64_t PARTS = 4;        // of a thread's tiles: whoever has a slow core takes fewer
constexpr int64_t LEAST = 8;        // tiles of a part

}  // namespace

void linear_alone(const Ops& ops, const Matrix& w, bool turned, const float* x, int64_t count, float* to, int threads) {
    const int64_t cols = w.cols, width = cols + 64;  // kernels write whole registers
    const int64_t groups = w.format == INT ? w.groups() : 0;
    std::vector<float> rows(size_t(count * width));
    std::vector<int8_t> codes(size_t(groups ? count * width : 0));
    std::vector<float> scales(size_t(count * groups));
    std::vector<int32_t> sums(size_t(count * groups));
    for (int64_t i = 0; i < count; i++) {
        float* row = rows.data() + i * width;
        std::memcpy(row, x + i * cols, size_t(cols) * sizeof(float));
        if (turned) ops.hadamard(row, cols);
        if (groups) ops.quantize(row, nullptr, w.group, 0, groups, codes.data() + i * width, scales.data() + i * groups, sums.data() + i * groups);
    }
    Rows in;
    in.x = rows.data();
    in.q = codes.data();
    in.ldx = in.ldq = width;
    in.scale = scales.data();
    in.sum = sums.data();
    in.lds = groups;
    Store out;
    out.out = to;
    out.ld = w.tiles() * LANES;
    const int64_t workers = w.bytes() < ALONE ? 1 : threads, part = std::max(LEAST, w.tiles() / (workers * PARTS));
    std::atomic<int64_t> next{0};
    const auto some = [&] {
        std::vector<uint8_t> scratch(size_t(ops.linear_scratch(w)));
        for (int64_t t; (t = next.fetch_add(part)) < w.tiles();)
            ops.linear(w, in, count, t, std::min(t + part, w.tiles()), out, scratch.data());
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < workers; i++) others.emplace_back(some);
    some();
    for (std::thread& other : others) other.join();
}

}  // namespace tk
