/* capi/compat: names that other programs expect of a llama.cpp library and upstream does not have. */
#include "ggml/api.h"
#include "moestream.h"

struct ggml_backend_buffer_type * llama_get_cpu_buffer_type(void) {
    const ms_api * api = ms_api_any();
    if (api == NULL && ms_api_bind(&api, NULL, NULL) != MOESTREAM_OK) {
        return NULL;
    }
    return api->ggml_backend_cpu_buffer_type();
}
