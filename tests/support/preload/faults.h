/* faults: what the two files of the preload library share; see faults.c. */
#ifndef MS_TEST_PRELOAD_FAULTS_H
#define MS_TEST_PRELOAD_FAULTS_H

#include <stdatomic.h>
#include <sys/types.h>

enum { TEXT = 96 };

typedef struct rule {
    char call[16], path[TEXT], lib[TEXT];
    long long min, from, count, every, short_bytes;
    int err, delay_ms, direct; /* direct: -1 any */
    int flip, zero;
    atomic_llong seen;
    atomic_llong bytes; /* reads: what matching calls returned */
} rule;

/* The rule that hits a read of `bytes` from `fd`, and the last one that matched it; NULL each if there is none. Counts. */
rule * ms_faults_match_read(const char * call, int fd, size_t bytes, rule ** matched);

/* Does the read as the rule (may be NULL) says, but for its delay: bytes or -errno. */
long long ms_faults_read(const rule * hit, int fd, void * dst, size_t bytes, off_t offset);

#endif
