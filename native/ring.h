/* A ring of variable-length records in shared memory, for one producer process and one consumer process.
 *
 * This header is the documentation; ring.py is a thin view of it. Records are written and read in place: no copy.
 *
 *   memory          0                    65536 = RING_DATA                                RING_DATA + capacity
 *                   | descriptor         | data                                           |
 *   data            | record | record | ............................. | record | padding |  (wraps to offset 0)
 *   record          | header, 64 bytes | payload, padded to a multiple of 64 bytes        |
 *
 *   descriptor      magic, version, capacity    written once, before anybody attaches
 *                   epoch                       whose use of the ring this is; + 1 at every recycle, never 0
 *     producer      tail                        where the next claim starts
 *                   touched                     bytes of data written since the last recycle: what a wipe must cover
 *                   producer_beat               CLOCK_MONOTONIC ns of its last sign of life
 *     consumer      read                        where the next read starts:   head <= read <= tail <= head + capacity
 *                   head                        everything before it is free again
 *                   freed                       bytes freed, padding at the wrap not counted: what credit is made of
 *                   stale                       records skipped because their epoch was not the ring's
 *                   consumer_beat
 *     doorbells     data_armed, space_armed     1: somebody may sleep on that bell, the next event must ring it
 *
 *   record header   length    n > 0: committed, n bytes with header and padding;  n < 0: claimed, still being written
 *                   nbytes    of payload
 *                   epoch     of the ring when it was claimed
 *                   kind      DATA, ABORTED (claimed, then given up) or PADDING (the rest of the data before a wrap)
 *                   released  consumer's own: it has read the record and needs it no longer
 *
 * tail, read, head count bytes since the last recycle and never wrap; offset = position % capacity. Positions and
 * lengths are multiples of 64, data starts on a page of every page size in use (4, 16, 64 KiB). A record is at most a
 * quarter of the capacity, so an empty ring always has room for one whatever the padding: FULL always passes.
 *
 * Order. The producer writes the header with a negative length and then stores tail (release); it fills the payload
 * and then stores the positive length (release). The consumer loads tail, then length (acquire): it sees nothing of a
 * record before all of it. Claims may be committed in any order; the consumer stops at the first that is not. It may
 * release in any order; head (release) moves over the released ones in order, and the producer loads it (acquire)
 * before it writes there again.
 *
 * Doorbells. Two descriptors, eventfds or FIFOs, for an event loop to wait on. A waiter drains its descriptor, stores
 * armed = 1, then looks for records (or space) until there are none, then sleeps. The other side makes its change and
 * then rings if it can take armed from 1 to 0. A full fence between the two steps on each side means that one of them
 * must see the other's: no wake-up is lost, and a waiter that is awake costs no system call. Bells begin armed.
 *
 * Death. Every operation takes effect with one store, so a SIGKILL leaves it done or not done. ring_recover, called by
 * the survivor, ends what is left: claims of a dead producer become ABORTED; all that a dead consumer held or had
 * before it is freed; a bell that was taken and not rung is rung. ring_recycle then makes the ring as new for its next
 * user. Numbers in shared memory are checked before use: a peer gone mad gives RING_CORRUPT, not a crash.
 *
 * Each side is one process; threads of it take turns (ring.py has a lock). recover and recycle need the other side
 * dead or idle. Nothing here allocates, and nothing blocks. */
#ifndef ZC_RING_H
#define ZC_RING_H

#include <stdint.h>

/* cffi reads from here */
#define RING_DATA 65536
#define RING_ALIGN 64

enum ring_code {
    RING_OK = 0,
    RING_FULL = -1,    /* no room now: wait for the space bell */
    RING_EMPTY = -2,   /* nothing committed at the read position: wait for the data bell */
    RING_SIZE = -3,    /* no payload, or more than ring_max_record */
    RING_STALE = -4,   /* the epoch has passed, or the record is no longer there */
    RING_BUSY = -5,    /* a claim is being written or a record is being read */
    RING_CORRUPT = -6, /* shared memory holds what no correct peer writes */
};

enum ring_side { RING_PRODUCER = 0, RING_CONSUMER = 1 };

/* One process's own view of a ring. */
struct ring {
    struct ring_descriptor *shared;
    uint8_t *data;
    uint64_t capacity;
    int data_fd;
    int space_fd;
};

/* One record: payload at memory[offset .. offset + nbytes). */
struct ring_span {
    uint64_t position;
    uint64_t offset;
    uint64_t nbytes;
    uint32_t epoch;
};

void ring_format(void *memory, uint64_t capacity);
int ring_open(struct ring *ring, void *memory, uint64_t memory_bytes, uint64_t capacity, int data_fd, int space_fd);

uint64_t ring_record_bytes(uint64_t nbytes);
uint64_t ring_max_record(const struct ring *ring);

/* Producer. */
int ring_claim(struct ring *ring, uint64_t nbytes, struct ring_span *span);
int ring_commit(struct ring *ring, uint64_t position, uint32_t epoch);
int ring_abort(struct ring *ring, uint64_t position, uint32_t epoch);

/* Consumer. */
int ring_read(struct ring *ring, struct ring_span *span);
int ring_release(struct ring *ring, uint64_t position, uint32_t epoch);

/* Waiter: call on wake-up, then look until there is nothing. */
void ring_clear_data_bell(struct ring *ring);
void ring_clear_space_bell(struct ring *ring);

/* Either side. Ages are in ns, negative when that side never gave a sign of life. */
void ring_beat(struct ring *ring, int side);
int64_t ring_age_ns(const struct ring *ring, int side);
uint32_t ring_epoch(const struct ring *ring);
uint64_t ring_used(const struct ring *ring);
uint64_t ring_freed(const struct ring *ring);
uint64_t ring_stale(const struct ring *ring);
int64_t ring_recover(struct ring *ring, int dead); /* claims or records ended */
int64_t ring_recycle(struct ring *ring);           /* bytes wiped */
/* cffi reads to here */

#ifdef RING_TEST_STOP
/* Test builds only: the process kills itself at the step of this name. */
extern char ring_test_stop_at[64];
#endif
#endif
