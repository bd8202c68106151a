/* cache: the slab, and how a budget is shared out over the size classes. */
#include "cache/slab.h"

#include "check.h"

/* ---- slab ---- */

TEST(slots_are_page_aligned_writable_and_do_not_overlap) {
    const uint64_t slot_bytes[3] = {3 * MS_PAGE, MS_PAGE, 7 * MS_PAGE};
    const int n_slots[3] = {5, 0, 4};
    ms_slab slab;
    moestream_error err = {.struct_size = sizeof err};
    REQUIRE(ms_slab_open(&slab, 3, slot_bytes, n_slots, &err) == MOESTREAM_OK);
    CHECK(slab.total_slots == 9 && slab.bytes == (5 * 3 + 4 * 7) * (uint64_t) MS_PAGE);
    CHECK((uintptr_t) slab.base % (2u << 20) == 0);
    for (int s = 0; s < slab.total_slots; s++) {
        CHECK((uintptr_t) ms_slab_slot(&slab, s) % MS_PAGE == 0);
        memset(ms_slab_slot(&slab, s), s + 1, (size_t) slot_bytes[s < 5 ? 0 : 2]);
    }
    uint64_t counted = 0;
    for (int s = 0; s < slab.total_slots; s++) {
        uint64_t n = slot_bytes[s < 5 ? 0 : 2];
        counted += n;
        for (uint64_t i = 0; i < n; i++) {
            if (ms_slab_slot(&slab, s)[i] != s + 1) {
                CHECK(!"another slot wrote here");
                break;
            }
        }
    }
    CHECK(counted == slab.bytes);
    CHECK(ms_slab_slot(&slab, 8) + slot_bytes[2] == slab.base + slab.bytes);
    ms_slab_close(&slab);
    ms_slab_close(&slab);
    ms_slab_close(NULL);
}

TEST(a_slab_of_no_slots_opens) {
    const uint64_t slot_bytes[1] = {MS_PAGE};
    const int n_slots[1] = {0};
    ms_slab slab;
    CHECK(ms_slab_open(&slab, 1, slot_bytes, n_slots, NULL) == MOESTREAM_OK && slab.total_slots == 0);
    ms_slab_close(&slab);
    CHECK(ms_slab_open(&slab, 0, NULL, NULL, NULL) == MOESTREAM_OK && slab.bytes == 0);
    ms_slab_close(&slab);
}

TEST(a_slab_that_is_refused_leaves_its_output_and_names_the_bytes) {
    const uint64_t slot_bytes[2] = {UINT64_C(1) << 52, UINT64_C(1) << 62};
    const int one_of_each[2] = {1, 1};
    const int many[2] = {2000000000, 2000000000};
    ms_slab slab;
    memset(&slab, 0x5a, sizeof slab);
    ms_slab before = slab;
    moestream_error err = {.struct_size = sizeof err};
    CHECK(ms_slab_open(&slab, 1, slot_bytes, one_of_each, &err) == MOESTREAM_ERR_NOMEM); /* no address space has it */
    CHECK(strstr(err.message, "4503599627370496") != NULL && err.os_errno != 0);
    CHECK(ms_slab_open(&slab, 2, slot_bytes, many, &err) == MOESTREAM_ERR_NOMEM); /* overflows */
    CHECK(memcmp(&slab, &before, sizeof slab) == 0);
}

/* ---- share ---- */

static uint64_t cost(int n, const uint64_t * slot_bytes, const int * n_slots) {
    uint64_t sum = 0;
    for (int c = 0; c < n; c++) {
        sum += slot_bytes[c] * (uint64_t) n_slots[c];
    }
    return sum;
}

TEST(share_keeps_its_rules_for_random_problems) {
    check_random rnd = {check_seed(1)};
    for (int round = 0; round < 20000; round++) {
        uint64_t slot_bytes[MS_MAX_CLASSES];
        int n_experts[MS_MAX_CLASSES], min_slots[MS_MAX_CLASSES], n_slots[MS_MAX_CLASSES], least[MS_MAX_CLASSES];
        int n = (int) check_below(&rnd, MS_MAX_CLASSES + 1);
        for (int c = 0; c < n; c++) {
            slot_bytes[c] = MS_PAGE * (1 + check_below(&rnd, round % 2 ? 2000 : 5));
            n_experts[c] = (int) check_below(&rnd, round % 3 ? 10000 : 20);
            min_slots[c] = (int) check_below(&rnd, 40);
            least[c] = min_slots[c] < n_experts[c] ? min_slots[c] : n_experts[c];
        }
        uint64_t full = cost(n, slot_bytes, n_experts);
        uint64_t minimum = cost(n, slot_bytes, least);
        uint64_t budget = check_below(&rnd, full + full / 4 + 1);
        uint64_t min_bytes = 0;
        bool fits = ms_slab_share(budget, n, slot_bytes, n_experts, min_slots, n_slots, &min_bytes);
        CHECK(min_bytes == minimum);
        CHECK(fits == (budget >= minimum));
        if (!fits) {
            continue;
        }
        uint64_t used = cost(n, slot_bytes, n_slots);
        CHECK(used <= budget);
        for (int c = 0; c < n; c++) {
            CHECK(n_slots[c] >= least[c] && n_slots[c] <= n_experts[c]);
            CHECK(n_slots[c] == n_experts[c] || budget - used < slot_bytes[c]); /* no slot fits any more */
        }
        CHECK(budget < full || used == full);
    }
}

TEST(share_is_proportional_to_the_bytes_of_the_classes) {
    const uint64_t slot_bytes[3] = {5 * MS_PAGE, 7 * MS_PAGE, 6 * MS_PAGE};
    const int n_experts[3] = {3000, 1000, 2000};
    const int none[3] = {0, 0, 0};
    int n_slots[3];
    uint64_t full = cost(3, slot_bytes, n_experts);
    for (uint64_t percent = 1; percent <= 100; percent++) {
        REQUIRE(ms_slab_share(full / 100 * percent, 3, slot_bytes, n_experts, none, n_slots, NULL));
        for (int c = 0; c < 3; c++) {
            double fraction = (double) n_slots[c] / n_experts[c];
            double wanted = (double) percent / 100;
            CHECK(fraction > wanted - 0.005 && fraction < wanted + 0.005);
        }
    }
}

TEST(share_gives_what_full_classes_leave_to_the_others) {
    const uint64_t slot_bytes[2] = {MS_PAGE, MS_PAGE};
    const int n_experts[2] = {10, 1000};
    const int min_slots[2] = {10, 2};
    int n_slots[2];
    REQUIRE(ms_slab_share(500 * (uint64_t) MS_PAGE, 2, slot_bytes, n_experts, min_slots, n_slots, NULL));
    CHECK(n_slots[0] == 10 && n_slots[1] == 490);
}

TEST(share_does_not_overflow) {
    const uint64_t big = UINT64_MAX / MS_PAGE * MS_PAGE;
    const uint64_t slot_bytes[2] = {big, big};
    const int n_experts[2] = {INT32_MAX, INT32_MAX};
    const int ones[2] = {1, 1};
    const int none[2] = {0, 0};
    int n_slots[2] = {-7, -7};
    uint64_t min_bytes = 0;
    CHECK(!ms_slab_share(UINT64_MAX, 2, slot_bytes, n_experts, ones, n_slots, &min_bytes));
    CHECK(min_bytes == UINT64_MAX && n_slots[0] == -7);
    CHECK(ms_slab_share(UINT64_MAX, 2, slot_bytes, n_experts, none, n_slots, &min_bytes));
    CHECK(min_bytes == 0 && n_slots[0] + n_slots[1] == 1);
    const uint64_t pages[2] = {MS_PAGE, MS_PAGE};
    CHECK(ms_slab_share(UINT64_MAX, 2, pages, n_experts, ones, n_slots, &min_bytes));
    CHECK(n_slots[0] == INT32_MAX && n_slots[1] == INT32_MAX);
}

TEST(share_at_the_minimum_is_the_minimum_and_one_byte_less_fails) {
    const uint64_t slot_bytes[2] = {9 * MS_PAGE, 4 * MS_PAGE};
    const int n_experts[2] = {64, 3};
    const int min_slots[2] = {16, 16}; /* more than the second class has */
    int n_slots[2];
    uint64_t min_bytes;
    CHECK(!ms_slab_share(0, 2, slot_bytes, n_experts, min_slots, n_slots, &min_bytes));
    CHECK(min_bytes == (16 * 9 + 3 * 4) * (uint64_t) MS_PAGE);
    CHECK(!ms_slab_share(min_bytes - 1, 2, slot_bytes, n_experts, min_slots, n_slots, NULL));
    CHECK(ms_slab_share(min_bytes, 2, slot_bytes, n_experts, min_slots, n_slots, NULL));
    CHECK(n_slots[0] == 16 && n_slots[1] == 3);
}

static const check_test tests[] = {
    LISTED(slots_are_page_aligned_writable_and_do_not_overlap),
    LISTED(a_slab_of_no_slots_opens),
    LISTED(a_slab_that_is_refused_leaves_its_output_and_names_the_bytes),
    LISTED(share_keeps_its_rules_for_random_problems),
    LISTED(share_is_proportional_to_the_bytes_of_the_classes),
    LISTED(share_gives_what_full_classes_leave_to_the_others),
    LISTED(share_does_not_overflow),
    LISTED(share_at_the_minimum_is_the_minimum_and_one_byte_less_fails),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
