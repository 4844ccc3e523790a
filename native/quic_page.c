/* The streams of one link: control bytes, pages out of shared memory, pages into it. */
#include <stdlib.h>
#include <string.h>

#include "quic_internal.h"

static const char *const BROKEN_SIZE = "page-size";

static int broken(quic_link *link, const char *fault) {
  link->fault = fault;
  return NGTCP2_ERR_CALLBACK_FAILURE;
}

/* The client's first stream is the control stream. */
static bool is_page(int64_t stream) { return stream != 0; }

static uint64_t ordinal(int64_t stream) { return ((uint64_t)stream >> 2) - ((stream & 1) == 0); }

/* -- out -- */

void quic_page_append(quic_pages_out *list, quic_page_out *page) {
  page->next = NULL;
  page->previous = list->last;
  if (list->last != NULL) {
    list->last->next = page;
  } else {
    list->first = page;
  }
  list->last = page;
}

void quic_page_remove(quic_pages_out *list, quic_page_out *page) {
  if (page->previous != NULL) {
    page->previous->next = page->next;
  } else {
    list->first = page->next;
  }
  if (page->next != NULL) {
    page->next->previous = page->previous;
  } else {
    list->last = page->previous;
  }
}

void quic_page_settle(quic_link *link, quic_pages_out *list, quic_page_out *page, int outcome) {
  quic_endpoint *endpoint = link->endpoint;
  quic_page_remove(list, page);
  endpoint->events.sent(endpoint->events.user, link->id, page->id, outcome);
  free(page);
}

void quic_page_whole(quic_link *link, quic_page_out *page) {
  quic_page_remove(&link->sending, page);
  quic_page_append(&link->unacked, page);
  page->whole = true;
}

int quic_on_acked(ngtcp2_conn *conn, int64_t stream, uint64_t offset, uint64_t size, void *user, void *stream_user) {
  quic_link *link = user;
  size_t acked = 0;
  (void)conn, (void)offset, (void)stream_user;
  if (stream != link->control_stream) return 0;
  link->control_first_acked += size;
  while (link->control_first != NULL && link->control_first != link->control_next &&
         link->control_first_acked >= link->control_first->size) {
    quic_chunk *chunk = link->control_first;
    link->control_first = chunk->next;
    link->control_first_acked -= chunk->size;
    acked += chunk->size;
    free(chunk);
  }
  if (link->control_first == NULL) link->control_last = NULL;
  if (acked > 0) link->endpoint->events.control_acked(link->endpoint->events.user, link->id, acked);
  return 0;
}

int quic_on_stop_sending(ngtcp2_conn *conn, int64_t stream, uint64_t code, void *user, void *stream_user) {
  quic_link *link = user;
  quic_page_out *page = stream_user;
  (void)code;
  if (!is_page(stream)) return broken(link, "control-ended");
  if (page == NULL || page->stopped || !ngtcp2_conn_is_local_stream(conn, stream)) return 0;
  if (!page->whole) quic_page_whole(link, page);
  page->stopped = true;
  return 0;
}

int quic_on_unblocked(ngtcp2_conn *conn, int64_t stream, uint64_t max_data, void *user, void *stream_user) {
  quic_link *link = user;
  quic_page_out *page = stream_user;
  (void)max_data;
  if (!is_page(stream)) {
    link->control_blocked = false;
  } else if (page != NULL && ngtcp2_conn_is_local_stream(conn, stream)) {
    page->blocked = false;
  }
  return 0;
}

/* -- in -- */

int quic_on_stream_open(ngtcp2_conn *conn, int64_t stream, void *user) {
  quic_link *link = user;
  if (!is_page(stream)) {
    link->control_stream = stream;
    return 0;
  }
  quic_page_in *page = calloc(1, sizeof *page);
  if (page == NULL) return NGTCP2_ERR_CALLBACK_FAILURE;
  page->stream = stream;
  page->next = link->pages_in;
  link->pages_in = page;
  return ngtcp2_conn_set_stream_user_data(conn, stream, page);
}

static void credit(quic_link *link, const quic_page_in *page, uint64_t size) {
  if (!page->stream_closed) ngtcp2_conn_extend_max_stream_offset(link->conn, page->stream, size);
  ngtcp2_conn_extend_max_offset(link->conn, size);
}

/* State does not stay behind in memory that is given back. Compilers leave out what is written before a free. */
static void free_held(quic_page_in *page) {
  if (page->held == NULL) return;
  memset(page->held, 0, page->got);
  __asm__ volatile("" : : "r"(page->held) : "memory");
  free(page->held);
  page->held = NULL;
}

/* A page that had its turn and whose stream is closed makes room for one more stream. */
static void forget(quic_link *link, quic_page_in *page) {
  quic_page_in **at = &link->pages_in;
  while (*at != page) at = &(*at)->next;
  *at = page->next;
  link->answers -= page->answer;
  free_held(page);
  free(page);
  ngtcp2_conn_extend_max_streams_bidi(link->conn, 1);
}

static void give_up(quic_link *link, quic_page_in *page) {
  quic_events *events = &link->endpoint->events;
  if (page->state == QUIC_PAGE_LANDING) events->lost(events->user, link->id, ordinal(page->stream), page->got);
  if (page->held != NULL) {
    credit(link, page, page->got);
    free_held(page);
  }
  page->state = QUIC_PAGE_GONE;
  page->refuse = link->refusals = true;
}

static int land(quic_link *link, quic_page_in *page) {
  quic_events *events = &link->endpoint->events;
  if (!page->finished || page->got != page->payload_size) return 0;
  page->state = QUIC_PAGE_DONE;
  page->answer = true;
  link->answers++;
  events->landed(events->user, link->id, ordinal(page->stream));
  return 0;
}

static int claim(quic_link *link, quic_page_in *page) {
  quic_events *events = &link->endpoint->events;
  page->landing = events->claim(events->user, link->id, ordinal(page->stream), page->preamble + QUIC_PREAMBLE,
                                page->preamble_size - QUIC_PREAMBLE, page->payload_size);
  if (page->landing == NULL) {
    give_up(link, page);
    return 0;
  }
  page->state = QUIC_PAGE_LANDING;
  if (page->held != NULL) {
    memcpy(page->landing, page->held, page->got);
    credit(link, page, page->got);
    free_held(page);
  }
  return land(link, page);
}

static quic_page_in *page_in_turn(const quic_link *link) {
  quic_page_in *page = link->pages_in;
  while (page != NULL && ordinal(page->stream) != link->next_claim) page = page->next;
  return page;
}

int quic_pages_claim(quic_link *link) {
  if (!link->accepts_pages) return 0;
  for (quic_page_in *page = page_in_turn(link); page != NULL; page = page_in_turn(link)) {
    if (page->state == QUIC_PAGE_PREAMBLE) return 0;
    link->next_claim++;
    int failed = page->state == QUIC_PAGE_WAITING ? claim(link, page) : 0;
    if (failed != 0) return failed;
    if (page->stream_closed) forget(link, page);
  }
  return 0;
}

static int hold(quic_link *link, quic_page_in *page, const uint8_t *data, size_t size) {
  if (page->got + size > page->held_room) {
    size_t room = 2 * (page->got + size);
    uint8_t *grown = malloc(room);
    if (grown == NULL) return broken(link, "memory");
    if (page->held != NULL) memcpy(grown, page->held, page->got);
    free_held(page);
    page->held = grown;
    page->held_room = room;
  }
  memcpy(page->held + page->got, data, size);
  page->got += size;
  return 0;
}

static uint64_t little(const uint8_t *at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | at[i];
  return value;
}

/* Takes what belongs to the preamble; returns how much that was, or -1 for a preamble out of bounds. */
static ptrdiff_t take_preamble(quic_link *link, quic_page_in *page, const uint8_t *data, size_t size) {
  size_t taken = 0;
  for (;;) {
    size_t header = page->preamble_size < QUIC_PREAMBLE ? 0 : (size_t)little(page->preamble, 2);
    if (page->preamble_size == QUIC_PREAMBLE) {
      page->payload_size = little(page->preamble + 2, 8);
      if (header == 0 || header > QUIC_MAX_HEADER || page->payload_size == 0 || page->payload_size > QUIC_MAX_PAYLOAD) {
        return -1;
      }
    }
    size_t missing = QUIC_PREAMBLE + header - page->preamble_size;
    size_t now = missing < size - taken ? missing : size - taken;
    if (now == 0) break;
    memcpy(page->preamble + page->preamble_size, data + taken, now);
    page->preamble_size += now;
    taken += now;
  }
  credit(link, page, taken);
  if (page->preamble_size > QUIC_PREAMBLE && page->preamble_size == QUIC_PREAMBLE + little(page->preamble, 2)) {
    page->state = QUIC_PAGE_WAITING;
  }
  return (ptrdiff_t)taken;
}

static int page_data(quic_link *link, quic_page_in *page, const uint8_t *data, size_t size, bool finished) {
  bool news = page->state == QUIC_PAGE_PREAMBLE;
  if (page->state == QUIC_PAGE_PREAMBLE) {
    ptrdiff_t taken = take_preamble(link, page, data, size);
    if (taken < 0 || (finished && page->state == QUIC_PAGE_PREAMBLE)) return broken(link, BROKEN_SIZE);
    data += taken;
    size -= (size_t)taken;
  }
  page->finished = finished;
  if (finished && page->state != QUIC_PAGE_GONE && size < page->payload_size - page->got) { /* its sender gave it up */
    give_up(link, page);
    news = true;
  }
  int failed = news ? quic_pages_claim(link) : 0;
  if (failed != 0) return failed;
  if (page->state == QUIC_PAGE_GONE) {
    credit(link, page, size);
    return 0;
  }
  if (page->state == QUIC_PAGE_DONE || size > page->payload_size - page->got) {
    return size == 0 ? 0 : broken(link, BROKEN_SIZE);
  }
  if (page->state == QUIC_PAGE_WAITING) return hold(link, page, data, size);
  if (page->state == QUIC_PAGE_LANDING) {
    if (size > 0) memcpy(page->landing + page->got, data, size);
    page->got += size;
    credit(link, page, size);
    return land(link, page);
  }
  return 0;
}

int quic_on_stream_data(ngtcp2_conn *conn, uint32_t flags, int64_t stream, uint64_t offset, const uint8_t *data,
                        size_t size, void *user, void *stream_user) {
  quic_link *link = user;
  (void)offset;
  bool finished = (flags & NGTCP2_STREAM_DATA_FLAG_FIN) != 0;
  if (stream == link->control_stream) {
    if (finished) return broken(link, "control-ended");
    if (link->state == QUIC_LINK_OPEN) link->endpoint->events.control(link->endpoint->events.user, link->id, data, size);
    return 0;
  }
  if (stream_user == NULL) return 0;
  if (ngtcp2_conn_is_local_stream(conn, stream)) return size == 0 ? 0 : broken(link, BROKEN_SIZE);
  return page_data(link, stream_user, data, size, finished);
}

int quic_on_stream_reset(ngtcp2_conn *conn, int64_t stream, uint64_t final_size, uint64_t code, void *user,
                         void *stream_user) {
  quic_link *link = user;
  quic_page_in *page = stream_user;
  (void)final_size;
  if (!is_page(stream)) return broken(link, "control-ended");
  if (ngtcp2_conn_is_local_stream(conn, stream)) { /* the receiver does not want it */
    return quic_on_stop_sending(conn, stream, code, user, stream_user);
  }
  if (page == NULL || page->state == QUIC_PAGE_DONE || page->state == QUIC_PAGE_GONE) return 0;
  give_up(link, page);
  return quic_pages_claim(link);
}

int quic_on_stream_close(ngtcp2_conn *conn, uint32_t flags, int64_t stream, uint64_t code, void *user,
                         void *stream_user) {
  quic_link *link = user;
  (void)flags, (void)code;
  if (!is_page(stream)) return broken(link, "control-ended");
  if (stream_user == NULL) return 0;
  if (ngtcp2_conn_is_local_stream(conn, stream)) {
    quic_page_out *page = stream_user;
    quic_pages_out *list = page->whole ? &link->unacked : &link->sending;
    quic_page_settle(link, list, page,
                     page->cancelled ? QUIC_CANCELLED : page->stopped ? QUIC_DROPPED : QUIC_SENT);
    return 0;
  }
  quic_page_in *page = stream_user;
  page->stream_closed = true;
  if (ordinal(stream) < link->next_claim) forget(link, page);
  return 0;
}

void quic_pages_refuse(quic_link *link) {
  if (!link->refusals) return;
  link->refusals = false;
  for (quic_page_in *page = link->pages_in; page != NULL; page = page->next) {
    if (page->refuse && !page->stream_closed) quic_refuse_stream(link->conn, page->stream, QUIC_CODE_DROPPED);
    page->refuse = false;
  }
}

void quic_pages_end(quic_link *link) {
  quic_events *events = &link->endpoint->events;
  while (link->pages_in != NULL) {
    quic_page_in *page = link->pages_in;
    link->pages_in = page->next;
    if (page->state == QUIC_PAGE_LANDING) events->lost(events->user, link->id, ordinal(page->stream), page->got);
    free_held(page);
    free(page);
  }
  while (link->unacked.first != NULL) quic_page_settle(link, &link->unacked, link->unacked.first, QUIC_FAILED);
  while (link->sending.first != NULL) quic_page_settle(link, &link->sending, link->sending.first, QUIC_FAILED);
  while (link->control_first != NULL) {
    quic_chunk *chunk = link->control_first;
    link->control_first = chunk->next;
    free(chunk);
  }
  link->control_last = link->control_next = NULL;
}
