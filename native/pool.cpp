// The threads that help kernels: kept from call to call, asleep while there is nothing to do.
//
// Whoever calls has its work listed, does it itself, and strikes it off; threads that are free take part meanwhile. Nobody
// ever waits for a thread that has not begun, so callers cannot block each other: where all threads are busy, a caller
// works alone. The pool is never destroyed: its threads sleep until the process ends. A forked child has none of them,
// and begins with an empty pool.
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "common.h"

namespace thinwire {
namespace {

struct Job {
    void (*const work)(void*);
    void* const with;
    int wanted;       // threads that may still join in
    int running = 0;  // threads that have, and are not done
    std::condition_variable done{};
    Job* next = nullptr;
};

class Pool {
   public:
    void run(Job& job) {
        const int wanted = job.wanted;
        std::unique_lock lock(mutex_);
        grow_to(wanted);
        job.next = jobs_;
        jobs_ = &job;
        lock.unlock();
        for (int thread = 0; thread < wanted; ++thread) woken_.notify_one();
        job.work(job.with);
        lock.lock();
        Job** place = &jobs_;
        while (*place != &job) place = &(*place)->next;
        *place = job.next;
        job.done.wait(lock, [&] { return job.running == 0; });
    }

   private:
    void grow_to(int threads) {
        try {
            for (; threads_ < threads; ++threads_) std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: those that run, and the caller, do all the work.
        }
    }

    [[noreturn]] void help() {
        std::unique_lock lock(mutex_);
        for (;;) {
            Job* job = jobs_;
            while (job && !job->wanted) job = job->next;
            if (!job) {
                woken_.wait(lock);
                continue;
            }
            --job->wanted;
            ++job->running;
            lock.unlock();
            job->work(job->with);
            lock.lock();
            if (--job->running == 0) job->done.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable woken_;
    Job* jobs_ = nullptr;
    int threads_ = 0;
};

Pool* const pool = [] {
    const auto made = new Pool;
    pthread_atfork(nullptr, nullptr, [] { new (pool) Pool; });  // the parent's threads, and what they locked, are not here
    return made;
}();

}  // namespace

void run_together(int threads, void (*work)(void*), void* with) {
    Job job{work, with, threads - 1};
    pool->run(job);
}

}  // namespace thinwire
