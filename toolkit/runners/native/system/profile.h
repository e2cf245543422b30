// Where a step's time goes, seen from thread 0 (waiting at the barrier behind a phase included).
#pragma once

#include <chrono>
#include <cstdint>

namespace tk {

enum Phase { P_OTHER, P_EMBED, P_PREPARE, P_QKV, P_ROPE, P_ATTENTION, P_O, P_GATED, P_DOWN, P_MOE, P_STATE, P_HEAD, P_SAMPLE, P_GATHER, PHASES };

class Profile {
public:
    Profile() { last_ = std::chrono::steady_clock::now(); }
    ~Profile() { print(); }
    void start() { last_ = std::chrono::steady_clock::now(); steps_++; }
    void tick(Phase p) {
        const auto now = std::chrono::steady_clock::now();
        spent_[p] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }
    void print();  // to stderr, and starts anew

private:
    std::chrono::steady_clock::time_point last_;
    double spent_[PHASES] = {};
    int64_t steps_ = 0;
};

}  // namespace tk
