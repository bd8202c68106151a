/*
 * cache/slab: the one big allocation that experts live in, and how a budget is shared out over the size classes.
 * Guarantees: as slab.h says; on failure nothing stays mapped.
 * Never touches the memory, never reads files, never locks.
 */
#include "cache/slab.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

/* ---- memory ---- */

/* `bytes` of anonymous memory at a multiple of HUGE_PAGE, or NULL. Without MAP_NORESERVE: a refusal is wanted here, not
 * as a kill in the middle of a decode. */
static uint8_t * map_aligned(uint64_t bytes) {
    uint64_t with_slack;
    if (!ms_add_u64(bytes, HUGE_PAGE, &with_slack) || with_slack > SIZE_MAX) {
        errno = ENOMEM;
        return NULL;
    }
    uint8_t * all = mmap(NULL, (size_t) with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) {
        return NULL;
    }
    size_t before = (size_t) (ms_align_up((uint64_t) (uintptr_t) all, HUGE_PAGE) - (uint64_t) (uintptr_t) all);
    size_t after = (size_t) (with_slack - bytes) - before;
    if (before > 0) {
        munmap(all, before);
    }
    if (after > 0) {
        munmap(all + before + bytes, after);
    }
    return all + before;
}

/* All of it advice: each may be refused without harm. Returns whether huge pages were granted. */
static bool advise(uint8_t * base, uint64_t bytes) {
    bool huge = false;
#if defined(MADV_HUGEPAGE)
    huge = madvise(base, (size_t) bytes, MADV_HUGEPAGE) == 0;
#endif
#if defined(MADV_DONTFORK)
    /* A fork during a direct read could otherwise leave the bytes in the child's copy of the page. */
    madvise(base, (size_t) bytes, MADV_DONTFORK);
#endif
#if defined(MADV_DONTDUMP)
    madvise(base, (size_t) bytes, MADV_DONTDUMP); /* everything in it is in the model file, too */
#endif
    return huge;
}

moestream_status ms_slab_open(ms_slab * slab, int n_classes, const uint64_t * slot_bytes, const int * n_slots,
                              moestream_error * err) {
    MS_ASSERT(n_classes >= 0 && n_classes <= MS_MAX_CLASSES);
    ms_slab new_slab;
    memset(&new_slab, 0, sizeof new_slab);
    new_slab.n_classes = n_classes;
    bool fits = true;
    for (int c = 0; c < n_classes; c++) {
        MS_ASSERT(slot_bytes[c] > 0 && slot_bytes[c] % MS_PAGE == 0 && n_slots[c] >= 0);
        new_slab.slot_bytes[c] = slot_bytes[c];
        new_slab.n_slots[c] = n_slots[c];
        new_slab.first_slot[c] = new_slab.total_slots;
        new_slab.class_offset[c] = new_slab.bytes;
        uint64_t class_bytes = 0;
        fits = fits && n_slots[c] <= INT_MAX - new_slab.total_slots &&
               ms_mul_u64(slot_bytes[c], (uint64_t) n_slots[c], &class_bytes) &&
               ms_add_u64(new_slab.bytes, class_bytes, &new_slab.bytes);
        new_slab.total_slots += fits ? n_slots[c] : 0;
    }
    if (!fits) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "the slots of %d classes came to more bytes than can be addressed",
                       n_classes);
    }
    if (new_slab.bytes > 0) {
        new_slab.base = map_aligned(new_slab.bytes);
        if (new_slab.base == NULL) {
            int e = errno;
            return ms_fail(err, MOESTREAM_ERR_NOMEM, e, "%llu bytes for the expert cache were refused: %s",
                           (unsigned long long) new_slab.bytes, strerror(e));
        }
        new_slab.huge = advise(new_slab.base, new_slab.bytes);
    }
    *slab = new_slab;
    return MOESTREAM_OK;
}

void ms_slab_close(ms_slab * slab) {
    if (slab == NULL) {
        return;
    }
    if (slab->base != NULL) {
        munmap(slab->base, (size_t) slab->bytes);
    }
    memset(slab, 0, sizeof *slab);
}

uint8_t * ms_slab_slot(const ms_slab * slab, int slot) {
    MS_ASSERT(slot >= 0 && slot < slab->total_slots);
    int c = slab->n_classes - 1;
    while (slot < slab->first_slot[c]) {
        c--;
    }
    return slab->base + slab->class_offset[c] + (uint64_t) (slot - slab->first_slot[c]) * slab->slot_bytes[c];
}

/* ---- sharing out a budget ----
 * With t from 0 to FULL, class c gets its minimum and n_experts[c] * t / FULL more slots, up to n_experts[c]. The bytes
 * grow with t, so the largest t that fits is found by bisection; classes that are full drop out of the sharing by
 * themselves. FULL exceeds any number of experts, so t resolves single slots. */

static const uint64_t FULL = (uint64_t) 1 << 32;

typedef struct share_problem {
    int n_classes;
    const uint64_t * slot_bytes;
    const int * n_experts;
    int min_slots[MS_MAX_CLASSES]; /* never above n_experts */
} share_problem;

static int slots_at(const share_problem * p, int c, uint64_t t) {
    uint64_t more = (uint64_t) p->n_experts[c] * t / FULL; /* below 2^31 * 2^32 */
    uint64_t most = (uint64_t) (p->n_experts[c] - p->min_slots[c]);
    return p->min_slots[c] + (int) (more < most ? more : most);
}

/* false where it overflows */
static bool bytes_at(const share_problem * p, uint64_t t, uint64_t * bytes) {
    uint64_t sum = 0;
    for (int c = 0; c < p->n_classes; c++) {
        uint64_t class_bytes;
        if (!ms_mul_u64(p->slot_bytes[c], (uint64_t) slots_at(p, c, t), &class_bytes) ||
            !ms_add_u64(sum, class_bytes, &sum)) {
            return false;
        }
    }
    *bytes = sum;
    return true;
}

/* The budget that is left is smaller than the next step of all classes together: big slots first, one each, and then
 * whatever still fits. */
static void use_up(const share_problem * p, uint64_t left, int * n_slots) {
    int order[MS_MAX_CLASSES];
    for (int i = 0; i < p->n_classes; i++) {
        int at = i;
        for (; at > 0 && p->slot_bytes[order[at - 1]] < p->slot_bytes[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < p->n_classes; i++) {
            int c = order[i];
            uint64_t room = (uint64_t) (p->n_experts[c] - n_slots[c]);
            uint64_t more = left / p->slot_bytes[c];
            more = more < room ? more : room;
            more = pass == 0 && more > 1 ? 1 : more;
            n_slots[c] += (int) more;
            left -= more * p->slot_bytes[c];
        }
    }
}

bool ms_slab_share(uint64_t budget, int n_classes, const uint64_t * slot_bytes, const int * n_experts,
                   const int * min_slots, int * n_slots, uint64_t * min_bytes) {
    MS_ASSERT(n_classes >= 0 && n_classes <= MS_MAX_CLASSES);
    share_problem p = {.n_classes = n_classes, .slot_bytes = slot_bytes, .n_experts = n_experts};
    for (int c = 0; c < n_classes; c++) {
        MS_ASSERT(slot_bytes[c] > 0 && n_experts[c] >= 0 && min_slots[c] >= 0);
        p.min_slots[c] = min_slots[c] < n_experts[c] ? min_slots[c] : n_experts[c];
    }
    uint64_t used;
    bool addressable = bytes_at(&p, 0, &used);
    if (min_bytes != NULL) {
        *min_bytes = addressable ? used : UINT64_MAX;
    }
    if (!addressable || used > budget) {
        return false;
    }
    uint64_t fits = 0;
    uint64_t too_much = FULL + 1; /* at FULL every class is full */
    while (too_much - fits > 1) {
        uint64_t t = fits + (too_much - fits) / 2;
        uint64_t bytes;
        if (bytes_at(&p, t, &bytes) && bytes <= budget) {
            fits = t;
            used = bytes;
        } else {
            too_much = t;
        }
    }
    for (int c = 0; c < n_classes; c++) {
        n_slots[c] = slots_at(&p, c, fits);
    }
    use_up(&p, budget - used, n_slots);
    return true;
}
