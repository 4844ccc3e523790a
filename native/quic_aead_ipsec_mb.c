/* Packets of AES-128-GCM protected by Intel's Multi-Buffer Crypto, which is two to three times as fast as GnuTLS where
 * the CPU has VAES. The handshake, header protection and every other cipher stay with the TLS library; so does
 * everything where the CPU has no AES instructions or the library fails its self-test.
 *
 * ngtcp2 hands out keys at one place only, its key update. So a client with the library begins one as soon as the
 * handshake is confirmed (RFC 9001, 6.1); from then on each end that has the library protects packets here. */
#include <intel-ipsec-mb.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "quic_internal.h"

#define KEY 16
#define NONCE 12
#define TAG 16
#define MAX_KEY 64 /* of any cipher, as ngtcp2 has it */
#define OURS 1     /* in the handle: nobody else's is odd */

typedef struct {
  struct gcm_key_data schedule; /* aligned as its type says */
  struct gcm_context_data scratch;
} aead_key;

_Static_assert(sizeof(aead_key) % _Alignof(aead_key) == 0, "aligned_alloc wants a multiple");

/* One for the process: calls only read its table of functions. NULL where this machine cannot. */
static IMB_MGR *library;

static void load(void) {
  const uint64_t needed =
      IMB_FEATURE_AESNI | IMB_FEATURE_PCLMULQDQ | IMB_FEATURE_SELF_TEST | IMB_FEATURE_SELF_TEST_PASS;
  IMB_MGR *found = alloc_mb_mgr(0);
  if (found == NULL) return;
  init_mb_mgr_auto(found, NULL);
  if (imb_get_errno(found) == 0 && (found->features & needed) == needed) {
    library = found;
  } else {
    free_mb_mgr(found);
  }
}

static bool loaded(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
  return library != NULL;
}

static aead_key *ours(const ngtcp2_crypto_aead_ctx *ctx) {
  uintptr_t handle = (uintptr_t)ctx->native_handle;
  return handle & OURS ? (aead_key *)(handle - OURS) : NULL;
}

/* In constant time. */
static bool equal(const uint8_t *a, const uint8_t *b) {
  unsigned differs = 0;
  for (size_t i = 0; i < TAG; i++) differs |= a[i] ^ b[i];
  return differs == 0;
}

int quic_aead_encrypt(uint8_t *dest, const ngtcp2_crypto_aead *aead, const ngtcp2_crypto_aead_ctx *ctx,
                      const uint8_t *plain, size_t size, const uint8_t *nonce, size_t nonce_size, const uint8_t *data,
                      size_t data_size) {
  aead_key *key = ours(ctx);
  if (key == NULL) return ngtcp2_crypto_encrypt_cb(dest, aead, ctx, plain, size, nonce, nonce_size, data, data_size);
  if (nonce_size != NONCE) return NGTCP2_ERR_CALLBACK_FAILURE;
  IMB_AES128_GCM_ENC(library, &key->schedule, &key->scratch, dest, plain, size, nonce, data, data_size, dest + size, TAG);
  return 0;
}

int quic_aead_decrypt(uint8_t *dest, const ngtcp2_crypto_aead *aead, const ngtcp2_crypto_aead_ctx *ctx,
                      const uint8_t *cipher, size_t size, const uint8_t *nonce, size_t nonce_size, const uint8_t *data,
                      size_t data_size) {
  uint8_t tag[TAG];
  aead_key *key = ours(ctx);
  if (key == NULL) return ngtcp2_crypto_decrypt_cb(dest, aead, ctx, cipher, size, nonce, nonce_size, data, data_size);
  if (nonce_size != NONCE || size < TAG) return NGTCP2_ERR_DECRYPT;
  size -= TAG;
  IMB_AES128_GCM_DEC(library, &key->schedule, &key->scratch, dest, cipher, size, nonce, data, data_size, tag, TAG);
  if (equal(tag, cipher + size)) return 0;
  imb_clear_mem(dest, size);
  imb_clear_mem(tag, sizeof tag); /* it would make the forgery valid */
  return NGTCP2_ERR_DECRYPT;
}

/* Takes the place of the TLS library's key, which stays when memory is short. */
static void adopt(ngtcp2_crypto_aead_ctx *ctx, const uint8_t *secret) {
  aead_key *key = aligned_alloc(_Alignof(aead_key), sizeof *key);
  if (key == NULL) return;
  IMB_AES128_GCM_PRE(library, secret, &key->schedule);
  ngtcp2_crypto_aead_ctx_free(ctx);
  ctx->native_handle = (void *)((uintptr_t)key | OURS);
}

/* Of the ciphers that quic_tls_*.c allow, only AES-128-GCM has keys of this size. */
static bool serves(ngtcp2_conn *conn) {
  return loaded() && ngtcp2_crypto_aead_keylen(&ngtcp2_conn_get_crypto_ctx(conn)->aead) == KEY;
}

int quic_aead_update(ngtcp2_conn *conn, uint8_t *rx_secret, uint8_t *tx_secret, ngtcp2_crypto_aead_ctx *rx,
                     uint8_t *rx_iv, ngtcp2_crypto_aead_ctx *tx, uint8_t *tx_iv, const uint8_t *old_rx_secret,
                     const uint8_t *old_tx_secret, size_t secret_size, void *user) {
  uint8_t rx_key[MAX_KEY], tx_key[MAX_KEY];
  (void)user;
  if (ngtcp2_crypto_update_key(conn, rx_secret, tx_secret, rx, rx_key, rx_iv, tx, tx_key, tx_iv, old_rx_secret,
                               old_tx_secret, secret_size) != 0) {
    return NGTCP2_ERR_CALLBACK_FAILURE;
  }
  if (serves(conn)) {
    adopt(rx, rx_key);
    adopt(tx, tx_key);
  }
  imb_clear_mem(rx_key, sizeof rx_key);
  imb_clear_mem(tx_key, sizeof tx_key);
  return 0;
}

void quic_aead_delete(ngtcp2_conn *conn, ngtcp2_crypto_aead_ctx *ctx, void *user) {
  aead_key *key = ours(ctx);
  if (key == NULL) {
    ngtcp2_crypto_delete_crypto_aead_ctx_cb(conn, ctx, user);
    return;
  }
  imb_clear_mem(key, sizeof *key);
  free(key);
}

void quic_aead_begin(quic_link *link, uint64_t now) {
  if (!link->confirmed || link->updated || !serves(link->conn)) return;
  link->updated = ngtcp2_conn_initiate_key_update(link->conn, now) == 0;
}

const char *quic_aead_name(void) {
  static char text[48];
  if (!loaded()) return ", no ipsec-mb on this CPU";
  snprintf(text, sizeof text, ", packets by ipsec-mb %s", imb_get_version_str());
  return text;
}
