#include "step/model.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "step/run.h"
#include "step/step.h"

namespace tk {
namespace {

void copy_blocks(Model& m, const StepArrays& in) {
    for (int64_t g = 0; g < in.groups; g++) {
        const Group& group = m.program.groups[size_t(g)];
        const int64_t n = in.copies_size[g];
        std::vector<uint8_t> held(size_t(n * group.block_bytes));
        for (int64_t i = 0; i < n; i++)
            memcpy(held.data() + i * group.block_bytes, group.data + in.copies[g][2 * i] * group.block_bytes, size_t(group.block_bytes));
        for (int64_t i = 0; i < n; i++)
            memcpy(group.data + in.copies[g][2 * i + 1] * group.block_bytes, held.data() + i * group.block_bytes, size_t(group.block_bytes));
    }
}

// Each sequence's state into the slot where it goes on, from where it was; all are read before any is written.
void begin_states(Model& m, const StepArrays& in) {
    for (int64_t g = 0; g < in.groups; g++) {
        const Group& group = m.program.groups[size_t(g)];
        if (!group.state) continue;
        const size_t size = size_t(group.block_bytes);
        auto moved = [&](int64_t s) { return in.block_tables[g] + s * in.table_width[g]; };
        auto at = [&](int32_t slot) { return group.data + slot * group.block_bytes; };
        std::map<int32_t, std::vector<uint8_t>> held;  // of those that are written
        for (int64_t s = 0; s < in.seqs; s++)
            if (moved(s)[0] != moved(s)[1]) held[moved(s)[1]];
        for (int64_t s = 0; s < in.seqs; s++) {
            const auto found = held.find(moved(s)[0]);
            if (found != held.end() && found->second.empty()) found->second.assign(at(found->first), at(found->first) + size);
        }
        for (int64_t s = 0; s < in.seqs; s++) {
            const int32_t from = moved(s)[0], to = moved(s)[1];
            if (from == to) continue;
            const auto found = held.find(from);
            if (from < 0) memset(at(to), 0, size);
            else memcpy(at(to), found == held.end() ? at(from) : found->second.data(), size);
        }
    }
}

// What all threads share while a step runs.
struct Job {
    Model& model;
    const StepArrays& in;
    const StepResults& out;
    Plan& plan;
    Cut cut;
    uint32_t met = 0;  // what the calling thread's run says of it; all threads' say the same
    bool heads = false;
    const Kept* kept = nullptr;  // a picture whose rows, the chunk's, are to be remembered,
    int64_t row = 0;             // from this one on
};

void run_thread(void* arg, int index) {
    Job& job = *static_cast<Job*>(arg);
    Run run(job.model, job.in, job.out, job.plan, job.cut, index);
    if (job.kept) run.remember(*job.kept, job.row);
    else if (job.heads) run.heads();
    else run.layers();
    if (index == 0) job.met = run.met();
}

void run_all(Model& m, Job& job, int64_t head_blocks) {
    m.pool.run(run_thread, &job, phases_of(m.program, head_blocks));
    m.meetings += job.met;
    if (m.link && m.link->lost()) throw Error("another rank of the model is lost");
}

}  // namespace

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Model::borrow_cache() {
    for (size_t g = 0; program.lender && g < program.groups.size(); g++) {
        program.groups[g].data = program.lender->groups[g].data;
        program.groups[g].blocks = program.lender->groups[g].blocks;
    }
}

void Model::step(const StepArrays& in, const StepResults& out) {
    borrow_cache();
    check_step(program, in, out, int64_t(previous.size()));
    if (program.ranks > 1 && !link) throw Error("the rank has not joined the others");
    if (profile) profile->start();
    copy_blocks(*this, in);
    begin_states(*this, in);
    remember(in, out);
    if (in.tokens == 0) {
        previous.clear();
        return;
    }
    Plan plan = make_plan(in);
    plan.hidden = work->hidden_rows(int64_t(plan.rows.size()));
    Job job{*this, in, out, plan, {}};
    for (int64_t t = 0, end; t < in.tokens; t = end) {
        end = chunk_end(in, t);
        job.cut = cut_chunk(program, in, t, end - t, pool.size());
        job.cut.adapters = adapters.of_rows(in, t, end - t);
        adapters.lowered.begin();
        work->partials(partial_floats(program, in, job.cut));
        run_all(*this, job, 0);
    }
    job.heads = true;
    job.cut.adapters.clear();
    adapters.lowered.begin(uint64_t(plan.logit_rows / work->logit_rows + 1));
    if (const Adapters all = adapters.of_rows(in, 0, in.tokens); !all.empty())
        for (const int64_t t : plan.rows) job.cut.adapters.push_back(all[size_t(t)]);
    if (!plan.rows.empty()) run_all(*this, job, plan.logit_rows / work->logit_rows + 1);
    previous.assign(out.tokens, out.tokens + in.rows);
}

// What cross layers keep of the step's new pictures.
void Model::remember(const StepArrays& in, const StepResults& out) {
    for (int64_t i = 0; i < in.gone_size; i++) pictures.erase(in.gone[i]);
    int64_t before = 0;
    for (int64_t i = 0; i < in.new_size; i++) {
        const int64_t rows = in.new_pictures[2 * i + 1], cells = (rows + LANES - 1) / LANES;
        Kept& kept = pictures[in.new_pictures[2 * i]] = {rows, cells, Pages(cells * program.kept)};
        Plan none;
        Job job{*this, in, out, none, {}};
        job.kept = &kept;
        for (int64_t row = 0; row < rows; row += CHUNK) {
            job.cut.first = before + row;
            job.cut.count = std::min(CHUNK, rows - row);
            job.row = row;
            run_all(*this, job, 0);
        }
        before += rows;
    }
    for (int64_t i = 0; i < in.seen_size; i++)
        if (!pictures.count(in.seen[i])) throw Error("views.seen: picture " + std::to_string(in.seen[i]) + " is not kept");
}

Model::Model(Program prog, const Ops* o, int threads)
    : program(std::move(prog)), ops(o), pool(threads), work(std::make_unique<Workspace>(program, *o, pool.size())) {}

Model::~Model() = default;

void Model::join(int fd) {
    if (program.ranks == 1) throw Error("the program is none of several ranks'");
    link = std::make_unique<Link>(fd, work->gathered, program.ranks);
    meetings = 0;
}

void Model::allocate_cache(const int64_t* blocks, int64_t groups) {
    if (groups != int64_t(program.groups.size()))
        throw Error("num_blocks: expected " + std::to_string(program.groups.size()) + " counts, found " + std::to_string(groups));
    if (program.lender) throw Error("num_blocks: the cache is another model's");
    release_cache();
    for (int64_t g = 0; g < groups; g++) {
        Group& group = program.groups[size_t(g)];
        if (blocks[g] < 1 || blocks[g] > (int64_t(1) << 40) / std::max<int64_t>(group.block_bytes, 1))
            throw Error("num_blocks: expected a count above 0 that fits the memory, found " + std::to_string(blocks[g]));
        cache.emplace_back(blocks[g] * group.block_bytes);
        group.blocks = blocks[g];
        group.data = cache.back().data();
    }
}

void Model::release_cache() {
    for (Group& g : program.groups) {
        g.data = nullptr;
        g.blocks = 0;
    }
    cache.clear();
    pictures.clear();
}

}  // namespace tk
