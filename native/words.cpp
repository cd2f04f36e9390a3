// Words that processes say to each other in memory that they all see: counts that only grow.
//
// Whoever waits for one sleeps in the kernel, and is woken by whoever says it: no socket, and no third thread, lies between.
#include "common.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <ctime>

namespace thinwire {
namespace {

using Word = std::uint32_t;

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// All that was written before is there for whoever hears it.
void say(address word, Word count) {
    std::atomic_ref(*at<Word>(word)).store(count, std::memory_order_release);
    syscall(SYS_futex, at<Word>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Whether the word was said, `count` or a later one, before so many seconds had passed.
bool hear(address word, Word count, double seconds) {
    const double end = now() + seconds;
    for (;;) {
        const Word said = std::atomic_ref(*at<Word>(word)).load(std::memory_order_acquire);
        if (static_cast<std::int32_t>(said - count) >= 0) return true;
        const double left = end - now();
        if (left <= 0) return false;
        const timespec wait{static_cast<time_t>(left), static_cast<long>((left - std::floor(left)) * 1e9)};
        syscall(SYS_futex, at<Word>(word), FUTEX_WAIT, said, &wait, nullptr, 0);  // a signal, too, brings us back here
    }
}

}  // namespace

void bind_words(nb::module_& m) {
    m.def("say", say, without_gil());
    m.def("hear", hear, without_gil());
}

}  // namespace thinwire
#else
namespace thinwire {
void bind_words(nb::module_&) {}
}  // namespace thinwire
#endif
