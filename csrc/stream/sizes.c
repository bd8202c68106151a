/* stream/sizes: slot layouts and size classes that follow from the index. Pure: no files, no memory of its own. */
#include <string.h>

#include "stream/internal.h"

/* Longest aligned window over the experts of a bank: slices begin at any multiple of the GGUF alignment. */
static uint64_t bank_window(const ms_bank * bank) {
    uint64_t longest = 0;
    for (int e = 0; e < bank->n_expert; e++) {
        uint64_t at = ms_bank_offset(bank, e);
        uint64_t window = ms_align_up(at + bank->slice_bytes, MS_PAGE) - ms_align_down(at, MS_PAGE);
        longest = window > longest ? window : longest;
        if (at % MS_PAGE == 0 && bank->slice_bytes % MS_PAGE == 0) {
            break; /* they all begin on a page */
        }
    }
    return longest;
}

static uint64_t group_slot_bytes(const ms_index * index, int g) {
    uint64_t bytes = 0;
    for (int k = 0; k < index->group[g].n_slices; k++) {
        bytes += bank_window(&index->bank[index->group[g].bank[k]]);
    }
    return bytes;
}

void ms_stream_layout(const ms_index * index, int g, uint32_t * slice_at) {
    uint64_t at = 0;
    for (int k = 0; k < index->group[g].n_slices; k++) {
        slice_at[k] = (uint32_t) at;
        at += bank_window(&index->bank[index->group[g].bank[k]]);
    }
}

/* Joins the two neighbouring classes whose union wastes the least until at most MS_MAX_CLASSES are left. `size` is
 * ascending, `count` the experts of each. */
static int join_classes(uint64_t * size, uint64_t * count, int n) {
    while (n > MS_MAX_CLASSES) {
        int best = 0;
        uint64_t best_waste = UINT64_MAX;
        for (int i = 0; i + 1 < n; i++) {
            uint64_t waste = (size[i + 1] - size[i]) * count[i];
            if (waste < best_waste) {
                best_waste = waste;
                best = i;
            }
        }
        count[best + 1] += count[best];
        memmove(&size[best], &size[best + 1], (size_t) (n - best - 1) * sizeof(*size));
        memmove(&count[best], &count[best + 1], (size_t) (n - best - 1) * sizeof(*count));
        n--;
    }
    return n;
}

enum { MS_MAX_SIZES = 64 };

/* Adds one group's size to the ascending list; when the list is full the nearest larger entry takes it. */
static int add_size(uint64_t * size, uint64_t * count, int n, uint64_t bytes, uint64_t experts) {
    int i = 0;
    while (i < n && size[i] < bytes) {
        i++;
    }
    if (i < n && size[i] == bytes) {
        count[i] += experts;
        return n;
    }
    if (n == MS_MAX_SIZES) {
        if (i == n) {
            size[--i] = bytes;
        }
        count[i] += experts;
        return n;
    }
    memmove(&size[i + 1], &size[i], (size_t) (n - i) * sizeof(*size));
    memmove(&count[i + 1], &count[i], (size_t) (n - i) * sizeof(*count));
    size[i] = bytes;
    count[i] = experts;
    return n + 1;
}

void ms_stream_size(const ms_index * index, ms_stream_sizes * sizes, int * group_class) {
    uint64_t size[MS_MAX_SIZES], count[MS_MAX_SIZES];
    int n = 0;
    memset(sizes, 0, sizeof(*sizes));
    for (int g = 0; g < index->n_groups; g++) {
        n = add_size(size, count, n, group_slot_bytes(index, g), (uint64_t) index->group[g].n_expert);
    }
    n = join_classes(size, count, n);
    sizes->n_classes = n;
    int used = index->n_expert_used > 0 ? index->n_expert_used : 1;
    for (int c = 0; c < n; c++) {
        sizes->slot_bytes[c] = size[c];
    }
    for (int g = 0; g < index->n_groups; g++) {
        uint64_t bytes = group_slot_bytes(index, g);
        int cls = 0, experts = index->group[g].n_expert;
        while (sizes->slot_bytes[cls] < bytes) {
            cls++;
        }
        sizes->n_experts[cls] += experts;
        sizes->n_groups[cls]++;
        sizes->cycle_bytes += (uint64_t) (used < experts ? used : experts) * size[cls];
        if (group_class != NULL) {
            group_class[g] = cls;
        }
    }
    for (int c = 0; c < n; c++) {
        int want = 2 * used;
        sizes->min_slots[c] = want < sizes->n_experts[c] ? want : sizes->n_experts[c];
        sizes->min_bytes += (uint64_t) sizes->min_slots[c] * size[c];
        sizes->full_bytes += (uint64_t) sizes->n_experts[c] * size[c];
    }
}
