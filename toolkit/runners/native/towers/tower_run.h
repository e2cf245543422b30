// One thread's view of a tower's call.
#pragma once

#include "towers/tower.h"

namespace tk {

constexpr int64_t TOWER_PART = 320;  // rows that a thread takes through a layer together, at most

class TowerRun : RowWork {
public:
    TowerRun(Tower& t, const TowerArrays& i, int index)
        : RowWork(*t.ops, t.program.bf16, true, t.scratch[size_t(index)].linear), tower(t), in(i), own(t.scratch[size_t(index)]),
          x(t.shared.x.at<float>(0)), y(t.shared.y.at<float>(0)), ld(t.shared.ld), thread(index) {}

    void stages();
    static int64_t phases(const TowerArrays& in) { return 2 + 2 * (in.last - in.first); }

private:
    // The next phase: body(rows) for all parts of the rows, each by one thread.
    template <class Body>
    void each_part(Body&& body) {
        tower.pool.chunks(phase++, uint32_t(tower.parts.size()), [&](uint32_t i) { body(tower.parts[i]); });
        mark(P_OTHER);
    }
    void mark(Phase name) {
        if (thread == 0 && tower.profile) tower.profile->tick(name);
    }

    void apply(const Norm& n);
    void apply(const TowerProduct& p);
    void apply(const TowerActivation& a);
    void apply(const TowerNear& n);
    void apply(const TowerLayer& l);

    void project(const TowerLayer& l, Range rows);
    void project_clipped(const TowerLayer& l, Range rows);
    void norm_heads(const TowerLayer& l, const Norm& n, float* x) const;
    void ready(const TowerLayer& l, const Norm& norm, const Input& in, const Bounds& bounds, Range rows);
    void gated_clipped(const TowerLayer& l, Range rows);
    void turn(const TowerLayer& l, int64_t row, float* q, float* k) const;
    const float* padded(const TowerLayer& l, const float* from, int64_t n, float* to, int64_t* ld_of) const;
    void ask_far(const TowerLayer& l, int64_t head, int64_t rows) const;
    void put_far(const TowerLayer& l, const Tower::Segment& s, Range rows, int64_t first_row, float* to) const;
    void put_queries(const TowerLayer& l, int64_t head, const Tower::Segment& s, Range rows, int64_t first_row) const;
    void put_keys(const TowerLayer& l, int64_t head, const Tower::Segment& s, Range rows, int64_t first_row) const;
    uint8_t* query(const TowerLayer& l, int64_t head, int64_t row) const;
    void attend(const TowerLayer& l, Range rows);
    void attend_block(const TowerLayer& l, const Tower::Segment& s, int64_t head, Range block, float* out);
    void finish(const TowerLayer& l, Range rows);
    void add(const Linear& l, const InputBuffer& from, const Norm& norm, const Vector& scale, const Bounds* bounds, Range rows);

    Tower& tower;
    const TowerArrays& in;
    Tower::Scratch& own;
    float *x, *y;  // [rows][ld]: before and after a product
    const int64_t ld;
    const int thread;
    int64_t phase = 0;
};

}  // namespace tk
