#include "team.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpins = 400;  // about 25 microseconds: longer than a barrier takes, shorter than a time slice
constexpr int kMostThreads = 256;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Team {
    pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
    int threads = 1, started = 0;
    int active = 1;             // members of the current job; the other threads only say that they are done
    uint32_t before_start = 0;  // the job that a new thread has not missed
    Signal job;
    Barrier barrier, done;
    void (*work)(void*, const Member&) = nullptr;
    void* argument = nullptr;
    pid_t owner = 0;  // threads do not survive a fork
};
Team team;

void* member_main(void* index_pointer) {
    const int index = (int)(intptr_t)index_pointer;
    uint32_t seen = team.before_start;
    for (;;) {
        team.job.wait_past(seen);
        seen = team.job.now();
        if (index < team.active) team.work(team.argument, Member{index, team.active, &team.barrier});
        team.done.wait();
    }
    return nullptr;
}

}  // namespace

void Signal::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
    if (parked_.load(std::memory_order_seq_cst) != 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1 << 30, 0, 0, 0);
#endif
}

void Signal::wait_past(uint32_t seen) {
    for (int i = 0; i < kSpins; i++) {
        if (now() != seen) return;
        relax();
    }
    while (now() == seen) {
#if defined(__linux__)
        parked_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        parked_.fetch_sub(1, std::memory_order_seq_cst);
#else
        usleep(50);
#endif
    }
}

void Barrier::wait() {
    const uint32_t seen = opened_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed), claimed_.store(0, std::memory_order_relaxed);
        opened_.advance();
    } else {
        opened_.wait_past(seen);
    }
}

int team_size() { return team.threads; }

void set_team_size(int threads) {
    pthread_mutex_lock(&team.in_use);
    team.threads = threads < 1 ? 1 : threads > kMostThreads ? kMostThreads : threads;
    pthread_mutex_unlock(&team.in_use);
}

void run_on_team(int most, void (*work)(void*, const Member&), void* argument) {
    if (most == 1) return work(argument, Member{0, 1, nullptr});  // nobody need wake up
    pthread_mutex_lock(&team.in_use);
    if (team.owner != getpid()) team.owner = getpid(), team.started = 0;
    const int wanted = most < team.threads ? most : team.threads;
    team.before_start = team.job.now();
    for (; team.started + 1 < wanted; team.started++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, member_main, (void*)(intptr_t)(team.started + 1)) != 0) break;
        pthread_detach(thread);
    }
    team.active = wanted < team.started + 1 ? wanted : team.started + 1;
    team.work = work, team.argument = argument;
    team.barrier.reset(team.active);
    team.done.reset(team.started + 1);
    if (team.started > 0) team.job.advance();
    work(argument, Member{0, team.active, &team.barrier});
    if (team.started > 0) team.done.wait();
    pthread_mutex_unlock(&team.in_use);
}
