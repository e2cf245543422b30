// Threads that run one function together, each with its own index; the caller is thread 0.
//
// Between steps the workers sleep. Inside a step a barrier spins for at most 20 microseconds and then sleeps too, so
// that a second busy process gets its share of the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tk {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }
    // Calls fn(arg, index) on every thread; returns when all are done.
    void run(void (*fn)(void*, int), void* arg);
    // Every thread of a running function must call it equally often.
    void barrier();

private:
    struct alignas(64) Word {
        std::atomic<uint32_t> value{0};
    };
    static void wait_change(Word& word, Word& sleepers, uint32_t seen);
    static void wake(Word& word, Word& sleepers);
    void work(int index);

    int size_;
    Word generation_, generation_sleepers_, phase_, phase_sleepers_, arrived_;
    void (*fn_)(void*, int) = nullptr;
    void* arg_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

// Cores this process may use: its affinity mask, cut to the quota of its control group.
int usable_cores();

}  // namespace tk
