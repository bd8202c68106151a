/*
 * base/log: the bounded ring in which lines wait until the host takes them.
 * Guarantees: a line equal to the one before it from the same source is counted, not kept, while that one still
 * waits; when the ring is full the oldest line goes, and the next one says how many were lost.
 * Never calls out, never prints, never allocates: no host language is entered from a thread of ours.
 *
 * Locks: `ring.lock` guards the ring; it is held for a copy of one line. What llama.cpp sends in pieces is put together
 * per thread, without a lock.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/text.h"

enum {
    RING_LINES = 256,
    TEXT_BYTES = sizeof(((moestream_log_line *) 0)->text),
    SOURCE_MOESTREAM = 0,
    SOURCE_FOREIGN = 1,
    N_SOURCES = 2,
    LEVEL_CONTINUED = 5 /* ggml: more of the line before, at its level */
};

typedef struct log_entry {
    int level;
    int source;
    uint32_t repeats;
    uint32_t dropped;
    char text[TEXT_BYTES];
} log_entry;

/* Lines are numbered from 0 as they come; line i sits at i % RING_LINES while first <= i < next. */
static struct {
    pthread_mutex_t lock;
    uint64_t first;
    uint64_t next;
    uint64_t after_newest[N_SOURCES]; /* number of the source's last line + 1, 0 before there is one */
    log_entry entry[RING_LINES];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_int min_level = MS_LOG_INFO;

static uint32_t add_clamped(uint32_t a, uint32_t b) {
    return a > UINT32_MAX - b ? UINT32_MAX : a + b;
}

static void push_line(int level, int source, const char * text, size_t length) {
    pthread_mutex_lock(&ring.lock);
    uint64_t after = ring.after_newest[source];
    log_entry * before = after > ring.first ? &ring.entry[(after - 1) % RING_LINES] : NULL;
    if (before != NULL && before->level == level && strcmp(before->text, text) == 0) {
        before->repeats = add_clamped(before->repeats, 1);
        pthread_mutex_unlock(&ring.lock);
        return;
    }
    uint32_t lost = 0;
    if (ring.next - ring.first == RING_LINES) {
        const log_entry * oldest = &ring.entry[ring.first % RING_LINES];
        lost = add_clamped(oldest->dropped, add_clamped(oldest->repeats, 1));
        ring.first++;
    }
    log_entry * entry = &ring.entry[ring.next % RING_LINES];
    entry->level = level;
    entry->source = source;
    entry->repeats = 0;
    entry->dropped = 0;
    memcpy(entry->text, text, length + 1);
    ring.next++;
    ring.after_newest[source] = ring.next;
    log_entry * oldest = &ring.entry[ring.first % RING_LINES];
    oldest->dropped = add_clamped(oldest->dropped, lost);
    pthread_mutex_unlock(&ring.lock);
}

void ms_log(int level, const char * format, ...) {
    if (level < atomic_load_explicit(&min_level, memory_order_relaxed)) {
        return;
    }
    char text[TEXT_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0) {
        return;
    }
    bool cut = (size_t) n >= sizeof text;
    size_t length = ms_text_one_line(text, cut ? sizeof text - 1 : (size_t) n, cut);
    push_line(level, SOURCE_MOESTREAM, text, length);
}

bool ms_log_take(moestream_log_line * line) {
    pthread_mutex_lock(&ring.lock);
    bool any = ring.first < ring.next;
    if (any) {
        const log_entry * entry = &ring.entry[ring.first % RING_LINES];
        line->level = entry->level;
        line->source = entry->source;
        line->repeats = entry->repeats;
        line->dropped = entry->dropped;
        memcpy(line->text, entry->text, sizeof line->text);
        ring.first++;
    }
    pthread_mutex_unlock(&ring.lock);
    return any;
}

void ms_log_set_level(int level) {
    atomic_store_explicit(&min_level, level, memory_order_relaxed);
}

/* ---- lines of llama.cpp and ggml, which come in pieces ---- */

typedef struct foreign_line {
    int level;
    size_t n;
    bool cut;
    char text[TEXT_BYTES];
    char last_error[TEXT_BYTES];
} foreign_line;

static _Thread_local foreign_line foreign;

static void finish_foreign(foreign_line * f) {
    size_t length = ms_text_one_line(f->text, f->n, f->cut);
    f->n = 0;
    f->cut = false;
    if (length == 0) {
        return;
    }
    if (f->level == MS_LOG_ERROR) {
        memcpy(f->last_error, f->text, length + 1);
    }
    if (f->level >= atomic_load_explicit(&min_level, memory_order_relaxed)) {
        push_line(f->level, SOURCE_FOREIGN, f->text, length);
    }
}

void ms_log_foreign(int level, const char * text) {
    if (text == NULL) {
        return;
    }
    foreign_line * f = &foreign;
    if (level != LEVEL_CONTINUED) {
        finish_foreign(f); /* a line that its sender never ended */
        f->level = level >= MS_LOG_DEBUG && level <= MS_LOG_ERROR ? level : MS_LOG_INFO;
    } else if (f->level == 0) {
        f->level = MS_LOG_INFO;
    }
    for (const char * c = text; *c != '\0'; c++) {
        if (*c == '\n') {
            finish_foreign(f);
        } else if (f->n < TEXT_BYTES - 1) {
            f->text[f->n++] = *c;
        } else {
            f->cut = true;
        }
    }
}

const char * ms_log_last_foreign_error(void) {
    return foreign.last_error;
}

void ms_log_clear_foreign_error(void) {
    foreign.last_error[0] = '\0';
}
