# Compiler launcher, sanitizers, and the flags of our own code: ms_own_code(<target>).

if(NOT CMAKE_C_COMPILER_LAUNCHER AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    find_program(MS_CCACHE ccache)
    if(MS_CCACHE)
        set(CMAKE_C_COMPILER_LAUNCHER "${MS_CCACHE}")
        set(CMAKE_CXX_COMPILER_LAUNCHER "${MS_CCACHE}")
    endif()
endif()

# Inherited by every target below, so that ggml is built alike: a sanitizer that does not see both sides of a lock
# reports races that are none.
if(MOESTREAM_SANITIZE STREQUAL "address")
    add_compile_options(-fsanitize=address -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=address)
    # Only for our own code: upstream's is not ours to judge.
    set(MS_OWN_SANITIZE -fsanitize=undefined -fno-sanitize-recover=undefined)
elseif(MOESTREAM_SANITIZE STREQUAL "thread")
    add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=thread)
elseif(MOESTREAM_SANITIZE)
    message(FATAL_ERROR "MOESTREAM_SANITIZE=${MOESTREAM_SANITIZE}: only address and thread are known.")
endif()
if(MOESTREAM_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang" OR NOT MOESTREAM_SANITIZE STREQUAL "address")
        message(FATAL_ERROR "MOESTREAM_FUZZ needs clang and MOESTREAM_SANITIZE=address (see tests/fuzz/README.md).")
    endif()
    list(APPEND MS_OWN_SANITIZE -fsanitize=fuzzer-no-link) # what libFuzzer steers by
endif()

set(MS_WARNINGS -Wall -Wextra -Wshadow -Wpointer-arith -Wundef -Wvla -Wformat=2
    $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes>
    $<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes>)
if(MOESTREAM_SANITIZE)
    # GCC's documentation says so: with sanitizers this warning is wrong in many places (here: inside std::regex).
    list(APPEND MS_WARNINGS -Wno-maybe-uninitialized)
endif()
if(MOESTREAM_WERROR)
    list(APPEND MS_WARNINGS -Werror)
endif()

if(MOESTREAM_MUTATE)
    string(TOUPPER "${MOESTREAM_MUTATE}" MS_MUTATION)
    message(WARNING "Building with the deliberate defect MS_MUTATE_${MS_MUTATION}: for tests of the tests only.")
endif()

function(ms_own_code target)
    target_compile_options(${target} PRIVATE ${MS_WARNINGS} ${MS_OWN_SANITIZE}
        "-ffile-prefix-map=${CMAKE_BINARY_DIR}/rooms/=" "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
    # Not for llama.cpp: GCC contracts a * b + c in gnu11 and does not in c11, so ggml's results would change.
    set_target_properties(${target} PROPERTIES C_EXTENSIONS OFF CXX_EXTENSIONS OFF)
    if(MS_OWN_SANITIZE)
        target_link_options(${target} PRIVATE -fsanitize=undefined)
    endif()
    if(MOESTREAM_MUTATE)
        target_compile_definitions(${target} PRIVATE "MS_MUTATE_${MS_MUTATION}")
    endif()
endfunction()
