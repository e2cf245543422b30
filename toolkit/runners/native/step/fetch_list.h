// Memory that is fetched a share at a time, between other work.
#pragma once

#include <algorithm>
#include <vector>

#include "ops.h"

namespace tk {

class FetchList {
public:
    void clear() {
        list_.clear();  // its memory stays: this is called in every layer
        next_ = 0, done_ = bytes_ = share_ = 0;
    }
    void add(const Matrix& w) {
        list_.push_back({w.data, w.bytes()});
        bytes_ += w.bytes();
    }
    // `step` will be called so many times; the list may be over before.
    void begin(int64_t times) { share_ = bytes_ / 64 / std::max<int64_t>(times, 1) + 1; }
    void step() {
        for (int64_t lines = share_; lines > 0 && next_ < list_.size(); lines--) {
            fetch_to_l2(list_[next_].at + done_);
            if ((done_ += 64) >= list_[next_].bytes) next_++, done_ = 0;
        }
    }

private:
    std::vector<Later> list_;
    size_t next_ = 0;
    int64_t done_ = 0, bytes_ = 0, share_ = 0;
};

}  // namespace tk
