/* What ngtcp2 itself can move between two processes of this machine: one connection, one stream, one buffer sent over
 * and over, received bytes copied once to where any receiver would keep them; GSO, GRO, no pages, no claims, no Python.
 * The ceiling that `zc-handoff bench link --transport quic` compares the link with. The rate is counted after a warm-up
 * of a fifth of the time, as the link's is. Usage: quic_ceiling IDENTITY.pem SECONDS DATAGRAM bbr|cubic
 * Prints: Gb/s, CPU seconds per GiB of both processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "quic_internal.h" /* only for its TLS, quic_tls_*.c: the same library and settings as the link has */

#define WINDOW (32 << 20)
#define BUFFER (32 << 20) /* beyond the caches: state to send is not in them either */
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

struct end {
  int fd;
  ngtcp2_conn *conn;
  quic_endpoint endpoint; /* these two for quic_tls_start alone */
  quic_link link;
  struct sockaddr_in local, peer;
  int64_t stream;
  uint64_t moved, counted, warm, began, ended; /* `counted` from the first bytes after `warm` on */
  size_t datagram;
  uint8_t *landing;
};

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
  fprintf(stderr, "quic_ceiling: %s\n", what);
  exit(1);
}

static void fill_random(uint8_t *dest, size_t size, const ngtcp2_rand_ctx *context) {
  (void)context;
  if (getrandom(dest, size, 0) != (ssize_t)size) die("getrandom");
}

static int new_cid(ngtcp2_conn *conn, ngtcp2_cid *cid, uint8_t *token, size_t size, void *user) {
  (void)conn, (void)user;
  cid->datalen = size;
  fill_random(cid->data, size, NULL);
  fill_random(token, NGTCP2_STATELESS_RESET_TOKENLEN, NULL);
  return 0;
}

static int arrived(ngtcp2_conn *conn, uint32_t flags, int64_t stream, uint64_t offset, const uint8_t *data,
                   size_t size, void *user, void *stream_user) {
  struct end *end = user;
  (void)flags, (void)stream_user;
  for (size_t done = 0, part; done < size; done += part) {
    size_t at = (offset + done) % BUFFER;
    part = size - done < BUFFER - at ? size - done : BUFFER - at;
    memcpy(end->landing + at, data + done, part);
  }
  end->moved += size;
  end->ended = now();
  if (end->began != 0) end->counted += size;
  if (end->began == 0 && end->ended >= end->warm) end->began = end->ended;
  ngtcp2_conn_extend_max_stream_offset(conn, stream, size);
  ngtcp2_conn_extend_max_offset(conn, size);
  return 0;
}

static const ngtcp2_callbacks CALLBACKS = {
    .client_initial = ngtcp2_crypto_client_initial_cb,
    .recv_client_initial = ngtcp2_crypto_recv_client_initial_cb,
    .recv_crypto_data = ngtcp2_crypto_recv_crypto_data_cb,
    .encrypt = ngtcp2_crypto_encrypt_cb,
    .decrypt = ngtcp2_crypto_decrypt_cb,
    .hp_mask = ngtcp2_crypto_hp_mask_cb,
    .recv_retry = ngtcp2_crypto_recv_retry_cb,
    .update_key = ngtcp2_crypto_update_key_cb,
    .delete_crypto_aead_ctx = ngtcp2_crypto_delete_crypto_aead_ctx_cb,
    .delete_crypto_cipher_ctx = ngtcp2_crypto_delete_crypto_cipher_ctx_cb,
    .get_path_challenge_data = ngtcp2_crypto_get_path_challenge_data_cb,
    .version_negotiation = ngtcp2_crypto_version_negotiation_cb,
    .rand = fill_random,
    .get_new_connection_id = new_cid,
    .recv_stream_data = arrived,
};

static int trust_anyone(void *user, uint64_t link, const uint8_t *certificate, size_t size) {
  (void)user, (void)link, (void)certificate, (void)size;
  return 1;
}

static void start_tls(struct end *end, const char *identity, int server) {
  char pem[8192];
  FILE *file = fopen(identity, "r");
  size_t size = file == NULL ? 0 : fread(pem, 1, sizeof pem - 1, file);
  pem[size] = '\0';
  if (file != NULL) fclose(file);
  quic_tls *tls = quic_tls_new(pem);
  if (tls == NULL) die("cannot use the identity");
  end->endpoint.events.verify = trust_anyone;
  end->link.endpoint = &end->endpoint;
  end->link.server = server;
  end->link.conn = end->conn;
  if (quic_tls_start(tls, &end->link) != 0) die("TLS");
}

static ngtcp2_path path_of(struct end *end) {
  return (ngtcp2_path){{(struct sockaddr *)&end->local, sizeof end->local},
                       {(struct sockaddr *)&end->peer, sizeof end->peer},
                       NULL};
}

static void start(struct end *end, const char *identity, const ngtcp2_pkt_hd *initial, const char *congestion) {
  ngtcp2_settings settings;
  ngtcp2_transport_params params;
  ngtcp2_cid own = {.datalen = 16}, other = {.datalen = 16};
  ngtcp2_path path = path_of(end);
  ngtcp2_settings_default(&settings);
  ngtcp2_transport_params_default(&params);
  settings.cc_algo = strcmp(congestion, "bbr") == 0 ? NGTCP2_CC_ALGO_BBR : NGTCP2_CC_ALGO_CUBIC;
  settings.initial_ts = now();
  settings.max_tx_udp_payload_size = end->datagram;
  settings.no_tx_udp_payload_size_shaping = end->datagram > 1452;
  params.initial_max_data = params.initial_max_stream_data_uni = WINDOW;
  params.initial_max_streams_uni = 1;
  fill_random(own.data, 16, NULL);
  fill_random(other.data, 16, NULL);
  int failed;
  if (initial == NULL) {
    failed = ngtcp2_conn_client_new(&end->conn, &other, &own, &path, NGTCP2_PROTO_VER_V1, &CALLBACKS, &settings,
                                    &params, NULL, end);
  } else {
    params.original_dcid = initial->dcid;
#if NGTCP2_VERSION_NUM >= 0x010000
    params.original_dcid_present = 1;
#endif
    failed = ngtcp2_conn_server_new(&end->conn, &initial->scid, &own, &path, initial->version, &CALLBACKS, &settings,
                                    &params, NULL, end);
  }
  if (failed != 0) die("no connection");
  start_tls(end, identity, initial != NULL);
}

static void send_batch(struct end *end, const uint8_t *data, size_t size, size_t segment) {
  union {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(uint16_t))];
  } room = {0};
  struct iovec vector = {(void *)(uintptr_t)data, size};
  struct msghdr header = {&end->peer, sizeof end->peer, &vector, 1, &room, sizeof room, 0};
  struct cmsghdr *c = CMSG_FIRSTHDR(&header);
  uint16_t value = (uint16_t)segment;
  c->cmsg_level = IPPROTO_UDP;
  c->cmsg_type = UDP_SEGMENT;
  c->cmsg_len = CMSG_LEN(sizeof value);
  memcpy(CMSG_DATA(c), &value, sizeof value);
  if (size <= segment) header.msg_controllen = 0;
  while (sendmsg(end->fd, &header, 0) < 0 && errno == EINTR) continue;
}

static void write_packets(struct end *end, const uint8_t *buffer) {
  static uint8_t batch[65507 + 9216];
  size_t used = 0, segment = 0, count = 0, written = 0, quantum = ngtcp2_conn_get_send_quantum(end->conn);
  ngtcp2_path_storage path;
  ngtcp2_pkt_info info;
  ngtcp2_path_storage_zero(&path);
  uint64_t t = now();
  if (buffer != NULL && end->stream < 0 && ngtcp2_conn_get_handshake_completed(end->conn)) {
    ngtcp2_conn_open_uni_stream(end->conn, &end->stream, NULL);
  }
  while (written == 0 || written + end->datagram <= quantum) { /* beyond a full batch: one more system call */
    size_t at = end->moved % BUFFER;
    ngtcp2_vec vector = {(uint8_t *)(uintptr_t)buffer + at, BUFFER - at};
    ngtcp2_ssize taken = -1;
    int has = end->stream >= 0;
    ngtcp2_ssize size = ngtcp2_conn_writev_stream(end->conn, &path.path, &info, batch + used, end->datagram, &taken,
                                                  NGTCP2_WRITE_STREAM_FLAG_NONE, has ? end->stream : -1, &vector,
                                                  has ? 1 : 0, t);
    if (size == NGTCP2_ERR_STREAM_DATA_BLOCKED) {
      size = ngtcp2_conn_writev_stream(end->conn, &path.path, &info, batch + used, end->datagram, &taken, 0, -1, NULL,
                                       0, t);
    }
    if (size <= 0) break;
    if (taken > 0) end->moved += (uint64_t)taken;
    written += (size_t)size;
    if (count > 0 && (size_t)size > segment) { /* a larger one: a probe */
      send_batch(end, batch, used, segment);
      memmove(batch, batch + used, (size_t)size);
      used = count = 0;
    }
    if (count == 0) segment = (size_t)size;
    used += (size_t)size;
    count++;
    if ((size_t)size < segment || count == 64 || used + segment > 65507) {
      send_batch(end, batch, used, segment);
      used = count = 0;
    }
  }
  if (count > 0) send_batch(end, batch, used, segment);
  ngtcp2_conn_update_pkt_tx_time(end->conn, t);
}

static int read_packets(struct end *end, const char *identity, const char *congestion) {
  static uint8_t data[8][65536];
  struct mmsghdr messages[8];
  struct iovec vectors[8];
  union {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(int))];
  } rooms[8];
  memset(messages, 0, sizeof messages);
  for (int i = 0; i < 8; i++) {
    vectors[i] = (struct iovec){data[i], sizeof data[i]};
    messages[i].msg_hdr = (struct msghdr){&end->peer, sizeof end->peer, &vectors[i], 1, &rooms[i], sizeof rooms[i], 0};
  }
  int count = recvmmsg(end->fd, messages, 8, MSG_DONTWAIT, NULL);
  ngtcp2_path path = path_of(end);
  ngtcp2_pkt_info info = {0};
  for (int i = 0; i < count; i++) {
    size_t length = messages[i].msg_len, segment = length;
    struct cmsghdr *c = CMSG_FIRSTHDR(&messages[i].msg_hdr);
    if (c != NULL && c->cmsg_type == UDP_GRO) {
      int value;
      memcpy(&value, CMSG_DATA(c), sizeof value);
      segment = (size_t)value;
    }
    for (size_t at = 0; at < length; at += segment) {
      size_t size = length - at < segment ? length - at : segment;
      if (end->conn == NULL) {
        ngtcp2_pkt_hd initial;
        if (ngtcp2_accept(&initial, data[i] + at, size) != 0) continue;
        start(end, identity, &initial, congestion);
        path = path_of(end);
      }
      if (ngtcp2_conn_read_pkt(end->conn, &path, &info, data[i] + at, size, now()) != 0) return 0;
    }
  }
  return 1;
}

static void run(struct end *end, const char *identity, const char *congestion, const uint8_t *buffer, uint64_t until) {
  while (now() < until) {
    uint64_t expiry = UINT64_MAX, t = now();
    if (end->conn != NULL) {
      if (ngtcp2_conn_get_expiry(end->conn) <= t && ngtcp2_conn_handle_expiry(end->conn, t) != 0) return;
      write_packets(end, buffer);
      expiry = ngtcp2_conn_get_expiry(end->conn);
    }
    t = now();
    uint64_t left = expiry <= t ? 0 : expiry - t;
    if (left > 100000000ull) left = 100000000ull;
    struct timespec timeout = {0, (long)left};
    struct pollfd fd = {end->fd, POLLIN, 0};
    if (ppoll(&fd, 1, &timeout, NULL) > 0 && !read_packets(end, identity, congestion)) return;
  }
}

static int open_socket(struct sockaddr_in *local) {
  int fd = socket(AF_INET, SOCK_DGRAM, 0), size = 8 << 20, on = 1;
  socklen_t length = sizeof *local;
  *local = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (fd < 0 || bind(fd, (struct sockaddr *)local, length) != 0) die("no socket");
  getsockname(fd, (struct sockaddr *)local, &length);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
  return fd;
}

static double cpu(int who) {
  struct rusage usage;
  getrusage(who, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv) {
  if (argc != 5) die("usage: quic_ceiling IDENTITY.pem SECONDS DATAGRAM bbr|cubic");
  uint64_t duration = (uint64_t)(atof(argv[2]) * 1e9);
  struct end server = {.stream = -1, .datagram = (size_t)atoi(argv[3])};
  struct end client = {.stream = -1, .datagram = (size_t)atoi(argv[3])};
  server.fd = open_socket(&server.local);
  client.fd = open_socket(&client.local);
  client.peer = server.local;
  server.warm = now() + duration / 5;
  uint64_t until = now() + duration;
  pid_t child = fork();
  if (child == 0) {
    uint8_t *buffer = malloc(BUFFER);
    if (buffer == NULL) die("memory");
    for (size_t i = 0; i < BUFFER; i++) buffer[i] = (uint8_t)(i * 2654435761u >> 13);
    close(server.fd);
    start(&client, argv[1], NULL, argv[4]);
    run(&client, argv[1], argv[4], buffer, until);
    _exit(0);
  }
  close(client.fd);
  server.landing = calloc(1, BUFFER);
  if (server.landing == NULL) die("memory");
  run(&server, argv[1], argv[4], NULL, until);
  kill(child, SIGTERM);
  waitpid(child, NULL, 0);
  if (server.counted == 0) die("nothing arrived");
  double seconds = (double)(server.ended - server.began) / 1e9;
  double gib = (double)server.moved / (1 << 30);
  printf("%.3f %.3f\n", (double)server.counted * 8 / seconds / 1e9, (cpu(RUSAGE_SELF) + cpu(RUSAGE_CHILDREN)) / gib);
  return 0;
}
