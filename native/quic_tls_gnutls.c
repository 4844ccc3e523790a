/* The keys of a QUIC link with GnuTLS: TLS 1.3 only, both certificates asked for and shown to `verify`, ALPN
 * mandatory, no tickets and so no resumption and no 0-RTT. */
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <ngtcp2/ngtcp2_crypto_gnutls.h>
#include <stdlib.h>
#include <string.h>

#include "quic_internal.h"

struct quic_tls {
  gnutls_certificate_credentials_t credentials;
  gnutls_priority_t priority;
};

/* AES-128 first: the fastest where there is hardware for it, which is everywhere this runs. */
static const char PRIORITY[] =
    "%DISABLE_TLS13_COMPAT_MODE:NORMAL:-VERS-ALL:+VERS-TLS1.3:-CIPHER-ALL:+AES-128-GCM:+AES-256-GCM:"
    "+CHACHA20-POLY1305:-GROUP-ALL:+GROUP-X25519:+GROUP-SECP256R1";

static ngtcp2_conn *conn_of(ngtcp2_crypto_conn_ref *ref) { return ((quic_link *)ref->user_data)->conn; }

static int verify(gnutls_session_t session) {
  const ngtcp2_crypto_conn_ref *ref = gnutls_session_get_ptr(session);
  quic_link *link = ref->user_data;
  unsigned count = 0;
  const gnutls_datum_t *chain = gnutls_certificate_get_peers(session, &count);
  quic_endpoint *endpoint = link->endpoint;
  if (chain != NULL && count == 1 &&
      endpoint->events.verify(endpoint->events.user, link->id, chain[0].data, chain[0].size) == 1) {
    return 0;
  }
  link->untrusted = true;
  return GNUTLS_E_CERTIFICATE_ERROR;
}

quic_tls *quic_tls_new(const char *identity_pem) {
  quic_tls *tls = calloc(1, sizeof *tls);
  gnutls_datum_t pem = {(unsigned char *)(uintptr_t)identity_pem, (unsigned)strlen(identity_pem)};
  if (tls == NULL || gnutls_certificate_allocate_credentials(&tls->credentials) != 0 ||
      gnutls_certificate_set_x509_key_mem(tls->credentials, &pem, &pem, GNUTLS_X509_FMT_PEM) != 0 ||
      gnutls_priority_init(&tls->priority, PRIORITY, NULL) != 0) {
    quic_tls_free(tls);
    return NULL;
  }
  return tls;
}

int quic_tls_secret(const char *identity_pem, uint8_t *secret) {
  static const char label[] = "zc-handoff quic reset";
  return gnutls_hmac_fast(GNUTLS_MAC_SHA256, identity_pem, strlen(identity_pem), label, sizeof label, secret) == 0 ? 0
                                                                                                                   : -1;
}

void quic_tls_free(quic_tls *tls) {
  if (tls == NULL) return;
  if (tls->priority != NULL) gnutls_priority_deinit(tls->priority);
  if (tls->credentials != NULL) gnutls_certificate_free_credentials(tls->credentials);
  free(tls);
}

int quic_tls_start(quic_tls *tls, quic_link *link) {
  gnutls_session_t session = NULL;
  gnutls_datum_t alpn = {(unsigned char *)(uintptr_t)QUIC_ALPN, sizeof QUIC_ALPN - 1};
  unsigned flags = link->server ? GNUTLS_SERVER | GNUTLS_NO_TICKETS : GNUTLS_CLIENT | GNUTLS_NO_TICKETS;
  if (gnutls_init(&session, flags) != 0) return -1;
  link->session = session;
  link->ref.get_conn = conn_of;
  link->ref.user_data = link;
  int failed = link->server ? ngtcp2_crypto_gnutls_configure_server_session(session)
                            : ngtcp2_crypto_gnutls_configure_client_session(session);
  if (failed != 0 || gnutls_priority_set(session, tls->priority) != 0 ||
      gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, tls->credentials) != 0 ||
      gnutls_alpn_set_protocols(session, &alpn, 1, GNUTLS_ALPN_MANDATORY) != 0) {
    return -1;
  }
  gnutls_session_set_ptr(session, &link->ref);
  gnutls_session_set_verify_function(session, verify);
  if (link->server) gnutls_certificate_server_set_request(session, GNUTLS_CERT_REQUIRE);
  ngtcp2_conn_set_tls_native_handle(link->conn, session);
  return 0;
}

void quic_tls_end(quic_link *link) {
  if (link->session != NULL) gnutls_deinit(link->session);
  link->session = NULL;
}

const char *quic_tls_name(void) { return "GnuTLS"; }

const char *quic_tls_version(void) { return gnutls_check_version(NULL); }
