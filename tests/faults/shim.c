/* Preloaded into a command: counts its file-system calls below $FAULT_DIR, and does $FAULT_DO at call $FAULT_AT.
 *
 * FAULT_COUNTER  file of two longs: the calls so far, of all processes of the command, and the faults that were done
 * FAULT_DO       "kill": the process group gets SIGKILL before the call; "kill-one": only the process does; "short": a
 *                write writes half of its bytes; a number: the call fails with this errno
 * FAULT_LAST     the last call that fails (default: FAULT_AT); of a full disk, all that follow do
 * FAULT_WRITES   if set, only calls that need space count
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int (*open_)(const char *, int, ...);

static long *counter(void) {
    static long *shared;
    if (!shared) {
        if (!open_) open_ = dlsym(RTLD_NEXT, "open64");
        int fd = getenv("FAULT_COUNTER") ? open_(getenv("FAULT_COUNTER"), O_RDWR | O_CLOEXEC) : -1;
        if (fd < 0) return NULL;
        void *at = mmap(NULL, 2 * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) return NULL;
        shared = at;
    }
    return shared;
}

static int is_below(const char *path) {
    const char *folder = getenv("FAULT_DIR");
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static int is_below_fd(int fd, char *path, size_t size) {
    char link[32];
    if (!getenv("FAULT_DIR")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, size - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return is_below(path);
}

static void count_fault(void) {
    long *shared = counter();
    if (shared) __atomic_fetch_add(shared + 1, 1, __ATOMIC_SEQ_CST);
}

/* Count a call. Return 0 to make it, an errno to fail with, -1 to write less. */
static int fault(int needs_space) {
    if (getenv("FAULT_WRITES") && !needs_space) return 0;
    long *shared = counter();
    const char *what = getenv("FAULT_DO"), *first = getenv("FAULT_AT"), *last = getenv("FAULT_LAST");
    if (!shared) return 0;
    long n = __atomic_fetch_add(shared, 1, __ATOMIC_SEQ_CST);
    if (!what || !first || n < atol(first) || n > atol(last ? last : first)) return 0;
    if (!strcmp(what, "short")) return -1;
    count_fault();
    if (!strcmp(what, "kill")) kill(0, SIGKILL), pause();
    if (!strcmp(what, "kill-one")) kill(getpid(), SIGKILL), pause();
    return atoi(what);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(is_ours, needs_space) \
    do { int saved = errno, e = (is_ours) ? fault(needs_space) : 0; errno = saved; if (e > 0) { errno = e; return -1; } } while (0)
#define PATH_CALL(name, parameters, arguments, path, needs_space) \
    int name parameters { REAL(name); FAIL(is_below(path), needs_space); return real arguments; }
#define FD_CALL(name, parameters, arguments, needs_space) \
    int name parameters { REAL(name); char p[4096]; FAIL(is_below_fd(fd, p, sizeof p), needs_space); return real arguments; }

PATH_CALL(rename, (const char *a, const char *b), (a, b), a, 0)
PATH_CALL(renameat, (int x, const char *a, int y, const char *b), (x, a, y, b), a, 0)
PATH_CALL(renameat2, (int x, const char *a, int y, const char *b, unsigned f), (x, a, y, b, f), a, 0)
PATH_CALL(link, (const char *a, const char *b), (a, b), b, 1)
PATH_CALL(symlink, (const char *a, const char *b), (a, b), b, 1)
PATH_CALL(unlink, (const char *a), (a), a, 0)
PATH_CALL(rmdir, (const char *a), (a), a, 0)
PATH_CALL(mkdir, (const char *a, mode_t m), (a, m), a, 1)
FD_CALL(fsync, (int fd), (fd), 1)
FD_CALL(fdatasync, (int fd), (fd), 1)
FD_CALL(ftruncate, (int fd, off_t n), (fd, n), 1)
FD_CALL(ftruncate64, (int fd, off64_t n), (fd, n), 1)

int unlinkat(int folder, const char *a, int flags) {
    REAL(unlinkat);
    char p[4096];
    FAIL(*a == '/' ? is_below(a) : is_below_fd(folder, p, sizeof p), 0);
    return real(folder, a, flags);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        FAIL((flags & (O_CREAT | O_TRUNC)) && is_below(path), 1); \
        return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

#define WRITE(name, parameters, arguments, half) \
    ssize_t name parameters { \
        REAL(name); char p[4096]; int e = 0, saved = errno; \
        if (is_below_fd(fd, p, sizeof p)) e = fault(1); \
        errno = saved; \
        if (e > 0) { errno = e; return -1; } \
        if (e < 0 && n > 1) { count_fault(); return real half; } \
        return real arguments; }
WRITE(write, (int fd, const void *b, size_t n), (fd, b, n), (fd, b, (n + 1) / 2))
WRITE(pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), (fd, b, (n + 1) / 2, o))
WRITE(pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), (fd, b, (n + 1) / 2, o))
WRITE(writev, (int fd, const struct iovec *v, int n), (fd, v, n), (fd, v, (n + 1) / 2))

/* The clock jumps by $CLOCK_JUMP seconds at $CLOCK_JUMP_AT, in seconds since 1970. */
static long jump(long now) {
    const char *by = getenv("CLOCK_JUMP"), *at = getenv("CLOCK_JUMP_AT");
    if (!by || !at || now < atol(at)) return 0;
    count_fault();
    return atol(by);
}

int clock_gettime(clockid_t id, struct timespec *t) {
    REAL(clock_gettime);
    int failed = real(id, t);
    if (!failed && id == CLOCK_REALTIME) t->tv_sec += jump(t->tv_sec);
    return failed;
}

time_t time(time_t *t) {
    REAL(time);
    time_t now = real(NULL);
    now += jump(now);
    if (t) *t = now;
    return now;
}
