/* What changed between the ngtcp2 of Debian 12 (0.12) and 1.x, under the names of 1.x. */
#ifndef ZC_QUIC_SHIM_H
#define ZC_QUIC_SHIM_H

#include <ngtcp2/ngtcp2.h>
#include <ngtcp2/ngtcp2_crypto.h>

#if NGTCP2_VERSION_NUM < 0x010000
#define ngtcp2_ccerr ngtcp2_connection_close_error
#define ngtcp2_ccerr_default ngtcp2_connection_close_error_default
#define ngtcp2_ccerr_set_liberr ngtcp2_connection_close_error_set_transport_error_liberr
#define ngtcp2_ccerr_set_tls_alert ngtcp2_connection_close_error_set_transport_error_tls_alert
#define ngtcp2_ccerr_set_application_error ngtcp2_connection_close_error_set_application_error
#define NGTCP2_CCERR_TYPE_APPLICATION NGTCP2_CONNECTION_CLOSE_ERROR_CODE_TYPE_APPLICATION
#define NGTCP2_CCERR_TYPE_IDLE_CLOSE NGTCP2_CONNECTION_CLOSE_ERROR_CODE_TYPE_TRANSPORT_IDLE_CLOSE

static inline void quic_peer_close(ngtcp2_conn *conn, ngtcp2_ccerr *error) {
  ngtcp2_conn_get_connection_close_error(conn, error);
}

static inline int quic_refuse_stream(ngtcp2_conn *conn, int64_t stream, uint64_t code) {
  return ngtcp2_conn_shutdown_stream(conn, stream, code);
}

static inline void quic_set_token(ngtcp2_settings *settings, const ngtcp2_pkt_hd *header) {
  settings->token = header->token;
}

static inline ngtcp2_vec quic_token(const ngtcp2_pkt_hd *header) { return header->token; }

typedef ngtcp2_conn_stat quic_conn_info;
#define quic_get_conn_info ngtcp2_conn_get_conn_stat
/* 0.12 probes four sizes up to 1452 bytes only. */
#define QUIC_PROBES_LARGE 0
#else
static inline void quic_peer_close(ngtcp2_conn *conn, ngtcp2_ccerr *error) { *error = *ngtcp2_conn_get_ccerr(conn); }

static inline int quic_refuse_stream(ngtcp2_conn *conn, int64_t stream, uint64_t code) {
  return ngtcp2_conn_shutdown_stream(conn, 0, stream, code);
}

static inline void quic_set_token(ngtcp2_settings *settings, const ngtcp2_pkt_hd *header) {
  settings->token = header->token;
  settings->tokenlen = header->tokenlen;
  settings->token_type = NGTCP2_TOKEN_TYPE_RETRY;
}

static inline ngtcp2_vec quic_token(const ngtcp2_pkt_hd *header) {
  ngtcp2_vec token = {(uint8_t *)(uintptr_t)header->token, header->tokenlen};
  return token;
}

typedef ngtcp2_conn_info quic_conn_info;
#define quic_get_conn_info ngtcp2_conn_get_conn_info
#define QUIC_PROBES_LARGE (NGTCP2_VERSION_NUM >= 0x010400)
#endif

#endif
