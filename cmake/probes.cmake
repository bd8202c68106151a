# What differs between llama.cpp commits, asked of the headers: writes config/ms_config.h.
# Each probe compiles two lines of C; nothing is linked, so a library need not exist yet.

include(CheckCSourceCompiles)
include(CheckStructHasMember)
include(CheckSymbolExists)

# Answers are cached by CMake; they belong to one tree.
set(MS_PROBE_KEY "${MS_LLAMA_ROOT} ${MS_LLAMA_COMMIT}")
if(NOT "${MS_PROBED}" STREQUAL "${MS_PROBE_KEY}")
    get_cmake_property(MS_CACHED CACHE_VARIABLES)
    foreach(MS_NAME ${MS_CACHED})
        if(MS_NAME MATCHES "^MS_PROBE_")
            unset(${MS_NAME} CACHE)
        endif()
    endforeach()
    set(MS_PROBED "${MS_PROBE_KEY}" CACHE INTERNAL "")
endif()

set(MS_PROBES "")

macro(ms_probe_member name struct member header)
    check_struct_has_member("struct ${struct}" ${member} ${header} MS_PROBE_${name} LANGUAGE C)
    ms_probe_result(${name})
endmacro()
macro(ms_probe_symbol name symbol header)
    check_symbol_exists(${symbol} ${header} MS_PROBE_${name})
    ms_probe_result(${name})
endmacro()
macro(ms_probe_result name)
    if(MS_PROBE_${name})
        string(APPEND MS_PROBES "#define MS_HAVE_${name} 1\n")
    else()
        string(APPEND MS_PROBES "#define MS_HAVE_${name} 0\n")
    endif()
endmacro()

set(MS_SAVED_TYPE "${CMAKE_TRY_COMPILE_TARGET_TYPE}")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_REQUIRED_INCLUDES ${MS_LLAMA_INCLUDES})
set(CMAKE_REQUIRED_QUIET ON)

ms_probe_member(MP_LOAD_MODE llama_model_params load_mode llama.h)
ms_probe_member(MP_USE_MMAP llama_model_params use_mmap llama.h)
ms_probe_member(MP_USE_MLOCK llama_model_params use_mlock llama.h)
ms_probe_member(MP_USE_DIRECT_IO llama_model_params use_direct_io llama.h)
ms_probe_member(MP_LAZY_MODE llama_model_params lazy_mode llama.h)
ms_probe_member(MP_LOAD_MTP llama_model_params load_mtp llama.h)
ms_probe_member(MP_USE_EXTRA_BUFTS llama_model_params use_extra_bufts llama.h)
ms_probe_member(MP_NO_HOST llama_model_params no_host llama.h)
ms_probe_member(MP_NO_ALLOC llama_model_params no_alloc llama.h)
ms_probe_member(CP_OP_OFFLOAD llama_context_params op_offload llama.h)
ms_probe_member(CP_FLASH_ATTN_TYPE llama_context_params flash_attn_type llama.h)
ms_probe_member(CP_FLASH_ATTN llama_context_params flash_attn llama.h)
ms_probe_member(CP_KV_UNIFIED llama_context_params kv_unified llama.h)
ms_probe_member(CP_SWA_FULL llama_context_params swa_full llama.h)
ms_probe_symbol(LLAMA_LOAD_FROM_FILE_PTR llama_model_load_from_file_ptr llama.h)
ms_probe_symbol(LLAMA_LOAD_MODE_FROM_STR llama_load_mode_from_str llama.h)
ms_probe_symbol(LLAMA_MAX_OVERRIDES llama_max_tensor_buft_overrides llama.h)
ms_probe_symbol(LLAMA_VERSION llama_version llama.h)
ms_probe_symbol(GGML_VERSION ggml_version ggml.h)
# an enumerator, whose address check_symbol_exists would take
check_c_source_compiles("#include <ggml.h>\nint flag(void) { return GGML_TENSOR_FLAG_COMPUTE; }"
    MS_PROBE_TENSOR_FLAG_COMPUTE)
ms_probe_result(TENSOR_FLAG_COMPUTE)

# A probe that answers "no" to everything has met broken headers, not an old commit.
check_struct_has_member("struct llama_model_params" tensor_buft_overrides llama.h MS_PROBE_SANE LANGUAGE C)
if(NOT MS_PROBE_SANE)
    message(FATAL_ERROR "${MS_LLAMA_ROOT}/include/llama.h does not compile as C, or is older than "
        "llama_model_params.tensor_buft_overrides (2025-04). See CMakeFiles/CMakeError.log or CMakeConfigureLog.yaml.")
endif()

set(CMAKE_TRY_COMPILE_TARGET_TYPE "${MS_SAVED_TYPE}")
unset(CMAKE_REQUIRED_INCLUDES)
unset(CMAKE_REQUIRED_QUIET)

set(MS_CONFIG_DIR "${CMAKE_BINARY_DIR}/config")
configure_file("${CMAKE_CURRENT_LIST_DIR}/ms_config.h.in" "${MS_CONFIG_DIR}/ms_config.h" @ONLY)
