/*
 * cache/slab: one anonymous allocation cut into slots of several size classes.
 * Guarantees: slots are page-aligned and do not overlap; memory is only touched by whoever fills a slot.
 * Never reads files, never locks.
 */
#ifndef MS_SLAB_H
#define MS_SLAB_H

#include "base/base.h"

enum { MS_MAX_CLASSES = 8 };

typedef struct ms_slab {
    uint8_t * base;
    uint64_t bytes; /* of address space */
    int n_classes;
    uint64_t slot_bytes[MS_MAX_CLASSES];
    int first_slot[MS_MAX_CLASSES]; /* slots are numbered through all classes */
    int n_slots[MS_MAX_CLASSES];
    uint64_t class_offset[MS_MAX_CLASSES];
    int total_slots;
    bool huge;
} ms_slab;

/* Errors: NOMEM with the bytes and the system's reason. Huge pages are asked for, and done without where refused. */
moestream_status ms_slab_open(ms_slab * slab, int n_classes, const uint64_t * slot_bytes, const int * n_slots,
                              moestream_error * err);
void ms_slab_close(ms_slab * slab);
uint8_t * ms_slab_slot(const ms_slab * slab, int slot);

/* How many slots of each class a budget buys: at least min_slots[c] each, the rest in proportion to
 * n_experts[c] * slot_bytes[c], at most n_experts[c] (a minimum above that counts as that). Returns false if the
 * minimum does not fit; *min_bytes is the budget that would. Pure. */
bool ms_slab_share(uint64_t budget, int n_classes, const uint64_t * slot_bytes, const int * n_experts,
                   const int * min_slots, int * n_slots, uint64_t * min_bytes);

#endif
