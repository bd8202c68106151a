/*
 * reader_small: the tests of reader_test.c once more, with the smallest ring, so that most reads wait for a place in
 * it; as on a kernel that cannot wait with a timeout (before 5.11); and with waits that nothing but a completion or a
 * wake-up ends, so that a lost one shows.
 */
#define MS_URING_MAX_ENTRIES 1
#define MS_URING_NO_EXT_ARG 1
#define MS_URING_MAX_WAIT_NS 60000000000

#include "reader_test.c"
