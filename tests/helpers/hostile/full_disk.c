/* A disk that is full: from its FULL_AFTER-th write below the folder FULL_UNDER on, every write there fails. Preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long writes;

static int is_full(void) {
    const char *after = getenv("FULL_AFTER");
    if (__sync_add_and_fetch(&writes, 1) <= atol(after)) return 0;
    errno = ENOSPC;
    return 1;
}

static int below(const char *path) {
    const char *folder = getenv("FULL_UNDER");
    return folder && strncmp(path, folder, strlen(folder)) == 0;
}

static int full_descriptor(int descriptor) {
    char name[32], path[PATH_MAX];
    if (!getenv("FULL_UNDER")) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path) && is_full();
}

static int full_path(const char *path) {
    char whole[PATH_MAX + 2];
    if (!path || !getenv("FULL_UNDER")) return 0;
    if (path[0] == '/') return below(path) && is_full();
    if (!getcwd(whole, PATH_MAX / 2)) return 0;
    snprintf(whole + strlen(whole), PATH_MAX / 2, "/%s", path);
    return below(whole) && is_full();
}

#define REAL(result, name, ...)                                         \
    static result (*real)(__VA_ARGS__);                                 \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

ssize_t write(int descriptor, const void *bytes, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    return full_descriptor(descriptor) ? -1 : real(descriptor, bytes, count);
}
ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t at) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    return full_descriptor(descriptor) ? -1 : real(descriptor, bytes, count, at);
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t at) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    return full_descriptor(descriptor) ? -1 : real(descriptor, bytes, count, at);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return full_descriptor(descriptor) ? -1 : real(descriptor, parts, count);
}
size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    return full_descriptor(fileno(file)) ? 0 : real(bytes, size, count, file);
}
int fsync(int descriptor) {
    REAL(int, fsync, int);
    return full_descriptor(descriptor) ? -1 : real(descriptor);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return full_path(path) ? -1 : real(path, mode);
}

#define OPENS(name, parameters, arguments, path)                        \
    int name parameters {                                               \
        static int (*real) parameters;                                  \
        if (!real) real = (int (*) parameters)dlsym(RTLD_NEXT, #name);  \
        mode_t mode = 0;                                                \
        if (flags & O_CREAT) {                                          \
            va_list more;                                               \
            va_start(more, flags);                                      \
            mode = va_arg(more, mode_t);                                \
            va_end(more);                                               \
            if (access(path, F_OK) && full_path(path)) return -1;       \
        }                                                               \
        return real arguments;                                          \
    }
OPENS(open, (const char *path, int flags, ...), (path, flags, mode), path)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), path)
OPENS(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), path)
OPENS(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), path)
