// A loaded model: its program, its cache and what a step needs. `step` runs one (model.cpp).
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "system/link.h"
#include "step/adapters.h"
#include "system/pool.h"
#include "system/profile.h"
#include "step/program.h"
#include "step/workspace.h"

namespace tk {

struct StepArrays;
struct StepResults;

// Keys and values of a picture that cross layers look at: of each layer and head cells of keys, then of values.
struct Kept {
    int64_t rows, cells;
    Pages pages;
};

// What a rank has handed the others: from when until when, seconds of the system's steady clock, and how many bytes.
struct Meeting {
    double from, to, bytes;
};
double seconds();

class Model {
public:
    Model(Program program, const Ops* ops, int threads);
    ~Model();
    void allocate_cache(const int64_t* blocks, int64_t groups);
    void release_cache();
    void borrow_cache();  // as it is now, of the model whose cache is read, if that is another
    // Joins the other ranks; see Link. Comes before the first step.
    void join(int fd);
    void step(const StepArrays& in, const StepResults& out);
    void remember(const StepArrays& in, const StepResults& out);

    Program program;
    const Ops* ops;
    Pool pool;
    std::vector<int32_t> previous;  // tokens sampled by the last step
    std::vector<Pages> cache;
    AdapterTable adapters;
    std::map<int32_t, Kept> pictures;  // by number
    std::unique_ptr<Workspace> work;
    std::unique_ptr<Link> link;  // to the other ranks, where the program is one of several
    uint32_t meetings = 0;       // with them so far
    std::unique_ptr<std::vector<Meeting>> trace;  // where somebody wants to know of them
    std::unique_ptr<Profile> profile;
};

}  // namespace tk
