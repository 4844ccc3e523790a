/* Two QUIC endpoints in one process, in one thread, with the wire in this file's hands; built with sanitizers by
 * scripts/sanitize. Usage: quic_fuzz DATAGRAMS SEED
 *
 *   datagrams  that many random, mutated, cut and replayed datagrams against a listening endpoint that serves a link
 *   peers      a trusted peer that sends nonsense inside its streams, over and over
 *   nameless   a peer without a certificate
 *   keys       renewed by either end, over and over
 *   packets    ipsec-mb, where it is built in: byte for byte what the TLS library makes of the same keys
 *   moving     a client that deliberately goes to other addresses in mid-page; ours only has it happen to it
 *
 * After each part: what was sent properly has arrived exactly, nothing else was claimed, memory has not grown. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <malloc.h>
#include <netinet/udp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "quic_internal.h"
#ifdef QUIC_TLS_OSSL /* as native/build_quic.py says */
#include <ngtcp2/ngtcp2_crypto_ossl.h>
#else
#include <gnutls/gnutls.h>
#endif

#define KEPT 4096
#define PAGE 70000
#define GROWTH (2 << 20)

typedef struct {
  quic_endpoint *endpoint;
  int fd, socket; /* its index in the endpoint */
  struct sockaddr_in address;
  uint64_t link;
  bool trusting;
  int opened, closed, why, landed, lost, sent, claimed, control;
  uint8_t *room;
} side;

static side client, server;
static struct {
  uint8_t *data;
  size_t size;
} corpus[KEPT];
static size_t kept;
static uint8_t payload[PAGE];
static uint64_t state;

/* Trusted by nobody but this file. */
static const char identity[] =
    "-----BEGIN PRIVATE KEY-----\n"
    "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgUnaUWIdkd7icW7G7\n"
    "lgbXpub9Q4oHF6Yny2CQrRqrP4+hRANCAASQPtsoeKySs/Lwes8Eby131lkc50dh\n"
    "Lv2gvRNvjpZzLSIXI4d4i6SsmQeK82ZVwd5RAacAvLIR5/dnFBH0PEyO\n"
    "-----END PRIVATE KEY-----\n"
    "-----BEGIN CERTIFICATE-----\n"
    "MIIBdjCCARugAwIBAgIUGkh37qQnHKT2KnEXDmn44x2vUAIwCgYIKoZIzj0EAwIw\n"
    "DzENMAsGA1UEAwwEZnV6ejAgFw0yNjExMzAwNzA5NDdaGA8yMTI2MTEwNjA3MDk0\n"
    "N1owDzENMAsGA1UEAwwEZnV6ejBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJA+\n"
    "2yh4rJKz8vB6zwRvLXfWWRznR2Eu/aC9E2+OlnMtIhcjh3iLpKyZB4rzZlXB3lEB\n"
    "pwC8shHn92cUEfQ8TI6jUzBRMB0GA1UdDgQWBBSP/E+0uCQOUSQzmTSdMh2MNNRY\n"
    "QDAfBgNVHSMEGDAWgBSP/E+0uCQOUSQzmTSdMh2MNNRYQDAPBgNVHRMBAf8EBTAD\n"
    "AQH/MAoGCCqGSM49BAMCA0kAMEYCIQD8L/7l4Naw4D3xMbz5++VbBKyrK4MhHPNW\n"
    "d4RQ+zAa9QIhAJbJgvks3H6JUWarVz1f1W0EksubYfEliUHONcXucfGb\n"
    "-----END CERTIFICATE-----\n";

static uint64_t dice(void) { /* xorshift: the same on every machine */
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "quic_fuzz: %s:%d: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                 \
    }                                                                          \
  } while (0)

/* -- events -- */

static int verify(void *user, uint64_t link, const uint8_t *certificate, size_t size) {
  (void)link, (void)certificate, (void)size;
  return ((side *)user)->trusting;
}

static void opened(void *user, uint64_t link) {
  ((side *)user)->opened++;
  ((side *)user)->link = link;
}

static void control(void *user, uint64_t link, const uint8_t *data, size_t size) {
  (void)link, (void)data;
  ((side *)user)->control += (int)size;
}

static void control_acked(void *user, uint64_t link, size_t size) { (void)user, (void)link, (void)size; }

static uint8_t *claim(void *user, uint64_t link, uint64_t page, const uint8_t *header, size_t header_size,
                      uint64_t payload_size) {
  side *s = user;
  (void)link, (void)page;
  s->claimed++;
  CHECK(header_size > 0 && header_size <= QUIC_MAX_HEADER && header[0] != 0);
  if (payload_size != PAGE || s->room != NULL) return NULL;
  s->room = malloc(PAGE); /* its own block: a byte too many is found */
  return s->room;
}

static void release(side *s) {
  free(s->room);
  s->room = NULL;
}

static void landed(void *user, uint64_t link, uint64_t page) {
  side *s = user;
  (void)link, (void)page;
  CHECK(s->room != NULL && memcmp(s->room, payload, PAGE) == 0);
  s->landed++;
  release(s);
}

static void lost(void *user, uint64_t link, uint64_t page, uint64_t written) {
  (void)link, (void)page;
  CHECK(written <= PAGE);
  ((side *)user)->lost++;
  release(user);
}

static void sent(void *user, uint64_t link, uint64_t page, int outcome) {
  (void)link, (void)page, (void)outcome;
  ((side *)user)->sent++;
}

static void closed(void *user, uint64_t link, int why, uint64_t code, const char *reason) {
  (void)link, (void)code, (void)reason;
  ((side *)user)->closed++;
  ((side *)user)->why = why;
}

/* -- the wire -- */

/* From now on this side is at another port of 127.0.0.`host`. */
static void bind_side(side *s, uint32_t host, bool accept) {
  socklen_t size = sizeof s->address;
  int off = 0;
  s->fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
  s->address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl((127u << 24) + host)};
  CHECK(bind(s->fd, (struct sockaddr *)&s->address, size) == 0);
  CHECK(getsockname(s->fd, (struct sockaddr *)&s->address, &size) == 0);
  CHECK((s->socket = quic_add_socket(s->endpoint, s->fd, accept)) >= 0);
  setsockopt(s->fd, IPPROTO_UDP, UDP_GRO, &off, sizeof off); /* one datagram at a time, to keep */
  s->endpoint->sockets[s->socket].gso = false;
}

static void open_side(side *s, bool accept) {
  quic_events events = {s, verify, opened, control, control_acked, claim, landed, lost, sent, closed};
  quic_options options = {identity, QUIC_CUBIC, 1452, 1 << 20, 60000000000ull, 30000000000ull, 2000000000ull, 16, 8};
  memset(s, 0, sizeof *s);
  s->trusting = true;
  s->endpoint = quic_open(&events, &options);
  CHECK(s->endpoint != NULL);
  bind_side(s, 1, accept);
}

static void close_side(side *s) {
  quic_socket sockets[QUIC_MAX_SOCKETS];
  size_t count = s->endpoint->socket_count;
  memcpy(sockets, s->endpoint->sockets, sizeof sockets);
  quic_free(s->endpoint);
  for (size_t i = 0; i < count; i++) close(sockets[i].fd);
  release(s);
}

static void feed(side *s, const void *data, size_t size, const struct sockaddr_in *from) {
  quic_address address = {.v4 = *from};
  uint8_t *exact = malloc(size); /* a read beyond the datagram is found */
  CHECK(exact != NULL || size == 0);
  if (size > 0) memcpy(exact, data, size);
  quic_input(s->endpoint, s->socket, &address, sizeof address.v4, exact, size, quic_now());
  free(exact);
}

static int deliver(side *s, bool keep) {
  uint8_t data[65536];
  struct sockaddr_in from;
  socklen_t from_size = sizeof from;
  ssize_t size;
  int count = 0;
  while ((size = recvfrom(s->fd, data, sizeof data, 0, (struct sockaddr *)&from, &from_size)) >= 0) {
    count++;
    if (keep && kept < KEPT) {
      corpus[kept].data = malloc((size_t)size + 1);
      memcpy(corpus[kept].data, data, (size_t)size);
      corpus[kept++].size = (size_t)size;
    }
    feed(s, data, (size_t)size, &from);
  }
  return count;
}

static void turn(bool keep) {
  quic_step(client.endpoint, quic_now());
  int count = deliver(&server, keep);
  quic_step(server.endpoint, quic_now());
  count += deliver(&client, false);
  if (count == 0) usleep(50);
}

/* Until `*counter` has reached `wanted`, or two seconds. */
static bool turn_until(const int *counter, int wanted, bool keep) {
  uint64_t end = quic_now() + 2000000000ull;
  while (*counter < wanted && quic_now() < end) turn(keep);
  return *counter >= wanted;
}

static uint64_t dial(void) {
  uint64_t link = quic_connect(client.endpoint, 0, &server.address, sizeof server.address);
  CHECK(link != 0);
  return link;
}

static void meet(bool keep) {
  int before = server.opened;
  client.link = dial();
  CHECK(turn_until(&server.opened, before + 1, keep));
  quic_accept_pages(server.endpoint, server.link);
}

static void send_good_page(bool keep) {
  int landed_before = server.landed, sent_before = client.sent;
  CHECK(quic_send_page(client.endpoint, client.link, 1, "header", 6, payload, PAGE) == 0);
  CHECK(turn_until(&server.landed, landed_before + 1, keep));
  CHECK(turn_until(&client.sent, sent_before + 1, keep));
}

/* -- datagrams -- */

static size_t mutate(uint8_t *data) {
  size_t pick = (size_t)(dice() % kept), size = corpus[pick].size;
  memcpy(data, corpus[pick].data, size);
  switch (dice() % 6) {
    case 0: /* replayed as it was */
      break;
    case 1: /* cut */
      size = (size_t)(dice() % (size + 1));
      break;
    case 2: /* bits */
      for (uint64_t n = 1 + dice() % 8; n > 0 && size > 0; n--) data[dice() % size] ^= (uint8_t)(1u << dice() % 8);
      break;
    case 3: /* the header only: what is read before anything is authentic */
      for (uint64_t n = 1 + dice() % 4; n > 0; n--) data[dice() % (size < 64 ? size : 64)] = (uint8_t)dice();
      break;
    case 4: /* longer than it was */
      for (size_t n = (size_t)(dice() % 200); n > 0 && size < 2000; n--) data[size++] = (uint8_t)dice();
      break;
    default: { /* the start of one, the end of another */
      size_t other = (size_t)(dice() % kept), at = (size_t)(dice() % (size + 1));
      size = at + (corpus[other].size > at ? corpus[other].size - at : 0);
      if (corpus[other].size > at) memcpy(data + at, corpus[other].data + at, corpus[other].size - at);
    }
  }
  return size;
}

static size_t junk(uint8_t *data) {
  size_t size = (size_t)(dice() % 1500);
  for (size_t i = 0; i < size; i++) data[i] = (uint8_t)dice();
  if (size > 6 && dice() % 2) memcpy(data, "\xc0\x00\x00\x00\x01", 5); /* a long header of QUIC version 1 */
  return size;
}

static void fuzz_datagrams(long count) {
  uint8_t data[4096];
  meet(true);
  quic_send_control(client.endpoint, client.link, "hello", 5);
  for (int i = 0; i < 12; i++) send_good_page(true);
  size_t before = 0;
  for (long i = 0; i < count; i++) {
    size_t size = dice() % 4 == 0 ? junk(data) : mutate(data);
    struct sockaddr_in from = client.address;
    if (dice() % 8 == 0) { /* another address, but never of another machine */
      from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + (uint32_t)(dice() % 200));
      from.sin_port = (uint16_t)(dice() | 1);
    }
    feed(&server, data, size, &from);
    if (i % 2000 == 1999) {
      send_good_page(false);
      if (i >= count / 10 && before == 0) before = mallinfo2().uordblks;
    }
  }
  send_good_page(false);
  CHECK(server.opened == 1 && server.closed == 0 && server.claimed == server.landed && server.control == 5);
  uint64_t end = quic_now() + 3000000000ull; /* whatever handshakes replays began are over by now */
  quic_counts counts;
  do {
    turn(false);
    quic_count(server.endpoint, &counts);
  } while (counts.links > 1 && quic_now() < end);
  CHECK(counts.links == 1);
#ifndef __SANITIZE_ADDRESS__ /* its allocator does not count */
  CHECK(mallinfo2().uordblks < before + GROWTH);
#endif
  printf("datagrams: %ld from a corpus of %zu, %llu ignored, %llu retries, %d pages exact meanwhile\n", count, kept,
         (unsigned long long)counts.ignored, (unsigned long long)counts.retries_sent, server.landed);
}

/* -- trusted peers that send nonsense -- */

static void fuzz_peer(void) {
  meet(false);
  quic_link *link = client.endpoint->links[client.link & 0xffff];
  for (uint64_t n = 1 + dice() % 6; n > 0; n--) {
    uint8_t header[QUIC_MAX_HEADER] = {1};
    uint64_t size = dice() % 2 ? PAGE : 1 + dice() % PAGE;
    if (quic_send_page(client.endpoint, client.link, n, header, 1 + dice() % 256, payload, size) != 0) break;
    quic_page_out *page = link->sending.last;
    switch (dice() % 5) {
      case 0: /* sizes that are lies, small ones and huge ones */
        page->preamble[dice() % QUIC_PREAMBLE] = (uint8_t)dice();
        break;
      case 1: /* a stream that ends too early */
        page->payload_size = dice() % page->payload_size;
        break;
      case 2: /* within the preamble, even */
        page->preamble_size = 1 + dice() % page->preamble_size;
        page->payload_size = 0;
        break;
      case 3:
        for (uint64_t rounds = dice() % 3; rounds > 0; rounds--) turn(false);
        quic_cancel_page(client.endpoint, client.link, n);
        break;
      default:
        break;
    }
  }
  if (dice() % 4 == 0) quic_send_control(client.endpoint, client.link, payload, dice() % PAGE);
  for (uint64_t rounds = 5 + dice() % 30; rounds > 0; rounds--) turn(false);
  quic_close(client.endpoint, client.link, "next", 0);
  CHECK(turn_until(&server.closed, server.opened, false));
  CHECK(server.room == NULL);
}

static void fuzz_peers(int count) {
  for (int i = 0; i < count; i++) fuzz_peer();
  CHECK(server.opened == server.closed);
  meet(false);
  send_good_page(false);
  printf("peers: %d that sent nonsense, %d pages claimed, %d landed, %d lost\n", count, server.claimed, server.landed,
         server.lost);
}

/* -- no certificate at all, and one that is not trusted -- */

static void forget_certificate(quic_link *link) {
#ifdef QUIC_TLS_OSSL
  SSL_certs_clear(ngtcp2_crypto_ossl_ctx_get_ssl(link->session));
#else
  static gnutls_certificate_credentials_t none;
  CHECK(none != NULL || gnutls_certificate_allocate_credentials(&none) == 0);
  CHECK(gnutls_credentials_set(link->session, GNUTLS_CRD_CERTIFICATE, none) == 0);
#endif
}

static void refuse(bool nameless) {
  int opened_before = server.opened, closed_before = server.closed;
  client.link = dial();
  if (nameless) forget_certificate(client.endpoint->links[client.link & 0xffff]);
  server.trusting = nameless;
  CHECK(turn_until(&server.closed, closed_before + 1, false));
  CHECK(server.opened == opened_before && (server.why == QUIC_CLOSED_UNTRUSTED || server.why == QUIC_CLOSED_REFUSED));
  int client_closed = client.closed;
  if (client_closed == 0) CHECK(turn_until(&client.closed, 1, false));
  CHECK(client.why == QUIC_CLOSED_REFUSED);
}

/* -- keys -- */

static quic_link *link_of(const side *s) { return s->endpoint->links[s->link & 0xffff]; }

static void renew_keys(int count) {
  meet(false);
  send_good_page(false);
#ifdef QUIC_AEAD_IPSEC_MB
  CHECK(link_of(&client)->updated); /* the keys that its engine does not hand out are no longer used */
#endif
  for (int i = 0; i < count; i++) {
    ngtcp2_conn *conn = link_of(i % 2 ? &server : &client)->conn;
    uint64_t end = quic_now() + 2000000000ull;
    while (ngtcp2_conn_initiate_key_update(conn, quic_now()) != 0) { /* until the peer has confirmed the last ones */
      CHECK(quic_now() < end);
      turn(false);
    }
    send_good_page(false);
  }
  CHECK(client.closed == 0 && server.closed == 0);
  printf("keys: renewed %d times\n", count);
}

/* -- packets -- */

#ifdef QUIC_AEAD_IPSEC_MB
#define LARGEST 9000

/* One key, each in its own library. */
typedef struct {
  const ngtcp2_crypto_aead *aead;
  ngtcp2_crypto_aead_ctx fast, plain;
} protection;

typedef int (*protect)(uint8_t *, const ngtcp2_crypto_aead *, const ngtcp2_crypto_aead_ctx *, const uint8_t *, size_t,
                       const uint8_t *, size_t, const uint8_t *, size_t);

/* A block of its own for every input and output, as `feed` does. */
static int call(protect how, const protection *p, const ngtcp2_crypto_aead_ctx *ctx, uint8_t *data, size_t size,
                size_t out_size, const uint8_t *nonce, const uint8_t *header, size_t header_size) {
  uint8_t *in = malloc(size + 1), *out = malloc(out_size + 1);
  memcpy(in, data, size);
  memset(out, 0xa5, out_size);
  int failed = how(out, p->aead, ctx, in, size, nonce, 12, header, header_size);
  memcpy(data, out, out_size);
  free(in);
  free(out);
  return failed;
}

static void flip(uint8_t *data, size_t size) { data[dice() % size] ^= (uint8_t)(1u << dice() % 8); }

static void compare(const protection *p, size_t size) {
  static uint8_t ours[LARGEST + 16], theirs[LARGEST + 16], original[LARGEST];
  uint8_t nonce[12], header[64];
  size_t header_size = 1 + (size_t)(dice() % sizeof header);
  for (size_t i = 0; i < size; i++) ours[i] = theirs[i] = original[i] = (uint8_t)dice();
  for (size_t i = 0; i < sizeof nonce; i++) nonce[i] = (uint8_t)dice();
  for (size_t i = 0; i < header_size; i++) header[i] = (uint8_t)dice();
  CHECK(call(quic_aead_encrypt, p, &p->fast, ours, size, size + 16, nonce, header, header_size) == 0);
  CHECK(call(ngtcp2_crypto_encrypt_cb, p, &p->plain, theirs, size, size + 16, nonce, header, header_size) == 0);
  CHECK(memcmp(ours, theirs, size + 16) == 0);
  CHECK(call(ngtcp2_crypto_decrypt_cb, p, &p->plain, ours, size + 16, size, nonce, header, header_size) == 0);
  CHECK(call(quic_aead_decrypt, p, &p->fast, theirs, size + 16, size, nonce, header, header_size) == 0);
  CHECK(memcmp(ours, original, size) == 0 && memcmp(theirs, original, size) == 0);
  CHECK(quic_aead_encrypt(ours, p->aead, &p->fast, ours, size, nonce, 12, header, header_size) == 0); /* in place */
  switch (dice() % 3) {
    case 0:
      flip(ours, size + 16);
      break;
    case 1:
      flip(header, header_size);
      break;
    default:
      flip(nonce, sizeof nonce);
  }
  CHECK(call(quic_aead_decrypt, p, &p->fast, ours, size + 16, size, nonce, header, header_size) == NGTCP2_ERR_DECRYPT);
  for (size_t i = 0; i < size; i++) CHECK(ours[i] == 0); /* nothing of it is seen */
  CHECK(quic_aead_decrypt(theirs, p->aead, &p->fast, ours, (size_t)(dice() % 16), nonce, 12, header, header_size) ==
        NGTCP2_ERR_DECRYPT); /* less than a tag */
}

/* The next keys of a live link, as ngtcp2 asks for them. */
static void compare_packets(int count) {
  meet(false);
  ngtcp2_conn *conn = link_of(&client)->conn;
  for (int i = 0; i < count; i++) {
    protection rx = {.aead = &ngtcp2_conn_get_crypto_ctx(conn)->aead}, tx = rx;
    uint8_t secrets[2][32], next[4][32], keys[2][64], ivs[4][64];
    for (size_t k = 0; k < sizeof secrets; k++) ((uint8_t *)secrets)[k] = (uint8_t)dice();
    CHECK(quic_aead_update(conn, next[0], next[1], &rx.fast, ivs[0], &tx.fast, ivs[1], secrets[0], secrets[1], 32,
                           NULL) == 0);
    CHECK(ngtcp2_crypto_update_key(conn, next[2], next[3], &rx.plain, keys[0], ivs[2], &tx.plain, keys[1], ivs[3],
                                   secrets[0], secrets[1], 32) == 0);
    CHECK(memcmp(next[0], next[2], 64) == 0 && memcmp(ivs[0], ivs[2], 12) == 0 && memcmp(ivs[1], ivs[3], 12) == 0);
    /* Every size around the blocks of 16, 128 and 768 bytes, then any. Only a handle that is odd is not GnuTLS's. */
    CHECK(((uintptr_t)rx.fast.native_handle & 1) == 1);
    compare(&rx, i < 1600 ? (size_t)i : (size_t)(dice() % LARGEST));
    compare(&tx, (size_t)(dice() % LARGEST));
    quic_aead_delete(conn, &rx.fast, NULL);
    quic_aead_delete(conn, &tx.fast, NULL);
    ngtcp2_crypto_aead_ctx_free(&rx.plain);
    ngtcp2_crypto_aead_ctx_free(&tx.plain);
  }
  printf("packets: %d keys of both libraries agree\n", count);
}
#endif

/* -- a client that moves -- */

static bool server_is_at(const struct sockaddr_in *address) {
  const ngtcp2_path *path = ngtcp2_conn_get_path(link_of(&server)->conn);
  return path->remote.addrlen == sizeof *address && memcmp(path->remote.addr, address, sizeof *address) == 0;
}

static void move(uint32_t host) {
  quic_link *link = link_of(&client);
  int landed_before = server.landed, claimed_before = server.claimed;
  CHECK(quic_send_page(client.endpoint, client.link, 1, "header", 6, payload, PAGE) == 0);
  CHECK(turn_until(&server.claimed, claimed_before + 1, false));
  CHECK(server.room != NULL); /* in the middle of it */
  bind_side(&client, host, false);
  link->socket = client.socket;
  ngtcp2_path path = {{(struct sockaddr *)&client.address, sizeof client.address},
                      {(struct sockaddr *)&server.address, sizeof server.address}, NULL};
  CHECK(ngtcp2_conn_initiate_immediate_migration(link->conn, &path, quic_now()) == 0);
  CHECK(turn_until(&server.landed, landed_before + 1, false));
  send_good_page(false);
  CHECK(server_is_at(&client.address));
}

static void move_about(int count) {
  meet(false);
  send_good_page(false); /* the client knows now that the handshake is over */
  for (int i = 1; i <= count; i++) move(1 + (uint32_t)i % 2);
  CHECK(server.opened == 1 && server.closed == 0 && server.lost == 0);
  printf("moving: followed to %d addresses, %d pages exact\n", count, server.landed);
}

static void part(void (*run)(int), int argument) {
  open_side(&server, true);
  open_side(&client, false);
  run(argument);
  close_side(&client);
  close_side(&server);
}

static void refuse_both(int unused) {
  (void)unused;
  refuse(true);
  client.closed = 0;
  refuse(false);
  printf("nameless: refused, and so is an untrusted name\n");
}

static void run_datagrams(int count) { fuzz_datagrams(count); }

int main(int argc, char **argv) {
  CHECK(argc == 3);
  state = strtoull(argv[2], NULL, 10) * 2654435761u + 1;
  for (size_t i = 0; i < PAGE; i++) payload[i] = (uint8_t)dice();
  part(run_datagrams, atoi(argv[1]));
  part(fuzz_peers, 200);
  part(refuse_both, 0);
  part(renew_keys, 6);
#ifdef QUIC_AEAD_IPSEC_MB
  part(compare_packets, 4000);
#endif
  part(move_about, 5);
  for (size_t i = 0; i < kept; i++) free(corpus[i].data);
  return 0;
}
