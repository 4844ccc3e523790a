/* The QUIC endpoint: the thread's loop, whom a datagram belongs to, and who may open a link. */
#define _GNU_SOURCE
#include "quic.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "quic_internal.h"

#define RETRY_TOKEN_NS 10000000000ull /* a client answers a Retry at once */
#define RESET_EVERY_NS 10000000ull    /* stateless resets are for peers, which need one; strangers get no more */
#define RESET_RANDOM 24               /* makes it look like any short packet */

uint64_t quic_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* -- making and freeing -- */

quic_endpoint *quic_open(const quic_events *events, const quic_options *options) {
  if (options->datagram < 1200 || options->datagram > QUIC_MAX_DATAGRAM || options->max_links > 4096 ||
      options->max_greeting > 4096) {
    return NULL;
  }
  quic_endpoint *endpoint = calloc(1, sizeof *endpoint);
  if (endpoint == NULL) return NULL;
  endpoint->events = *events;
  endpoint->options = *options;
  endpoint->slots = options->max_links + options->max_greeting;
  endpoint->wake[0] = endpoint->wake[1] = -1;
  endpoint->links = calloc(endpoint->slots, sizeof *endpoint->links);
  endpoint->batch.data = malloc(QUIC_BATCH + QUIC_MAX_DATAGRAM);
  endpoint->receive = quic_receive_new();
  endpoint->tls = quic_tls_new(options->identity_pem);
  bool secret = quic_tls_secret(options->identity_pem, endpoint->reset_secret) == 0;
  endpoint->options.identity_pem = NULL;
  if (endpoint->links == NULL || endpoint->batch.data == NULL || endpoint->receive == NULL || endpoint->tls == NULL ||
      !secret || pipe(endpoint->wake) != 0 ||
      getentropy(endpoint->secret, sizeof endpoint->secret) != 0) {
    quic_free(endpoint);
    return NULL;
  }
  for (int i = 0; i < 2; i++) {
    fcntl(endpoint->wake[i], F_SETFL, O_NONBLOCK);
    fcntl(endpoint->wake[i], F_SETFD, FD_CLOEXEC);
  }
  return endpoint;
}

void quic_free(quic_endpoint *endpoint) {
  for (size_t i = 0; endpoint->links != NULL && i < endpoint->slots; i++) {
    quic_link *link = endpoint->links[i];
    if (link == NULL) continue;
    if (link->reason[0] == '\0') snprintf(link->reason, sizeof link->reason, "shutdown");
    quic_link_end(link, QUIC_CLOSED_HERE, quic_now());
    quic_link_free(link);
  }
  for (int i = 0; i < 2; i++) {
    if (endpoint->wake[i] >= 0) close(endpoint->wake[i]);
  }
  quic_tls_free(endpoint->tls);
  quic_receive_free(endpoint->receive);
  free(endpoint->batch.data);
  free(endpoint->links);
  free(endpoint);
}

int quic_add_socket(quic_endpoint *endpoint, int fd, int accept) {
  if (endpoint->socket_count == QUIC_MAX_SOCKETS) return -1;
  quic_socket *s = &endpoint->sockets[endpoint->socket_count];
  *s = (quic_socket){.fd = fd, .accept = accept != 0};
  return quic_socket_prepare(s) ? (int)endpoint->socket_count++ : -1;
}

/* -- whom a datagram belongs to -- */

static bool owns(const quic_link *link, const uint8_t *cid, size_t size) {
  for (size_t i = 0; i < link->cid_count; i++) {
    if (link->cids[i].datalen == size && memcmp(link->cids[i].data, cid, size) == 0) return true;
  }
  return false;
}

static quic_link *owner(quic_endpoint *endpoint, const uint8_t *cid, size_t size) {
  for (size_t i = 0; i < endpoint->slots; i++) {
    if (endpoint->links[i] != NULL && owns(endpoint->links[i], cid, size)) return endpoint->links[i];
  }
  return NULL;
}

/* Stateless: nothing is kept for an address until it returns the token. */
static void send_retry(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                       const ngtcp2_pkt_hd *initial, uint64_t now) {
  uint8_t token[NGTCP2_CRYPTO_MAX_RETRY_TOKENLEN], packet[NGTCP2_MAX_UDP_PAYLOAD_SIZE];
  ngtcp2_cid cid = {.datalen = QUIC_CID};
  if (getentropy(cid.data, cid.datalen) != 0) return;
  ngtcp2_ssize token_size =
      ngtcp2_crypto_generate_retry_token(token, endpoint->secret, sizeof endpoint->secret, initial->version, &from->any,
                                         from_size, &cid, &initial->dcid, now);
  if (token_size < 0) return;
  ngtcp2_ssize size = ngtcp2_crypto_write_retry(packet, sizeof packet, initial->version, &initial->scid, &cid,
                                                &initial->dcid, token, (size_t)token_size);
  if (size < 0) return;
  endpoint->counts.retries_sent++;
  quic_send_one(endpoint, socket, from, from_size, packet, (size_t)size);
}

/* A peer that still talks to an earlier life of this host learns at once that it is over. Always shorter than what it
 * answers, so two hosts cannot keep answering each other. */
static void send_reset(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                       const ngtcp2_version_cid *header, size_t size, uint64_t now) {
  uint8_t token[NGTCP2_STATELESS_RESET_TOKENLEN], noise[RESET_RANDOM], packet[RESET_RANDOM + sizeof token];
  ngtcp2_cid cid;
  if (now < endpoint->reset_at || size <= sizeof packet || header->dcidlen != QUIC_CID ||
      getentropy(noise, sizeof noise) != 0) {
    return;
  }
  ngtcp2_cid_init(&cid, header->dcid, header->dcidlen);
  if (ngtcp2_crypto_generate_stateless_reset_token(token, endpoint->reset_secret, sizeof endpoint->reset_secret,
                                                   &cid) != 0) {
    return;
  }
  ngtcp2_ssize written = ngtcp2_pkt_write_stateless_reset(packet, sizeof packet, token, noise, sizeof noise);
  if (written < 0) return;
  endpoint->reset_at = now + RESET_EVERY_NS;
  endpoint->counts.resets_sent++;
  quic_send_one(endpoint, socket, from, from_size, packet, (size_t)written);
}

static bool from_peer_of(const quic_link *link, const quic_address *from, socklen_t from_size) {
  if (link->state == QUIC_LINK_CLOSED) return false;
  const ngtcp2_addr *peer = &ngtcp2_conn_get_path(link->conn)->remote;
  return peer->addrlen == from_size && memcmp(peer->addr, from, from_size) == 0;
}

/* A stateless reset names no link: it is recognised by its token, among the links with whoever sent it. */
static bool offer(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                  const uint8_t *data, size_t size, uint64_t now) {
  bool known = false;
  for (size_t i = 0; i < endpoint->slots; i++) {
    quic_link *link = endpoint->links[i];
    if (link == NULL || !from_peer_of(link, from, from_size)) continue;
    known = true;
    quic_link_read(link, socket, from, from_size, data, size, now);
  }
  return known;
}

static quic_link *greet(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                        const uint8_t *data, size_t size, uint64_t now) {
  ngtcp2_pkt_hd initial;
  ngtcp2_cid original;
  if (!endpoint->sockets[socket].accept || ngtcp2_accept(&initial, data, size) != 0) return NULL;
  ngtcp2_vec token = quic_token(&initial);
  if (token.len == 0 ||
      ngtcp2_crypto_verify_retry_token(&original, token.base, token.len, endpoint->secret, sizeof endpoint->secret,
                                       initial.version, &from->any, from_size, &initial.dcid, RETRY_TOKEN_NS,
                                       now) != 0) {
    send_retry(endpoint, socket, from, from_size, &initial, now);
    return NULL;
  }
  quic_link *link = quic_link_new(endpoint, socket, from, from_size, &initial, &original, now);
  if (link == NULL) endpoint->counts.refused++;
  return link;
}

void quic_input(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                const uint8_t *data, size_t size, uint64_t now) {
  ngtcp2_version_cid header;
  endpoint->counts.datagrams_received++;
  /* Other versions are not answered: both ends of a link run this engine. */
  if (size == 0 || ngtcp2_pkt_decode_version_cid(&header, data, size, QUIC_CID) != 0) {
    endpoint->counts.ignored++;
    return;
  }
  quic_link *link = owner(endpoint, header.dcid, header.dcidlen);
  if (link == NULL) link = greet(endpoint, socket, from, from_size, data, size, now);
  if (link == NULL) {
    endpoint->counts.ignored++;
    if ((data[0] & 0x80) == 0 && !offer(endpoint, socket, from, from_size, data, size, now)) {
      send_reset(endpoint, socket, from, from_size, &header, size, now);
    }
    return;
  }
  quic_link_read(link, socket, from, from_size, data, size, now);
}

void quic_refused(quic_endpoint *endpoint, const quic_address *from, socklen_t from_size, const uint8_t *quoted,
                  size_t size, uint64_t now) {
  for (size_t i = 0; i < endpoint->slots; i++) {
    quic_link *link = endpoint->links[i];
    if (link != NULL && quic_link_sent(link, from, from_size, quoted, size)) quic_link_refused(link, now);
  }
}

/* -- the loop -- */

uint64_t quic_step(quic_endpoint *endpoint, uint64_t now) {
  uint64_t next = QUIC_NEVER;
  if (endpoint->batch_stuck) quic_batch_flush(endpoint);
  for (size_t i = 0; i < endpoint->slots; i++) {
    quic_link *link = endpoint->links[i];
    if (link == NULL) continue;
    if (link->state == QUIC_LINK_CLOSED && now >= link->deadline) {
      endpoint->links[i] = NULL;
      quic_link_free(link);
      continue;
    }
    if (link->state != QUIC_LINK_CLOSED) quic_link_expire(link, now);
    quic_link_write(link, now);
    uint64_t expiry = quic_link_expiry(link);
    if (expiry < next) next = expiry;
  }
  if (!endpoint->batch_stuck) quic_batch_flush(endpoint);
  return next;
}

static bool wait_for(quic_endpoint *endpoint, struct pollfd *fds, uint64_t until) {
  nfds_t count = 0;
  for (; count < endpoint->socket_count; count++) {
    bool full = endpoint->batch_stuck && endpoint->batch.socket == (int)count;
    fds[count] = (struct pollfd){.fd = endpoint->sockets[count].fd, .events = full ? POLLIN | POLLOUT : POLLIN};
  }
  fds[count++] = (struct pollfd){.fd = endpoint->wake[0], .events = POLLIN};
  uint64_t now = quic_now();
  uint64_t left = until <= now ? 0 : until - now;
#ifdef __linux__
  struct timespec timeout = {(time_t)(left / 1000000000ull), (long)(left % 1000000000ull)};
  ppoll(fds, count, until == QUIC_NEVER ? NULL : &timeout, NULL);
#else
  poll(fds, count, until == QUIC_NEVER ? -1 : (int)((left + 999999) / 1000000));
#endif
  return (fds[count - 1].revents & POLLIN) != 0;
}

void quic_run(quic_endpoint *endpoint) {
  struct pollfd fds[QUIC_MAX_SOCKETS + 1] = {0};
#ifdef __linux__
  prctl(PR_SET_NAME, "zc-quic");
  prctl(PR_SET_TIMERSLACK, 1); /* pacing is late by this much per burst; the default is 50 us */
#endif
  for (;;) {
    uint64_t next = quic_step(endpoint, quic_now());
    bool woken = wait_for(endpoint, fds, next);
    for (size_t i = 0; i < endpoint->socket_count; i++) {
      if (fds[i].revents & POLLERR) quic_receive_errors(endpoint, (int)i, quic_now());
      if (fds[i].revents & (POLLIN | POLLERR)) quic_receive(endpoint, (int)i, quic_now());
    }
    if (!woken) continue;
    uint8_t drain[64];
    while (read(endpoint->wake[0], drain, sizeof drain) == (ssize_t)sizeof drain) continue;
    return;
  }
}

void quic_wake(quic_endpoint *endpoint) {
  uint8_t one = 1;
  while (write(endpoint->wake[1], &one, 1) < 0 && errno == EINTR) continue;
}

/* -- calls about one link -- */

static quic_link *find(const quic_endpoint *endpoint, uint64_t id) {
  size_t slot = (size_t)(id & 0xffff);
  quic_link *link = slot < endpoint->slots ? endpoint->links[slot] : NULL;
  return link != NULL && link->id == id && link->state != QUIC_LINK_CLOSED ? link : NULL;
}

uint64_t quic_connect(quic_endpoint *endpoint, int socket, const void *address, size_t size) {
  quic_address to;
  if (socket < 0 || (size_t)socket >= endpoint->socket_count || size > sizeof to) return 0;
  memset(&to, 0, sizeof to);
  memcpy(&to, address, size);
  quic_link *link = quic_link_new(endpoint, socket, &to, (socklen_t)size, NULL, NULL, quic_now());
  return link != NULL ? link->id : 0;
}

void quic_accept_pages(quic_endpoint *endpoint, uint64_t id) {
  quic_link *link = find(endpoint, id);
  if (link == NULL) return;
  link->accepts_pages = true;
  int error = quic_pages_claim(link);
  if (error != 0) {
    quic_link_fail(link, error, quic_now());
  } else {
    quic_pages_refuse(link);
  }
}

int quic_send_control(quic_endpoint *endpoint, uint64_t id, const void *data, size_t size) {
  quic_link *link = find(endpoint, id);
  if (link == NULL || size == 0) return 0;
  quic_chunk *chunk = malloc(sizeof *chunk + size);
  if (chunk == NULL) return -1;
  chunk->next = NULL;
  chunk->size = size;
  memcpy(chunk->data, data, size);
  if (link->control_last != NULL) {
    link->control_last->next = chunk;
  } else {
    link->control_first = chunk;
  }
  link->control_last = chunk;
  if (link->control_next == NULL) link->control_next = chunk;
  return 0;
}

void quic_consumed(quic_endpoint *endpoint, uint64_t id, size_t size) {
  quic_link *link = find(endpoint, id);
  if (link == NULL || link->control_stream < 0) return;
  ngtcp2_conn_extend_max_stream_offset(link->conn, link->control_stream, size);
  ngtcp2_conn_extend_max_offset(link->conn, size);
}

int quic_send_page(quic_endpoint *endpoint, uint64_t id, uint64_t number, const void *header, size_t header_size,
                   const void *payload, uint64_t payload_size) {
  quic_link *link = find(endpoint, id);
  if (link == NULL || header_size == 0 || header_size > QUIC_MAX_HEADER || payload_size == 0 ||
      payload_size > QUIC_MAX_PAYLOAD) {
    return -1;
  }
  quic_page_out *page = calloc(1, sizeof *page);
  if (page == NULL) return -1;
  page->id = number;
  page->stream = -1;
  page->payload = payload;
  page->payload_size = payload_size;
  page->preamble_size = QUIC_PREAMBLE + header_size;
  for (size_t i = 0; i < 2; i++) page->preamble[i] = (uint8_t)(header_size >> (8 * i));
  for (size_t i = 0; i < 8; i++) page->preamble[2 + i] = (uint8_t)(payload_size >> (8 * i));
  memcpy(page->preamble + QUIC_PREAMBLE, header, header_size);
  quic_page_append(&link->sending, page);
  return 0;
}

static quic_page_out *find_page(const quic_pages_out *list, uint64_t number) {
  quic_page_out *page = list->first;
  while (page != NULL && page->id != number) page = page->next;
  return page;
}

void quic_cancel_page(quic_endpoint *endpoint, uint64_t id, uint64_t number) {
  quic_link *link = find(endpoint, id);
  if (link == NULL) return;
  quic_page_out *page = find_page(&link->sending, number);
  if (page != NULL && page->stream < 0) {
    quic_page_settle(link, &link->sending, page, QUIC_CANCELLED);
    return;
  }
  if (page != NULL) {
    /* Its end comes early, in the stream: a reset could overtake the beginning, and then the peer's engine forgets
     * the stream without a word, so that neither its answer nor the turn of the pages behind it would ever come. */
    uint64_t begun = page->sent > page->preamble_size ? page->sent - page->preamble_size : 0;
    page->payload_size = begun;
    page->blocked = false;
  } else {
    page = find_page(&link->unacked, number);
  }
  if (page != NULL) page->cancelled = true;
}

void quic_close(quic_endpoint *endpoint, uint64_t id, const char *reason, uint64_t flush_ns) {
  quic_link *link = find(endpoint, id);
  if (link == NULL || link->state == QUIC_LINK_FLUSHING) return;
  snprintf(link->reason, sizeof link->reason, "%s", reason);
  uint64_t now = quic_now();
  if (link->state == QUIC_LINK_GREETING || link->control_first == NULL) {
    quic_link_end(link, QUIC_CLOSED_HERE, now);
    return;
  }
  link->state = QUIC_LINK_FLUSHING;
  link->deadline = now + flush_ns;
}

int quic_path(quic_endpoint *endpoint, uint64_t id, quic_path_stats *stats) {
  quic_link *link = find(endpoint, id);
  if (link == NULL) return -1;
  quic_conn_info info;
  quic_get_conn_info(link->conn, &info);
  *stats = (quic_path_stats){
      .rtt_ns = link->state == QUIC_LINK_GREETING ? 0 : info.latest_rtt,
      .congestion_window = info.cwnd,
      .in_flight = info.bytes_in_flight,
      .datagram = ngtcp2_conn_get_path_max_tx_udp_payload_size(link->conn),
  };
  return 0;
}

void quic_count(quic_endpoint *endpoint, quic_counts *counts) {
  *counts = endpoint->counts;
  for (size_t i = 0; i < endpoint->slots; i++) counts->links += endpoint->links[i] != NULL;
  counts->gso = endpoint->socket_count > 0 && endpoint->sockets[0].gso;
  counts->gro = endpoint->socket_count > 0 && endpoint->sockets[0].gro;
}

const char *quic_engine(void) {
  static char text[128];
  snprintf(text, sizeof text, "ngtcp2 %s, %s %s%s", ngtcp2_version(0)->version_str, quic_tls_name(),
           quic_tls_version(), quic_aead_name());
  return text;
}
