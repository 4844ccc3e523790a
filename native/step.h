/* Steps between stores at which a test build can be killed; nothing at all in the product. */
#ifndef ZC_STEP_H
#define ZC_STEP_H

#ifdef RING_TEST_STOP
#include <signal.h>
#include <string.h>
#include <unistd.h>
extern char ring_test_stop_at[64];
#define STEP(name)                                   \
    do {                                             \
        if (strcmp(ring_test_stop_at, (name)) == 0)  \
            kill(getpid(), SIGKILL);                 \
    } while (0)
#else
#define STEP(name) ((void)0)
#endif
#endif
