#include "system/profile.h"

#include <cstdio>

namespace tk {

void Profile::print() {
    static const char* const names[PHASES] = {"other", "embed", "prepare", "qkv", "rope+kv", "attention",
                                              "o", "gate+up", "down", "moe", "state", "head", "sample", "gather"};
    double total = 0;
    for (double s : spent_) total += s;
    if (!steps_ || total <= 0) return;
    fprintf(stderr, "native: %lld steps, %.3f ms a step\n", (long long)steps_, 1e3 * total / double(steps_));
    for (int i = 0; i < PHASES; i++)
        if (spent_[i] > 0)
            fprintf(stderr, "  %-10s %8.3f ms  %5.1f %%\n", names[i], 1e3 * spent_[i] / double(steps_), 100 * spent_[i] / total);
    for (double& s : spent_) s = 0;
    steps_ = 0;
}

}  // namespace tk
