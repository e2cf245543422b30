#include "system/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace tk {
namespace {

void futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Moves this thread off a core, to wherever else it may run.
void leave(int core) {
    cpu_set_t allowed, others;
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

// Keeps a worker on the index-th core of those that the process may use; where that is refused it stays free.
static void pin(std::thread& thread, int index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
        }
}

Pool::Pool(int threads) : size_(std::max(threads, 1)) {
    // The caller stays free: it takes the core that is left, and does not hand a narrowed mask on to threads of its own.
    const char* wanted = std::getenv("TOOLKIT_CPU_PIN");
    cpu_set_t allowed;
    const bool pinned = wanted && std::strcmp(wanted, "1") == 0 && sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
                        size_ <= CPU_COUNT(&allowed);
    for (int i = 1; i < size_; i++) {
        threads_.emplace_back(&Pool::work, this, i);
        if (pinned) pin(threads_.back(), i);
    }
}

Pool::~Pool() {
    stop_ = true;
    generation_.fetch_add(1);
    wake(generation_, generation_sleepers_);
    for (std::thread& t : threads_) t.join();
}

template <class Over>
void Pool::wait(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, Over over) {
    if (spin([&] { return over(word.load()); })) return;
    sleepers.fetch_add(1);
    for (uint32_t seen; !over(seen = word.load());) futex(&word, FUTEX_WAIT, seen);
    sleepers.fetch_sub(1);
    if (const int core = waker_.load(); core == sched_getcpu()) leave(core);
}

void Pool::wait_for(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t value) {
    wait(word, sleepers, [value](uint32_t now) { return now == value; });
}

void Pool::wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
    if (!sleepers.load()) return;
    waker_ = sched_getcpu();
    futex(&word, FUTEX_WAKE, INT_MAX);
}

void Pool::work(int index) {
    uint32_t seen = 0;
    for (;;) {
        wait(generation_, generation_sleepers_, [seen](uint32_t now) { return now != seen; });
        seen = generation_.load();
        if (stop_) return;
        active_.fetch_add(1);
        if (open_.load()) fn_(arg_, index);
        if (active_.fetch_sub(1) == 1) wake(active_, active_sleepers_);
    }
}

void Pool::run(void (*fn)(void*, int), void* arg, int64_t phases) {
    if (phases > capacity_) {
        counters_ = std::make_unique<Counter[]>(size_t(phases));
        capacity_ = phases;
    } else {
        for (int64_t i = 0; i < phases; i++) {
            counters_[size_t(i)].next.store(0, std::memory_order_relaxed);
            counters_[size_t(i)].done.store(0, std::memory_order_relaxed);
        }
    }
    if (size_ == 1) return fn(arg, 0);
    fn_ = fn;
    arg_ = arg;
    open_ = true;
    generation_.fetch_add(1);
    wake(generation_, generation_sleepers_);
    fn(arg, 0);
    // Who has not come by now need not come; who is inside must be out before the arguments and counters change.
    open_ = false;
    wait_for(active_, active_sleepers_, 0);
}

}  // namespace tk
