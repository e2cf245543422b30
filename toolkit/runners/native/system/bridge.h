// Joins the memory of one machine's ranks to other machines': once all ranks here have come to a meeting (link.h) it packs what
// they have written into a message for the others, writes what the others' messages bring, and counts their ranks in.
//
// Nobody writes where another still reads: of ranks here none comes to a meeting before the bridge has counted the others in at the
// one before, so all have taken what lies in the place of the one before that. A machine that runs ahead waits with its next
// message, for nobody takes it before this meeting is over.
#pragma once

#include <cstdint>
#include <memory>

#include "system/link.h"

namespace tk {

class Bridge {
public:
    // `file`: the memory of ranks [first, first + here) of `ranks`; it stays the caller's. Comes before any of them joins. Raises Error.
    Bridge(int file, int64_t ranks, int64_t first, int64_t here);
    // Until the ranks here have come to the next meeting: how many bytes a message has at most, or 0 where a rank is lost.
    int64_t wait();
    // Their message; how many bytes it has.
    int64_t pack(uint8_t* to) const;
    // That of another machine, in a buffer for the longest. Raises Error where it is no such message.
    void unpack(const uint8_t* from);
    // All messages have been unpacked: the ranks here go on.
    void arrive();
    void lose() { link_->lose(); }

private:
    struct Head {
        int64_t size, meeting, first;
    };
    int64_t head_size() const { return int64_t(sizeof(Head)) + here_ * int64_t(sizeof(Posted)); }
    int64_t most() const { return head_size() + link_->bytes_; }
    int file_;
    int64_t ranks_, first_, here_;
    std::unique_ptr<Link> link_;
    uint32_t over_ = 0;     // ranks that have come to meetings that are over
    uint32_t meeting_ = 0;  // under way
};

}  // namespace tk
