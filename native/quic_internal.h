/* The parts of the QUIC endpoint among themselves: quic.c (thread, routing), quic_link.c (one connection),
 * quic_page.c (its streams), quic_net.c (sockets), quic_tls_*.c (keys), quic_aead_*.c (packets). */
#ifndef ZC_QUIC_INTERNAL_H
#define ZC_QUIC_INTERNAL_H

#include <netinet/in.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "quic.h"
#include "quic_shim.h"

#define QUIC_ALPN "zc-handoff/1"
#define QUIC_CID 16
#define QUIC_MAX_CIDS 12        /* ngtcp2 keeps up to 8 of ours active, and some retiring */
#define QUIC_PREAMBLE 10        /* u16 header size, u64 payload size */
#define QUIC_MAX_PAYLOAD (1ull << 34)
#define QUIC_BATCH 65507        /* the largest UDP payload, so the largest batch of segments */
#define QUIC_MAX_SEGMENTS 64    /* UDP_MAX_SEGMENTS of older kernels */
#define QUIC_MAX_DATAGRAM 9216
#define QUIC_CODE_CLOSED 0      /* application error codes on the wire; the reason is in words beside it */
#define QUIC_CODE_DROPPED 1
#define QUIC_NEVER UINT64_MAX

typedef union {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
  struct sockaddr_storage storage;
} quic_address;

typedef struct {
  int fd;
  bool accept;
  bool gso;
  bool gro;
  quic_address local;
  socklen_t local_size;
} quic_socket;

/* Packets of one link to one address, on their way into one system call. */
typedef struct {
  uint8_t *data;
  size_t used, segment, count;
  int socket;
  quic_address to;
  socklen_t to_size;
} quic_batch;

typedef struct quic_tls quic_tls;

typedef struct quic_chunk { /* control bytes, until acknowledged */
  struct quic_chunk *next;
  size_t size;
  uint8_t data[];
} quic_chunk;

typedef struct quic_page_out {
  struct quic_page_out *next, *previous;
  uint64_t id;
  int64_t stream; /* -1 before it is opened */
  const uint8_t *payload;
  uint64_t payload_size, sent; /* `sent` counts the preamble too */
  size_t preamble_size;
  bool blocked, cancelled, stopped;
  bool whole; /* all that will be sent of it was; it is in `unacked` */
  uint8_t preamble[QUIC_PREAMBLE + QUIC_MAX_HEADER];
} quic_page_out;

typedef struct {
  quic_page_out *first, *last;
} quic_pages_out;

enum quic_page_state { QUIC_PAGE_PREAMBLE, QUIC_PAGE_WAITING, QUIC_PAGE_LANDING, QUIC_PAGE_DONE, QUIC_PAGE_GONE };

typedef struct quic_page_in {
  struct quic_page_in *next;
  enum quic_page_state state;
  int64_t stream;
  bool stream_closed, finished;
  bool answer, refuse; /* still to be told to the sender */
  size_t preamble_size;
  uint64_t payload_size, got; /* `got` counts payload bytes, held or landed */
  uint8_t *landing;
  uint8_t *held;
  size_t held_room;
  uint8_t preamble[QUIC_PREAMBLE + QUIC_MAX_HEADER];
} quic_page_in;

enum quic_link_state { QUIC_LINK_GREETING, QUIC_LINK_OPEN, QUIC_LINK_FLUSHING, QUIC_LINK_CLOSED };

typedef struct quic_link {
  quic_endpoint *endpoint;
  uint64_t id;
  enum quic_link_state state;
  bool server, accepts_pages, control_blocked;
  int socket;
  ngtcp2_conn *conn;
  ngtcp2_crypto_conn_ref ref;
  void *session; /* of the TLS library */
  bool untrusted, forgotten;
  bool confirmed, updated; /* a client's: the handshake, by the server; the keys, for quic_aead_*.c */
  const char *fault; /* the rule that the peer broke */
  char reason[QUIC_MAX_REASON + 1];
  uint64_t deadline; /* of flushing, then of the closing period */
  uint64_t refused_at; /* first report that nobody listens there since the peer was last heard; 0: none */
  ngtcp2_cid cids[QUIC_MAX_CIDS];
  size_t cid_count;
  int64_t control_stream;
  quic_chunk *control_first, *control_last, *control_next; /* next to send */
  size_t control_next_offset, control_first_acked;
  quic_pages_out sending, unacked;
  quic_page_in *pages_in;
  uint64_t next_claim;
  size_t answers; /* pages in with `answer` */
  bool refusals;
  uint8_t close_packet[NGTCP2_MAX_UDP_PAYLOAD_SIZE];
  size_t close_size, close_heard;
  quic_address close_to;
  socklen_t close_to_size;
} quic_link;

struct quic_endpoint {
  quic_events events;
  quic_options options;
  quic_tls *tls;
  int wake[2]; /* a pipe: eventfd is not everywhere */
  quic_socket sockets[QUIC_MAX_SOCKETS];
  size_t socket_count;
  quic_link **links; /* max_links + max_greeting slots */
  size_t slots;
  size_t greeting;
  uint64_t serial;
  uint8_t secret[32];       /* of Retry tokens */
  uint8_t reset_secret[32]; /* of stateless reset tokens: the same after a restart */
  uint64_t reset_at;        /* when the next stateless reset may be sent */
  quic_batch batch;
  bool batch_stuck; /* the socket's buffer is full */
  struct quic_receive *receive;
  quic_counts counts;
};

/* quic.c */
uint64_t quic_now(void);
/* One datagram off the wire. */
void quic_input(quic_endpoint *endpoint, int socket, const quic_address *from, socklen_t from_size,
                const uint8_t *data, size_t size, uint64_t now);
/* A host at `from` reports that nobody takes datagrams there; `quoted` is the beginning of one. */
void quic_refused(quic_endpoint *endpoint, const quic_address *from, socklen_t from_size, const uint8_t *quoted,
                  size_t size, uint64_t now);
/* Timers and packets to send; returns when it wants to be called again. */
uint64_t quic_step(quic_endpoint *endpoint, uint64_t now);

/* quic_link.c */
quic_link *quic_link_new(quic_endpoint *endpoint, int socket, const quic_address *peer, socklen_t peer_size,
                         const ngtcp2_pkt_hd *initial, const ngtcp2_cid *original, uint64_t now);
void quic_link_free(quic_link *link);
void quic_link_read(quic_link *link, int socket, const quic_address *from, socklen_t from_size, const uint8_t *data,
                    size_t size, uint64_t now);
void quic_link_write(quic_link *link, uint64_t now);
/* Whether `quoted` is the beginning of a datagram that this link sent to where its peer is. */
bool quic_link_sent(const quic_link *link, const quic_address *to, socklen_t to_size, const uint8_t *quoted,
                    size_t size);
void quic_link_refused(quic_link *link, uint64_t now);
uint64_t quic_link_expiry(const quic_link *link);
void quic_link_expire(quic_link *link, uint64_t now);
/* The peer broke the rule in `fault`, or `error` is what ngtcp2 returned. */
void quic_link_fail(quic_link *link, int error, uint64_t now);
/* Says goodbye and emits `closed`; what remains is the closing period. */
void quic_link_end(quic_link *link, int why, uint64_t now);

/* quic_page.c */
int quic_on_stream_open(ngtcp2_conn *conn, int64_t stream, void *user);
int quic_on_stream_data(ngtcp2_conn *conn, uint32_t flags, int64_t stream, uint64_t offset, const uint8_t *data,
                        size_t size, void *user, void *stream_user);
int quic_on_acked(ngtcp2_conn *conn, int64_t stream, uint64_t offset, uint64_t size, void *user, void *stream_user);
int quic_on_stream_close(ngtcp2_conn *conn, uint32_t flags, int64_t stream, uint64_t code, void *user,
                         void *stream_user);
int quic_on_stream_reset(ngtcp2_conn *conn, int64_t stream, uint64_t final_size, uint64_t code, void *user,
                         void *stream_user);
int quic_on_stop_sending(ngtcp2_conn *conn, int64_t stream, uint64_t code, void *user, void *stream_user);
int quic_on_unblocked(ngtcp2_conn *conn, int64_t stream, uint64_t max_data, void *user, void *stream_user);
void quic_page_append(quic_pages_out *list, quic_page_out *page);
void quic_page_remove(quic_pages_out *list, quic_page_out *page);
/* From `sending` to `unacked`. */
void quic_page_whole(quic_link *link, quic_page_out *page);
void quic_page_settle(quic_link *link, quic_pages_out *list, quic_page_out *page, int outcome);
/* Claim every page whose turn has come, in the sender's order. 0, or NGTCP2_ERR_CALLBACK_FAILURE. */
int quic_pages_claim(quic_link *link);
/* After packets were read: the senders of pages nobody wants are told. */
void quic_pages_refuse(quic_link *link);
/* Everything open is lost. */
void quic_pages_end(quic_link *link);

/* quic_net.c */
struct quic_receive *quic_receive_new(void);
void quic_receive_free(struct quic_receive *receive);
bool quic_socket_prepare(quic_socket *s);
/* Read what waits on a socket, a bounded number of datagrams. */
void quic_receive(quic_endpoint *endpoint, int socket, uint64_t now);
/* Read what the network reported about datagrams sent. */
void quic_receive_errors(quic_endpoint *endpoint, int socket, uint64_t now);
/* The packet of `size` bytes at data + used belongs to the batch; may send. False when the socket is full. */
bool quic_batch_add(quic_endpoint *endpoint, const quic_link *link, const ngtcp2_path *path, size_t size);
bool quic_batch_flush(quic_endpoint *endpoint);
void quic_send_one(quic_endpoint *endpoint, int socket, const quic_address *to, socklen_t to_size,
                   const uint8_t *data, size_t size);

/* quic_tls_*.c */
quic_tls *quic_tls_new(const char *identity_pem);
/* 32 bytes that only the holder of the identity knows, always the same. 0, or -1. */
int quic_tls_secret(const char *identity_pem, uint8_t *secret);
void quic_tls_free(quic_tls *tls);
int quic_tls_start(quic_tls *tls, quic_link *link);
void quic_tls_end(quic_link *link);
const char *quic_tls_name(void);
/* Of the library that is loaded, not of its headers. */
const char *quic_tls_version(void);

/* quic_aead_*.c, where there is one: in the place of ngtcp2's own callbacks, which call the TLS library. */
#ifdef QUIC_AEAD_IPSEC_MB
int quic_aead_encrypt(uint8_t *dest, const ngtcp2_crypto_aead *aead, const ngtcp2_crypto_aead_ctx *ctx,
                      const uint8_t *plain, size_t size, const uint8_t *nonce, size_t nonce_size, const uint8_t *data,
                      size_t data_size);
/* NGTCP2_ERR_DECRYPT, and nothing in `dest`, unless the packet is authentic. */
int quic_aead_decrypt(uint8_t *dest, const ngtcp2_crypto_aead *aead, const ngtcp2_crypto_aead_ctx *ctx,
                      const uint8_t *cipher, size_t size, const uint8_t *nonce, size_t nonce_size, const uint8_t *data,
                      size_t data_size);
int quic_aead_update(ngtcp2_conn *conn, uint8_t *rx_secret, uint8_t *tx_secret, ngtcp2_crypto_aead_ctx *rx,
                     uint8_t *rx_iv, ngtcp2_crypto_aead_ctx *tx, uint8_t *tx_iv, const uint8_t *old_rx_secret,
                     const uint8_t *old_tx_secret, size_t secret_size, void *user);
void quic_aead_delete(ngtcp2_conn *conn, ngtcp2_crypto_aead_ctx *ctx, void *user);
/* Before packets are written: moves a link to these keys, once. */
void quic_aead_begin(quic_link *link, uint64_t now);
/* To follow the TLS library's name. */
const char *quic_aead_name(void);
#else
#define quic_aead_encrypt ngtcp2_crypto_encrypt_cb
#define quic_aead_decrypt ngtcp2_crypto_decrypt_cb
#define quic_aead_update ngtcp2_crypto_update_key_cb
#define quic_aead_delete ngtcp2_crypto_delete_crypto_aead_ctx_cb
static inline void quic_aead_begin(quic_link *link, uint64_t now) { (void)link, (void)now; }
static inline const char *quic_aead_name(void) { return ""; }
#endif

#endif
