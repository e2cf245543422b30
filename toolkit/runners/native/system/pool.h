// Threads that run one function together, and the phases that the function is made of.
//
// A phase is cut into chunks that threads take one after the other; it is over when all its chunks are done, not when
// all threads have arrived. So a thread that another process keeps off its core holds up at most the chunk in its hand, and
// when it comes back it passes the phases that ended meanwhile. Between runs the workers sleep; waiting spins for at most 20
// microseconds before it sleeps. Who is woken on its waker's core would take that core from it for a slice of the system's,
// milliseconds, so it moves to another first.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace tk {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // yield does nothing on most cores
#endif
}

constexpr std::chrono::microseconds SPIN{20};

// Whether it is over() within the time that waiting spins.
template <class Over>
bool spin(Over&& over) {
    if (over()) return true;
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (over()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// One phase of a run: chunks taken, chunks done, threads asleep until it is over.
struct alignas(64) Counter {
    std::atomic<uint32_t> next{0}, done{0}, sleepers{0};
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls fn(arg, index) on the caller (index 0) and on every worker that comes in time. `phases`: how many counters fn
    // may use; all threads must go through the same phases in the same order.
    void run(void (*fn)(void*, int), void* arg, int64_t phases);

    // Takes chunks of phase `phase` until none is left, then waits for the others'. body(chunk); last() by whoever ends the last.
    template <class Body, class Last>
    void chunks(int64_t phase, uint32_t count, Body&& body, Last&& last) {
        Counter& c = counters_[size_t(phase)];
        for (uint32_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            body(i);
            if (c.done.fetch_add(1) + 1 != count) continue;
            last();
            wake(c.done, c.sleepers);
        }
        wait_for(c.done, c.sleepers, count);
    }
    template <class Body>
    void chunks(int64_t phase, uint32_t count, Body&& body) {
        chunks(phase, count, body, [] {});
    }

private:
    template <class Over>
    void wait(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, Over over);
    void wait_for(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t value);
    void wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers);
    void work(int index);

    int size_;
    std::unique_ptr<Counter[]> counters_;
    int64_t capacity_ = 0;
    alignas(64) std::atomic<uint32_t> generation_{0};
    std::atomic<uint32_t> generation_sleepers_{0};
    alignas(64) std::atomic<uint32_t> active_{0};  // workers inside fn, or about to look whether they may enter
    std::atomic<uint32_t> active_sleepers_{0};
    std::atomic<bool> open_{false}, stop_{false};
    std::atomic<int> waker_{-1};  // the core of who woke others last
    void (*fn_)(void*, int) = nullptr;
    void* arg_ = nullptr;
    std::vector<std::thread> threads_;
};

}  // namespace tk
