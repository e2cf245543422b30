#include "draft/join.h"

#include <algorithm>
#include <cstring>

#include "step/read.h"

namespace tk {
namespace {

constexpr int64_t MOST_ROWS = int64_t(1) << 22;
constexpr int64_t PARTS = 4;  // of a thread's tiles: whoever has a slow core takes fewer
constexpr int64_t PHASES = 2;

// One thread's view of a call.
class JoinRun : RowWork {
public:
    JoinRun(Join& j, int index) : RowWork(*j.ops, j.program.bf16, false, j.scratch[size_t(index)].linear), join(j), p(j.program), s(j.shared) {}

    void run(const float* from, int64_t rows, float* to) {
        for (int64_t first = 0; first < rows; first += JOIN_ROWS) some(from, {first, std::min(first + JOIN_ROWS, rows)}, to);
    }

private:
    void some(const float* all, Range rows, float* to) {
        const int64_t n = rows.last - rows.first, width = p.in.width, wide = p.linear.w.rows;
        join.pool.chunks(phase++, uint32_t(n), [&](uint32_t t) {
            const float* from = all + (rows.first + t) * width;
            float* x = s.in.x + t * s.in.ldx;
            const Norm& norm = p.norm;
            for (int64_t at = 0; norm.present() && at < width; at += norm.size) norm_row(norm, from + at, x + at, at / norm.size);
            prepare_row(p.in, Norm(), norm.present() ? x : from, s.in, t);
        });
        const int64_t tiles = p.linear.w.tiles(), parts = std::min<int64_t>(tiles, join.pool.size() * PARTS);
        join.pool.chunks(phase++, uint32_t(parts), [&](uint32_t i) {
            const Range part{tiles * i / parts, tiles * (i + 1) / parts};
            Store store;
            store.out = s.out;
            store.ld = s.ld;
            linear(p.linear, s.in, 0, n, part, store);
            const int64_t first = part.first * LANES, last = std::min(part.last * LANES, wide);
            for (int64_t t = 0; t < n; t++)
                std::memcpy(to + (rows.first + t) * wide + first, s.out + t * s.ld + first, size_t(last - first) * 4);
        });
    }

    Join& join;
    const JoinProgram& p;
    Join::Shared& s;
    int64_t phase = 0;
};

struct Job {
    Join& join;
    const float* from;
    int64_t rows;
    float* to;
};

void run_thread(void* arg, int index) {
    const Job& job = *static_cast<const Job*>(arg);
    JoinRun(job.join, index).run(job.from, job.rows, job.to);
}

}  // namespace

JoinProgram parse_join(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                       bool bf16_dot) {
    Values all(names, values, count, tensors, tensors_size);
    const Record r(all);
    JoinProgram p;
    p.bf16 = bf16_dot;
    const int64_t parts = r.integer("parts", 1, 4096);
    p.linear = r.linear("join", 0, 0, true);
    p.in.width = p.linear.w.cols;
    if (p.in.width % parts) r.fail("parts", "no divisor of what the join reads");
    p.norm = r.norm("norm", p.in.width / parts, parts);
    all.finish();
    p.in.turned = p.linear.turned;
    join(p.in, p.linear);
    return p;
}

Join::Shared::Shared(const JoinProgram& p) : ld(p.linear.w.tiles() * LANES) {
    in = input(JOIN_ROWS, p.in.width);
    out = take<float>(JOIN_ROWS * ld);
}

Join::Join(JoinProgram prog, const Ops* o, int threads) : program(std::move(prog)), ops(o), pool(threads), shared(program) {
    for (int i = 0; i < pool.size(); i++) scratch.emplace_back(program, *ops);
}

void Join::run(const float* from, int64_t rows, float* to) {
    if (rows < 1 || rows > MOST_ROWS) throw Error("join: bad number of rows");
    Job job{*this, from, rows, to};
    pool.run(run_thread, &job, PHASES * ((rows + JOIN_ROWS - 1) / JOIN_ROWS));
}

}  // namespace tk
