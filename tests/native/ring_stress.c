/* The ring and the slab by themselves, for the sanitizers: `scripts/sanitize` builds and runs this.
 *
 *   ring_stress threads     a producer and a consumer thread, checksums, doorbells, releases out of order
 *   ring_stress processes   the same with two processes
 *   ring_stress bells       one record at a time, committed just as the other side falls asleep: a litmus for the fence of ring_bell
 *   ring_stress kill        a process killed at every step between two stores; the survivor recovers and recycles
 *   ring_stress garbage     random bytes in shared memory: codes come back, nothing outside the memory is touched */
#define _GNU_SOURCE
#include "ring.h"
#include "slab.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                              \
        }                                                                         \
    } while (0)

enum { CAPACITY = 16384, HELD = 5, RECORDS = 100000 };

static uint64_t seed = 1;

static uint32_t random_below(uint64_t *state, uint32_t bound)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33) % bound;
}

static int fifo(void)
{
    char path[] = "/tmp/ring-stress-XXXXXX";
    CHECK(mkdtemp(path) != NULL);
    char name[64];
    snprintf(name, sizeof name, "%s/bell", path);
    CHECK(mkfifo(name, 0600) == 0);
    const int fd = open(name, O_RDWR | O_NONBLOCK);
    CHECK(fd >= 0 && unlink(name) == 0 && rmdir(path) == 0);
    return fd;
}

static uint8_t *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

struct fixture {
    uint8_t *memory;
    struct ring ring;
};

static struct fixture new_ring(void)
{
    struct fixture made = {.memory = shared_memory(RING_DATA + CAPACITY)};
    ring_format(made.memory, CAPACITY);
    CHECK(ring_open(&made.ring, made.memory, RING_DATA + CAPACITY, CAPACITY, fifo(), fifo()) == RING_OK);
    return made;
}

static void drop_ring(struct fixture *made)
{
    close(made->ring.data_fd);
    close(made->ring.space_fd);
    munmap(made->memory, RING_DATA + CAPACITY);
}

static void sleep_until(int fd)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    CHECK(poll(&waiting, 1, 20000) == 1); /* 0 is a lost wake-up */
}

/* ---- stress ---- */

static void fill(uint8_t *payload, uint64_t nbytes, uint32_t number)
{
    memset(payload, (int)(number % 251), nbytes);
    memcpy(payload, &number, nbytes < 4 ? nbytes : 4);
}

static void check(const uint8_t *payload, uint64_t nbytes, uint32_t number)
{
    uint8_t expected[CAPACITY];
    CHECK(nbytes <= sizeof expected);
    fill(expected, nbytes, number);
    CHECK(memcmp(payload, expected, nbytes) == 0);
}

static void *produce(void *argument)
{
    struct fixture *made = argument;
    uint64_t state = seed;
    struct ring_span span, waiting = {0};
    for (uint32_t number = 0; number < RECORDS;) {
        const uint64_t nbytes = 1 + random_below(&state, (uint32_t)ring_max_record(&made->ring));
        int code;
        while ((code = ring_claim(&made->ring, nbytes, &span)) == RING_FULL) {
            if (waiting.nbytes != 0) {
                CHECK(ring_commit(&made->ring, waiting.position, waiting.epoch) == RING_OK);
                waiting.nbytes = 0;
            }
            ring_clear_space_bell(&made->ring);
            if ((code = ring_claim(&made->ring, nbytes, &span)) != RING_FULL)
                break;
            sleep_until(made->ring.space_fd);
        }
        CHECK(code == RING_OK);
        const int aborted = random_below(&state, 8) == 0;
        if (!aborted)
            fill(made->memory + span.offset, nbytes, number++);
        /* Every second record is committed after the one that follows it. */
        if (!aborted && waiting.nbytes == 0 && random_below(&state, 2) == 0) {
            waiting = span;
            continue;
        }
        CHECK((aborted ? ring_abort : ring_commit)(&made->ring, span.position, span.epoch) == RING_OK);
        if (waiting.nbytes != 0)
            CHECK(ring_commit(&made->ring, waiting.position, waiting.epoch) == RING_OK);
        waiting.nbytes = 0;
    }
    if (waiting.nbytes != 0)
        CHECK(ring_commit(&made->ring, waiting.position, waiting.epoch) == RING_OK);
    return NULL;
}

static void release_one(struct fixture *made, struct ring_span *held, int *count, uint64_t *state)
{
    const uint32_t chosen = random_below(state, (uint32_t)*count);
    CHECK(ring_release(&made->ring, held[chosen].position, held[chosen].epoch) == RING_OK);
    held[chosen] = held[--*count];
}

static void *consume(void *argument)
{
    struct fixture *made = argument;
    uint64_t state = seed + 1;
    struct ring_span held[HELD];
    int count = 0;
    for (uint32_t number = 0; number < RECORDS;) {
        const int code = ring_read(&made->ring, &held[count]);
        if (code == RING_OK) {
            check(made->memory + held[count].offset, held[count].nbytes, number++);
            count++;
        }
        if (count == HELD || (code == RING_EMPTY && count > 0)) {
            release_one(made, held, &count, &state);
            continue;
        }
        CHECK(code == RING_OK || code == RING_EMPTY);
        if (code == RING_EMPTY) {
            ring_clear_data_bell(&made->ring);
            if ((ring_read(&made->ring, &held[0])) == RING_EMPTY)
                sleep_until(made->ring.data_fd);
            else {
                check(made->memory + held[0].offset, held[0].nbytes, number++);
                count = 1;
            }
        }
    }
    while (count > 0)
        release_one(made, held, &count, &state);
    return NULL;
}

static void stress_threads(void)
{
    struct fixture made = new_ring();
    pthread_t producer, consumer;
    CHECK(pthread_create(&producer, NULL, produce, &made) == 0);
    CHECK(pthread_create(&consumer, NULL, consume, &made) == 0);
    CHECK(pthread_join(producer, NULL) == 0 && pthread_join(consumer, NULL) == 0);
    CHECK(ring_recycle(&made.ring) == CAPACITY);
    drop_ring(&made);
}

static int wait_for(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void stress_processes(void)
{
    struct fixture made = new_ring();
    const pid_t child = fork();
    if (child == 0) {
        produce(&made);
        _exit(0);
    }
    consume(&made);
    CHECK(wait_for(child) == 0);
    CHECK(ring_recycle(&made.ring) == CAPACITY);
    drop_ring(&made);
}

/* ---- bells ---- */

enum { NAPS = 300000 };

static _Atomic uint32_t naps;

static void spin(uint64_t *state, uint32_t bound)
{
    for (volatile uint32_t i = random_below(state, bound); i > 0; i--)
        ;
}

static void *wake(void *argument)
{
    struct fixture *made = argument;
    struct ring_span span;
    uint64_t state = 3;
    for (uint32_t number = 0; number < NAPS; number++) {
        while (atomic_load(&naps) != number)
            ;
        spin(&state, 800); /* about as long as the other side needs to clear its bell and look */
        CHECK(ring_claim(&made->ring, 8, &span) == RING_OK);
        CHECK(ring_commit(&made->ring, span.position, span.epoch) == RING_OK);
    }
    return NULL;
}

static void bells(void)
{
    struct fixture made = new_ring();
    struct ring_span span;
    pthread_t waker;
    uint64_t state = 4;
    CHECK(pthread_create(&waker, NULL, wake, &made) == 0);
    for (uint32_t number = 0; number < NAPS; number++) {
        atomic_store(&naps, number);
        spin(&state, 20);
        for (;;) {
            ring_clear_data_bell(&made.ring);
            if (ring_read(&made.ring, &span) == RING_OK)
                break;
            sleep_until(made.ring.data_fd);
        }
        CHECK(ring_release(&made.ring, span.position, span.epoch) == RING_OK);
    }
    CHECK(pthread_join(waker, NULL) == 0);
    drop_ring(&made);
}

/* ---- kill ---- */

static int is_wiped(const uint8_t *data, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        if (data[i] != 0)
            return 0;
    return 1;
}

static struct ring_span push(struct fixture *made, uint64_t nbytes, uint32_t number)
{
    struct ring_span span;
    CHECK(ring_claim(&made->ring, nbytes, &span) == RING_OK);
    fill(made->memory + span.offset, nbytes, number);
    CHECK(ring_commit(&made->ring, span.position, span.epoch) == RING_OK);
    return span;
}

/* The next claim of 1000 bytes has to wrap; one record, number 7, lies unread before it. */
static void bring_to_the_wrap(struct fixture *made)
{
    struct ring_span span;
    const uint64_t each = ring_record_bytes(1000);
    for (uint64_t used = 0; used + 2 * each <= CAPACITY; used += each) {
        push(made, 1000, 1);
        CHECK(ring_read(&made->ring, &span) == RING_OK);
        CHECK(ring_release(&made->ring, span.position, span.epoch) == RING_OK);
    }
    push(made, 1000, 7);
}

static void die_producing(struct fixture *made, int abort_it)
{
    struct ring_span span;
    ring_claim(&made->ring, 1000, &span);
    fill(made->memory + span.offset, 1000, 8);
    (abort_it ? ring_abort : ring_commit)(&made->ring, span.position, span.epoch);
}

static void die_producing_a_record(struct fixture *made)
{
    die_producing(made, 0);
}

static void die_aborting(struct fixture *made)
{
    die_producing(made, 1);
}

static void die_consuming(struct fixture *made)
{
    struct ring_span first, second;
    ring_read(&made->ring, &first);
    ring_read(&made->ring, &second);
    ring_release(&made->ring, second.position, second.epoch);
    ring_release(&made->ring, first.position, first.epoch);
}

static void die_recycling(struct fixture *made)
{
    struct ring_span span;
    while (ring_read(&made->ring, &span) == RING_OK)
        ring_release(&made->ring, span.position, span.epoch);
    ring_recycle(&made->ring);
}

static void killed(const char *step, void (*act)(struct fixture *), struct fixture *made)
{
    const pid_t child = fork();
    if (child == 0) {
        strncpy(ring_test_stop_at, step, sizeof ring_test_stop_at - 1);
        act(made);
        _exit(0);
    }
    const int status = wait_for(child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
        fprintf(stderr, "step %s was not reached\n", step);
        abort();
    }
}

static void survive(const char *step, int dead, void (*act)(struct fixture *))
{
    struct fixture made = new_ring();
    struct ring_span span;
    bring_to_the_wrap(&made);
    if (dead == RING_CONSUMER)
        push(&made, 1000, 8);
    ring_clear_data_bell(&made.ring); /* both armed: the victim's next event rings */
    ring_clear_space_bell(&made.ring);
    killed(step, act, &made);
    CHECK(ring_recover(&made.ring, dead) >= 0);
    sleep_until(dead == RING_PRODUCER ? made.ring.data_fd : made.ring.space_fd);
    for (uint32_t number = 7; ring_read(&made.ring, &span) == RING_OK; number++) {
        check(made.memory + span.offset, span.nbytes, number);
        CHECK(number <= 8);
        CHECK(ring_release(&made.ring, span.position, span.epoch) == RING_OK);
    }
    CHECK(ring_used(&made.ring) == 0 || act == die_recycling);
    CHECK(ring_recycle(&made.ring) >= 0);
    CHECK(is_wiped(made.memory + RING_DATA, CAPACITY));
    push(&made, 1000, 9);
    CHECK(ring_read(&made.ring, &span) == RING_OK);
    check(made.memory + span.offset, span.nbytes, 9);
    drop_ring(&made);
}

static void survive_slab(const char *step)
{
    uint8_t *memory = shared_memory(SLAB_DATA + CAPACITY);
    slab_format(memory, CAPACITY);
    struct slab_descriptor *slab = slab_open(memory, SLAB_DATA + CAPACITY, CAPACITY);
    CHECK(slab != NULL);
    const pid_t child = fork();
    if (child == 0) {
        strncpy(ring_test_stop_at, step, sizeof ring_test_stop_at - 1);
        CHECK(slab_claim(slab, 77));
        slab_touch(slab, CAPACITY);
        memset(memory + SLAB_DATA, 0xee, CAPACITY);
        slab_release(slab, 77);
        _exit(0);
    }
    CHECK(WIFSIGNALED(wait_for(child)));
    CHECK(slab_owner(slab) == 0 || slab_release(slab, 77) >= 0);
    CHECK(is_wiped(memory + SLAB_DATA, CAPACITY) && slab_claim(slab, 78));
    munmap(memory, SLAB_DATA + CAPACITY);
}

static void kill_everywhere(void)
{
    const char *producing[] = {"claim-touched", "claim-padded",     "claim-headed", "claim-done",
                               "commit-begun",  "commit-published", "bell-taken",   "bell-rung"};
    const char *consuming[] = {"read-moved", "read-skipped", "release-marked", "release-head", "release-freed",
                               "bell-taken", "bell-rung"};
    const char *recycling[] = {"recycle-epoch", "recycle-wiped", "recycle-untouched",
                               "recycle-head",  "recycle-read",  "recycle-tail"};
    const char *slab[] = {"slab-claimed", "slab-release-begun", "slab-wiped", "slab-untouched", "slab-released"};
    for (size_t i = 0; i < sizeof producing / sizeof *producing; i++)
        survive(producing[i], RING_PRODUCER, die_producing_a_record);
    survive("abort-marked", RING_PRODUCER, die_aborting);
    for (size_t i = 0; i < sizeof consuming / sizeof *consuming; i++)
        survive(consuming[i], RING_CONSUMER, die_consuming);
    for (size_t i = 0; i < sizeof recycling / sizeof *recycling; i++)
        survive(recycling[i], RING_CONSUMER, die_recycling);
    for (size_t i = 0; i < sizeof slab / sizeof *slab; i++)
        survive_slab(slab[i]);
}

/* ---- garbage ---- */

static void any_operation(struct ring *ring, uint64_t *state)
{
    struct ring_span span;
    const uint64_t end = RING_DATA + CAPACITY;
    switch (random_below(state, 6)) {
    case 0:
        if (ring_claim(ring, 1 + random_below(state, 3000), &span) == RING_OK) {
            CHECK(span.offset >= RING_DATA && span.nbytes <= end - span.offset);
            ring_commit(ring, span.position, span.epoch);
        }
        break;
    case 1:
        if (ring_claim(ring, 1 + random_below(state, 3000), &span) == RING_OK)
            ring_abort(ring, span.position, span.epoch);
        break;
    case 2:
    case 3:
        if (ring_read(ring, &span) == RING_OK) {
            CHECK(span.offset >= RING_DATA && span.nbytes <= end - span.offset);
            ring_release(ring, span.position, span.epoch);
        }
        break;
    case 4:
        ring_recover(ring, (int)random_below(state, 2));
        break;
    default:
        ring_recycle(ring);
    }
}

static void scribble(uint8_t *memory, uint64_t *state)
{
    static const int64_t favourites[] = {0, -1, 64, -64, 63, 128, CAPACITY, -CAPACITY, INT64_MAX, INT64_MIN, 1 << 31};
    /* Cursors, bells and the record headers; magic and capacity (the first 16 bytes) are only read by ring_open. */
    const uint32_t place = random_below(state, 3) == 0 ? 16 + 8 * random_below(state, 80)
                                                       : RING_DATA + 8 * random_below(state, CAPACITY / 8);
    int64_t value = favourites[random_below(state, sizeof favourites / sizeof *favourites)];
    if (random_below(state, 3) == 0)
        value = (int64_t)random_below(state, CAPACITY) & ~63;
    memcpy(memory + place, &value, sizeof value);
    if (random_below(state, 2) == 0) { /* a header that is wrong as a whole */
        const int64_t header[2] = {64 + (int64_t)random_below(state, CAPACITY), (int64_t)random_below(state, CAPACITY)};
        memcpy(memory + RING_DATA + 64 * random_below(state, CAPACITY / 64), header, sizeof header);
    }
}

static void garbage(void)
{
    /* From malloc, so that the address sanitizer sees one byte too far. */
    const size_t bytes = RING_DATA + CAPACITY;
    uint8_t *memory = aligned_alloc(4096, bytes);
    CHECK(memory != NULL);
    struct ring ring;
    const int data_fd = fifo(), space_fd = fifo();
    for (int round = 0; round < 3000; round++) {
        uint64_t state = seed + (uint64_t)round;
        memset(memory, 0, bytes);
        ring_format(memory, CAPACITY);
        CHECK(ring_open(&ring, memory, bytes, CAPACITY, data_fd, space_fd) == RING_OK);
        for (int step = 0; step < 60; step++) {
            any_operation(&ring, &state);
            if (step >= 10)
                scribble(memory, &state);
        }
        /* Whatever it was: recovered on both sides, it serves again. */
        ring_recover(&ring, RING_PRODUCER);
        ring_recover(&ring, RING_CONSUMER);
        CHECK(ring_recycle(&ring) >= 0);
        struct ring_span span;
        CHECK(ring_claim(&ring, 64, &span) == RING_OK);
        CHECK(ring_commit(&ring, span.position, span.epoch) == RING_OK && ring_read(&ring, &span) == RING_OK);
    }
    close(data_fd);
    close(space_fd);
    free(memory);
}

int main(int argc, char **argv)
{
    const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"threads", stress_threads}, {"processes", stress_processes}, {"bells", bells}, {"kill", kill_everywhere}, {"garbage", garbage}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (argc == 2 && strcmp(argv[1], parts[i].name) == 0) {
            parts[i].run();
            printf("%s: ok\n", parts[i].name);
            return 0;
        }
    fprintf(stderr, "usage: %s threads|processes|bells|kill|garbage\n", argv[0]);
    return 2;
}
