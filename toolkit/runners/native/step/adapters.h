// LoRA adapters: what they make of the linears that they change, for the rows of a step that have one.
//
// A row's number is made by the same operations whatever shares the step: the base linear is computed for all rows together,
// and what a row's adapter adds is added to that row alone, by kernels whose results do not depend on the number of rows.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "step/fetch_list.h"
#include "step/program.h"
#include "step/workspace.h"

namespace tk {

// What an adapter makes of one linear.
struct Change {
    Linear a, b;        // [inputs, rank], [outputs, rank]: x a b^T is added, unless they are absent
    Vector steps;       // of codes: a is [rank, inputs], read with what the linear reads, and (x a^T) * steps is rounded for b
    Linear whole;       // in place of the linear
    Vector magnitudes;  // what W x + b(a(x)) is multiplied by, by outputs
    bool adds() const { return !whole.present() && !magnitudes; }
    bool low() const { return a.present(); }
    bool coded() const { return low() && a.w.format == INT; }
};

struct Adapter {
    std::vector<std::unique_ptr<Change>> changes;  // by the site of the linear; null = none
    std::vector<float> held;                       // magnitudes
    const Change* at(int site) const { return site < 0 ? nullptr : changes[size_t(site)].get(); }
};

using Adapters = std::vector<const Adapter*>;  // of rows; null = none

// Products of the rows of a chunk with a, as floats and as codes where b has codes. Threads that share the tiles of a linear share its rows out too: whoever comes first makes a
// row's product, the others find it.
class Lowered {
public:
    static constexpr int64_t PLACES = 8;  // more than linears of one phase that read the same row
    // Room for `rows` rows of products of rank `rank`; what it held is lost.
    void grow(int64_t rows, int64_t rank);
    // Rows come `times` times that are made anew each: the last time is number `serial()`, those before count down.
    void begin(uint64_t times = 1) { serial_ += times; }
    uint64_t serial() const { return serial_; }
    // Of the row, and those behind it.
    InputBuffer rows(int site, int64_t row) const;
    // Whether the caller is to make the product of the row, or of the rows from it on that are always made together.
    bool claim(uint64_t serial, int site, int64_t row);
    void made(uint64_t serial, int site, int64_t row);
    void wait(uint64_t serial, int site, int64_t row) const;

private:
    int64_t groups() const { return ld_ / LANES; }  // at most
    static uint64_t mark(uint64_t serial, int site) { return (serial << 24 | uint64_t(site)) << 1; }
    std::atomic<uint64_t>& state(int site, int64_t row) const { return states_[size_t(site % PLACES * rows_ + row)]; }
    int64_t rows_ = 0, ld_ = 0;
    uint64_t serial_ = 1;
    Pages numbers_, codes_, scales_, sums_;
    std::unique_ptr<std::atomic<uint64_t>[]> states_;
};

// Adapters of a model by their slots, and what steps with them need.
struct AdapterTable {
    static constexpr int64_t SLOTS = 1 << 16;
    std::vector<std::unique_ptr<Adapter>> slots;
    Lowered lowered;
    int64_t rank = 0;
    struct Scratch {
        std::vector<uint8_t> linear;
        Pages half;  // [CHUNK][STRIPE] of one half of a gated product, then as much of a product that is scaled
        std::vector<std::pair<int64_t, int64_t>> runs;
        std::vector<Later> later;
        std::vector<float> padded;  // a row of inputs
        FetchList coming;
    };
    std::vector<Scratch> threads;
    bool changes_experts = false;

    // Tensors come five a site: a, b, magnitudes or steps, whole, what columns count in the lengths of rows; those without data are
    // absent. Raises Error.
    void put(const Program& p, const Ops& ops, int64_t threads, int64_t slot, const int32_t* sites, const TensorRecord* tensors,
             int64_t count);
    void drop(int64_t slot);
    // Of tokens [first, first + count) of the step; empty where none has one. Raises Error for a slot that is empty.
    Adapters of_rows(const StepArrays& in, int64_t first, int64_t count) const;
};

}  // namespace tk
