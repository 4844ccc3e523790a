/* See slab.h. */
#define _GNU_SOURCE
#include "slab.h"

#include "step.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#define MAGIC UINT64_C(0x3142414c5343585a) /* "ZXCSLAB1" */

struct slab_descriptor {
    uint64_t magic;
    uint64_t capacity;
    _Atomic uint64_t owner;
    _Atomic uint64_t touched;
};

void slab_format(void *memory, uint64_t capacity)
{
    struct slab_descriptor *slab = memory;
    memset(slab, 0, sizeof *slab);
    slab->capacity = capacity;
    slab->magic = MAGIC;
}

struct slab_descriptor *slab_open(void *memory, uint64_t memory_bytes, uint64_t capacity)
{
    struct slab_descriptor *slab = memory;
    if (memory_bytes < SLAB_DATA || capacity > memory_bytes - SLAB_DATA || slab->magic != MAGIC ||
        slab->capacity != capacity)
        return NULL;
    return slab;
}

uint64_t slab_owner(const struct slab_descriptor *slab)
{
    return atomic_load_explicit(&slab->owner, memory_order_acquire);
}

int slab_claim(struct slab_descriptor *slab, uint64_t owner)
{
    uint64_t nobody = 0;
    const int taken = atomic_compare_exchange_strong_explicit(&slab->owner, &nobody, owner, memory_order_acq_rel,
                                                              memory_order_acquire);
    STEP("slab-claimed");
    return taken;
}

void slab_touch(struct slab_descriptor *slab, uint64_t end)
{
    uint64_t touched = atomic_load_explicit(&slab->touched, memory_order_relaxed);
    while (touched < end && !atomic_compare_exchange_weak_explicit(&slab->touched, &touched, end, memory_order_acq_rel,
                                                                   memory_order_relaxed))
        ;
}

int64_t slab_release(struct slab_descriptor *slab, uint64_t owner)
{
    if (slab_owner(slab) != owner)
        return -1;
    const uint64_t touched = atomic_load_explicit(&slab->touched, memory_order_acquire);
    const uint64_t wiped = touched < slab->capacity ? touched : slab->capacity;
    STEP("slab-release-begun");
    memset((uint8_t *)slab + SLAB_DATA, 0, wiped);
    STEP("slab-wiped");
    atomic_store_explicit(&slab->touched, 0, memory_order_release);
    STEP("slab-untouched");
    atomic_store_explicit(&slab->owner, 0, memory_order_release);
    STEP("slab-released");
    return (int64_t)wiped;
}
