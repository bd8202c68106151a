/*
 * The plan through the public header, on a model of this file's own making: rule lists of every length, order, and any
 * text as a rule. It is here, beside the Python tests, so that the sanitizers watch rules.c and plan.c.
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "check.h"
#include "moestream.h"

enum { N_LAYER = 3, N_EXPERT = 2, WIDTH = 32, N_TENSORS = N_LAYER * 4, LENGTH = 65536 };

static const char * const PARTS[] = {"ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight",
                                     "attn_norm.weight"};

/* ---- a GGUF by hand ---- */

static uint8_t file_bytes[LENGTH];
static size_t file_length;

static void put(const void * bytes, size_t n) {
    memcpy(file_bytes + file_length, bytes, n);
    file_length += n;
}

static void put_number(uint64_t value, size_t n) {
    put(&value, n); /* little-endian, as the format and this machine */
}

static void put_text(const char * text) {
    put_number(strlen(text), 8);
    put(text, strlen(text));
}

static void put_u32_key(const char * key, uint32_t value) {
    put_text(key);
    put_number(4, 4); /* GGUF_TYPE_UINT32 */
    put_number(value, 4);
}

static const char * model_path(void) {
    static char path[64];
    if (path[0] != '\0') {
        return path;
    }
    put("GGUF", 4);
    put_number(3, 4);
    put_number(N_TENSORS, 8);
    put_number(4, 8);
    put_text("general.architecture");
    put_number(8, 4); /* GGUF_TYPE_STRING */
    put_text("qwen3moe");
    put_u32_key("qwen3moe.block_count", N_LAYER);
    put_u32_key("qwen3moe.expert_count", N_EXPERT);
    put_u32_key("qwen3moe.expert_used_count", 1);
    uint64_t offset = 0;
    for (int i = 0; i < N_TENSORS; i++) {
        char name[64];
        int part = i % 4, n_dims = part == 3 ? 1 : 3;
        snprintf(name, sizeof(name), "blk.%d.%s", i / 4, PARTS[part]);
        put_text(name);
        put_number((uint64_t) n_dims, 4);
        for (int d = 0; d < n_dims; d++) {
            put_number(d == 2 ? N_EXPERT : WIDTH, 8);
        }
        put_number(0, 4); /* F32 */
        put_number(offset, 8);
        offset += part == 3 ? WIDTH * 4 : WIDTH * WIDTH * N_EXPERT * 4;
    }
    file_length = (file_length + 31) / 32 * 32;
    int fd = memfd_create("plan.gguf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, file_bytes, file_length) != (ssize_t) file_length ||
        ftruncate(fd, (off_t) (file_length + offset)) != 0) {
        perror("plan_test: making its model");
        exit(1);
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return path;
}

static moestream_params params_off(void) {
    moestream_params p = {.struct_size = sizeof(p), .stream = MOESTREAM_STREAM_OFF};
    return p;
}

static int count_at(const moestream_plan * plan, const char * place) {
    int n = 0;
    moestream_plan_tensor t = {.struct_size = sizeof(t)};
    for (int i = 0; moestream_plan_get_tensor(plan, i, &t) == MOESTREAM_OK; i++) {
        n += strcmp(t.place, place) == 0;
    }
    return n;
}

/* ---- tests ---- */

TEST(n_cpu_moe_moves_the_experts_of_the_first_blocks) {
    for (int n = 0; n <= N_LAYER + 2; n++) {
        moestream_params p = params_off();
        moestream_plan * plan = NULL;
        p.n_cpu_moe = n;
        REQUIRE(moestream_plan_open(&plan, model_path(), &p, NULL) == MOESTREAM_OK);
        CHECK(count_at(plan, "CPU") == 3 * (n < N_LAYER ? n : N_LAYER));
        moestream_plan_close(plan);
    }
}

TEST(strings_and_arrays_are_copied) {
    char pattern[] = "blk\\.1\\..*_exps", place[] = "CPU";
    int32_t layers[] = {2};
    moestream_rule rule = {pattern, place};
    moestream_params p = params_off();
    p.rules = &rule;
    p.n_rules = 1;
    p.cpu_moe_layers = layers;
    p.n_cpu_moe_layers = 1;
    moestream_plan * plan = NULL;
    REQUIRE(moestream_plan_open(&plan, model_path(), &p, NULL) == MOESTREAM_OK);
    memset(pattern, 'x', sizeof(pattern));
    memset(place, 'x', sizeof(place));
    memset(&rule, 0, sizeof(rule));
    moestream_plan_rule got = {.struct_size = sizeof(got)};
    CHECK(moestream_plan_get_rule(plan, 0, &got) == MOESTREAM_OK && got.n_matched == 3);
    CHECK_STR(got.pattern, "blk\\.1\\..*_exps");
    CHECK_STR(got.place, "CPU");
    CHECK(count_at(plan, "CPU") == 6);
    moestream_plan_close(plan);
}

TEST(more_rules_than_llama_cpp_takes_are_refused) {
    static moestream_rule rules[4096];
    for (int i = 0; i < 4096; i++) {
        rules[i] = (moestream_rule) {"never", "CPU"};
    }
    moestream_params p = params_off();
    moestream_error err = {.struct_size = sizeof(err)};
    moestream_plan * plan = NULL;
    p.rules = rules;
    p.n_rules = 4096;
    CHECK(moestream_plan_open(&plan, model_path(), &p, &err) == MOESTREAM_ERR_INVALID && plan == NULL);
    p.n_rules = 4095;
    CHECK(moestream_plan_open(&plan, model_path(), &p, &err) == MOESTREAM_OK);
    moestream_plan_close(plan);
    plan = NULL;
    p.cpu_moe = 1;
    CHECK(moestream_plan_open(&plan, model_path(), &p, &err) == MOESTREAM_ERR_INVALID && plan == NULL);
}

/* Any text is a rule that is in force, or INVALID with a message; never a crash, and nothing is left behind. */
TEST(any_text_is_a_rule_or_invalid) {
    static const char alphabet[] = "abk.019()[]{}|?*+^$\\=,:<>!-_ \xc3\xa9\ndexps";
    static const char * const places[] = {"CPU", "DEFAULT", "STREAM", "CPU_REPACK?", "\xff"};
    unsigned seed = (unsigned) check_seed(7);
    int n_taken = 0;
    for (int round = 0; round < 4000; round++) {
        char text[4][24];
        moestream_rule rules[4];
        moestream_params p = params_off();
        p.stream = round % 2 == 0 ? MOESTREAM_STREAM_ON : MOESTREAM_STREAM_OFF;
        p.n_rules = 1 + (size_t) rand_r(&seed) % 4;
        for (size_t i = 0; i < p.n_rules; i++) {
            int length = rand_r(&seed) % 20;
            for (int c = 0; c < length; c++) {
                text[i][c] = alphabet[(size_t) rand_r(&seed) % (sizeof(alphabet) - 1)];
            }
            text[i][length] = '\0';
            rules[i] =
                (moestream_rule) {text[i], places[rand_r(&seed) % 16 < 12 ? rand_r(&seed) % 2 : rand_r(&seed) % 5]};
        }
        p.rules = rules;
        p.n_cpu_moe = rand_r(&seed) % 5;
        p.n_gpu_layers = rand_r(&seed) % 6 - 1;
        moestream_error err = {.struct_size = sizeof(err)};
        moestream_plan * plan = NULL;
        moestream_status st = moestream_plan_open(&plan, model_path(), &p, &err);
        if (st != MOESTREAM_OK) {
            CHECK(st == MOESTREAM_ERR_INVALID && err.status == st && err.message[0] != '\0' && plan == NULL);
            continue;
        }
        n_taken++;
        moestream_plan_info info = {.struct_size = sizeof(info)};
        moestream_plan_tensor t = {.struct_size = sizeof(t)};
        CHECK(moestream_plan_get_info(plan, &info) == MOESTREAM_OK && info.n_tensors == N_TENSORS);
        for (int i = 0; i < N_TENSORS; i++) {
            CHECK(moestream_plan_get_tensor(plan, i, &t) == MOESTREAM_OK && t.rule < info.n_rules);
        }
        moestream_plan_close(plan);
    }
    CHECK(n_taken > 100);
}

static const check_test tests[] = {
    LISTED(n_cpu_moe_moves_the_experts_of_the_first_blocks),
    LISTED(strings_and_arrays_are_copied),
    LISTED(more_rules_than_llama_cpp_takes_are_refused),
    LISTED(any_text_is_a_rule_or_invalid),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
