/*
 * stream/pace: notices storage that cannot keep up, and says once what to expect of it.
 * Guarantees: one warning a stream at most; cheap bookkeeping under the stream's lock, no clock of its own.
 * The fastest of a run of reads is looked at, not the mean: with many reads in flight each waits for the others, but on
 * storage that is fast enough some of them come back at once.
 */
#include "stream/internal.h"

enum { LOOK_EVERY = 16 /* reads */, SLOW_RUNS = 3 };
static const double SLOW_BYTES_PER_S = 100e6;
static const uint64_t SLOW_NS = 20 * 1000 * 1000; /* no disk that is any use takes longer for its fastest read */

void ms_pace_begin_locked(ms_stream * s, uint64_t now) {
    if (s->n_demand_in_flight == 0) {
        s->pace.busy_since = now;
    }
}

bool ms_pace_done_locked(ms_stream * s, uint64_t now, uint64_t age_ns, uint64_t bytes, bool last) {
    ms_pace * p = &s->pace;
    p->busy_bytes += bytes;
    p->busy_ns += now - p->busy_since;
    p->busy_since = last ? 0 : now;
    p->fastest_ns = p->n_reads == 0 || age_ns < p->fastest_ns ? age_ns : p->fastest_ns;
    if (++p->n_reads < LOOK_EVERY) {
        return false;
    }
    /* slab memory that is touched for the first time, or a deep queue, delays reads on any disk: so a run must be slow as a
     * whole, too, and several runs in a row */
    double seconds = (double) (p->busy_ns - p->run_busy_ns) * 1e-9;
    bool trickles = (double) (p->busy_bytes - p->run_busy_bytes) < SLOW_BYTES_PER_S * seconds;
    p->n_slow_runs = p->fastest_ns > SLOW_NS && trickles ? p->n_slow_runs + 1 : 0;
    p->run_busy_ns = p->busy_ns;
    p->run_busy_bytes = p->busy_bytes;
    bool slow = p->n_slow_runs >= SLOW_RUNS && !p->warned;
    p->n_reads = 0;
    p->warned = p->warned || slow;
    return slow;
}

void ms_pace_warn(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    ms_pace p = s->pace;
    pthread_mutex_unlock(&s->lock);
    double rate = p.busy_ns > 0 ? (double) p.busy_bytes / ((double) p.busy_ns * 1e-9) : 0;
    double per_token = rate > 0 ? rate / (double) (s->sizes.cycle_bytes > 0 ? s->sizes.cycle_bytes : 1) : 0;
    ms_log(
        MS_LOG_WARN,
        "slow storage: the fastest of the last %d reads took %.0f ms, %.1f MB arrive per second; a token whose experts "
        "are not in the cache takes %.1f s, expect about %.2f tokens/s",
        LOOK_EVERY, (double) p.fastest_ns * 1e-6, rate * 1e-6, per_token > 0 ? 1 / per_token : 0, per_token);
}
