// A wire between two network namespaces, for scripts/netlab: rate, delay and per-packet loss in user space.
//
//   netlab NETNS_A NETNS_B DEVICE RATE_BIT_S DELAY_NS LOSS_PPM QUEUE_BYTES
//
// Makes one TUN device in each namespace, says "ready" on stdout, and carries packets between them, one thread per
// direction, until SIGTERM; then it prints what it did as one line of JSON. Rate 0 is as fast as this machine forwards.
// Without loss the kernel hands over unsegmented TCP (virtio-net header), which is what makes gigabits possible; with
// loss it may not, so that one loss is one packet. Not part of the extension: scripts/netlab builds it on demand.
//
// Bound: ARENA bytes in flight per direction; what does not fit is dropped and counted, like a switch does.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
  ARENA = 256 << 20,          // 4 Gb/s for 400 ms, and a queue
  MAX_PACKET = 66000,         // virtio-net header and the longest IP packet
  FRAME_OVERHEAD = 38,        // Ethernet: preamble 8, header 14, checksum 4, gap 12
  READS_PER_TURN = 16,
};

static double rate_bit_s;
static uint64_t delay_ns, loss_ppm, queue_bytes;

// One packet on the wire, followed by its bytes. Length 0: the arena's end, go on at its start.
struct entry {
  uint64_t arrives;
  uint32_t length;
  uint32_t unused;
};

struct direction {
  int in, out;
  uint64_t random;
  char *arena;
  size_t head, tail, used;    // next to fill, next to deliver, bytes between them
  uint64_t wire_free;         // when the last accepted packet has left
  _Atomic uint64_t packets, lost, overflowed;
};

static void fail(const char *what) {
  fprintf(stderr, "netlab: %s: %s\n", what, strerror(errno));
  exit(1);
}

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int open_tun(const char *netns, const char *device) {
  int ns = open(netns, O_RDONLY | O_CLOEXEC);
  if (ns < 0 || setns(ns, CLONE_NEWNET)) fail(netns);
  close(ns);
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tun < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  strncpy(request.ifr_name, device, IFNAMSIZ - 1);
  if (ioctl(tun, TUNSETIFF, &request)) fail(device);
  unsigned offload = loss_ppm ? 0 : TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
  if (ioctl(tun, TUNSETOFFLOAD, offload)) fail("TUNSETOFFLOAD");
  return tun;
}

static int is_lost(struct direction *d) {
  d->random ^= d->random << 13;
  d->random ^= d->random >> 7;
  d->random ^= d->random << 17;
  return (d->random >> 11) % 1000000 < loss_ppm;
}

static size_t footprint(size_t length) { return (sizeof(struct entry) + length + 15) & ~(size_t)15; }

// Room for the longest packet at `head`, or NULL while the arena is full.
static struct entry *room(struct direction *d) {
  size_t need = footprint(MAX_PACKET);
  if (ARENA - d->head < need) {
    if (d->used + (ARENA - d->head) + need > ARENA) return NULL;
    if (d->head < ARENA) ((struct entry *)(d->arena + d->head))->length = 0;
    d->used += ARENA - d->head;
    d->head = 0;
  }
  return d->used + need > ARENA ? NULL : (struct entry *)(d->arena + d->head);
}

// When a packet that enters now has left the sender, or 0 if the queue before the wire is full.
static uint64_t depart(struct direction *d, size_t bytes, unsigned segments, uint64_t time) {
  if (rate_bit_s == 0) return time;
  uint64_t start = d->wire_free > time ? d->wire_free : time;
  if ((double)(start - time) * rate_bit_s / 8e9 + (double)bytes > (double)queue_bytes) return 0;
  d->wire_free = start + (uint64_t)((double)(bytes + segments * FRAME_OVERHEAD) * 8e9 / rate_bit_s);
  return d->wire_free;
}

// Take one packet from the sender. 0 when there is none.
static int take(struct direction *d) {
  static _Thread_local char overflow[MAX_PACKET];
  struct entry *entry = room(d);
  char *packet = entry ? (char *)(entry + 1) : overflow;
  ssize_t length = read(d->in, packet, MAX_PACKET);
  if (length <= (ssize_t)sizeof(struct virtio_net_hdr)) return 0;
  size_t bytes = (size_t)length - sizeof(struct virtio_net_hdr);
  unsigned gso = ((struct virtio_net_hdr *)packet)->gso_size;
  unsigned segments = gso ? (unsigned)((bytes + gso - 1) / gso) : 1;
  d->packets += segments;
  if (loss_ppm && is_lost(d)) {
    d->lost++;
    return 1;
  }
  uint64_t leaves = entry ? depart(d, bytes, segments, now()) : 0;
  if (leaves == 0) {
    d->overflowed += segments;
    return 1;
  }
  entry->arrives = leaves + delay_ns;
  entry->length = (uint32_t)length;
  d->head += footprint((size_t)length);
  d->used += footprint((size_t)length);
  return 1;
}

// The next packet to deliver, or NULL when nothing is on the wire.
static struct entry *first(struct direction *d) {
  if (d->used == 0) return NULL;
  if (d->tail == ARENA || ((struct entry *)(d->arena + d->tail))->length == 0) {
    d->used -= ARENA - d->tail;
    d->tail = 0;
  }
  return d->used ? (struct entry *)(d->arena + d->tail) : NULL;
}

static void deliver(struct direction *d) {
  struct entry *entry;
  while ((entry = first(d)) != NULL && entry->arrives <= now()) {
    if (write(d->out, entry + 1, entry->length) < 0 && errno != EAGAIN && errno != EIO) fail("write to TUN");
    d->tail += footprint(entry->length);
    d->used -= footprint(entry->length);
  }
}

static void *forward(void *argument) {
  struct direction *d = argument;
  prctl(PR_SET_TIMERSLACK, 1);  // 50 us otherwise: as long as the delays of a LAN
  for (;;) {
    deliver(d);
    int taken = 0;
    while (taken < READS_PER_TURN && take(d)) taken++;
    if (taken) continue;
    struct entry *entry = first(d);
    struct timespec wait = {0, 0}, *limit = NULL;
    if (entry != NULL) {
      uint64_t time = now(), left = entry->arrives > time ? entry->arrives - time : 0;
      wait.tv_sec = (time_t)(left / 1000000000u);
      wait.tv_nsec = (long)(left % 1000000000u);
      limit = &wait;
    }
    struct pollfd poll_in = {d->in, POLLIN, 0};
    ppoll(&poll_in, 1, limit, NULL);
  }
  return NULL;
}

static void start(struct direction *d, uint64_t seed) {
  d->random = seed;
  d->arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (d->arena == MAP_FAILED) fail("mmap");
  pthread_t thread;
  if ((errno = pthread_create(&thread, NULL, forward, d))) fail("pthread_create");
}

int main(int argc, char **argv) {
  if (argc != 8) {
    fprintf(stderr, "usage: netlab NETNS_A NETNS_B DEVICE RATE_BIT_S DELAY_NS LOSS_PPM QUEUE_BYTES\n");
    return 2;
  }
  static struct direction there, back;
  rate_bit_s = strtod(argv[4], NULL);
  delay_ns = strtoull(argv[5], NULL, 10);
  loss_ppm = strtoull(argv[6], NULL, 10);
  queue_bytes = strtoull(argv[7], NULL, 10);
  there.in = back.out = open_tun(argv[1], argv[3]);
  there.out = back.in = open_tun(argv[2], argv[3]);
  sigset_t ending;
  sigemptyset(&ending);
  sigaddset(&ending, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ending, NULL);
  start(&there, 88172645463325252u);
  start(&back, 1181783497276652981u);
  puts("ready");
  fflush(stdout);
  int signal_number;
  sigwait(&ending, &signal_number);
  printf("{\"packets\": [%lu, %lu], \"lost\": [%lu, %lu], \"overflowed\": [%lu, %lu]}\n", there.packets, back.packets,
         there.lost, back.lost, there.overflowed, back.overflowed);
  return 0;
}
