/* cache: the rules of the slot cache one by one, and all of them against a naive model of it. */
#include "cache/slot_cache.h"

#include "check.h"

/* ---- slot cache: single rules ---- */

enum { ONE_CLASS_EXPERTS = 100 };

static bool open_one(ms_slot_cache * cache, int n_slots) {
    const int group_class[1] = {0};
    const int group_experts[1] = {ONE_CLASS_EXPERTS};
    const int group_layer[1] = {0};
    return CHECK(ms_slot_cache_open(cache, 1, group_class, group_experts, group_layer, 1, &n_slots, NULL) ==
                 MOESTREAM_OK);
}

/* Holds `expert`, used now. */
static int use(ms_slot_cache * cache, int expert) {
    int slot = ms_slot_find(cache, 0, expert);
    if (slot < 0) {
        slot = ms_slot_assign(cache, 0, expert, 0);
    }
    if (slot >= 0) {
        ms_slot_touch(cache, slot, 0);
    }
    ms_slot_cache_check(cache);
    return slot;
}

TEST(pinned_slot_is_never_evicted) {
    ms_slot_cache cache;
    if (!open_one(&cache, 3)) {
        return;
    }
    int pinned = use(&cache, 0);
    ms_slot_pin(&cache, pinned);
    ms_slot_pin(&cache, pinned);
    for (int e = 1; e < 50; e++) {
        CHECK(use(&cache, e) != pinned);
    }
    CHECK(ms_slot_find(&cache, 0, 0) == pinned);
    ms_slot_unpin(&cache, pinned); /* still pinned once */
    CHECK(use(&cache, 50) != pinned && use(&cache, 51) != pinned && use(&cache, 52) != pinned);
    ms_slot_unpin(&cache, pinned);
    CHECK(use(&cache, 53) == pinned && ms_slot_find(&cache, 0, 0) == -1);
    ms_slot_cache_close(&cache);
}

TEST(slot_with_a_read_in_flight_is_never_evicted) {
    ms_slot_cache cache;
    if (!open_one(&cache, 2)) {
        return;
    }
    int reading = use(&cache, 0);
    ms_slot_begin_read(&cache, reading, 1);
    CHECK(ms_slot_state(&cache, reading, 1) == MS_READING && ms_slot_state(&cache, reading, 0) == MS_EMPTY);
    CHECK(use(&cache, 1) != reading && use(&cache, 2) != reading && use(&cache, 3) != reading);
    ms_slot_publish(&cache, reading, 1, true);
    ms_slot_cache_check(&cache);
    CHECK(ms_slot_state(&cache, reading, 1) == MS_READY);
    CHECK(use(&cache, 4) != reading && use(&cache, 5) != reading); /* published, but not yet ended */
    ms_slot_end_read(&cache, reading);
    CHECK(use(&cache, 6) == reading);
    CHECK(ms_slot_state(&cache, reading, 1) == MS_EMPTY); /* another expert's slice is not this one's */
    ms_slot_cache_close(&cache);
}

TEST(within_a_layer_the_least_recently_used_goes_first) {
    ms_slot_cache cache;
    if (!open_one(&cache, 4)) {
        return;
    }
    int slot[4];
    for (int e = 0; e < 4; e++) {
        slot[e] = use(&cache, e);
    }
    use(&cache, 0);
    use(&cache, 2);
    const int victims[4] = {1, 3, 0, 2};
    for (int i = 0; i < 4; i++) {
        CHECK(use(&cache, 10 + i) == slot[victims[i]]);
        CHECK(ms_slot_find(&cache, 0, victims[i]) == -1);
    }
    CHECK(cache.n_evictions == 4 && cache.used == 4);
    ms_slot_cache_close(&cache);
}

TEST(empty_and_forgotten_slots_are_taken_first) {
    ms_slot_cache cache;
    if (!open_one(&cache, 3)) {
        return;
    }
    use(&cache, 0);
    int recent = use(&cache, 1);
    CHECK(use(&cache, 2) >= 0 && cache.n_evictions == 0);
    ms_slot_touch(&cache, recent, 0);
    ms_slot_begin_read(&cache, recent, 0);
    ms_slot_publish(&cache, recent, 0, true);
    ms_slot_end_read(&cache, recent);
    ms_slot_forget(&cache, recent);
    ms_slot_cache_check(&cache);
    CHECK(ms_slot_find(&cache, 0, 1) == -1 && cache.used == 2 && ms_slot_state(&cache, recent, 0) == MS_EMPTY);
    CHECK(use(&cache, 3) == recent && cache.n_evictions == 0);
    ms_slot_cache_close(&cache);
}

TEST(assign_respects_spare_after) {
    ms_slot_cache cache;
    if (!open_one(&cache, 3)) {
        return;
    }
    int oldest = use(&cache, 0);
    uint64_t since = cache.tick + 1;
    use(&cache, 1);
    use(&cache, 2);
    int ahead = ms_slot_assign(&cache, 0, 3, since);
    CHECK(ahead == oldest);
    ms_slot_cache_check(&cache);
    CHECK(ms_slot_assign(&cache, 0, 4, since) == -1); /* all others are as recent, and so is what was read ahead */
    CHECK(ms_slot_find(&cache, 0, 3) == ahead && ms_slot_find(&cache, 0, 1) >= 0);
    CHECK(ms_slot_assign(&cache, 0, 4, 0) >= 0); /* a demand may */
    ms_slot_forget(&cache, ahead);
    CHECK(ms_slot_assign(&cache, 0, 5, since) == ahead); /* an empty one is nobody's */
    ms_slot_cache_check(&cache);
    ms_slot_cache_close(&cache);
}

TEST(assign_fails_when_every_slot_is_pinned_or_being_read) {
    ms_slot_cache cache;
    if (!open_one(&cache, 2)) {
        return;
    }
    int pinned = use(&cache, 0);
    int reading = use(&cache, 1);
    ms_slot_pin(&cache, pinned);
    ms_slot_begin_read(&cache, reading, 0);
    CHECK(ms_slot_free_count(&cache, 0) == 0 && ms_slot_assign(&cache, 0, 2, 0) == -1);
    ms_slot_cache_check(&cache);
    ms_slot_publish(&cache, reading, 0, false);
    ms_slot_end_read(&cache, reading);
    CHECK(ms_slot_free_count(&cache, 0) == 1 && ms_slot_state(&cache, reading, 0) == MS_FAILED);
    ms_slot_clear(&cache, reading, 0);
    CHECK(ms_slot_state(&cache, reading, 0) == MS_EMPTY);
    CHECK(ms_slot_assign(&cache, 0, 2, 0) == reading);
    ms_slot_cache_check(&cache);
    ms_slot_cache_close(&cache);
}

/* Three layers of ten experts; each pass over a layer uses some of them. */
static void pass(ms_slot_cache * cache, int group, const int * experts, int n) {
    ms_slot_visit(cache, group, 1);
    for (int round = 0; round < 2; round++) { /* what is there first */
        for (int i = 0; i < n; i++) {
            int slot = ms_slot_find(cache, group, experts[i]);
            if (slot < 0 && round == 1) {
                slot = ms_slot_assign(cache, group, experts[i], 0);
            }
            if (slot >= 0) {
                ms_slot_touch(cache, slot, 0);
            }
            ms_slot_cache_check(cache);
        }
    }
}

static bool holds(const ms_slot_cache * cache, int group, int a, int b) {
    return ms_slot_find(cache, group, a) >= 0 && ms_slot_find(cache, group, b) >= 0;
}

TEST(of_equals_the_layer_that_comes_last_gives_way) {
    const int group_class[3] = {0, 0, 0}, group_experts[3] = {10, 10, 10};
    const int group_layer[3] = {7, 2, 5}; /* in the file's order; they come as 1, 2, 0 */
    const int n_slots = 6, one[2] = {0, 1}, other[2] = {2, 3};
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, 3, group_class, group_experts, group_layer, 1, &n_slots, NULL) == MOESTREAM_OK);
    CHECK(cache.position[0] == 2 && cache.position[1] == 0 && cache.position[2] == 1);
    pass(&cache, 1, one, 2);
    pass(&cache, 2, one, 2);
    pass(&cache, 0, one, 2);
    pass(&cache, 1, other, 2); /* its own old ones were passed over by a visit: least-recently-used took the same */
    CHECK(holds(&cache, 1, 2, 3) && holds(&cache, 2, 0, 1) && holds(&cache, 0, 0, 1));
    ms_slot_visit(&cache, 2, 1);
    ms_slot_touch(&cache, ms_slot_find(&cache, 2, 0), 0);
    ms_slot_touch(&cache, ms_slot_find(&cache, 2, 1), 0);
    ms_slot_assign(&cache, 2, 2,
                   0); /* all of the last visit: layer 2, just passed, comes last; not layer 7, which is next */
    CHECK(holds(&cache, 2, 0, 1) && holds(&cache, 0, 0, 1) && !holds(&cache, 1, 2, 3));
    ms_slot_cache_close(&cache);
}

/* A prompt of as many tokens as experts, each of which chooses one of its own, in turn. All are in use at once. */
static void prompt(ms_slot_cache * cache, int group, int n) {
    int slots[10];
    ms_slot_visit(cache, group, n);
    for (int e = 0; e < n; e++) {
        slots[e] = ms_slot_assign(cache, group, e, 0);
        CHECK(slots[e] >= 0);
        ms_slot_pin(cache, slots[e]);
        ms_slot_touch(cache, slots[e], n - 1 - e);
    }
    for (int e = 0; e < n; e++) {
        ms_slot_unpin(cache, slots[e]);
    }
    ms_slot_cache_check(cache);
}

TEST(behind_a_prompt_each_layer_holds_what_its_last_tokens_chose) {
    const int group_class[3] = {0, 0, 0}, group_experts[3] = {10, 10, 10}, group_layer[3] = {0, 1, 2};
    const int n_slots = 10;
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, 3, group_class, group_experts, group_layer, 1, &n_slots, NULL) == MOESTREAM_OK);
    for (int g = 0; g < 3; g++) {
        prompt(&cache, g, 6);
    }
    CHECK(cache.used == n_slots && holds(&cache, 2, 0, 5));
    CHECK(holds(&cache, 0, 4, 5) && holds(&cache, 1, 4, 5));
    CHECK(ms_slot_find(&cache, 0, 3) == -1 && ms_slot_find(&cache, 1, 3) == -1);
    ms_slot_cache_close(&cache);
}

TEST(a_layer_that_is_not_visited_any_more_ages) {
    const int group_class[2] = {0, 0}, group_experts[2] = {10, 10}, group_layer[2] = {0, 1};
    const int n_slots = 4, one[2] = {0, 1}, other[2] = {2, 3};
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, 2, group_class, group_experts, group_layer, 1, &n_slots, NULL) == MOESTREAM_OK);
    pass(&cache, 0, one, 2);
    pass(&cache, 1, one, 2);
    pass(&cache, 1, other, 2);
    CHECK(holds(&cache, 0, 0, 1)); /* for all it knows, layer 0 is next */
    pass(&cache, 1, one, 2);
    pass(&cache, 1, other, 2);
    CHECK(holds(&cache, 1, 0, 1) && holds(&cache, 1, 2, 3));
    ms_slot_cache_close(&cache);
}

TEST(what_a_pass_has_used_is_not_its_own_victim_while_there_is_another) {
    const int group_class[2] = {0, 0}, group_experts[2] = {10, 10}, group_layer[2] = {0, 1};
    const int n_slots = 3, few[2] = {0, 1}, many[4] = {0, 1, 2, 3};
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, 2, group_class, group_experts, group_layer, 1, &n_slots, NULL) == MOESTREAM_OK);
    pass(&cache, 0, few, 2);
    pass(&cache, 1, few, 1);
    pass(&cache, 0, many, 3);
    CHECK(holds(&cache, 0, 0, 1) && ms_slot_find(&cache, 1, 0) == -1);
    pass(&cache, 0, many, 4); /* there is no other: the pass goes on with its own */
    CHECK(cache.used == 3 && ms_slot_find(&cache, 0, 3) >= 0);
    ms_slot_cache_close(&cache);
}

TEST(a_cache_smaller_than_a_cycle_still_finds_something) {
    enum { LAYERS = 8, EACH = 4 };
    int group_class[LAYERS] = {0}, group_experts[LAYERS], group_layer[LAYERS];
    const int n_slots = LAYERS * EACH / 2, experts[EACH] = {0, 1, 2, 3};
    for (int g = 0; g < LAYERS; g++) {
        group_experts[g] = EACH;
        group_layer[g] = g;
    }
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, LAYERS, group_class, group_experts, group_layer, 1, &n_slots, NULL) ==
            MOESTREAM_OK);
    uint64_t evictions = 0;
    for (int token = 0; token < 20; token++) {
        evictions = cache.n_evictions;
        for (int g = 0; g < LAYERS; g++) {
            pass(&cache, g, experts, EACH);
        }
    }
    /* the same experts in turn, of which half fit: the best there is reads half and a few, least-recently-used all */
    CHECK(cache.n_evictions - evictions <= LAYERS * EACH / 2 + EACH);
    ms_slot_cache_close(&cache);
}

TEST(a_cache_without_slots_and_a_group_without_class_work) {
    const int group_class[2] = {0, -1};
    const int group_experts[2] = {4, 4};
    const int group_layer[2] = {0, 1};
    const int n_slots[1] = {0};
    ms_slot_cache cache;
    REQUIRE(ms_slot_cache_open(&cache, 2, group_class, group_experts, group_layer, 1, n_slots, NULL) == MOESTREAM_OK);
    CHECK(ms_slot_find(&cache, 1, 3) == -1 && ms_slot_assign(&cache, 0, 0, 0) == -1);
    CHECK(ms_slot_free_count(&cache, 0) == 0);
    ms_slot_cache_check(&cache);
    ms_slot_cache_close(&cache);
    ms_slot_cache_close(&cache);
    ms_slot_cache_close(NULL);
}

/* ---- wrong use stops ---- */

static void assign_twice(void * arg) {
    ms_slot_assign(arg, 0, 0, 0);
}
static void forget_pinned(void * arg) {
    ms_slot_forget(arg, ms_slot_find(arg, 0, 0));
}
static void clear_pinned(void * arg) {
    ms_slot_clear(arg, ms_slot_find(arg, 0, 0), 0);
}
static void read_anew_what_others_look_at(void * arg) {
    ms_slot_pin(arg, ms_slot_find(arg, 0, 0));
    ms_slot_begin_read(arg, ms_slot_find(arg, 0, 0), 2);
}
static void read_a_ready_slice(void * arg) {
    ms_slot_begin_read(arg, ms_slot_find(arg, 0, 0), 0);
}
static void publish_without_read(void * arg) {
    ms_slot_publish(arg, ms_slot_find(arg, 0, 0), 1, true);
}
static void unpin_twice(void * arg) {
    ms_slot_unpin(arg, ms_slot_find(arg, 0, 0));
    ms_slot_unpin(arg, ms_slot_find(arg, 0, 0));
}
static void find_outside(void * arg) {
    ms_slot_find(arg, 0, ONE_CLASS_EXPERTS);
}

TEST(wrong_use_aborts) {
    ms_slot_cache cache;
    if (!open_one(&cache, 2)) {
        return;
    }
    int slot = use(&cache, 0);
    ms_slot_begin_read(&cache, slot, 0);
    ms_slot_publish(&cache, slot, 0, true);
    ms_slot_end_read(&cache, slot);
    ms_slot_begin_read(&cache, slot, 2);
    ms_slot_publish(&cache, slot, 2, false);
    ms_slot_end_read(&cache, slot);
    ms_slot_pin(&cache, slot);
    CHECK(check_aborts(read_anew_what_others_look_at, &cache));
    ms_slot_begin_read(&cache, slot, 2); /* the only one who has it pinned may */
    CHECK(ms_slot_state(&cache, slot, 2) == MS_READING);
    ms_slot_publish(&cache, slot, 2, false);
    ms_slot_end_read(&cache, slot);
    CHECK(check_aborts(assign_twice, &cache));
    CHECK(check_aborts(forget_pinned, &cache));
    CHECK(check_aborts(clear_pinned, &cache));
    CHECK(check_aborts(read_a_ready_slice, &cache));
    CHECK(check_aborts(publish_without_read, &cache));
    CHECK(check_aborts(unpin_twice, &cache));
    CHECK(check_aborts(find_outside, &cache));
    ms_slot_cache_close(&cache);
}

static void check(void * arg) {
    ms_slot_cache_check(arg);
}

TEST(the_check_notices_broken_bookkeeping) {
    ms_slot_cache cache;
    if (!open_one(&cache, 3)) {
        return;
    }
    use(&cache, 0);
    use(&cache, 1);
    CHECK(!check_aborts(check, &cache));
    cache.n_free[0]++;
    CHECK(check_aborts(check, &cache));
    cache.n_free[0]--;
    cache.used++;
    CHECK(check_aborts(check, &cache));
    cache.used--;
    cache.slot_of[5] = 0;
    CHECK(check_aborts(check, &cache));
    cache.slot_of[5] = -1;
    cache.slot[cache.head[1]].used_at = 0; /* of the group's list */
    CHECK(check_aborts(check, &cache));
    ms_slot_cache_close(&cache);
}

/* ---- slot cache against a naive model ---- */

enum { GROUPS = 5, EXPERTS = 9, CLASSES = 2, MODEL_SLOTS = 11 };
static const int model_class[GROUPS] = {0, 1, 0, 1, 0};
static const int model_experts[GROUPS] = {9, 7, 9, 5, 1};
static const int model_slots[CLASSES] = {6, 5};
static const int model_layer[GROUPS] = {3, 0, 1, 2, 2};
static const int model_position[GROUPS] = {4, 0, 1, 2, 3};

/* What there is to know about an expert that has a slot, in the plainest form. */
typedef struct model_entry {
    bool held;
    int slot, pins;
    int state[MS_SLOT_SLICES];
    bool ended[MS_SLOT_SLICES]; /* false from begin_read to end_read */
    uint64_t used_at, order;    /* order: of touches and assignments, unique */
    int visit;
} model_entry;

static model_entry model[GROUPS][EXPERTS];
static uint64_t model_tick, model_order;
static int model_evictions, model_visits[GROUPS], model_here, model_passes, model_pass_of[GROUPS];

static bool model_evictable(const model_entry * m) {
    for (int k = 0; k < MS_SLOT_SLICES; k++) {
        if (!m->ended[k]) {
            return false;
        }
    }
    return m->pins == 0;
}

static int model_held(int cls, int * n_evictable) {
    int n = 0;
    for (int g = 0; g < GROUPS; g++) {
        for (int e = 0; e < model_experts[g]; e++) {
            n += model_class[g] == cls && model[g][e].held;
            *n_evictable += model_class[g] == cls && model[g][e].held && model_evictable(&model[g][e]);
        }
    }
    return n;
}

/* The least recently used one of a group that may go. */
static model_entry * model_oldest(int g, uint64_t spare_after) {
    model_entry * oldest = NULL;
    for (int e = 0; e < model_experts[g]; e++) {
        model_entry * m = &model[g][e];
        bool may = m->held && model_evictable(m) && (spare_after == 0 || m->used_at < spare_after);
        oldest = may && (oldest == NULL || m->order < oldest->order) ? m : oldest;
    }
    return oldest;
}

/* The slot that must be taken: a free one (-2: any of the free), or that of the expert which most visits passed over, of
 * equals in the layer that comes last; -1 if there is none. */
static int model_victim(int cls, uint64_t spare_after, model_entry ** victim) {
    int n_evictable = 0;
    *victim = NULL;
    if (model_held(cls, &n_evictable) < model_slots[cls]) {
        return -2;
    }
    for (int sparing = 1; sparing >= 0 && *victim == NULL; sparing--) {
        int best = -1;
        for (int g = 0; g < GROUPS; g++) {
            model_entry * m = model_class[g] == cls ? model_oldest(g, spare_after) : NULL;
            int idle = (model_passes - model_pass_of[g]) / GROUPS;
            int missed = m != NULL ? model_visits[g] - m->visit + idle : 0;
            int until = (model_position[g] - model_here + GROUPS - 1) % GROUPS + 1;
            bool own = sparing && missed == 0 && until == GROUPS;
            if (m != NULL && !own && missed * (GROUPS + 1) + until > best) {
                best = missed * (GROUPS + 1) + until;
                *victim = m;
            }
        }
    }
    return *victim != NULL ? (*victim)->slot : -1;
}

static void model_assign(ms_slot_cache * cache, int g, int e, uint64_t spare_after) {
    model_entry * victim;
    int expected = model_victim(model_class[g], spare_after, &victim);
    int slot = ms_slot_assign(cache, g, e, spare_after);
    CHECK(expected == -2 ? slot >= 0 : slot == expected);
    if (victim != NULL) {
        victim->held = false;
        model_evictions++;
    }
    if (slot >= 0) {
        model_entry * m = &model[g][e];
        memset(m, 0, sizeof *m);
        m->held = true;
        m->slot = slot;
        m->used_at = model_tick;
        m->visit = model_visits[g];
        m->order = ++model_order;
        for (int k = 0; k < MS_SLOT_SLICES; k++) {
            m->ended[k] = true;
        }
    }
}

static void model_slice_step(ms_slot_cache * cache, model_entry * m, int k, bool ok) {
    if (!m->ended[k] && m->state[k] == MS_READING) {
        ms_slot_publish(cache, m->slot, k, ok);
        m->state[k] = ok ? MS_READY : MS_FAILED;
    } else if (!m->ended[k]) {
        ms_slot_end_read(cache, m->slot);
        m->ended[k] = true;
    } else if (m->state[k] == MS_EMPTY || (m->state[k] == MS_FAILED && m->pins <= 1 && ok)) {
        ms_slot_begin_read(cache, m->slot, k);
        m->state[k] = MS_READING;
        m->ended[k] = false;
    } else if (m->pins == 0) {
        ms_slot_clear(cache, m->slot, k);
        m->state[k] = MS_EMPTY;
    }
}

static void model_step(ms_slot_cache * cache, check_random * rnd) {
    int g = (int) check_below(rnd, GROUPS);
    int e = (int) check_below(rnd, (uint64_t) model_experts[g]);
    model_entry * m = &model[g][e];
    int what = (int) check_below(rnd, 100);
    if (check_below(rnd, 8) == 0) {
        int n = 1 + (int) check_below(rnd, 3);
        ms_slot_visit(cache, g, n);
        model_visits[g] += n;
        model_pass_of[g] = ++model_passes;
        model_here = model_position[g];
    }
    if (!m->held) {
        uint64_t spare = what < 70 ? 0 : 1 + check_below(rnd, model_tick + 2);
        model_assign(cache, g, e, spare);
    } else if (what < 30) {
        ms_slot_touch(cache, m->slot, 0);
        m->used_at = ++model_tick;
        m->visit = model_visits[g];
        m->order = ++model_order;
    } else if (what < 40) {
        ms_slot_pin(cache, m->slot);
        m->pins++;
    } else if (what < 60 && m->pins > 0) {
        ms_slot_unpin(cache, m->slot);
        m->pins--;
    } else if (what < 95) {
        model_slice_step(cache, m, (int) check_below(rnd, MS_SLOT_SLICES), check_below(rnd, 4) > 0);
    } else if (model_evictable(m)) {
        ms_slot_forget(cache, m->slot);
        m->held = false;
    }
}

/* Both ways: all the model holds is in the cache, and nothing else is. */
static void model_compare(const ms_slot_cache * cache) {
    int n_held = 0;
    for (int g = 0; g < GROUPS; g++) {
        for (int e = 0; e < model_experts[g]; e++) {
            const model_entry * m = &model[g][e];
            CHECK(ms_slot_find(cache, g, e) == (m->held ? m->slot : -1));
            n_held += m->held;
            for (int k = 0; m->held && k < MS_SLOT_SLICES; k++) {
                CHECK((int) ms_slot_state(cache, m->slot, k) == m->state[k]);
            }
        }
    }
    CHECK(cache->used == n_held && cache->n_evictions == (uint64_t) model_evictions && cache->tick == model_tick);
    for (int c = 0; c < CLASSES; c++) {
        int n_evictable = 0;
        int held = model_held(c, &n_evictable);
        CHECK(ms_slot_free_count(cache, c) == model_slots[c] - held + n_evictable);
    }
}

TEST(random_operations_agree_with_a_naive_cache) {
    check_random rnd = {check_seed(20240229)};
    for (int round = 0; round < 20; round++) {
        ms_slot_cache cache;
        REQUIRE(ms_slot_cache_open(&cache, GROUPS, model_class, model_experts, model_layer, CLASSES, model_slots,
                                   NULL) == MOESTREAM_OK);
        CHECK(cache.n_slots == MODEL_SLOTS);
        memset(model, 0, sizeof model);
        model_tick = cache.tick;
        model_order = 0;
        model_evictions = 0;
        memset(model_visits, 0, sizeof model_visits);
        memset(model_pass_of, 0, sizeof model_pass_of);
        model_passes = 0;
        model_here = 0;
        for (int i = 0; i < 5000 && atomic_load(&check_failures) == 0; i++) {
            model_step(&cache, &rnd);
            ms_slot_cache_check(&cache);
            model_compare(&cache);
        }
        CHECK(model_evictions > 100);
        ms_slot_cache_close(&cache);
    }
}

static const check_test tests[] = {
    LISTED(pinned_slot_is_never_evicted),
    LISTED(slot_with_a_read_in_flight_is_never_evicted),
    LISTED(within_a_layer_the_least_recently_used_goes_first),
    LISTED(empty_and_forgotten_slots_are_taken_first),
    LISTED(assign_respects_spare_after),
    LISTED(assign_fails_when_every_slot_is_pinned_or_being_read),
    LISTED(of_equals_the_layer_that_comes_last_gives_way),
    LISTED(behind_a_prompt_each_layer_holds_what_its_last_tokens_chose),
    LISTED(a_layer_that_is_not_visited_any_more_ages),
    LISTED(what_a_pass_has_used_is_not_its_own_victim_while_there_is_another),
    LISTED(a_cache_smaller_than_a_cycle_still_finds_something),
    LISTED(a_cache_without_slots_and_a_group_without_class_work),
    LISTED(wrong_use_aborts),
    LISTED(the_check_notices_broken_bookkeeping),
    LISTED(random_operations_agree_with_a_naive_cache),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
