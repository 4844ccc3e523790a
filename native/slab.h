/* A slab: one contiguous blob in shared memory, such as a recurrent snapshot, owned by one user at a time.
 *
 *   memory          0                    65536 = SLAB_DATA                                SLAB_DATA + capacity
 *                   | descriptor         | data                                           |
 *
 *   descriptor      magic, capacity      written once, before anybody attaches
 *                   owner                pid << 32 | epoch of who claimed it; 0: free
 *                   touched              bytes of data anybody may have written since the last release
 *
 * claim takes owner from 0 in one step. release wipes what was touched, zeroes touched, and stores owner = 0 last, so
 * a slab whose owner was killed at any moment is still owned: the survivor releases it in the dead one's name. When
 * the owner is alive but the process writing for it is dead, the owner just releases. Who may write when is agreed
 * over the worker's socket, not here. */
#ifndef ZC_SLAB_H
#define ZC_SLAB_H

#include <stdint.h>

/* cffi reads from here */
#define SLAB_DATA 65536

struct slab_descriptor;

void slab_format(void *memory, uint64_t capacity);
struct slab_descriptor *slab_open(void *memory, uint64_t memory_bytes, uint64_t capacity); /* NULL: not a slab */
uint64_t slab_owner(const struct slab_descriptor *slab);
int slab_claim(struct slab_descriptor *slab, uint64_t owner);        /* 1, or 0 when it is taken */
void slab_touch(struct slab_descriptor *slab, uint64_t end);         /* before writing up to `end` */
int64_t slab_release(struct slab_descriptor *slab, uint64_t owner); /* bytes wiped, or -1 when `owner` is not it */
/* cffi reads to here */

#endif
