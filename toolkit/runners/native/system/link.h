// Ranks: processes that run the same steps, each its part of every layer. What one has made the others of its machine take from
// memory that all have mapped. A rank writes its part, says so, and waits until all have said so; parts lie in two places by
// turns, so that nobody writes where another still reads. Where there are more machines, each has such memory, and a bridge
// (bridge.h) writes there for the ranks of the others, which a rank cannot tell from its neighbours.
//
// Waiting spins for as long as a pool's threads do (pool.h) before it sleeps, and leaves the core to others then. A rank that is
// lost would be waited for without end: whoever finds that out says so to all (`lose`), from then on nobody waits, what is
// computed is nonsense, and the step fails when it is over.
#pragma once

#include <atomic>
#include <cstdint>

namespace tk {

// What a rank has written in a meeting: of arrays that lie one behind the other, of each row its bytes [first, last).
struct alignas(64) Posted {
    static constexpr int64_t MOST = 7;  // arrays; codes, scales and sums of experts and of a shared one are six
    struct Part {
        int64_t rows, width, first, last;
    };
    int64_t count;
    Part parts[MOST];
};

class Link {
public:
    // `fd`: shared memory, the same for all ranks, which becomes large enough for parts of `bytes` bytes. No step of any rank may
    // be under way. Raises Error.
    Link(int fd, int64_t bytes, int64_t ranks);
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Meetings of a rank are numbered from 1 on, all ranks have the same in the same order. Where the parts of one lie:
    uint8_t* place(uint32_t meeting) const { return data_ + (meeting & 1) * size_of_place() + posts_; }
    Posted& posted(uint32_t meeting, int64_t rank) const { return reinterpret_cast<Posted*>(data_ + (meeting & 1) * size_of_place())[rank]; }
    // This rank's part is there: called by one of its threads.
    void arrive(uint32_t meeting);
    // All parts are there: by all its threads.
    void wait(uint32_t meeting) { until(before_ + meeting * ranks_); }

    void lose();
    bool lost() const;

private:
    friend class Bridge;
    struct Head {
        alignas(64) std::atomic<uint32_t> arrived;  // ranks, in all meetings
        alignas(64) std::atomic<uint32_t> sleepers;
        std::atomic<uint32_t> lost;
        std::atomic<uint32_t> meeting;  // to which a rank came last
        std::atomic<int64_t> bytes;     // that a place has for parts
    };
    int64_t size_of_place() const { return posts_ + bytes_; }
    void until(uint32_t arrived);
    void count_in(uint32_t ranks);
    Head* head_;
    uint8_t* data_;
    int64_t bytes_, posts_, size_;
    uint32_t ranks_, before_;  // before_: of models that were joined here before
};

}  // namespace tk
