/* UDP in batches: one system call for many datagrams where the kernel can (UDP_SEGMENT, UDP_GRO, recvmmsg), one for
 * each where it cannot. Which of them is found out by trying. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#ifdef __linux__
#include <linux/errqueue.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "quic_internal.h"

#ifdef __linux__
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#endif

#define SOCKET_BUFFER (8 << 20)
#define MESSAGES 8   /* datagrams, or runs of them, in one recvmmsg */
#define READ_ROUNDS 4 /* then timers and sending get their turn */
#define ERRORS 64     /* reports read at a time */

/* -- preparing -- */

bool quic_socket_prepare(quic_socket *s) {
  int on = 1, size = SOCKET_BUFFER;
  s->local_size = sizeof s->local;
  if (getsockname(s->fd, &s->local.any, &s->local_size) != 0) return false;
  setsockopt(s->fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  setsockopt(s->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
#ifdef __linux__
  /* Whole datagrams or none: path MTU discovery is QUIC's own. */
  int probe = s->local.any.sa_family == AF_INET6 ? IPV6_PMTUDISC_PROBE : IP_PMTUDISC_PROBE;
  if (s->local.any.sa_family == AF_INET6) {
    setsockopt(s->fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &probe, sizeof probe);
  } else {
    setsockopt(s->fd, IPPROTO_IP, IP_MTU_DISCOVER, &probe, sizeof probe);
  }
  setsockopt(s->fd, IPPROTO_IP, IP_RECVERR, &on, sizeof on); /* for IPv4 inside an IPv6 socket, too */
  if (s->local.any.sa_family == AF_INET6) setsockopt(s->fd, IPPROTO_IPV6, IPV6_RECVERR, &on, sizeof on);
  s->gro = setsockopt(s->fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on) == 0;
  int none = 0;
  s->gso = setsockopt(s->fd, IPPROTO_UDP, UDP_SEGMENT, &none, sizeof none) == 0;
#else
  (void)on;
#endif
  return true;
}

/* -- receiving -- */

#ifdef __linux__
typedef struct mmsghdr message;
#define HEADER(m) ((m)->msg_hdr)
#define LENGTH(m) ((m)->msg_len)
#else
typedef struct {
  struct msghdr msg_hdr;
  size_t msg_len;
} message;
#define HEADER(m) ((m)->msg_hdr)
#define LENGTH(m) ((m)->msg_len)
#endif

typedef union {
  struct cmsghdr align;
  uint8_t bytes[CMSG_SPACE(sizeof(int))];
} control_room;

struct quic_receive {
  message messages[MESSAGES];
  struct iovec vectors[MESSAGES];
  quic_address from[MESSAGES];
  control_room control[MESSAGES];
  uint8_t data[MESSAGES][65536];
};

struct quic_receive *quic_receive_new(void) { return calloc(1, sizeof(struct quic_receive)); }

void quic_receive_free(struct quic_receive *receive) { free(receive); }

static int read_messages(int fd, struct quic_receive *r) {
  for (size_t i = 0; i < MESSAGES; i++) {
    r->vectors[i] = (struct iovec){r->data[i], sizeof r->data[i]};
    HEADER(&r->messages[i]) = (struct msghdr){
        .msg_name = &r->from[i],
        .msg_namelen = sizeof r->from[i],
        .msg_iov = &r->vectors[i],
        .msg_iovlen = 1,
        .msg_control = &r->control[i],
        .msg_controllen = sizeof r->control[i],
    };
  }
#ifdef __linux__
  return recvmmsg(fd, r->messages, MESSAGES, MSG_DONTWAIT, NULL);
#else
  ssize_t size = recvmsg(fd, &r->messages[0].msg_hdr, MSG_DONTWAIT);
  if (size < 0) return -1;
  r->messages[0].msg_len = (size_t)size;
  return 1;
#endif
}

static size_t segment_size(const message *m) {
#ifdef __linux__
  const struct msghdr *header = &HEADER(m);
  for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c != NULL; c = CMSG_NXTHDR((struct msghdr *)(uintptr_t)header, c)) {
    int size;
    if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
      memcpy(&size, CMSG_DATA(c), sizeof size);
      if (size > 0) return (size_t)size;
    }
  }
#endif
  return LENGTH(m);
}

void quic_receive(quic_endpoint *endpoint, int socket, uint64_t now) {
  struct quic_receive *r = endpoint->receive;
  for (int round = 0; round < READ_ROUNDS; round++) {
    int count = read_messages(endpoint->sockets[socket].fd, r);
    for (int i = 0; i < count; i++) {
      size_t length = LENGTH(&r->messages[i]), segment = segment_size(&r->messages[i]);
      for (size_t at = 0; at < length; at += segment) {
        size_t size = length - at < segment ? length - at : segment;
        quic_input(endpoint, socket, &r->from[i], HEADER(&r->messages[i]).msg_namelen, r->data[i] + at, size, now);
      }
    }
    if (count < MESSAGES) return;
  }
}

#ifdef __linux__
/* True if the report is that its target's host has no such socket. */
static bool nobody_there(struct msghdr *header) {
  for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c != NULL; c = CMSG_NXTHDR(header, c)) {
    if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_RECVERR) ||
        (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_RECVERR)) {
      struct sock_extended_err report;
      memcpy(&report, CMSG_DATA(c), sizeof report);
      return report.ee_errno == ECONNREFUSED && report.ee_origin != SO_EE_ORIGIN_LOCAL;
    }
  }
  return false;
}

void quic_receive_errors(quic_endpoint *endpoint, int socket, uint64_t now) {
  for (int i = 0; i < ERRORS; i++) {
    uint8_t quoted[64], room[512];
    quic_address to;
    struct iovec vector = {quoted, sizeof quoted};
    struct msghdr header = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = &vector, .msg_iovlen = 1,
                            .msg_control = room, .msg_controllen = sizeof room};
    ssize_t size = recvmsg(endpoint->sockets[socket].fd, &header, MSG_ERRQUEUE | MSG_DONTWAIT);
    if (size < 0) return;
    if (nobody_there(&header)) quic_refused(endpoint, &to, header.msg_namelen, quoted, (size_t)size, now);
  }
}
#else
void quic_receive_errors(quic_endpoint *endpoint, int socket, uint64_t now) { (void)endpoint, (void)socket, (void)now; }
#endif

/* -- sending -- */

/* What an earlier datagram met, perhaps on its way to somebody else, is reported once, in place of sending. */
static bool of_another(ssize_t result, int *left) { return result < 0 && errno == ECONNREFUSED && (*left)-- > 0; }

static bool socket_full(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS; }

/* Anything but a full buffer is a lost packet to QUIC: unreachable networks come back, probes may be too large. */
void quic_send_one(quic_endpoint *endpoint, int socket, const quic_address *to, socklen_t to_size,
                   const uint8_t *data, size_t size) {
  endpoint->counts.datagrams_sent++;
  int tries = 1;
  ssize_t sent;
  do sent = sendto(endpoint->sockets[socket].fd, data, size, MSG_DONTWAIT, &to->any, to_size);
  while (of_another(sent, &tries));
}

#ifdef __linux__
static ssize_t send_segments(const quic_batch *batch, int fd) {
  control_room room = {0};
  struct iovec vector = {batch->data, batch->used};
  struct msghdr header = {
      .msg_name = (void *)(uintptr_t)&batch->to,
      .msg_namelen = batch->to_size,
      .msg_iov = &vector,
      .msg_iovlen = 1,
      .msg_control = &room,
      .msg_controllen = CMSG_SPACE(sizeof(uint16_t)),
  };
  struct cmsghdr *c = CMSG_FIRSTHDR(&header);
  uint16_t segment = (uint16_t)batch->segment;
  c->cmsg_level = IPPROTO_UDP;
  c->cmsg_type = UDP_SEGMENT;
  c->cmsg_len = CMSG_LEN(sizeof segment);
  memcpy(CMSG_DATA(c), &segment, sizeof segment);
  int tries = 1;
  ssize_t sent;
  do sent = sendmsg(fd, &header, MSG_DONTWAIT);
  while (of_another(sent, &tries));
  return sent;
}

/* Returns how many datagrams left, -1 if none could. */
static int send_apart(const quic_batch *batch, int fd) {
  struct mmsghdr messages[QUIC_MAX_SEGMENTS] = {0};
  struct iovec vectors[QUIC_MAX_SEGMENTS];
  for (size_t i = 0; i < batch->count; i++) {
    size_t at = i * batch->segment;
    vectors[i] = (struct iovec){batch->data + at, i + 1 < batch->count ? batch->segment : batch->used - at};
    messages[i].msg_hdr.msg_name = (void *)(uintptr_t)&batch->to;
    messages[i].msg_hdr.msg_namelen = batch->to_size;
    messages[i].msg_hdr.msg_iov = &vectors[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  int tries = 1, sent;
  do sent = sendmmsg(fd, messages, (unsigned)batch->count, MSG_DONTWAIT);
  while (of_another(sent, &tries));
  return sent;
}
#else
static int send_apart(const quic_batch *batch, int fd) {
  for (size_t i = 0; i < batch->count; i++) {
    size_t at = i * batch->segment;
    size_t size = i + 1 < batch->count ? batch->segment : batch->used - at;
    if (sendto(fd, batch->data + at, size, MSG_DONTWAIT, &batch->to.any, batch->to_size) < 0) {
      return i > 0 ? (int)i : -1;
    }
  }
  return (int)batch->count;
}
#endif

static void drop_front(quic_batch *batch, size_t datagrams) {
  size_t bytes = datagrams >= batch->count ? batch->used : datagrams * batch->segment;
  memmove(batch->data, batch->data + bytes, batch->used - bytes);
  batch->used -= bytes;
  batch->count -= datagrams < batch->count ? datagrams : batch->count;
}

bool quic_batch_flush(quic_endpoint *endpoint) {
  quic_batch *batch = &endpoint->batch;
  endpoint->batch_stuck = false;
  while (batch->count > 0) {
    quic_socket *s = &endpoint->sockets[batch->socket];
    size_t left = batch->count;
#ifdef __linux__
    if (s->gso && batch->count > 1) {
      if (send_segments(batch, s->fd) < 0) {
        if (socket_full()) {
          endpoint->batch_stuck = true;
          return false;
        }
        /* EINVAL or EIO: this kernel or device cannot after all. */
        s->gso = errno != EINVAL && errno != EIO && errno != EOPNOTSUPP;
        if (!s->gso) continue;
      }
      endpoint->counts.datagrams_sent += left;
      drop_front(batch, left);
      continue;
    }
#endif
    int sent = send_apart(batch, s->fd);
    if (sent < 0 && socket_full()) {
      endpoint->batch_stuck = true;
      return false;
    }
    left = sent > 0 ? (size_t)sent : 1; /* the one that failed counts as lost */
    endpoint->counts.datagrams_sent += left;
    drop_front(batch, left);
  }
  return true;
}

static bool same_place(const quic_batch *batch, const quic_link *link, const ngtcp2_path *path) {
  return batch->socket == link->socket && batch->to_size == path->remote.addrlen &&
         memcmp(&batch->to, path->remote.addr, batch->to_size) == 0;
}

bool quic_batch_add(quic_endpoint *endpoint, const quic_link *link, const ngtcp2_path *path, size_t size) {
  quic_batch *batch = &endpoint->batch;
  if (batch->count > 0 && (size > batch->segment || !same_place(batch, link, path))) {
    /* The new packet stands behind the batch: send that, then move the packet to the front. */
    size_t at = batch->used;
    bool free_again = quic_batch_flush(endpoint);
    if (!free_again) { /* lost: rare, and QUIC's to repair */
      return false;
    }
    memmove(batch->data, batch->data + at, size);
  }
  if (batch->count == 0) {
    batch->segment = size;
    batch->socket = link->socket;
    batch->to_size = (socklen_t)path->remote.addrlen;
    memcpy(&batch->to, path->remote.addr, batch->to_size);
  }
  batch->used += size;
  batch->count++;
  bool more = size == batch->segment && batch->count < QUIC_MAX_SEGMENTS &&
              batch->used + batch->segment <= QUIC_BATCH;
  return more || quic_batch_flush(endpoint);
}
