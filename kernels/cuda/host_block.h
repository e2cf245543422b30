// One thread block on a CPU: every lane is a fiber that runs until it must wait for others.
//
// This is how g++ builds and runs the kernels' own source (see hardware.cuh). It is as strict as hardware may be: shared
// memory starts as NaN, asynchronous copies arrive at the latest moment that is allowed, and lanes run in an order that
// the caller chooses, so that a missing wait or barrier gives wrong numbers. It measures nothing.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace tk::host {

constexpr int LANES = 32;
constexpr size_t STACK = 128 * 1024;

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

// Waiting in rounds: the last of `size` to arrive does the work for all.
struct Meeting {
    int size = 0, arrived = 0;
    uint64_t round = 0;
};

struct WarpState {
    Meeting meeting;
    uint32_t a[LANES][4], b[LANES][2];
    float d[LANES][4];
};

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    std::vector<Copy> pending;
    std::deque<std::vector<Copy>> groups;
    bool waited = false;  // for the kernel before
};

struct Range {
    const void* start;
    size_t bytes;
};

struct Block {
    int x = 0, y = 0, z = 0, grid_x = 0, grid_y = 0, grid_z = 0, threads = 0, current = 0;
    bool backwards = false;
    std::vector<Range> late;  // memory of the kernel before: not to be touched by a lane that has not waited for it
    bool early = false;       // one did
    ucontext_t main;
    std::vector<Lane> lanes;
    std::vector<WarpState> warps;
    Meeting barrier;
    std::vector<unsigned char> shared;
    std::function<void(unsigned char*)> kernel;

    Lane& lane() { return lanes[current]; }

    void touch(const void* at, size_t bytes) {
        const auto address = reinterpret_cast<uintptr_t>(at);
        if (lane().waited) return;
        for (const Range& range : late) {
            const auto start = reinterpret_cast<uintptr_t>(range.start);
            if (address < start + range.bytes && start < address + bytes) early = true;
        }
    }

    void pause() { swapcontext(&lane().context, &main); }

    template <class Work>
    void meet(Meeting& meeting, Work work) {
        const uint64_t round = meeting.round;
        if (++meeting.arrived == meeting.size) {
            work();
            meeting.arrived = 0;
            ++meeting.round;
            return;
        }
        while (meeting.round == round) pause();
    }
};

inline Block*& block() {
    static thread_local Block* current = nullptr;
    return current;
}

inline void enter() {
    Block& b = *block();
    b.kernel(b.shared.data() + (16 - reinterpret_cast<uintptr_t>(b.shared.data()) % 16) % 16);
    b.lane().done = true;
    b.pause();
}

// Runs one block to its end; false where lanes wait for each other for ever.
inline bool run(Block& b, int shared_bytes) {
    block() = &b;
    b.shared.assign(shared_bytes + 16, 0xff);
    b.lanes.clear();
    b.lanes.resize(b.threads);
    b.warps.assign(b.threads / LANES, WarpState{});
    for (auto& warp : b.warps) warp.meeting.size = LANES;
    b.barrier = Meeting{b.threads, 0, 0};
    for (auto& lane : b.lanes) {
        lane.stack.reset(new char[STACK]);
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = STACK;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, enter, 0);
    }
    for (int left = b.threads; left > 0;) {
        uint64_t before = b.barrier.round, after = 0;
        for (auto& warp : b.warps) before += warp.meeting.round;
        const int left_before = left;
        for (int i = 0; i < b.threads; ++i) {
            b.current = b.backwards ? b.threads - 1 - i : i;
            if (b.lane().done) continue;
            swapcontext(&b.main, &b.lane().context);
            if (b.lane().done) --left;
        }
        after = b.barrier.round;
        for (auto& warp : b.warps) after += warp.meeting.round;
        if (after == before && left == left_before) return false;
    }
    return true;
}

// `value` rounded to nearest, ties to even, in a format with `mantissa` stored bits and this smallest normal exponent.
inline double round_to(double value, int mantissa, int lowest, double largest) {
    if (value == 0 || !std::isfinite(value)) return value;
    const int exponent = std::max(std::ilogb(value), lowest);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, mantissa - exponent)), exponent - mantissa);
    return std::fabs(rounded) > largest ? std::copysign(INFINITY, value) : rounded;
}

}  // namespace tk::host
