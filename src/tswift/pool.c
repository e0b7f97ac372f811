/* Threads that help with work that lies in a queue, and sleep as soon as there is none.

   OpenMP's threads all have to arrive before a region ends, and spin while they wait: with one core taken by another
   process a step took 40 times as long. Here nobody is waited for who has not begun: whoever calls does all the work that
   no helper takes, so a core that is busy elsewhere slows it by its share. A helper looks for work for some microseconds
   after it has had some, and sleeps then. */

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "vectors.h"

enum {
    MOST = 64,                /* helpers */
    AWAKE = 20000,            /* nanoseconds for which a helper looks for work */
    LOOKS = 64                /* at the job between two looks at the clock */
};

static struct {
    void (*work)(void *);
    void *given;
    uint32_t number;          /* of the job */
    uint32_t open;            /* how many more helpers may join it */
    uint32_t inside;          /* helpers at work, or about to see whether they may */
    uint32_t asleep;
    pid_t busy;               /* the process whose work is under way, or 0; after a fork amid it, the parent */
    uint32_t helpers;
    pid_t process;
    pthread_mutex_t lock;
    pthread_cond_t begun;     /* what helpers sleep on */
} pool;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void wait_for_job(uint32_t seen) {
    for (const int64_t until = now() + AWAKE; now() < until;)
        for (int look = 0; look < LOOKS; look++) {
            if (__atomic_load_n(&pool.number, __ATOMIC_ACQUIRE) != seen) return;
            relax();
        }
    pthread_mutex_lock(&pool.lock);
    __atomic_fetch_add(&pool.asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.number, __ATOMIC_SEQ_CST) == seen) pthread_cond_wait(&pool.begun, &pool.lock);
    __atomic_fetch_sub(&pool.asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.lock);
}

/* Take one of the places of a job, if it has any left. */
static int join(void) {
    uint32_t left = __atomic_load_n(&pool.open, __ATOMIC_SEQ_CST);
    while (left)
        if (__atomic_compare_exchange_n(&pool.open, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 1;
    return 0;
}

static void *help(void *first) {
    uint32_t seen = (uint32_t)(uintptr_t)first;
    for (;;) {
        wait_for_job(seen);
        seen = __atomic_load_n(&pool.number, __ATOMIC_SEQ_CST);
        /* first inside, then a place: whoever has closed the job waits until nobody is inside */
        __atomic_fetch_add(&pool.inside, 1, __ATOMIC_SEQ_CST);
        if (join()) pool.work(pool.given);
        __atomic_fetch_sub(&pool.inside, 1, __ATOMIC_SEQ_CST);
    }
    return 0;
}

static void recruit(uint32_t wanted, pid_t own) {
    if (pool.process != own) { /* after a fork the helpers are the parent's */
        pool.process = own;
        pool.helpers = pool.asleep = pool.inside = 0;
        pthread_mutex_init(&pool.lock, 0);
        pthread_cond_init(&pool.begun, 0);
    }
    for (; pool.helpers < wanted && pool.helpers < MOST; pool.helpers++) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &detached, help, (void *)(uintptr_t)pool.number);
        pthread_attr_destroy(&detached);
        if (failed) return; /* the work is done without it */
    }
}

/* Do work that any number of threads can do together, with up to `threads` of them; as OpenMP's GOMP_parallel. */
void tswift_parallel(void (*work)(void *), void *given, unsigned threads, unsigned flags) {
    (void)flags;
    const pid_t own = getpid();
    pid_t busy = __atomic_load_n(&pool.busy, __ATOMIC_SEQ_CST);
    if (threads < 2 || busy == own ||
        !__atomic_compare_exchange_n(&pool.busy, &busy, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        work(given);
        return;
    }
    recruit(threads - 1, own);
    pool.work = work, pool.given = given;
    __atomic_store_n(&pool.open, threads - 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&pool.number, 1, __ATOMIC_SEQ_CST);
    const uint32_t asleep = __atomic_load_n(&pool.asleep, __ATOMIC_SEQ_CST);
    if (asleep) {
        pthread_mutex_lock(&pool.lock); /* whoever is about to sleep does so now, and hears */
        pthread_mutex_unlock(&pool.lock);
        for (uint32_t woken = 0; woken < asleep && woken < threads - 1; woken++) pthread_cond_signal(&pool.begun);
    }
    work(given);
    __atomic_store_n(&pool.open, 0, __ATOMIC_SEQ_CST);
    for (int look = 0; __atomic_load_n(&pool.inside, __ATOMIC_SEQ_CST); look++)
        if (look < 2000) relax();
        else sched_yield(); /* a helper has lost its core amid its work */
    __atomic_store_n(&pool.busy, 0, __ATOMIC_SEQ_CST);
}
