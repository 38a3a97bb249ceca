// A team of threads that runs one function on every member. Members wait by spinning briefly, then parked in the
// kernel: an idle team costs nothing.
#pragma once

#include <atomic>
#include <cstdint>

// A counter that threads can wait on until it moves.
class Signal {
public:
    uint32_t now() const { return value_.load(std::memory_order_acquire); }
    void advance();
    void wait_past(uint32_t seen);

private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> parked_{0};
};

class Barrier {
public:
    void reset(int threads) {
        threads_ = threads;
        arrived_.store(0, std::memory_order_relaxed), claimed_.store(0, std::memory_order_relaxed);
    }
    void wait();
    int claim() { return claimed_.fetch_add(1, std::memory_order_relaxed); }  // 0, 1, 2, ... since the last wait

private:
    int threads_ = 1;
    std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> claimed_{0};
    Signal opened_;
};

struct Member {
    int index, threads;
    Barrier* barrier;

    void sync() const {
        if (threads > 1) barrier->wait();
    }
    // This member's share [first, last) of `count` things, in neighbouring runs of almost equal size.
    void share(int count, int& first, int& last) const {
        first = (int)((int64_t)count * index / threads);
        last = (int)((int64_t)count * (index + 1) / threads);
    }
    // work(i) for those i of [0, count) that come to this member: whoever is free takes the next, as cores are not all
    // equally fast. There is a sync between two such loops.
    template <class Work>
    void take_turns(int count, Work work) const {
        if (threads == 1) {
            for (int i = 0; i < count; i++) work(i);
            return;
        }
        for (int i; (i = barrier->claim()) < count;) work(i);
    }
};

int team_size();
void set_team_size(int threads);

// Runs work(argument, member) on up to `most` members, the caller among them; one call at a time, others wait.
// By itself the caller runs it at once.
void run_on_team(int most, void (*work)(void*, const Member&), void* argument);
