/* Calls functions of libraries for another processor on behalf of a Python process, whose memory is fetched page by page
   as it is needed, to the same addresses; after each call what has changed is sent back. See foreign.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 16 };

static struct {
    uint64_t at;
    char *before; /* as it came */
} pages[MOST];
static int count;
static char locked;

static void take(void *to, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t some = read(0, (char *)to + done, size - done);
        if (some <= 0) _exit(0);
        done += some;
    }
}

static void give(const void *from, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t some = write(1, (const char *)from + done, size - done);
        if (some <= 0) _exit(1);
        done += some;
    }
}

static void give_word(int64_t word) { give(&word, sizeof word); }

static void fetch(int signal, siginfo_t *info, void *context) {
    const uint64_t at = (uint64_t)info->si_addr / PAGE * PAGE;
    while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE)) {}
    int known = 0;
    for (int i = 0; i < count; i++) known |= pages[i].at == at; /* another thread was first */
    if (!known) {
        char *two = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *before = two + PAGE;
        give_word('p'), give_word(at), take(two, PAGE);
        memcpy(before, two, PAGE);
        /* whole, or another thread could write to it before it is there */
        if (count == MOST || mremap(two, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != (void *)at) _exit(1);
        pages[count].at = at, pages[count++].before = before;
    }
    __atomic_clear(&locked, __ATOMIC_RELEASE);
}

static void give_back(void) {
    for (; count; count--) {
        char *now = (char *)pages[count - 1].at, *before = pages[count - 1].before;
        for (int first = 0, end; first < PAGE; first = end) {
            const int changed = now[first] != before[first];
            for (end = first + 1; end < PAGE && (now[end] != before[end]) == changed;) end++;
            if (changed) give_word('w'), give_word((int64_t)now + first), give_word(end - first), give(now + first, end - first);
        }
        munmap(now, PAGE), munmap(before, PAGE);
    }
}

typedef int64_t called(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, int64_t, int64_t);

int main(void) {
    struct sigaction handler = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &handler, 0);
    for (;;) {
        char name[PAGE] = "";
        int64_t handle, size, x[10], found;
        float y[2];
        take(&handle, sizeof handle);
        take(&size, sizeof size);
        if (handle) take(x, sizeof x), take(y, sizeof y); /* a function's address, and its arguments */
        else take(name, size);
        if (handle) {
            /* once more with all pages there: under qemu 7.2 what is fetched amid vectors' work may spoil it */
            for (int known = -1; known != count;) {
                known = count;
                for (int i = 0; i < count; i++) memcpy((void *)pages[i].at, pages[i].before, PAGE);
                found = ((called *)handle)(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], y[0], y[1], x[8], x[9]);
            }
            give_back();
        } else if (name[0] == '/') found = (int64_t)dlopen(name, RTLD_NOW);
        else found = (int64_t)dlsym((void *)strtoll(name, 0, 10), strchr(name, ' ') + 1);
        if (!handle && !found) fprintf(stderr, "%s\n", dlerror());
        give_word('r'), give_word(found);
    }
}
