/* Preloaded into a process, counts what its heap and its copies do, for a test to read while it runs.
 *
 * $MEMORY_WATCH/PID holds three 64-bit counters: bytes copied by memcpy and memmove in calls of at least COPY_FROM
 * bytes; allocations of more than $MEMORY_WATCH_LIMIT bytes; the largest of them. The test may set them to zero.
 * Python takes bytes and bytearrays of this size straight from malloc, and copies them with memcpy.
 * Build with -fno-builtin: the compiler would make calls to memcpy of the functions that stand in for it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define COPY_FROM 4096

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

static uint64_t here[3];
static volatile uint64_t *counters = here;
static uint64_t limit = UINT64_MAX;
static void *(*real_memmove)(void *, const void *, size_t);

__attribute__((constructor)) static void begin(void)
{
    const char *folder = getenv("MEMORY_WATCH"), *bytes = getenv("MEMORY_WATCH_LIMIT");
    char path[512];
    int fd;

    real_memmove = (void *(*)(void *, const void *, size_t))dlsym(RTLD_NEXT, "memmove");
    if (folder == NULL || bytes == NULL)
        return;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof here) != 0)
        return;
    counters = mmap(NULL, sizeof here, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (counters == MAP_FAILED) {
        counters = here;
        return;
    }
    limit = strtoull(bytes, NULL, 10);
}

static void note_allocation(size_t size)
{
    if (size <= limit)
        return;
    __atomic_fetch_add(&counters[1], 1, __ATOMIC_RELAXED);
    if (size > counters[2])
        counters[2] = size;
}

void *malloc(size_t size)
{
    note_allocation(size);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    note_allocation(size != 0 && count > SIZE_MAX / size ? SIZE_MAX : count * size);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    note_allocation(size);
    return __libc_realloc(old, size);
}

static void *copy(void *to, const void *from, size_t size)
{
    if (size >= COPY_FROM)
        __atomic_fetch_add(&counters[0], size, __ATOMIC_RELAXED);
    if (real_memmove != NULL)
        return real_memmove(to, from, size);
    /* Before the constructor ran. */
    volatile char *a = to;
    const volatile char *b = from;
    if (a < b)
        for (size_t i = 0; i < size; i++)
            a[i] = b[i];
    else
        while (size-- > 0)
            a[size] = b[size];
    return to;
}

void *memmove(void *to, const void *from, size_t size)
{
    return copy(to, from, size);
}

void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    return copy(to, from, size);
}
