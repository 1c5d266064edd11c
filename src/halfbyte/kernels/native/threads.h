/* A thread pool for the pieces of a kernel's stage. Threads take the next free piece, and the caller waits only for
   pieces that have been started: a worker that is descheduled, or lost in a fork, does not block it. */

#ifndef HALFBYTE_THREADS
#define HALFBYTE_THREADS

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*stage)(const void *job, int64_t first, int64_t last);

enum { MOST_WORKERS = 63, SPINS = 2000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_flag taken = ATOMIC_FLAG_INIT; /* one caller at a time uses the workers; others run alone */
static int workers;
static atomic_int sleepers;
static _Atomic uint64_t ticket; /* number of the job << 32 | next piece */
static _Atomic int64_t finished, count, grain;
static _Atomic uint32_t pieces;
static _Atomic(stage) run_piece;
static _Atomic(const void *) job_of_all;

static inline __attribute__((always_inline)) void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take one piece and run it; 0 if none is left. The job's fields are valid if the ticket has not changed meanwhile. */
static int take(void) {
    uint64_t seen = atomic_load(&ticket);
    uint32_t piece = (uint32_t)seen;
    stage run = atomic_load(&run_piece);
    const void *job = atomic_load(&job_of_all);
    int64_t all = atomic_load(&count), step = atomic_load(&grain);
    if (piece >= atomic_load(&pieces)) return 0;
    if (!atomic_compare_exchange_strong(&ticket, &seen, seen + 1)) return 1;
    int64_t first = piece * step;
    run(job, first, first + step < all ? first + step : all);
    atomic_fetch_add(&finished, 1);
    return 1;
}

static inline __attribute__((always_inline)) int waiting(void) { return (uint32_t)atomic_load(&ticket) < atomic_load(&pieces); }

static void *work(void *unused) {
    for (int idle = 0;;) {
        if (waiting()) {
            take();
            idle = 0;
        } else if (++idle < SPINS) {
            pause_briefly();
        } else {
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&sleepers, 1);
            while (!waiting()) pthread_cond_wait(&wake, &lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&lock);
            idle = 0;
        }
    }
    return unused;
}

static void alone_again(void) { /* in a forked child */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    atomic_flag_clear(&taken);
    workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&pieces, 0);
}

static void hire(int wanted) {
    static int told;
    if (!told) told = !pthread_atfork(NULL, NULL, alone_again);
    for (; workers < wanted && workers < MOST_WORKERS; workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) return;
        pthread_detach(thread);
    }
}

/* Run run(job, first, last) over [0, all), in pieces of `step` on `threads` threads. */
static void spread(stage run, const void *job, int64_t all, int64_t step, int threads) {
    if (threads < 2 || all <= step || atomic_flag_test_and_set(&taken)) {
        run(job, 0, all);
        return;
    }
    if (workers < threads - 1) hire(threads - 1);
    atomic_store(&run_piece, run); /* no piece is left, so no worker takes one while these change */
    atomic_store(&job_of_all, job);
    atomic_store(&count, all);
    atomic_store(&grain, step);
    atomic_store(&finished, 0);
    uint32_t many = (uint32_t)((all + step - 1) / step);
    atomic_store(&pieces, 0);
    atomic_store(&ticket, ((atomic_load(&ticket) >> 32) + 1) << 32);
    atomic_store(&pieces, many);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    while (take()) {}
    for (int idle = 0; atomic_load(&finished) < many;) {
        if (++idle < SPINS) pause_briefly();
        else sched_yield(); /* another program may have the core of a worker that has started a piece */
    }
    atomic_flag_clear(&taken);
}

#endif
