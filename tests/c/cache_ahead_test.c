/* cache: what reading ahead asks of the slot cache: a read that is not made after all, and a slot that goes first. */
#include "cache/slot_cache.h"

#include "check.h"

static bool open_cache(ms_slot_cache * cache, int n_slots) {
    const int group_class[2] = {0, 0};
    const int group_experts[2] = {20, 20}, group_layer[2] = {0, 1};
    return CHECK(ms_slot_cache_open(cache, 2, group_class, group_experts, group_layer, 1, &n_slots, NULL) ==
                 MOESTREAM_OK);
}

static int hold(ms_slot_cache * cache, int group, int expert) {
    int slot = ms_slot_assign(cache, group, expert, 0);
    if (slot >= 0) {
        ms_slot_touch(cache, slot, 0);
    }
    ms_slot_cache_check(cache);
    return slot;
}

TEST(cancelled_read_leaves_the_slot_evictable) {
    ms_slot_cache cache;
    if (!open_cache(&cache, 2)) {
        return;
    }
    int slot = hold(&cache, 0, 0);
    hold(&cache, 0, 1);
    ms_slot_begin_read(&cache, slot, 2);
    CHECK(ms_slot_free_count(&cache, 0) == 1);
    ms_slot_cancel_read(&cache, slot, 2);
    CHECK(ms_slot_state(&cache, slot, 2) == MS_EMPTY && ms_slot_free_count(&cache, 0) == 2);
    ms_slot_cache_check(&cache);
    CHECK(hold(&cache, 0, 2) == slot);
    ms_slot_cache_close(&cache);
}

TEST(demoted_slot_is_the_next_victim) {
    ms_slot_cache cache;
    if (!open_cache(&cache, 3)) {
        return;
    }
    hold(&cache, 0, 0);
    hold(&cache, 0, 1);
    int newest = hold(&cache, 0, 2);
    ms_slot_demote(&cache, newest);
    ms_slot_cache_check(&cache);
    CHECK(hold(&cache, 1, 5) == newest && ms_slot_find(&cache, 0, 2) == -1);
    ms_slot_cache_close(&cache);
}

TEST(demoted_slot_stays_while_empty_ones_are_left) {
    ms_slot_cache cache;
    if (!open_cache(&cache, 3)) {
        return;
    }
    int first = hold(&cache, 0, 0);
    ms_slot_demote(&cache, first);
    ms_slot_cache_check(&cache);
    CHECK(hold(&cache, 0, 1) != first && hold(&cache, 0, 2) != first);
    CHECK(ms_slot_find(&cache, 0, 0) == first);
    ms_slot_cache_close(&cache);
}

TEST(touched_slot_is_no_longer_demoted) {
    ms_slot_cache cache;
    if (!open_cache(&cache, 2)) {
        return;
    }
    int a = hold(&cache, 0, 0), b = hold(&cache, 0, 1);
    ms_slot_demote(&cache, b);
    ms_slot_touch(&cache, b, 0); /* the guess was right */
    ms_slot_cache_check(&cache);
    CHECK(hold(&cache, 0, 2) == a);
    ms_slot_cache_close(&cache);
}

static const check_test tests[] = {
    LISTED(cancelled_read_leaves_the_slot_evictable),
    LISTED(demoted_slot_is_the_next_victim),
    LISTED(demoted_slot_stays_while_empty_ones_are_left),
    LISTED(touched_slot_is_no_longer_demoted),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
