/* Calls of the system that fail when they are told to, for LD_PRELOAD on Linux.

   The file that FAULTS names is mapped into every process that is started with it, and says which
   call fails, how, and how often. What the C library calls inside itself is not seen. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum call { NONE, OPEN, WRITE, FORK, ACCEPT, MMAP, RENAME, GETRANDOM, CLOCK, THREAD };

/* Written by tests/provoked/faults.py, field for field. */
struct control {
    int32_t call;
    int32_t error;   /* an errno; 0 writes half of what is to be written */
    int32_t skipped; /* calls that still go well before the first that fails */
    int32_t left;    /* calls that still fail */
    int32_t waits;   /* for models.yaml to be opened: the start proper begins there */
    int32_t hits;    /* calls that failed */
    int64_t shift_s; /* of the clock that tells the date */
};

static struct control *control;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAULTS");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) {
        void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (found != MAP_FAILED)
            control = found;
    }
}

static int strikes(enum call call)
{
    if (control == NULL || control->waits || control->call != (int32_t)call || control->left <= 0)
        return 0;
    if (__atomic_fetch_sub(&control->skipped, 1, __ATOMIC_SEQ_CST) > 0)
        return 0;
    if (__atomic_fetch_sub(&control->left, 1, __ATOMIC_SEQ_CST) <= 0)
        return 0;
    __atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    errno = control->error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void note_open(const char *path)
{
    const char *end = control == NULL || path == NULL ? NULL : strstr(path, "models.yaml");
    if (end != NULL && end[strlen("models.yaml")] == '\0')
        control->waits = 0;
}

#define OPENS(name, first, given, path)                                                            \
    int name(first const char *path, int flags, ...)                                               \
    {                                                                                              \
        mode_t mode = 0;                                                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                       \
            va_list rest;                                                                          \
            va_start(rest, flags);                                                                 \
            mode = va_arg(rest, mode_t);                                                           \
            va_end(rest);                                                                          \
        }                                                                                          \
        note_open(path);                                                                           \
        return strikes(OPEN) ? -1 : REAL(name)(given path, flags, mode);                           \
    }
#define NOTHING
#define FOLDER int folder,
#define GIVEN_FOLDER folder,
OPENS(open, NOTHING, NOTHING, path)
OPENS(open64, NOTHING, NOTHING, path)
OPENS(openat, FOLDER, GIVEN_FOLDER, path)
OPENS(openat64, FOLDER, GIVEN_FOLDER, path)

static int is_on_disk(int file)
{
    struct stat found;
    return fstat(file, &found) == 0 && S_ISREG(found.st_mode);
}

ssize_t write(int file, const void *data, size_t size)
{
    if (!is_on_disk(file) || !strikes(WRITE))
        return REAL(write)(file, data, size);
    return control->error == 0 ? REAL(write)(file, data, (size + 1) / 2) : -1;
}

pid_t fork(void) { return strikes(FORK) ? -1 : REAL(fork)(); }

/* A frame of ours cannot be left by a child that shares it, so the real one is not called. */
pid_t vfork(void) { return strikes(FORK) ? -1 : REAL(fork)(); }

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const arguments[], char *const variables[])
{
    return strikes(FORK) ? errno
                         : REAL(posix_spawn)(pid, path, actions, attributes, arguments, variables);
}

int accept(int file, struct sockaddr *address, socklen_t *size)
{
    return strikes(ACCEPT) ? -1 : REAL(accept)(file, address, size);
}

int accept4(int file, struct sockaddr *address, socklen_t *size, int flags)
{
    return strikes(ACCEPT) ? -1 : REAL(accept4)(file, address, size, flags);
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    return strikes(MMAP) ? MAP_FAILED : REAL(mmap)(at, size, protection, flags, file, offset);
}

void *mmap64(void *at, size_t size, int protection, int flags, int file, off64_t offset)
{
    return strikes(MMAP) ? MAP_FAILED : REAL(mmap64)(at, size, protection, flags, file, offset);
}

int rename(const char *from, const char *to) { return strikes(RENAME) ? -1 : REAL(rename)(from, to); }

ssize_t getrandom(void *data, size_t size, unsigned flags)
{
    return strikes(GETRANDOM) ? -1 : REAL(getrandom)(data, size, flags);
}

static time_t shift(void)
{
    if (control == NULL || control->waits || control->call != CLOCK || control->left <= 0)
        return 0;
    control->hits++;
    return (time_t)control->shift_s;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = REAL(clock_gettime)(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return result;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *given)
{
    return strikes(THREAD) ? errno : REAL(pthread_create)(thread, attributes, run, given);
}
