/* A QUIC endpoint for pages in shared memory: many connections ("links"), one thread, no locks.
 *
 * Streams of a link, all bidirectional: the client's first carries control bytes both ways. Each page has a stream of
 * its own: u16 header size | u64 payload size | header | payload, little endian, then FIN; the receiver answers with an
 * empty FIN once the page has landed, or resets the stream. A payload that ends early was given up by its sender.
 * (Unidirectional streams would do without the answer, but ngtcp2 0.12 never closes those that the peer opened.) A
 * page's number is its stream's ordinal, so pages are claimed in the order in which their sender opened the streams;
 * bytes of a page that came before its turn are held, never credited to the sender, and so bounded by `window`.
 *
 * Sending reads the payload in place until the peer acknowledged it. Receiving writes each byte once into the landing
 * that `claim` gave, out of the decrypted packet.
 *
 * Threads: everything but `quic_wake` belongs to the thread that calls `quic_run`; `quic_run` returns when woken, so
 * that thread makes the calls in between. Events come from within those calls; in an event no function of this
 * header may be called. Bounds: `max_links` links of which `max_greeting` unproven, `QUIC_MAX_PAGES` open page
 * streams a link and direction, `window` bytes a link that are neither in their landing nor consumed.
 *
 * Nothing is allocated for an address that did not return a Retry token, and no event but `verify` is called for a
 * peer before both sides proved their keys.
 */
#ifndef ZC_QUIC_H
#define ZC_QUIC_H

#include <stddef.h>
#include <stdint.h>

/* cffi reads from here */
#define QUIC_MAX_HEADER 256
#define QUIC_MAX_PAGES 256
#define QUIC_MAX_SOCKETS 8
#define QUIC_MAX_REASON 64

/* Why a link ended. */
#define QUIC_CLOSED_HERE 0       /* quic_close; `reason` is what it was given */
#define QUIC_CLOSED_BY_PEER 1    /* its quic_close; `reason` is what it gave */
#define QUIC_CLOSED_REFUSED 2    /* the peer's TLS or QUIC engine refused; `code` is the QUIC transport error */
#define QUIC_CLOSED_SILENT 3     /* nothing heard for the idle timeout */
#define QUIC_CLOSED_NO_ANSWER 4  /* the handshake did not complete in time */
#define QUIC_CLOSED_UNTRUSTED 5  /* `verify` refused the peer's certificate, or it gave none */
#define QUIC_CLOSED_PROTOCOL 6   /* the peer broke a rule; `reason` says which */
#define QUIC_CLOSED_FORGOTTEN 7  /* the peer, restarted, does not know this link (stateless reset) */
#define QUIC_CLOSED_GONE 8       /* its host says that nothing listens there (ICMP); Linux only */

/* What became of a page to send. The payload is not read again. */
#define QUIC_SENT 0       /* it has landed */
#define QUIC_DROPPED 1    /* the peer did not want it */
#define QUIC_CANCELLED 2  /* quic_cancel_page */
#define QUIC_FAILED 3     /* the link ended */

#define QUIC_BBR 0
#define QUIC_CUBIC 1

typedef struct quic_endpoint quic_endpoint;

typedef struct {
  void *user;
  /* 1 if the holder of this certificate may be at the other end of this link. */
  int (*verify)(void *user, uint64_t link, const uint8_t *certificate, size_t size);
  void (*opened)(void *user, uint64_t link);
  void (*control)(void *user, uint64_t link, const uint8_t *data, size_t size);
  void (*control_acked)(void *user, uint64_t link, size_t size);
  /* Room for the whole payload, or NULL to drop the page. Must not wait. */
  uint8_t *(*claim)(void *user, uint64_t link, uint64_t page, const uint8_t *header, size_t header_size,
                    uint64_t payload_size);
  void (*landed)(void *user, uint64_t link, uint64_t page);
  /* The landing is not written again; its first `written` bytes were. */
  void (*lost)(void *user, uint64_t link, uint64_t page, uint64_t written);
  void (*sent)(void *user, uint64_t link, uint64_t page, int outcome);
  /* Last event of a link, after `lost` and `sent` for all that was open. */
  void (*closed)(void *user, uint64_t link, int why, uint64_t code, const char *reason);
} quic_events;

typedef struct {
  const char *identity_pem; /* private key and certificate */
  int congestion;
  size_t datagram;      /* largest UDP payload; above 1452 it is used unprobed where the engine cannot probe it */
  uint64_t window;      /* bytes a peer may send beyond what is in its landing */
  uint64_t idle_ns;     /* a silent peer is given up after this */
  uint64_t ping_ns;     /* an idle link says something this often */
  uint64_t greet_ns;    /* for a handshake */
  size_t max_links;
  size_t max_greeting;
} quic_options;

typedef struct {
  uint64_t rtt_ns; /* 0 before the first sample */
  uint64_t congestion_window;
  uint64_t in_flight;
  uint64_t datagram; /* what the path carries */
} quic_path_stats;

typedef struct {
  uint64_t datagrams_received;
  uint64_t datagrams_sent;
  uint64_t ignored;      /* datagrams that belong to no link and opened none */
  uint64_t retries_sent; /* address validations */
  uint64_t resets_sent;  /* answers to links of an earlier life of this host */
  uint64_t refused;      /* handshakes not begun, or ended for a newer one, because of a limit */
  uint64_t links;
  int gso;
  int gro;
} quic_counts;

/* NULL if the identity cannot be used or memory is short. `events` and `options` are copied, the PEM is not kept. */
quic_endpoint *quic_open(const quic_events *events, const quic_options *options);
/* Every link ends at once (`closed`), the peers are told. The sockets are the caller's to close afterwards. */
void quic_free(quic_endpoint *endpoint);

/* A bound, non-blocking UDP socket; returns its index, or -1 at QUIC_MAX_SOCKETS. `accept`: strangers may open links. */
int quic_add_socket(quic_endpoint *endpoint, int fd, int accept);
/* Serve until `quic_wake`. */
void quic_run(quic_endpoint *endpoint);
/* Any thread, and signal handlers. */
void quic_wake(quic_endpoint *endpoint);

/* All below: an unknown `link` is one that has ended; nothing happens. */

/* Returns the link, 0 at a limit. `address` is a struct sockaddr. */
uint64_t quic_connect(quic_endpoint *endpoint, int socket, const void *address, size_t size);
/* Pages may be claimed from now on; until then they wait, within `window`. */
void quic_accept_pages(quic_endpoint *endpoint, uint64_t link);
/* 0, or -1 when memory is short. Copies. */
int quic_send_control(quic_endpoint *endpoint, uint64_t link, const void *data, size_t size);
/* Control bytes that were worked off: the peer may send as many again. */
void quic_consumed(quic_endpoint *endpoint, uint64_t link, size_t size);
/* 0, then exactly one `sent` with `page`, any number of the caller's; -1 when memory is short or the link unknown. */
int quic_send_page(quic_endpoint *endpoint, uint64_t link, uint64_t page, const void *header, size_t header_size,
                   const void *payload, uint64_t payload_size);
void quic_cancel_page(quic_endpoint *endpoint, uint64_t link, uint64_t page);
/* Ends the link once the peer has the control bytes, at the latest after `flush_ns`. */
void quic_close(quic_endpoint *endpoint, uint64_t link, const char *reason, uint64_t flush_ns);
int quic_path(quic_endpoint *endpoint, uint64_t link, quic_path_stats *stats);
void quic_count(quic_endpoint *endpoint, quic_counts *counts);
const char *quic_engine(void);
/* cffi reads to here */

#endif
