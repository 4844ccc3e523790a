/* One QUIC connection: handshake, what is written when, timers, the end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "quic_internal.h"

#define CONTROL_VECTORS 16
#define PAGES_AHEAD 64 /* small pages share a packet */
/* How long a goodbye is repeated to a peer that did not hear it (RFC 9000, 10.2). */
#define CLOSING_PTOS 3
#define CACHE_LINE 64
#define MOST_ENTROPY 256 /* of one getentropy, which macOS has, too */
/* A client that changed its address is refused at the old one until it is heard from the new one. */
#define REFUSED_NS 500000000ull

static void fill_random(uint8_t *dest, size_t size, const ngtcp2_rand_ctx *context) {
  (void)context;
  while (size > 0) {
    size_t part = size < MOST_ENTROPY ? size : MOST_ENTROPY;
    if (getentropy(dest, part) != 0) continue;
    dest += part;
    size -= part;
  }
}

static void random_cid(ngtcp2_cid *cid) {
  cid->datalen = QUIC_CID;
  fill_random(cid->data, cid->datalen, NULL);
}

static int remember_cid(quic_link *link, const ngtcp2_cid *cid) {
  if (link->cid_count == QUIC_MAX_CIDS) return NGTCP2_ERR_CALLBACK_FAILURE;
  link->cids[link->cid_count++] = *cid;
  return 0;
}

/* -- what ngtcp2 asks and tells -- */

static int new_cid(ngtcp2_conn *conn, ngtcp2_cid *cid, uint8_t *token, size_t size, void *user) {
  quic_link *link = user;
  (void)conn;
  cid->datalen = size;
  fill_random(cid->data, size, NULL);
  if (ngtcp2_crypto_generate_stateless_reset_token(token, link->endpoint->reset_secret,
                                                   sizeof link->endpoint->reset_secret, cid) !=
      0) {
    return NGTCP2_ERR_CALLBACK_FAILURE;
  }
  return remember_cid(link, cid);
}

static int drop_cid(ngtcp2_conn *conn, const ngtcp2_cid *cid, void *user) {
  quic_link *link = user;
  (void)conn;
  for (size_t i = 0; i < link->cid_count; i++) {
    if (ngtcp2_cid_eq(&link->cids[i], cid)) {
      link->cids[i] = link->cids[--link->cid_count];
      return 0;
    }
  }
  return 0;
}

static int stateless_reset(ngtcp2_conn *conn, const ngtcp2_pkt_stateless_reset *reset, void *user) {
  (void)conn, (void)reset;
  ((quic_link *)user)->forgotten = true;
  return 0;
}

static int handshake_completed(ngtcp2_conn *conn, void *user) {
  quic_link *link = user;
  quic_endpoint *endpoint = link->endpoint;
  link->state = QUIC_LINK_OPEN;
  endpoint->greeting--;
  ngtcp2_conn_set_keep_alive_timeout(conn, endpoint->options.ping_ns);
  endpoint->events.opened(endpoint->events.user, link->id);
  return 0;
}

/* Of clients only. */
static int handshake_confirmed(ngtcp2_conn *conn, void *user) {
  (void)conn;
  ((quic_link *)user)->confirmed = true;
  return 0;
}

static const ngtcp2_callbacks *callbacks(void) {
  static ngtcp2_callbacks c;
  c.client_initial = ngtcp2_crypto_client_initial_cb;
  c.recv_client_initial = ngtcp2_crypto_recv_client_initial_cb;
  c.recv_crypto_data = ngtcp2_crypto_recv_crypto_data_cb;
  c.encrypt = quic_aead_encrypt;
  c.decrypt = quic_aead_decrypt;
  c.hp_mask = ngtcp2_crypto_hp_mask_cb;
  c.recv_retry = ngtcp2_crypto_recv_retry_cb;
  c.update_key = quic_aead_update;
  c.delete_crypto_aead_ctx = quic_aead_delete;
  c.delete_crypto_cipher_ctx = ngtcp2_crypto_delete_crypto_cipher_ctx_cb;
  c.get_path_challenge_data = ngtcp2_crypto_get_path_challenge_data_cb;
  c.version_negotiation = ngtcp2_crypto_version_negotiation_cb;
  c.rand = fill_random;
  c.get_new_connection_id = new_cid;
  c.remove_connection_id = drop_cid;
  c.handshake_completed = handshake_completed;
  c.handshake_confirmed = handshake_confirmed;
  c.recv_stateless_reset = stateless_reset;
  c.stream_open = quic_on_stream_open;
  c.recv_stream_data = quic_on_stream_data;
  c.acked_stream_data_offset = quic_on_acked;
  c.stream_close = quic_on_stream_close;
  c.stream_reset = quic_on_stream_reset;
  c.stream_stop_sending = quic_on_stop_sending;
  c.extend_max_stream_data = quic_on_unblocked;
  return &c;
}

/* -- beginning -- */

static void settings_of(const quic_endpoint *endpoint, ngtcp2_settings *settings, uint64_t now) {
  const quic_options *options = &endpoint->options;
  ngtcp2_settings_default(settings);
  settings->cc_algo = options->congestion == QUIC_CUBIC ? NGTCP2_CC_ALGO_CUBIC : NGTCP2_CC_ALGO_BBR;
  settings->initial_ts = now;
  settings->max_tx_udp_payload_size = options->datagram;
  settings->handshake_timeout = options->greet_ns;
  settings->no_tx_udp_payload_size_shaping = options->datagram > 1452 && !QUIC_PROBES_LARGE;
#if QUIC_PROBES_LARGE
  static const uint16_t probes[] = {1452, 4000, 8900, 1406, 1342, 1232};
  settings->pmtud_probes = probes;
  settings->pmtud_probeslen = sizeof probes / sizeof *probes;
#endif
}

static void params_of(const quic_endpoint *endpoint, ngtcp2_transport_params *params, bool server) {
  ngtcp2_transport_params_default(params);
  params->initial_max_data = endpoint->options.window;
  params->initial_max_stream_data_bidi_local = endpoint->options.window;
  params->initial_max_stream_data_bidi_remote = endpoint->options.window;
  params->initial_max_streams_bidi = QUIC_MAX_PAGES + server; /* the control stream is the client's */
  params->max_idle_timeout = endpoint->options.idle_ns;
  params->active_connection_id_limit = 4;
}

static int begin(quic_link *link, const quic_address *peer, socklen_t peer_size, const ngtcp2_pkt_hd *initial,
                 const ngtcp2_cid *original, uint64_t now) {
  quic_endpoint *endpoint = link->endpoint;
  quic_socket *s = &endpoint->sockets[link->socket];
  ngtcp2_settings settings;
  ngtcp2_transport_params params;
  settings_of(endpoint, &settings, now);
  params_of(endpoint, &params, link->server);
  ngtcp2_path path = {{&s->local.any, s->local_size}, {(struct sockaddr *)(uintptr_t)&peer->any, peer_size}, NULL};
  ngtcp2_cid own, other;
  random_cid(&own);
  if (remember_cid(link, &own) != 0) return -1;
  if (!link->server) {
    random_cid(&other);
    return ngtcp2_conn_client_new(&link->conn, &other, &own, &path, NGTCP2_PROTO_VER_V1, callbacks(), &settings,
                                  &params, NULL, link);
  }
  quic_set_token(&settings, initial);
  params.original_dcid = *original;
#if NGTCP2_VERSION_NUM >= 0x010000
  params.original_dcid_present = 1;
#endif
  params.retry_scid = initial->dcid;
  params.retry_scid_present = 1;
  params.stateless_reset_token_present = 1;
  if (ngtcp2_crypto_generate_stateless_reset_token(params.stateless_reset_token, endpoint->reset_secret,
                                                   sizeof endpoint->reset_secret, &own) != 0) {
    return -1;
  }
  if (remember_cid(link, &initial->dcid) != 0) return -1;
  return ngtcp2_conn_server_new(&link->conn, &initial->scid, &own, &path, initial->version, callbacks(), &settings,
                                &params, NULL, link);
}

static bool same_network(const ngtcp2_addr *one, const quic_address *other) {
  quic_address address;
  memcpy(&address, one->addr, one->addrlen);
  if (address.any.sa_family != other->any.sa_family) return false;
  if (address.any.sa_family == AF_INET) return address.v4.sin_addr.s_addr == other->v4.sin_addr.s_addr;
  return memcmp(&address.v6.sin6_addr, &other->v6.sin6_addr, 8) == 0; /* a host has a whole /64 */
}

/* Who begins handshakes and never ends them keeps no peer out, which needs milliseconds for its own: the oldest of
 * the newcomer's network goes, else the oldest of all. */
static void end_a_stranger(quic_endpoint *endpoint, const quic_address *newcomer, uint64_t now) {
  quic_link *oldest = NULL;
  bool alike = false;
  for (size_t i = 0; i < endpoint->slots; i++) {
    quic_link *link = endpoint->links[i];
    if (link == NULL || !link->server || link->state != QUIC_LINK_GREETING) continue;
    bool near = same_network(&ngtcp2_conn_get_path(link->conn)->remote, newcomer);
    if (oldest == NULL || near > alike || (near == alike && link->id < oldest->id)) {
      oldest = link;
      alike = near;
    }
  }
  if (oldest == NULL) return;
  endpoint->counts.refused++;
  endpoint->links[oldest->id & 0xffff] = NULL;
  quic_link_end(oldest, QUIC_CLOSED_NO_ANSWER, now);
  quic_link_free(oldest);
}

quic_link *quic_link_new(quic_endpoint *endpoint, int socket, const quic_address *peer, socklen_t peer_size,
                         const ngtcp2_pkt_hd *initial, const ngtcp2_cid *original, uint64_t now) {
  if (endpoint->greeting >= endpoint->options.max_greeting) end_a_stranger(endpoint, peer, now);
  size_t slot = 0;
  while (slot < endpoint->slots && endpoint->links[slot] != NULL) slot++;
  if (slot == endpoint->slots || endpoint->greeting >= endpoint->options.max_greeting) return NULL;
  quic_link *link = calloc(1, sizeof *link);
  if (link == NULL) return NULL;
  link->endpoint = endpoint;
  link->id = ++endpoint->serial << 16 | slot;
  link->server = initial != NULL;
  link->socket = socket;
  link->control_stream = -1;
  if (begin(link, peer, peer_size, initial, original, now) != 0 || quic_tls_start(endpoint->tls, link) != 0) {
    quic_link_free(link);
    return NULL;
  }
  endpoint->links[slot] = link;
  endpoint->greeting++;
  return link;
}

void quic_link_free(quic_link *link) {
  if (link->conn != NULL) ngtcp2_conn_del(link->conn);
  quic_tls_end(link);
  free(link);
}

/* -- the end -- */

static void write_close(quic_link *link, const ngtcp2_ccerr *error, uint64_t now) {
  quic_endpoint *endpoint = link->endpoint;
  ngtcp2_path_storage path;
  ngtcp2_pkt_info info;
  ngtcp2_path_storage_zero(&path);
  ngtcp2_ssize size = ngtcp2_conn_write_connection_close(link->conn, &path.path, &info, link->close_packet,
                                                         sizeof link->close_packet, error, now);
  if (size <= 0 || path.path.remote.addrlen > sizeof link->close_to) return;
  link->close_size = (size_t)size;
  link->close_to_size = (socklen_t)path.path.remote.addrlen;
  memcpy(&link->close_to, path.path.remote.addr, link->close_to_size);
  quic_batch_flush(endpoint); /* what was written before goes first */
  quic_send_one(endpoint, link->socket, &link->close_to, link->close_to_size, link->close_packet, link->close_size);
}

void quic_link_end(quic_link *link, int why, uint64_t now) {
  if (link->state == QUIC_LINK_CLOSED) return;
  if (link->state == QUIC_LINK_GREETING) link->endpoint->greeting--;
  link->state = QUIC_LINK_CLOSED;
  link->deadline = now; /* nothing to linger for, unless a close was sent */
  ngtcp2_ccerr error;
  uint64_t code = 0;
  ngtcp2_ccerr_default(&error);
  if (why == QUIC_CLOSED_BY_PEER) {
    quic_peer_close(link->conn, &error);
    code = error.error_code;
    if (error.type != NGTCP2_CCERR_TYPE_APPLICATION) why = QUIC_CLOSED_REFUSED;
    snprintf(link->reason, sizeof link->reason, "%.*s", (int)error.reasonlen, (const char *)error.reason);
  } else if (why == QUIC_CLOSED_HERE || why == QUIC_CLOSED_PROTOCOL || why == QUIC_CLOSED_SILENT) {
    if (why == QUIC_CLOSED_PROTOCOL) snprintf(link->reason, sizeof link->reason, "%s", link->fault);
    /* One that only stood still, or whose path did, learns of it as soon as it goes on. */
    if (why == QUIC_CLOSED_SILENT) snprintf(link->reason, sizeof link->reason, "peer-unresponsive");
    ngtcp2_ccerr_set_application_error(&error, QUIC_CODE_CLOSED, (const uint8_t *)link->reason, strlen(link->reason));
    write_close(link, &error, now);
  } else if (why == QUIC_CLOSED_UNTRUSTED || why == QUIC_CLOSED_REFUSED) {
    uint8_t alert = ngtcp2_conn_get_tls_alert(link->conn);
    if (alert != 0) {
      ngtcp2_ccerr_set_tls_alert(&error, alert, NULL, 0);
    } else {
      ngtcp2_ccerr_set_liberr(&error, NGTCP2_ERR_PROTO, NULL, 0);
    }
    code = error.error_code;
    write_close(link, &error, now);
  }
  if (link->close_size > 0) link->deadline = now + CLOSING_PTOS * ngtcp2_conn_get_pto(link->conn);
  quic_pages_end(link);
  link->endpoint->events.closed(link->endpoint->events.user, link->id, why, code, link->reason);
}

void quic_link_fail(quic_link *link, int error, uint64_t now) {
  if (link->forgotten) {
    quic_link_end(link, QUIC_CLOSED_FORGOTTEN, now);
  } else if (error == NGTCP2_ERR_DRAINING) {
    quic_link_end(link, QUIC_CLOSED_BY_PEER, now);
  } else if (error == NGTCP2_ERR_IDLE_CLOSE) {
    quic_link_end(link, QUIC_CLOSED_SILENT, now);
  } else if (error == NGTCP2_ERR_HANDSHAKE_TIMEOUT || error == NGTCP2_ERR_DROP_CONN) {
    quic_link_end(link, QUIC_CLOSED_NO_ANSWER, now);
  } else if (link->untrusted) {
    quic_link_end(link, QUIC_CLOSED_UNTRUSTED, now);
  } else if (link->state == QUIC_LINK_GREETING) {
    quic_link_end(link, QUIC_CLOSED_REFUSED, now);
  } else {
    if (link->fault == NULL) link->fault = ngtcp2_strerror(error);
    quic_link_end(link, QUIC_CLOSED_PROTOCOL, now);
  }
}

/* -- reading -- */

void quic_link_read(quic_link *link, int socket, const quic_address *from, socklen_t from_size, const uint8_t *data,
                    size_t size, uint64_t now) {
  quic_endpoint *endpoint = link->endpoint;
  if (link->state == QUIC_LINK_CLOSED) {
    /* The peer did not hear the goodbye: say it again, to its first, second, fourth, eighth... packet. */
    link->close_heard++;
    if ((link->close_heard & (link->close_heard - 1)) == 0 && link->close_size > 0) {
      quic_send_one(endpoint, link->socket, &link->close_to, link->close_to_size, link->close_packet, link->close_size);
    }
    return;
  }
  quic_socket *s = &endpoint->sockets[socket];
  ngtcp2_path path = {{&s->local.any, s->local_size}, {(struct sockaddr *)(uintptr_t)&from->any, from_size}, NULL};
  ngtcp2_pkt_info info = {0};
  int error = ngtcp2_conn_read_pkt(link->conn, &path, &info, data, size, now);
  if (error != 0) {
    quic_link_fail(link, error, now);
    return;
  }
  link->refused_at = 0;
  quic_pages_refuse(link);
}

/* Only who saw the datagram knows the connection id in it, so nobody else can end a link with such a report. */
bool quic_link_sent(const quic_link *link, const quic_address *to, socklen_t to_size, const uint8_t *quoted,
                    size_t size) {
  if (link->state == QUIC_LINK_CLOSED || size == 0) return false;
  const ngtcp2_addr *peer = &ngtcp2_conn_get_path(link->conn)->remote;
  const ngtcp2_cid *cid = ngtcp2_conn_get_dcid(link->conn);
  size_t at = (quoted[0] & 0x80) == 0 ? 1 : 6; /* RFC 9000, 17.2 and 17.3 */
  return peer->addrlen == to_size && memcmp(peer->addr, to, to_size) == 0 && cid->datalen > 0 &&
         size >= at + cid->datalen && memcmp(quoted + at, cid->data, cid->datalen) == 0;
}

void quic_link_refused(quic_link *link, uint64_t now) {
  if (link->refused_at == 0) {
    link->refused_at = now;
  } else if (now - link->refused_at >= REFUSED_NS) {
    quic_link_end(link, QUIC_CLOSED_GONE, now);
  }
}

/* -- writing -- */

typedef struct {
  int64_t stream;
  quic_page_out *page;  /* whose bytes these are; NULL: control, an answer, or nothing */
  quic_page_in *answer; /* whose FIN this is */
  ngtcp2_vec vectors[CONTROL_VECTORS];
  size_t count;
  uint32_t flags;
} next_data;

static void pick_control(quic_link *link, next_data *next) {
  size_t offset = link->control_next_offset;
  next->stream = link->control_stream;
  for (quic_chunk *chunk = link->control_next; chunk != NULL && next->count < CONTROL_VECTORS; chunk = chunk->next) {
    next->vectors[next->count++] = (ngtcp2_vec){chunk->data + offset, chunk->size - offset};
    offset = 0;
  }
}

static void pick_answer(quic_link *link, next_data *next) {
  quic_page_in *page = link->pages_in;
  while (!page->answer) page = page->next;
  next->answer = page;
  next->stream = page->stream;
  next->flags |= NGTCP2_WRITE_STREAM_FLAG_FIN;
}

/* Another process wrote the page, so it is in no near cache: fetch the next datagram's part while this one is encrypted.
 * Worth 3 to 8% of the rate with datagrams of 1452 bytes. */
static void prefetch(const quic_page_out *page, uint64_t from, uint64_t size) {
  uint64_t end = from + size < page->payload_size ? from + size : page->payload_size;
  for (uint64_t at = from; at < end; at += CACHE_LINE) __builtin_prefetch(page->payload + at);
}

static void pick_page(quic_link *link, next_data *next) {
  quic_page_out *page = link->sending.first;
  while (page != NULL && page->blocked) page = page->next;
  if (page == NULL || page->stream < 0) return;
  uint64_t into = page->sent < page->preamble_size ? 0 : page->sent - page->preamble_size;
  if (page->sent < page->preamble_size) {
    next->vectors[next->count++] = (ngtcp2_vec){page->preamble + page->sent, page->preamble_size - page->sent};
  }
  next->vectors[next->count++] = (ngtcp2_vec){(uint8_t *)(uintptr_t)page->payload + into, page->payload_size - into};
  prefetch(page, into + link->endpoint->options.datagram, link->endpoint->options.datagram);
  next->page = page;
  next->stream = page->stream;
  next->flags |= NGTCP2_WRITE_STREAM_FLAG_FIN;
}

/* Control first: a cancel or a commit must not wait behind a page. */
static void pick(quic_link *link, next_data *next) {
  *next = (next_data){.stream = -1, .flags = NGTCP2_WRITE_STREAM_FLAG_MORE};
  if (link->state == QUIC_LINK_GREETING) return;
  if (link->control_next != NULL && link->control_stream >= 0 && !link->control_blocked) {
    pick_control(link, next);
  } else if (link->answers > 0) {
    pick_answer(link, next);
  } else if (link->state == QUIC_LINK_OPEN) {
    pick_page(link, next);
  }
}

/* Ahead of writing: in the middle of a packet no stream may be opened. */
static void open_streams(quic_link *link) {
  if (link->state == QUIC_LINK_GREETING) return;
  if (!link->server && link->control_stream < 0) {
    ngtcp2_conn_open_bidi_stream(link->conn, &link->control_stream, NULL);
  }
  quic_page_out *page = link->sending.first;
  for (int ahead = 0; page != NULL && ahead < PAGES_AHEAD; page = page->next, ahead++) {
    if (page->stream < 0 && ngtcp2_conn_open_bidi_stream(link->conn, &page->stream, page) != 0) return;
  }
}

static void account_control(quic_link *link, size_t size) {
  while (size > 0) {
    size_t left = link->control_next->size - link->control_next_offset;
    if (size < left) {
      link->control_next_offset += size;
      return;
    }
    size -= left;
    link->control_next = link->control_next->next;
    link->control_next_offset = 0;
  }
}

static void account(quic_link *link, const next_data *next, ngtcp2_ssize size) {
  if (size < 0 || next->stream < 0) return;
  if (next->answer != NULL) {
    next->answer->answer = false;
    link->answers--;
    return;
  }
  if (next->page == NULL) {
    account_control(link, (size_t)size);
    return;
  }
  next->page->sent += (uint64_t)size;
  if (next->page->sent == next->page->preamble_size + next->page->payload_size) quic_page_whole(link, next->page);
}

/* True if another stream may be tried for the same packet. */
static bool tolerable(quic_link *link, const next_data *next, ngtcp2_ssize error) {
  if (error == NGTCP2_ERR_WRITE_MORE) return true;
  if (next->answer != NULL && error == NGTCP2_ERR_STREAM_SHUT_WR) { /* the sender has reset it meanwhile */
    account(link, next, 0);
    return true;
  }
  if (error == NGTCP2_ERR_STREAM_DATA_BLOCKED) {
    if (next->page != NULL) {
      next->page->blocked = true;
    } else {
      link->control_blocked = true;
    }
    return true;
  }
  if ((error == NGTCP2_ERR_STREAM_SHUT_WR || error == NGTCP2_ERR_STREAM_NOT_FOUND) && next->page != NULL) {
    next->page->stopped = true; /* its close is on the way */
    quic_page_whole(link, next->page);
    return true;
  }
  return false;
}

void quic_link_write(quic_link *link, uint64_t now) {
  quic_endpoint *endpoint = link->endpoint;
  quic_batch *batch = &endpoint->batch;
  if (link->state == QUIC_LINK_CLOSED || endpoint->batch_stuck) return;
  open_streams(link);
  quic_aead_begin(link, now);
  size_t quantum = ngtcp2_conn_get_send_quantum(link->conn);
  size_t written = 0;
  ngtcp2_path_storage path;
  ngtcp2_pkt_info info;
  next_data next;
  ngtcp2_path_storage_zero(&path);
  /* A datagram beyond the last full batch would be a system call of its own. */
  while (written == 0 || written + endpoint->options.datagram <= quantum) {
    pick(link, &next);
    ngtcp2_ssize taken = -1;
    ngtcp2_ssize size = ngtcp2_conn_writev_stream(link->conn, &path.path, &info, batch->data + batch->used,
                                                  endpoint->options.datagram, &taken, next.flags, next.stream,
                                                  next.vectors, next.count, now);
    account(link, &next, taken);
    if (size == 0) break;
    if (size < 0) {
      if (tolerable(link, &next, size)) continue;
      quic_link_fail(link, (int)size, now);
      return;
    }
    written += (size_t)size;
    if (!quic_batch_add(endpoint, link, &path.path, (size_t)size)) break;
  }
  if (written > 0) ngtcp2_conn_update_pkt_tx_time(link->conn, now);
}

/* -- timers -- */

uint64_t quic_link_expiry(const quic_link *link) {
  if (link->state == QUIC_LINK_CLOSED) return link->deadline;
  uint64_t expiry = ngtcp2_conn_get_expiry(link->conn);
  return link->state == QUIC_LINK_FLUSHING && link->deadline < expiry ? link->deadline : expiry;
}

void quic_link_expire(quic_link *link, uint64_t now) {
  if (link->state == QUIC_LINK_FLUSHING && (link->control_first == NULL || now >= link->deadline)) {
    quic_link_end(link, QUIC_CLOSED_HERE, now);
    return;
  }
  if (now < ngtcp2_conn_get_expiry(link->conn)) return;
  int error = ngtcp2_conn_handle_expiry(link->conn, now);
  if (error != 0) quic_link_fail(link, error, now);
}
