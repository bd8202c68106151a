/*
 * uring: faults for reads through io_uring, whose calls go past the C library. With MS_FAULTS_URING in the environment a
 * seccomp filter traps io_uring_setup and io_uring_enter (wherever they are made, also in a static liburing); the handler
 * looks at the reads that are being submitted and takes over those a rule hits: they become no-operations, and what the
 * rule says is their result. Late reads are done by a thread, which sends the result to the ring when it is time; those
 * with different delays overtake each other.
 * Guarantees: reads that no rule hits are the kernel's. Needs x86-64, the right to filter one's own calls, and a kernel
 * with injected results (6.10); ms_faults_uring says 0 where it has not all of them, and then nothing is trapped.
 * Never used by the product: it is unmodified under this rig.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "faults.h"

int ms_faults_uring(void);

#if defined(__x86_64__) && defined(__linux__)
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>

enum { MAX_RINGS = 64, MAX_LATE = 512, INJECT_RESULT = 1, SQES = 64, OWN_ENTRIES = 8 };

/* Their values; the headers of a build machine may be older than its kernel. */
enum { OP_NOP = 0, OP_READ = 22, OP_MSG_RING = 40, SKIP_CQE = 1 << 6 };

typedef struct ring {
    int fd; /* 0: free */
    unsigned *head, *mask, *array;
    struct io_uring_sqe * sqe;
} ring;

typedef struct late {
    struct io_uring_sqe sqe;
    int fd;
    rule how; /* a copy: the script may be replaced meanwhile */
    uint64_t due_ns;
} late;

static ring rings[MAX_RINGS];
static ring own; /* for sending late results */
static unsigned * own_tail;
static late waiting[MAX_LATE];
static int n_waiting;
static bool sender_runs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool works;

/* The one place from which the filter lets the two calls through. */
__asm__(".text\n"
        "ms_faults_raw:\n"
        "  mov %rdi, %rax\n  mov %rsi, %rdi\n  mov %rdx, %rsi\n  mov %rcx, %rdx\n  mov %r8, %r10\n  mov %r9, %r8\n"
        "  mov 8(%rsp), %r9\n"
        "  syscall\n"
        "ms_faults_raw_end:\n"
        "  ret\n");
extern long ms_faults_raw(long number, long a, long b, long c, long d, long e, long f)
    __attribute__((visibility("hidden")));
extern char ms_faults_raw_end[] __attribute__((visibility("hidden")));

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

/* ---- rings ---- */

static bool map_ring(ring * r, int fd, const struct io_uring_params * p, unsigned ** tail) {
    size_t bytes = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    char * sq = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    void * sqe = mmap(NULL, p->sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                      IORING_OFF_SQES);
    if (sq == MAP_FAILED || sqe == MAP_FAILED) {
        return false;
    }
    r->head = (unsigned *) (sq + p->sq_off.head);
    r->mask = (unsigned *) (sq + p->sq_off.ring_mask);
    r->array = (unsigned *) (sq + p->sq_off.array);
    r->sqe = sqe;
    *tail = (unsigned *) (sq + p->sq_off.tail);
    r->fd = fd;
    return true;
}

static long setup(long entries, struct io_uring_params * p) {
    long fd = ms_faults_raw(__NR_io_uring_setup, entries, (long) p, 0, 0, 0, 0);
    if (fd < 0 || (p->flags & IORING_SETUP_SQPOLL) != 0) {
        return fd;
    }
    pthread_mutex_lock(&lock);
    int at = -1;
    for (int i = 0; i < MAX_RINGS; i++) {
        at = rings[i].fd == (int) fd || (at < 0 && rings[i].fd == 0) ? i : at; /* a number that is used again */
    }
    unsigned * tail;
    if (at < 0 || !map_ring(&rings[at], (int) fd, p, &tail)) {
        abort(); /* a test must not pass because the rig does nothing */
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

/* ---- late reads ---- */

/* Puts a completion into a ring, as if the kernel had. */
static void send_result(const late * l, long long result) {
    unsigned index = *own_tail & *own.mask;
    struct io_uring_sqe * sqe = &own.sqe[index];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = OP_MSG_RING;
    sqe->fd = l->fd;
    sqe->len = (unsigned) (int) result;
    sqe->off = l->sqe.user_data;
    sqe->flags = SKIP_CQE;
    own.array[index] = index;
    __atomic_store_n(own_tail, *own_tail + 1, __ATOMIC_RELEASE);
    ms_faults_raw(__NR_io_uring_enter, own.fd, 1, 0, 0, 0, 0);
}

static void * sender(void * unused) {
    (void) unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        int next = -1;
        for (int i = 0; i < n_waiting; i++) {
            next = next < 0 || waiting[i].due_ns < waiting[next].due_ns ? i : next;
        }
        uint64_t now = now_ns();
        if (next < 0) {
            pthread_cond_wait(&changed, &lock);
        } else if (waiting[next].due_ns > now) {
            uint64_t left = waiting[next].due_ns - now < 5000000 ? waiting[next].due_ns - now : 5000000;
            struct timespec t = {0, (long) left};
            pthread_mutex_unlock(&lock);
            nanosleep(&t, NULL);
            pthread_mutex_lock(&lock);
        } else {
            late l = waiting[next];
            waiting[next] = waiting[--n_waiting];
            pthread_mutex_unlock(&lock);
            send_result(
                &l, ms_faults_read(&l.how, l.sqe.fd, (void *) (uintptr_t) l.sqe.addr, l.sqe.len, (off_t) l.sqe.off));
            pthread_mutex_lock(&lock);
        }
    }
    return NULL;
}

static void make_late(const ring * r, const struct io_uring_sqe * sqe, const rule * hit) {
    pthread_mutex_lock(&lock);
    if (!sender_runs) {
        sigset_t all, before;
        pthread_t thread;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        if (pthread_create(&thread, NULL, sender, NULL) != 0) {
            abort();
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_detach(thread);
        sender_runs = true;
    }
    if (n_waiting == MAX_LATE) {
        abort();
    }
    waiting[n_waiting].sqe = *sqe;
    waiting[n_waiting].fd = r->fd;
    memcpy(&waiting[n_waiting].how, hit, sizeof *hit);
    waiting[n_waiting++].due_ns = now_ns() + (uint64_t) hit->delay_ms * 1000000u;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

/* ---- submissions ---- */

static void change_read(const ring * r, struct io_uring_sqe * sqe) {
    rule * matched;
    rule * hit = ms_faults_match_read("uring", sqe->fd, sqe->len, &matched);
    if (matched != NULL) {
        atomic_fetch_add(&matched->bytes, sqe->len);
    }
    if (hit == NULL) {
        return;
    }
    struct io_uring_sqe was = *sqe;
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = OP_NOP;
    sqe->user_data = was.user_data;
    if (hit->delay_ms > 0) {
        sqe->flags = SKIP_CQE; /* the sender answers */
        make_late(r, &was, hit);
    } else {
        sqe->rw_flags = INJECT_RESULT;
        sqe->len =
            (unsigned) (int) ms_faults_read(hit, was.fd, (void *) (uintptr_t) was.addr, was.len, (off_t) was.off);
    }
}

static long enter(const greg_t * g) {
    int fd = (int) g[REG_RDI];
    unsigned to_submit = (unsigned) g[REG_RSI];
    for (int i = 0; i < MAX_RINGS && to_submit > 0; i++) {
        const ring * r = &rings[i];
        for (unsigned k = 0; r->fd == fd && k < to_submit; k++) {
            unsigned head = __atomic_load_n(r->head, __ATOMIC_ACQUIRE);
            struct io_uring_sqe * sqe = &r->sqe[r->array[(head + k) & *r->mask]];
            if (sqe->opcode == OP_READ) {
                change_read(r, sqe);
            }
        }
    }
    return ms_faults_raw(__NR_io_uring_enter, g[REG_RDI], g[REG_RSI], g[REG_RDX], g[REG_R10], g[REG_R8], g[REG_R9]);
}

static void trapped(int number, siginfo_t * info, void * context) {
    (void) number;
    greg_t * g = ((ucontext_t *) context)->uc_mcontext.gregs;
    int saved = errno;
    if (info->si_syscall == __NR_io_uring_setup) {
        g[REG_RAX] = setup(g[REG_RDI], (struct io_uring_params *) g[REG_RSI]);
    } else {
        g[REG_RAX] = enter(g);
    }
    errno = saved;
}

/* ---- set-up ---- */

static bool install(void) {
    uint64_t at = (uint64_t) (uintptr_t) ms_faults_raw_end;
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) at, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) (at >> 32), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = trapped;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    return sigaction(SIGSYS, &action, NULL) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* A ring of our own, and whether this kernel answers a no-operation with what it is told. */
static bool open_own(void) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    long fd = ms_faults_raw(__NR_io_uring_setup, OWN_ENTRIES, (long) &p, 0, 0, 0, 0);
    if (fd < 0 || !map_ring(&own, (int) fd, &p, &own_tail)) {
        return false;
    }
    char * cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
                     MAP_SHARED, (int) fd, IORING_OFF_CQ_RING);
    if (cq == MAP_FAILED) {
        return false;
    }
    memset(&own.sqe[0], 0, sizeof own.sqe[0]);
    own.sqe[0].opcode = OP_NOP;
    own.sqe[0].rw_flags = INJECT_RESULT;
    own.sqe[0].len = (unsigned) -EIO;
    own.array[0] = 0;
    __atomic_store_n(own_tail, 1, __ATOMIC_RELEASE);
    if (ms_faults_raw(__NR_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) != 1) {
        return false;
    }
    const struct io_uring_cqe * cqe = (const struct io_uring_cqe *) (cq + p.cq_off.cqes);
    return cqe->res == -EIO;
}

__attribute__((constructor)) static void begin_uring(void) {
    if (getenv("MS_FAULTS_URING") != NULL) {
        works = open_own() && install();
        unsetenv("MS_FAULTS_URING"); /* programs this one starts inherit the filter, but have no handler */
    }
}

#endif

/* 1 if reads through io_uring are watched. */
int ms_faults_uring(void) {
#if defined(__x86_64__) && defined(__linux__)
    return works;
#else
    return 0;
#endif
}
