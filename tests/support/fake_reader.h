/*
 * fake_reader: an ms_reader engine for tests, with faults by script.
 * Guarantees: the contract of io/reader.h, retry table included; what happens to the k-th read depends on the script
 * and its seed alone (reads are numbered from 0 as they are submitted). It starts no threads: reads are done inside
 * poll and wait, by whoever calls them.
 * Never writes to what it reads from.
 */
#ifndef MS_TEST_FAKE_READER_H
#define MS_TEST_FAKE_READER_H

#include "io/reader.h"

typedef struct fake_script {
    uint64_t seed;
    /* Where bytes come from: this memory, the same for every file; with NULL, the read's own file, buffered. */
    const uint8_t * bytes;
    uint64_t n_bytes;

    /* Reads number fail_at, fail_at + 1, ... (fail_count of them; FAKE_FOR_EVER until fake_reader_heal) get
     * `fail_errno` as the system's answer: every attempt does, or only the first `fail_attempts` where that is not 0
     * (then the read recovers if the retry table repeats that errno). fail_count 0: none. */
    uint64_t fail_at;
    int fail_count;
    int fail_errno; /* 0 answers "nothing came", which is EOF */
    int fail_attempts;

    /* Reads number corrupt_at, ... (corrupt_count of them) arrive with one bit flipped. */
    uint64_t corrupt_at;
    int corrupt_count;

    int short_percent;      /* chance of an attempt to bring only a part: 1, 511, 4095 bytes or any number */
    int interrupt_percent;  /* chance of an attempt to be answered -EINTR */
    int delay_turns;        /* a read completes 0 to this many turns (calls of poll or wait) after its submission */
    uint64_t delay_ns;      /* and 0 to this long after it */
    bool reorder;           /* of the reads that could complete, any one; otherwise the oldest */
    int max_deliveries;     /* per turn; 0 = all that could */
} fake_script;

enum { FAKE_FOR_EVER = -1 };

/* depth, done and user of `options` count. Errors: NOMEM. */
moestream_status fake_reader_open(ms_reader ** out, const ms_reader_options * options, const fake_script * script,
                                  moestream_error * err);

/* From now on nothing fails and nothing is corrupted. */
void fake_reader_heal(ms_reader * reader);
/* While held, nothing completes: for tests that need a read to be in flight. */
void fake_reader_hold(ms_reader * reader, bool held);

uint64_t fake_reader_submitted(ms_reader * reader);
int fake_reader_in_flight(ms_reader * reader);
/* The most reads that were in flight at once. */
int fake_reader_most_in_flight(ms_reader * reader);

#endif
