// The C boundary: models, caches and steps. Every function returns 0, or 1 with a message in tk_error().
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "step/model.h"
#include "draft/draft_head.h"
#include "draft/join.h"
#include "packing/pack_tiles.h"
#include "step/step.h"
#include "system/bridge.h"
#include "towers/tower.h"

#define TK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string message;

template <class F>
int guarded(F&& f) {
    try {
        f();
        return 0;
    } catch (const std::bad_alloc&) {
        message = "out of memory";
    } catch (const std::exception& e) {
        message = e.what();
    } catch (...) {
        message = "unknown failure";
    }
    return 1;
}

const tk::Ops* ops_or_throw(const char* isa) {
    const char* reason = "";
    const tk::Ops* ops = tk::select_ops(isa, &reason);
    if (!ops) throw tk::Error(std::string("instruction set ") + isa + ": " + reason);
    return ops;
}

int threads_or_throw(int64_t threads) {
    if (threads < 1 || threads > 4096) throw tk::Error("threads: expected 1 to 4096");
    return int(threads);
}

// With TOOLKIT_NATIVE_PROFILE=1, else null.
std::unique_ptr<tk::Profile> new_profile() {
    const char* wanted = std::getenv("TOOLKIT_NATIVE_PROFILE");
    return wanted && std::strcmp(wanted, "1") == 0 ? std::make_unique<tk::Profile>() : nullptr;
}

tk::Matrix described(const tk::TensorRecord& to, uint8_t* data) {
    const tk::Matrix w{to.kind, to.dtype, to.bits, to.group, to.minima, to.trellis, to.rows, to.cols, data};
    if (w.bytes() != to.bytes) throw tk::Error("pack: expected " + std::to_string(w.bytes()) + " bytes, found " + std::to_string(to.bytes));
    return w;
}

tk::Group& group_of(tk::Model* m, int64_t group, int64_t block) {
    if (group < 0 || group >= int64_t(m->program.groups.size())) throw tk::Error("cache group does not exist");
    tk::Group& g = m->program.groups[size_t(group)];
    if (!g.data || block < 0 || block >= g.blocks) throw tk::Error("cache block does not exist");
    return g;
}

}  // namespace

// Of all that passes here: functions, structures, the program's record, how tensors are packed. VERSION in library.py says
// the same; raise both when any of it changes, so that neither side reads the other's as its own.
TK_EXPORT int tk_version() { return 45; }

TK_EXPORT const char* tk_error() { return message.c_str(); }

// Name of the instruction set that `isa` selects ("" = the best), or null with tk_error().
TK_EXPORT const char* tk_isa(const char* isa) {
    const tk::Ops* ops = nullptr;
    return guarded([&] { ops = ops_or_throw(isa); }) ? nullptr : ops->name;
}

// Program and tensors stay the caller's; tensor memory must outlive the model, as `lender` must, whose cache it reads (or null).
TK_EXPORT tk::Model* tk_model_create(const char* names, const double* values, int64_t count,
                                     const tk::TensorRecord* tensors, int64_t tensors_size, const char* isa, int64_t threads,
                                     const tk::Model* lender) {
    tk::Model* model = nullptr;
    guarded([&] {
        const tk::Ops* ops = ops_or_throw(isa);
        const tk::Program* from = lender ? &lender->program : nullptr;
        tk::Program program = tk::parse_program(names, values, count, tensors, tensors_size, ops->bf16_dot, from);
        model = new tk::Model(std::move(program), ops, threads_or_throw(threads));
        model->profile = new_profile();
    });
    return model;
}

// A rank of several joins the others in the memory of `file`, which stays the caller's. No step of any rank may be under way.
TK_EXPORT int tk_model_join(tk::Model* model, int file) {
    return guarded([&] { model->join(file); });
}

// From any thread: a rank is lost, and no rank waits for others any more; steps that do fail.
TK_EXPORT void tk_model_lose(tk::Model* model) {
    if (model->link) model->link->lose();
}

// Whether one is lost.
TK_EXPORT int tk_model_lost(tk::Model* model) { return model->link && model->link->lost(); }

// Of tk::Bridge; `file` stays the caller's.
TK_EXPORT tk::Bridge* tk_bridge_open(int file, int64_t ranks, int64_t first, int64_t here) {
    tk::Bridge* bridge = nullptr;
    guarded([&] { bridge = new tk::Bridge(file, ranks, first, here); });
    return bridge;
}

TK_EXPORT void tk_bridge_close(tk::Bridge* bridge) { delete bridge; }

// -1 with tk_error().
TK_EXPORT int64_t tk_bridge_wait(tk::Bridge* bridge) {
    int64_t most = -1;
    guarded([&] { most = bridge->wait(); });
    return most;
}

TK_EXPORT int64_t tk_bridge_pack(tk::Bridge* bridge, uint8_t* to) { return bridge->pack(to); }

TK_EXPORT int tk_bridge_unpack(tk::Bridge* bridge, const uint8_t* from) {
    return guarded([&] { bridge->unpack(from); });
}

TK_EXPORT void tk_bridge_arrive(tk::Bridge* bridge) { bridge->arrive(); }

TK_EXPORT void tk_bridge_lose(tk::Bridge* bridge) { bridge->lose(); }

// How often ranks have handed each other what they had made, so far.
TK_EXPORT int64_t tk_model_meetings(tk::Model* model) { return model->meetings; }

// From now on each of them is kept (`on`), or none; between steps.
TK_EXPORT void tk_model_trace(tk::Model* model, int on) {
    model->trace = on ? std::make_unique<std::vector<tk::Meeting>>() : nullptr;
}

// Those kept so far, three numbers each (tk::Meeting), `most` of them at most: how many there are. Between steps.
TK_EXPORT int64_t tk_model_traced(tk::Model* model, double* to, int64_t most) {
    if (!model->trace) return 0;
    const int64_t n = int64_t(model->trace->size());
    std::memcpy(to, model->trace->data(), size_t(std::min(n, most)) * sizeof(tk::Meeting));
    return n;
}

TK_EXPORT void tk_model_free(tk::Model* model) { delete model; }

TK_EXPORT int64_t tk_block_bytes(tk::Model* model, int64_t group) {
    return group >= 0 && group < int64_t(model->program.groups.size()) ? model->program.groups[size_t(group)].block_bytes : -1;
}

TK_EXPORT int tk_cache_allocate(tk::Model* model, const int64_t* blocks, int64_t groups) {
    return guarded([&] { model->allocate_cache(blocks, groups); });
}

TK_EXPORT void tk_cache_release(tk::Model* model) { model->release_cache(); }

// Their content becomes zeros and their whole pages go back to the system.
TK_EXPORT int tk_cache_discard(tk::Model* model, int64_t group, const int64_t* blocks, int64_t count) {
    return guarded([&] {
        static const uintptr_t PAGE = uintptr_t(sysconf(_SC_PAGESIZE));
        for (int64_t i = 0; i < count; i++) {
            const tk::Group& g = group_of(model, group, blocks[i]);
            const uintptr_t from = uintptr_t(g.data + blocks[i] * g.block_bytes), to = from + uintptr_t(g.block_bytes);
            const uintptr_t first = (from + PAGE - 1) / PAGE * PAGE, last = to / PAGE * PAGE;
            if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
        }
    });
}

TK_EXPORT int tk_block_export(tk::Model* model, int64_t group, int64_t block, uint8_t* to) {
    return guarded([&] {
        const tk::Group& g = group_of(model, group, block);
        std::memcpy(to, g.data + block * g.block_bytes, size_t(g.block_bytes));
    });
}

TK_EXPORT int tk_block_import(tk::Model* model, int64_t group, int64_t block, const uint8_t* from, int64_t size) {
    return guarded([&] {
        const tk::Group& g = group_of(model, group, block);
        if (size != g.block_bytes) throw tk::Error("cache block: expected " + std::to_string(g.block_bytes) + " bytes, found " + std::to_string(size));
        std::memcpy(g.data + block * g.block_bytes, from, size_t(size));
    });
}

// The adapter in `slot`, which tensors (four a site, see AdapterTable::put) must outlive; between steps.
TK_EXPORT int tk_adapter_put(tk::Model* model, int64_t slot, const int32_t* sites, const tk::TensorRecord* tensors, int64_t count) {
    return guarded([&] { model->adapters.put(model->program, *model->ops, model->pool.size(), slot, sites, tensors, count); });
}

TK_EXPORT void tk_adapter_drop(tk::Model* model, int64_t slot) { model->adapters.drop(slot); }

TK_EXPORT int tk_step(tk::Model* model, const tk::StepArrays* in, const tk::StepResults* out) {
    return guarded([&] { model->step(*in, *out); });
}

// The embeddings of `count` tokens, [count, hidden].
TK_EXPORT int tk_embed(tk::Model* model, const int32_t* ids, int64_t count, float* to) {
    return guarded([&] {
        const tk::Program& p = model->program;
        std::vector<float> row(size_t(p.hidden) + 64);  // kernels write whole registers
        for (int64_t i = 0; i < count; i++) {
            if (ids[i] < 0 || ids[i] >= p.vocab) throw tk::Error("tk_embed: token " + std::to_string(ids[i]) + " does not exist");
            model->ops->matrix_row(p.embed.w, ids[i], p.embed_scale, row.data());
            if (p.embed.turned) model->ops->hadamard(row.data(), p.hidden);
            std::memcpy(to + i * p.hidden, row.data(), size_t(p.hidden) * sizeof(float));
        }
    });
}

// As for a model. TOOLKIT_NATIVE_PROFILE=1: it prints its profile when it is freed.
TK_EXPORT tk::Tower* tk_tower_create(const char* names, const double* values, int64_t count, const tk::TensorRecord* tensors,
                                     int64_t tensors_size, const char* isa, int64_t threads) {
    tk::Tower* tower = nullptr;
    guarded([&] {
        const tk::Ops* ops = ops_or_throw(isa);
        tk::TowerProgram program = tk::parse_tower(names, values, count, tensors, tensors_size, ops->bf16_dot);
        tower = new tk::Tower(std::move(program), ops, threads_or_throw(threads));
        tower->profile = new_profile();
    });
    return tower;
}

TK_EXPORT void tk_tower_free(tk::Tower* tower) { delete tower; }

TK_EXPORT int tk_tower_run(tk::Tower* tower, const tk::TowerArrays* in) {
    return guarded([&] { tower->run(*in); });
}

// Of tk::Join; null with tk_error().
TK_EXPORT tk::Join* tk_join_create(const char* names, const double* values, int64_t count, const tk::TensorRecord* tensors,
                                   int64_t tensors_size, const char* isa, int64_t threads) {
    tk::Join* join = nullptr;
    guarded([&] {
        const tk::Ops* ops = ops_or_throw(isa);
        join = new tk::Join(tk::parse_join(names, values, count, tensors, tensors_size, ops->bf16_dot), ops, threads_or_throw(threads));
    });
    return join;
}

TK_EXPORT void tk_join_free(tk::Join* join) { delete join; }

TK_EXPORT int tk_join_run(tk::Join* join, const float* from, int64_t rows, float* to) {
    return guarded([&] { join->run(from, rows, to); });
}

// Of tk::DraftHead; null with tk_error().
TK_EXPORT tk::DraftHead* tk_draft_create(const char* names, const double* values, int64_t count, const tk::TensorRecord* tensors,
                                         int64_t tensors_size, const char* isa, int64_t threads) {
    tk::DraftHead* head = nullptr;
    guarded([&] {
        const tk::Ops* ops = ops_or_throw(isa);
        head = new tk::DraftHead(tk::parse_draft(names, values, count, tensors, tensors_size, ops->bf16_dot), ops, threads_or_throw(threads));
    });
    return head;
}

TK_EXPORT void tk_draft_free(tk::DraftHead* head) { delete head; }

TK_EXPORT int tk_draft_step(tk::DraftHead* head, const tk::DraftArrays* in) {
    return guarded([&] { head->step(*in); });
}

// Fills `bytes` bytes at `data` with a matrix, which `to` describes, from what `from` points at.
TK_EXPORT int tk_pack(const tk::TensorRecord* to, uint8_t* data, const tk::PackSource* from, int64_t threads) {
    return guarded([&] { tk::pack_tiles(described(*to, data), *from, threads_or_throw(threads)); });
}

// The same to place `at` of an open file: 0, the system's error number where writing failed, -1 for another failure.
TK_EXPORT int tk_pack_file(const tk::TensorRecord* to, int file, int64_t at, const tk::PackSource* from, int64_t threads) {
    int error = 0;
    const int failed =
        guarded([&] { error = tk::write_tiles(described(*to, static_cast<uint8_t*>(const_cast<void*>(to->data))), *from, threads_or_throw(threads), file, at); });
    return failed ? -1 : error;
}
