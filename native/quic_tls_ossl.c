/* The keys of a QUIC link with OpenSSL >= 3.5 and ngtcp2 >= 1.12: TLS 1.3 only, both certificates asked for and shown to
 * `verify`, ALPN mandatory, no tickets and no session cache and so no resumption and no 0-RTT. */
#include <ngtcp2/ngtcp2_crypto_ossl.h>
#include <openssl/err.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "quic_internal.h"

struct quic_tls {
  SSL_CTX *context; /* of clients and of servers: the role is the session's */
};

/* AES-128 first: the fastest where there is hardware for it, which is everywhere this runs. */
static const char CIPHERS[] = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
static const char GROUPS[] = "X25519:P-256";
static const uint8_t ALPN[] = "\x0c" QUIC_ALPN; /* its size, then the name */
_Static_assert(sizeof QUIC_ALPN - 1 == 0x0c, "the ALPN's size byte");

static ngtcp2_conn *conn_of(ngtcp2_crypto_conn_ref *ref) { return ((quic_link *)ref->user_data)->conn; }

static int select_alpn(SSL *ssl, const uint8_t **chosen, uint8_t *chosen_size, const uint8_t *offered,
                       unsigned offered_size, void *unused) {
  (void)ssl, (void)unused;
  int found = SSL_select_next_proto((uint8_t **)(uintptr_t)chosen, chosen_size, ALPN, sizeof ALPN - 1, offered,
                                    offered_size);
  return found == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

/* OpenSSL asks nobody when the peer does not mention ALPN at all. */
static bool alpn_agreed(const SSL *ssl) {
  const uint8_t *name = NULL;
  unsigned size = 0;
  SSL_get0_alpn_selected(ssl, &name, &size);
  return size == sizeof QUIC_ALPN - 1 && memcmp(name, QUIC_ALPN, size) == 0;
}

static bool trusted(quic_link *link, X509 *certificate) {
  uint8_t *der = NULL;
  int size = i2d_X509(certificate, &der);
  quic_events *events = &link->endpoint->events;
  bool yes = size > 0 && events->verify(events->user, link->id, der, (size_t)size) == 1;
  OPENSSL_free(der);
  return yes;
}

/* In the place of OpenSSL's own check of the chain; that the peer holds the key it proves afterwards, to OpenSSL. */
static int verify(X509_STORE_CTX *store, void *unused) {
  const SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
  const ngtcp2_crypto_conn_ref *ref = SSL_get_app_data(ssl);
  quic_link *link = ref->user_data;
  const STACK_OF(X509) *chain = X509_STORE_CTX_get0_untrusted(store);
  (void)unused;
  bool agreed = alpn_agreed(ssl);
  if (agreed && sk_X509_num(chain) == 1 && trusted(link, X509_STORE_CTX_get0_cert(store))) return 1;
  link->untrusted = agreed;
  X509_STORE_CTX_set_error(store, X509_V_ERR_CERT_REJECTED);
  return 0;
}

static bool use_identity(SSL_CTX *context, const char *identity_pem) {
  BIO *key_text = BIO_new_mem_buf(identity_pem, -1), *certificate_text = BIO_new_mem_buf(identity_pem, -1);
  EVP_PKEY *key = key_text == NULL ? NULL : PEM_read_bio_PrivateKey(key_text, NULL, NULL, (void *)"");
  X509 *certificate = certificate_text == NULL ? NULL : PEM_read_bio_X509(certificate_text, NULL, NULL, NULL);
  bool used = key != NULL && certificate != NULL && SSL_CTX_use_certificate(context, certificate) == 1 &&
              SSL_CTX_use_PrivateKey(context, key) == 1 && SSL_CTX_check_private_key(context) == 1;
  X509_free(certificate);
  EVP_PKEY_free(key);
  BIO_free(certificate_text);
  BIO_free(key_text);
  return used;
}

/* Every setting that a system's openssl.cnf could have changed is made here. */
static bool restrict_protocol(SSL_CTX *context) {
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
  SSL_CTX_set_cert_verify_callback(context, verify, NULL);
  SSL_CTX_set_alpn_select_cb(context, select_alpn, NULL);
  return SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
         SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
         SSL_CTX_set_ciphersuites(context, CIPHERS) == 1 && SSL_CTX_set1_groups_list(context, GROUPS) == 1 &&
         SSL_CTX_set_num_tickets(context, 0) == 1 && SSL_CTX_set_max_early_data(context, 0) == 1 &&
         SSL_CTX_set_alpn_protos(context, ALPN, sizeof ALPN - 1) == 0;
}

/* Ciphers are looked up once a process instead of for every key. Without it, or if it fails, all is only slower. */
static void start_glue(void) { (void)ngtcp2_crypto_ossl_init(); }

quic_tls *quic_tls_new(const char *identity_pem) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  quic_tls *tls = calloc(1, sizeof *tls);
  if (tls == NULL) return NULL;
  pthread_once(&once, start_glue);
  tls->context = SSL_CTX_new(TLS_method());
  if (tls->context == NULL || !restrict_protocol(tls->context) || !use_identity(tls->context, identity_pem)) {
    quic_tls_free(tls);
    tls = NULL;
  }
  ERR_clear_error();
  return tls;
}

int quic_tls_secret(const char *identity_pem, uint8_t *secret) {
  static const char label[] = "zc-handoff quic reset";
  return HMAC(EVP_sha256(), identity_pem, (int)strlen(identity_pem), (const uint8_t *)label, sizeof label, secret,
              NULL) != NULL
             ? 0
             : -1;
}

void quic_tls_free(quic_tls *tls) {
  if (tls == NULL) return;
  SSL_CTX_free(tls->context);
  free(tls);
}

int quic_tls_start(quic_tls *tls, quic_link *link) {
  ngtcp2_crypto_ossl_ctx *session = NULL;
  SSL *ssl = SSL_new(tls->context);
  if (ssl == NULL || ngtcp2_crypto_ossl_ctx_new(&session, ssl) != 0) {
    SSL_free(ssl);
    return -1;
  }
  link->session = session;
  link->ref.get_conn = conn_of;
  link->ref.user_data = link;
  SSL_set_app_data(ssl, &link->ref);
  if (link->server) {
    SSL_set_accept_state(ssl);
  } else {
    SSL_set_connect_state(ssl);
  }
  ngtcp2_conn_set_tls_native_handle(link->conn, session);
  return link->server ? ngtcp2_crypto_ossl_configure_server_session(ssl)
                      : ngtcp2_crypto_ossl_configure_client_session(ssl);
}

void quic_tls_end(quic_link *link) {
  if (link->session == NULL) return;
  SSL *ssl = ngtcp2_crypto_ossl_ctx_get_ssl(link->session);
  SSL_set_app_data(ssl, NULL); /* freeing it tells ngtcp2's connection, which is gone */
  SSL_free(ssl);
  ngtcp2_crypto_ossl_ctx_del(link->session);
  link->session = NULL;
}

const char *quic_tls_name(void) { return "OpenSSL"; }

const char *quic_tls_version(void) { return OpenSSL_version(OPENSSL_VERSION_STRING); }
