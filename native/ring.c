/* See ring.h: layout, order of stores, doorbells and recovery are described there. */
#define _GNU_SOURCE
#include "ring.h"

#include "step.h"

#include <errno.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x31474e495243585a) /* "ZXCRING1" */

#ifdef RING_TEST_STOP
char ring_test_stop_at[64];
#endif

#define LINE 128 /* two x86 lines fetched together, one line on Apple silicon */

enum kind { KIND_DATA = 1, KIND_ABORTED = 2, KIND_PADDING = 3 };

struct ring_descriptor {
    uint64_t magic;
    uint64_t capacity;
    _Atomic uint32_t epoch;

    alignas(LINE) _Atomic uint64_t tail;
    _Atomic uint64_t touched;
    _Atomic int64_t producer_beat;

    alignas(LINE) _Atomic uint64_t read;
    _Atomic uint64_t head;
    _Atomic uint64_t freed;
    _Atomic uint64_t stale;
    _Atomic int64_t consumer_beat;

    alignas(LINE) _Atomic uint32_t data_armed;
    alignas(LINE) _Atomic uint32_t space_armed;
};

struct header {
    _Atomic int64_t length;
    uint64_t nbytes;
    uint32_t epoch;
    uint32_t kind;
    uint32_t released;
    uint32_t reserved[9];
};

_Static_assert(sizeof(struct header) == RING_ALIGN, "a header keeps the payload aligned");
_Static_assert(sizeof(struct ring_descriptor) <= RING_DATA, "the descriptor ends before the data");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "locks do not work across processes");

#define LOAD(field) atomic_load_explicit(&(field), memory_order_relaxed)
#define LOAD_ACQUIRE(field) atomic_load_explicit(&(field), memory_order_acquire)
#define STORE(field, value) atomic_store_explicit(&(field), (value), memory_order_relaxed)
#define STORE_RELEASE(field, value) atomic_store_explicit(&(field), (value), memory_order_release)

static struct header *header_at(const struct ring *ring, uint64_t position)
{
    return (struct header *)(ring->data + position % ring->capacity);
}

uint64_t ring_record_bytes(uint64_t nbytes)
{
    return sizeof(struct header) + ((nbytes + RING_ALIGN - 1) & ~(uint64_t)(RING_ALIGN - 1));
}

uint64_t ring_max_record(const struct ring *ring)
{
    return (ring->capacity / 4 & ~(uint64_t)(RING_ALIGN - 1)) - sizeof(struct header);
}

/* Could a correct producer have written a record of this length there? */
static int plausible(const struct ring *ring, uint64_t position, uint64_t size, uint64_t end)
{
    return size >= RING_ALIGN && size % RING_ALIGN == 0 && size <= end - position &&
           size <= ring->capacity - position % ring->capacity;
}

/* Bytes of a record, committed or not. Unsigned, because a peer may have written INT64_MIN. */
static uint64_t size_of(int64_t length)
{
    return length < 0 ? 0 - (uint64_t)length : (uint64_t)length;
}

void ring_format(void *memory, uint64_t capacity)
{
    struct ring_descriptor *shared = memory;
    memset(shared, 0, sizeof *shared);
    shared->capacity = capacity;
    STORE(shared->epoch, 1);
    STORE(shared->data_armed, 1);
    STORE(shared->space_armed, 1);
    shared->magic = MAGIC;
}

int ring_open(struct ring *ring, void *memory, uint64_t memory_bytes, uint64_t capacity, int data_fd, int space_fd)
{
    struct ring_descriptor *shared = memory;
    if (memory_bytes < RING_DATA || capacity > memory_bytes - RING_DATA || capacity < 16 * RING_ALIGN ||
        capacity % RING_ALIGN != 0 || shared->magic != MAGIC || shared->capacity != capacity)
        return RING_CORRUPT;
    *ring = (struct ring){shared, (uint8_t *)memory + RING_DATA, capacity, data_fd, space_fd};
    return RING_OK;
}

/* ---- doorbells ---- */

static void ring_bell(_Atomic uint32_t *armed, int fd)
{
    const uint64_t one = 1;
    atomic_thread_fence(memory_order_seq_cst);
    if (LOAD(*armed) == 0 || atomic_exchange_explicit(armed, 0, memory_order_acq_rel) == 0)
        return;
    STEP("bell-taken");
    /* EAGAIN means the descriptor is readable already, which is all a bell is for. */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    STEP("bell-rung");
}

static void rearm(_Atomic uint32_t *armed, int fd)
{
    uint64_t drained[16]; /* an eventfd gives 8 bytes, a FIFO at most the few rings since the last call */
    while (read(fd, drained, sizeof drained) < 0 && errno == EINTR)
        ;
    STORE(*armed, 1);
    atomic_thread_fence(memory_order_seq_cst);
}

void ring_clear_data_bell(struct ring *ring)
{
    rearm(&ring->shared->data_armed, ring->data_fd);
}

void ring_clear_space_bell(struct ring *ring)
{
    rearm(&ring->shared->space_armed, ring->space_fd);
}

/* ---- producer ---- */

static void write_header(struct ring *ring, uint64_t position, int64_t length, uint64_t nbytes, uint32_t kind)
{
    struct header *record = header_at(ring, position);
    record->nbytes = nbytes;
    record->epoch = LOAD(ring->shared->epoch);
    record->kind = kind;
    record->released = 0;
    STORE(record->length, length);
}

int ring_claim(struct ring *ring, uint64_t nbytes, struct ring_span *span)
{
    struct ring_descriptor *shared = ring->shared;
    if (nbytes == 0 || nbytes > ring_max_record(ring))
        return RING_SIZE;
    const uint64_t tail = LOAD(shared->tail);
    const uint64_t used = tail - LOAD_ACQUIRE(shared->head);
    const uint64_t to_end = ring->capacity - tail % ring->capacity;
    const uint64_t length = ring_record_bytes(nbytes);
    const uint64_t padding = length > to_end ? to_end : 0;
    const uint64_t position = tail + padding;
    if (used > ring->capacity || tail % RING_ALIGN != 0)
        return RING_CORRUPT;
    if (padding + length > ring->capacity - used)
        return RING_FULL;

    const uint64_t end = position + length;
    STORE(shared->touched, end < ring->capacity ? end : ring->capacity);
    STEP("claim-touched");
    if (padding != 0)
        write_header(ring, tail, (int64_t)padding, 0, KIND_PADDING);
    STEP("claim-padded");
    write_header(ring, position, -(int64_t)length, nbytes, KIND_DATA);
    STEP("claim-headed");
    STORE_RELEASE(shared->tail, end);
    STEP("claim-done");
    *span = (struct ring_span){position, RING_DATA + position % ring->capacity + sizeof(struct header), nbytes,
                               LOAD(shared->epoch)};
    return RING_OK;
}

/* The claim at `position`, or NULL when it is not this producer's to finish any more. */
static struct header *claimed(struct ring *ring, uint64_t position, uint32_t epoch)
{
    struct header *record = header_at(ring, position);
    if (epoch != LOAD(ring->shared->epoch) || LOAD(record->length) >= 0)
        return NULL;
    return record;
}

static void publish(struct ring *ring, struct header *record)
{
    STORE_RELEASE(record->length, (int64_t)size_of(LOAD(record->length)));
    STEP("commit-published");
    ring_bell(&ring->shared->data_armed, ring->data_fd);
}

int ring_commit(struct ring *ring, uint64_t position, uint32_t epoch)
{
    struct header *record = claimed(ring, position, epoch);
    if (record == NULL)
        return RING_STALE;
    STEP("commit-begun");
    publish(ring, record);
    return RING_OK;
}

int ring_abort(struct ring *ring, uint64_t position, uint32_t epoch)
{
    struct header *record = claimed(ring, position, epoch);
    if (record == NULL)
        return RING_STALE;
    record->kind = KIND_ABORTED;
    STEP("abort-marked");
    publish(ring, record);
    return RING_OK;
}

/* ---- consumer ---- */

/* Move head over what is released, in order. */
static int advance_head(struct ring *ring)
{
    struct ring_descriptor *shared = ring->shared;
    const uint64_t first = LOAD(shared->head), read = LOAD(shared->read);
    uint64_t head = first, freed = LOAD(shared->freed);
    if (read - head > ring->capacity || head % RING_ALIGN != 0)
        return RING_CORRUPT;
    while (head != read && header_at(ring, head)->released) {
        const uint64_t size = size_of(LOAD(header_at(ring, head)->length));
        if (!plausible(ring, head, size, read))
            return RING_CORRUPT;
        freed += header_at(ring, head)->kind == KIND_PADDING ? 0 : size;
        head += size;
    }
    if (head == first)
        return RING_OK;
    STORE_RELEASE(shared->head, head);
    STEP("release-head");
    STORE_RELEASE(shared->freed, freed);
    STEP("release-freed");
    ring_bell(&shared->space_armed, ring->space_fd);
    return RING_OK;
}

int ring_read(struct ring *ring, struct ring_span *span)
{
    struct ring_descriptor *shared = ring->shared;
    for (;;) {
        const uint64_t position = LOAD(shared->read), tail = LOAD_ACQUIRE(shared->tail);
        if (position == tail)
            return RING_EMPTY;
        if (tail - position > ring->capacity || position % RING_ALIGN != 0)
            return RING_CORRUPT;
        struct header *record = header_at(ring, position);
        const int64_t length = LOAD_ACQUIRE(record->length);
        if (length < 0)
            return RING_EMPTY;
        const uint64_t nbytes = record->nbytes;
        if (!plausible(ring, position, size_of(length), tail) || nbytes > size_of(length) - sizeof *record)
            return RING_CORRUPT;
        STORE_RELEASE(shared->read, position + size_of(length));
        STEP("read-moved");
        const uint32_t epoch = record->epoch, current = LOAD(shared->epoch);
        if (record->kind == KIND_DATA && epoch == current) {
            *span = (struct ring_span){position, RING_DATA + position % ring->capacity + sizeof *record, nbytes, epoch};
            return RING_OK;
        }
        if (record->kind == KIND_DATA)
            STORE(shared->stale, LOAD(shared->stale) + 1);
        record->released = 1;
        STEP("read-skipped");
        if (advance_head(ring) != RING_OK)
            return RING_CORRUPT;
    }
}

int ring_release(struct ring *ring, uint64_t position, uint32_t epoch)
{
    struct ring_descriptor *shared = ring->shared;
    const uint64_t head = LOAD(shared->head);
    if (epoch != LOAD(shared->epoch) || position - head >= LOAD(shared->read) - head)
        return RING_STALE;
    header_at(ring, position)->released = 1;
    STEP("release-marked");
    return advance_head(ring);
}

/* ---- either side ---- */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Atomic int64_t *beat_of(const struct ring *ring, int side)
{
    return side == RING_PRODUCER ? &ring->shared->producer_beat : &ring->shared->consumer_beat;
}

void ring_beat(struct ring *ring, int side)
{
    STORE(*beat_of(ring, side), now_ns());
}

int64_t ring_age_ns(const struct ring *ring, int side)
{
    const int64_t beat = LOAD(*beat_of(ring, side)), now = now_ns();
    if (beat <= 0)
        return -1;
    return now > beat ? now - beat : 0;
}

uint32_t ring_epoch(const struct ring *ring)
{
    return LOAD_ACQUIRE(ring->shared->epoch);
}

uint64_t ring_used(const struct ring *ring)
{
    const uint64_t head = LOAD_ACQUIRE(ring->shared->head);
    return LOAD_ACQUIRE(ring->shared->tail) - head;
}

uint64_t ring_freed(const struct ring *ring)
{
    return LOAD_ACQUIRE(ring->shared->freed);
}

uint64_t ring_stale(const struct ring *ring)
{
    return LOAD(ring->shared->stale);
}

/* ---- recovery ---- */

/* End of the records after `from`, as far as the cursors make sense. */
static uint64_t end_of_records(const struct ring *ring, uint64_t from)
{
    const uint64_t tail = LOAD_ACQUIRE(ring->shared->tail);
    return from % RING_ALIGN == 0 && tail % RING_ALIGN == 0 && tail - from <= ring->capacity ? tail : from;
}

/* Bytes of the record at `position`, or 0 when it makes no sense. */
static uint64_t sensible_size(const struct ring *ring, uint64_t position, uint64_t end)
{
    const uint64_t size = size_of(LOAD_ACQUIRE(header_at(ring, position)->length));
    return plausible(ring, position, size, end) ? size : 0;
}

static int64_t recover_producer(struct ring *ring)
{
    struct ring_descriptor *shared = ring->shared;
    int64_t ended = 0;
    uint64_t position = LOAD(shared->read);
    const uint64_t end = end_of_records(ring, position);
    uint64_t size;
    while (position != end && (size = sensible_size(ring, position, end)) != 0) {
        struct header *record = header_at(ring, position);
        if (LOAD(record->length) < 0) {
            record->kind = KIND_ABORTED;
            STORE_RELEASE(record->length, (int64_t)size);
            ended++;
        }
        position += size;
    }
    STORE_RELEASE(shared->tail, position); /* what follows nonsense is lost with its writer */
    STORE(shared->data_armed, 1);
    ring_bell(&shared->data_armed, ring->data_fd);
    return ended;
}

static int64_t recover_consumer(struct ring *ring)
{
    struct ring_descriptor *shared = ring->shared;
    int64_t dropped = 0;
    uint64_t position = LOAD(shared->head), freed = LOAD(shared->freed);
    const uint64_t end = end_of_records(ring, position);
    uint64_t size;
    /* Stops at a claim of the living producer, which is still writing there. */
    while (position != end && LOAD(header_at(ring, position)->length) >= 0 &&
           (size = sensible_size(ring, position, end)) != 0) {
        if (header_at(ring, position)->kind != KIND_PADDING) {
            freed += size;
            dropped++;
        }
        position += size;
    }
    STORE_RELEASE(shared->read, position);
    STORE_RELEASE(shared->head, position);
    STORE_RELEASE(shared->freed, freed);
    STORE(shared->space_armed, 1);
    ring_bell(&shared->space_armed, ring->space_fd);
    return dropped;
}

int64_t ring_recover(struct ring *ring, int dead)
{
    return dead == RING_PRODUCER ? recover_producer(ring) : recover_consumer(ring);
}

static int in_use(const struct ring *ring)
{
    uint64_t position = LOAD_ACQUIRE(ring->shared->read), size;
    const uint64_t end = end_of_records(ring, position);
    if (position != LOAD_ACQUIRE(ring->shared->head))
        return 1;
    for (; position != end && (size = sensible_size(ring, position, end)) != 0; position += size)
        if (LOAD(header_at(ring, position)->length) < 0)
            return 1;
    return 0;
}

int64_t ring_recycle(struct ring *ring)
{
    struct ring_descriptor *shared = ring->shared;
    if (in_use(ring))
        return RING_BUSY;
    const uint32_t epoch = LOAD(shared->epoch) + 1;
    STORE_RELEASE(shared->epoch, epoch == 0 ? 1 : epoch);
    STEP("recycle-epoch");
    const uint64_t touched = LOAD(shared->touched);
    const uint64_t wiped = touched < ring->capacity ? touched : ring->capacity;
    memset(ring->data, 0, wiped);
    STEP("recycle-wiped");
    STORE(shared->touched, 0);
    STEP("recycle-untouched");
    STORE(shared->freed, 0);
    STORE(shared->head, 0);
    STEP("recycle-head");
    STORE(shared->read, 0);
    STEP("recycle-read");
    STORE_RELEASE(shared->tail, 0);
    STEP("recycle-tail");
    rearm(&shared->data_armed, ring->data_fd);
    rearm(&shared->space_armed, ring->space_fd);
    return (int64_t)wiped;
}
