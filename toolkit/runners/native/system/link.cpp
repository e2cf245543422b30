#include "system/link.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include "step/program.h"
#include "system/pool.h"

namespace tk {
namespace {

constexpr int64_t HEAD = 4096;        // bytes before the parts
constexpr long LOOK = 100 * 1000000;  // ns after which a sleeper looks again whether somebody is lost: `lose` may come before it sleeps

int64_t pages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Of several processes: not private.
void sleep_on(std::atomic<uint32_t>* word, uint32_t value) {
    const timespec most{0, LOOK};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &most, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) { syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

Link::Link(int fd, int64_t bytes, int64_t ranks)
    : bytes_(pages(bytes)), posts_(pages(ranks * int64_t(sizeof(Posted)))), ranks_(uint32_t(ranks)) {
    static_assert(sizeof(Head) <= HEAD && std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);
    size_ = HEAD + 2 * size_of_place();
    auto failed = [](const char* what) { return Error(std::string("memory of several ranks: ") + what + ": " + std::strerror(errno)); };
    struct stat now;
    if (fstat(fd, &now) != 0) throw failed("not open");
    if (now.st_size < size_ && ftruncate(fd, size_) != 0) throw failed("no room");
    void* all = mmap(nullptr, size_t(size_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (all == MAP_FAILED) throw failed("not mapped");
    head_ = static_cast<Head*>(all);
    data_ = static_cast<uint8_t*>(all) + HEAD;
    before_ = head_->arrived.load();
    if (bytes_) head_->bytes.store(bytes_);
}

Link::~Link() { munmap(head_, size_t(size_)); }

void Link::arrive(uint32_t meeting) {
    head_->meeting.store(meeting, std::memory_order_relaxed);
    count_in(1);
}

void Link::count_in(uint32_t ranks) {
    head_->arrived.fetch_add(ranks);
    if (head_->sleepers.load()) wake_all(&head_->arrived);
}

void Link::until(uint32_t arrived) {
    auto over = [&] { return int32_t(head_->arrived.load() - arrived) >= 0 || lost(); };
    if (spin(over)) return;
    head_->sleepers.fetch_add(1);
    for (uint32_t seen;;) {
        seen = head_->arrived.load();
        if (over()) break;
        sleep_on(&head_->arrived, seen);
    }
    head_->sleepers.fetch_sub(1);
}

void Link::lose() {
    head_->lost.store(1);
    wake_all(&head_->arrived);
}

bool Link::lost() const { return head_->lost.load() != 0; }

}  // namespace tk
