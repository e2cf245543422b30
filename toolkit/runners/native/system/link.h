// Ranks: processes on one machine that run the same steps, each its part of every layer. What one has made the others take from
// memory that all have mapped. A rank writes its part, says so, and waits until all have said so; parts lie in two places by
// turns, so that nobody writes where another still reads.
//
// Waiting spins for as long as a pool's threads do (pool.h) before it sleeps, and leaves the core to others then. A rank that is
// lost would be waited for without end: whoever finds that out says so to all (`lose`), from then on nobody waits, what is
// computed is nonsense, and the step fails when it is over.
#pragma once

#include <atomic>
#include <cstdint>

namespace tk {

class Link {
public:
    // `fd`: shared memory, the same for all ranks, which becomes large enough for parts of `bytes` bytes. No step of any rank may
    // be under way. Raises Error.
    Link(int fd, int64_t bytes, int64_t ranks);
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Meetings of a rank are numbered from 1 on, all ranks have the same in the same order. Where the parts of one lie:
    uint8_t* place(uint32_t meeting) const { return data_ + (meeting & 1) * bytes_; }
    // This rank's part is there: called by one of its threads.
    void arrive();
    // All parts are there: by all its threads.
    void wait(uint32_t meeting);

    void lose();
    bool lost() const;

private:
    struct Head {
        alignas(64) std::atomic<uint32_t> arrived;  // ranks, in all meetings
        alignas(64) std::atomic<uint32_t> sleepers;
        std::atomic<uint32_t> lost;
    };
    Head* head_;
    uint8_t* data_;
    int64_t bytes_, size_;
    uint32_t ranks_, before_;  // before_: of models that were joined here before
};

}  // namespace tk
