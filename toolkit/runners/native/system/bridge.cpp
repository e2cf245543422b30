#include "system/bridge.h"

#include <cstring>

#include "step/program.h"

namespace tk {

Bridge::Bridge(int file, int64_t ranks, int64_t first, int64_t here)
    : file_(file), ranks_(ranks), first_(first), here_(here), link_(std::make_unique<Link>(file, 0, ranks)) {
    if (here < 1 || first < 0 || first % here || ranks % here || first + here > ranks) throw Error("bridge: ranks do not divide");
}

int64_t Bridge::wait() {
    link_->until(over_ + uint32_t(here_));
    if (link_->lost()) return 0;
    meeting_ = link_->head_->meeting.load();
    if (const int64_t bytes = link_->head_->bytes.load(); bytes != link_->bytes_) link_ = std::make_unique<Link>(file_, bytes, ranks_);
    return most();
}

int64_t Bridge::pack(uint8_t* to) const {
    const uint8_t* place = link_->place(meeting_);
    uint8_t* at = to + head_size();
    for (int64_t rank = first_; rank < first_ + here_; rank++) {
        const Posted& posted = link_->posted(meeting_, rank);
        std::memcpy(to + sizeof(Head) + (rank - first_) * int64_t(sizeof(Posted)), &posted, sizeof(Posted));
        const uint8_t* row = place;
        for (int64_t i = 0; i < posted.count; i++) {
            const Posted::Part& part = posted.parts[i];
            const int64_t own = part.last - part.first;
            for (int64_t t = 0; t < part.rows; t++, row += part.width, at += own) std::memcpy(at, row + part.first, size_t(own));
        }
    }
    const Head head{at - to, meeting_, first_};
    std::memcpy(to, &head, sizeof head);
    return head.size;
}

void Bridge::unpack(const uint8_t* from) {
    Head head;
    std::memcpy(&head, from, sizeof head);
    const bool other = head.first >= 0 && head.first < ranks_ && head.first % here_ == 0 && head.first != first_;
    if (!other || head.size < head_size() || head.size > most()) throw Error("another machine's ranks have sent no message of ranks");
    if (head.meeting != meeting_)
        throw Error("another machine's ranks are at meeting " + std::to_string(head.meeting) + ", those here at " + std::to_string(meeting_));
    const uint8_t *at = from + head_size(), *end = from + head.size;
    uint8_t* const place = link_->place(meeting_);
    for (int64_t rank = 0; rank < here_; rank++) {
        Posted posted;
        std::memcpy(&posted, from + sizeof(Head) + rank * int64_t(sizeof(Posted)), sizeof posted);
        if (posted.count < 0 || posted.count > Posted::MOST) throw Error("another machine's ranks have sent too many arrays");
        int64_t before = 0;
        for (int64_t i = 0; i < posted.count; i++) {
            const Posted::Part& part = posted.parts[i];
            const int64_t own = part.last - part.first, room = link_->bytes_ - before;
            const bool fits = part.rows >= 0 && part.first >= 0 && own >= 0 && part.last <= part.width && part.width > 0 &&
                              part.rows <= room / part.width && (own == 0 || part.rows <= (end - at) / own);
            if (!fits) throw Error("another machine's ranks have sent an array that does not fit");
            for (int64_t t = 0; t < part.rows; t++, at += own) std::memcpy(place + before + t * part.width + part.first, at, size_t(own));
            before += part.rows * part.width;
        }
    }
    if (at != end) throw Error("another machine's ranks have sent more than they say");
}

void Bridge::arrive() {
    over_ += uint32_t(ranks_);
    link_->count_in(uint32_t(ranks_ - here_));
}

}  // namespace tk
