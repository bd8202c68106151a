# The C tests: each tests/c/*_test.c is a program; `ms_tests` builds them, ctest runs them. A test that returns 77 was
# skipped, having printed why. Tests that need llama.cpp load the library that MOESTREAM_LIBLLAMA names.

file(GLOB MS_TEST_FILES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/c/*_test.c"
    "${PROJECT_SOURCE_DIR}/tests/fuzz/*_test.c")
file(GLOB MS_SUPPORT_FILES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/support/*.c")
add_custom_target(ms_tests)

set(MS_TEST_INCLUDES "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/csrc/include" "${PROJECT_SOURCE_DIR}/tests"
    "${PROJECT_SOURCE_DIR}/tests/c" "${MS_CONFIG_DIR}")

set(MS_TEST_LIBRARIES ms_capi ms_ggml ms_stream ms_cache ms_io ms_gguf ms_base)
if(MS_SUPPORT_FILES)
    add_library(ms_test_support STATIC EXCLUDE_FROM_ALL ${MS_SUPPORT_FILES})
    ms_own_code(ms_test_support)
    target_include_directories(ms_test_support PRIVATE ${MS_TEST_INCLUDES})
    target_include_directories(ms_test_support SYSTEM PRIVATE ${MS_LLAMA_INCLUDES})
    target_link_libraries(ms_test_support PUBLIC ${MS_TEST_LIBRARIES})
    list(PREPEND MS_TEST_LIBRARIES ms_test_support)
endif()

set(MS_TEST_ENVIRONMENT "MOESTREAM_CORPUS=${PROJECT_SOURCE_DIR}/tests/fuzz/corpus")
if(TARGET llama)
    add_dependencies(ms_tests llama)
    list(APPEND MS_TEST_ENVIRONMENT "MOESTREAM_LIBLLAMA=${MS_LIB_DIR}/libllama.so")
elseif(MOESTREAM_SANITIZE AND MOESTREAM_PREBUILT_LLAMA)
    # libllama of a plain build, moved beside the sanitized ggml libraries: they have the same SONAMEs, and its RUNPATH
    # is $ORIGIN. So ggml's threads are watched without compiling llama.cpp once more.
    add_custom_command(OUTPUT "${MS_LIB_DIR}/libllama.so"
        COMMAND "${CMAKE_COMMAND}" -E make_directory "${MS_LIB_DIR}"
        COMMAND "${CMAKE_COMMAND}" -E copy "${MOESTREAM_PREBUILT_LLAMA}" "${MS_LIB_DIR}/libllama.so"
        DEPENDS "${MOESTREAM_PREBUILT_LLAMA}" VERBATIM)
    add_custom_target(ms_prebuilt_llama DEPENDS "${MS_LIB_DIR}/libllama.so")
    add_dependencies(ms_tests ms_prebuilt_llama ${MS_LLAMA_TARGETS})
    list(APPEND MS_TEST_ENVIRONMENT "MOESTREAM_LIBLLAMA=${MS_LIB_DIR}/libllama.so")
elseif(MS_LLAMA_LIBRARY)
    list(APPEND MS_TEST_ENVIRONMENT "MOESTREAM_LIBLLAMA=${MS_LLAMA_LIBRARY}")
else()
    message(STATUS "C tests: no libllama for the tests that need one (MOESTREAM_PREBUILT_LLAMA would name one)")
endif()
if(MOESTREAM_SANITIZE STREQUAL "address")
    list(APPEND MS_TEST_ENVIRONMENT "ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1"
        "UBSAN_OPTIONS=print_stacktrace=1"
        "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/lsan.supp:print_suppressions=0")
elseif(MOESTREAM_SANITIZE STREQUAL "thread")
    list(APPEND MS_TEST_ENVIRONMENT
        "TSAN_OPTIONS=halt_on_error=0:second_deadlock_stack=1:suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp")
endif()

foreach(MS_FILE ${MS_TEST_FILES})
    get_filename_component(MS_NAME "${MS_FILE}" NAME_WE)
    add_executable(${MS_NAME} EXCLUDE_FROM_ALL "${MS_FILE}")
    ms_own_code(${MS_NAME})
    set_target_properties(${MS_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests" ENABLE_EXPORTS OFF
        LINKER_LANGUAGE CXX)
    target_compile_options(${MS_NAME} PRIVATE -UNDEBUG)
    target_include_directories(${MS_NAME} PRIVATE ${MS_TEST_INCLUDES})
    target_include_directories(${MS_NAME} SYSTEM PRIVATE ${MS_LLAMA_INCLUDES})
    target_link_libraries(${MS_NAME} PRIVATE ${MS_TEST_LIBRARIES})
    add_dependencies(ms_tests ${MS_NAME})
    add_test(NAME ${MS_NAME} COMMAND ${MS_NAME})
    set_tests_properties(${MS_NAME} PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77 ENVIRONMENT "${MS_TEST_ENVIRONMENT}")
endforeach()

# The libFuzzer harness: built by clang alone, run by hand (make fuzz).
if(MOESTREAM_FUZZ)
    add_executable(expert_index_fuzzer EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/fuzz/expert_index_fuzzer.c")
    ms_own_code(expert_index_fuzzer)
    target_include_directories(expert_index_fuzzer PRIVATE ${MS_TEST_INCLUDES})
    target_include_directories(expert_index_fuzzer SYSTEM PRIVATE ${MS_LLAMA_INCLUDES})
    target_link_libraries(expert_index_fuzzer PRIVATE ${MS_TEST_LIBRARIES} -fsanitize=fuzzer)
    set_target_properties(expert_index_fuzzer PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
        LINKER_LANGUAGE CXX)
    add_dependencies(expert_index_fuzzer ms_prebuilt_llama ${MS_LLAMA_TARGETS})
endif()

# Deliberate defects: the rooms under the stream are built once more with each, and the named test has to fail.
if(NOT MOESTREAM_SANITIZE AND NOT MOESTREAM_MUTATE)
    file(GLOB MS_MUTANT_SOURCES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/stream/*.c"
        "${PROJECT_SOURCE_DIR}/csrc/cache/*.c" "${PROJECT_SOURCE_DIR}/csrc/io/*.c" "${PROJECT_SOURCE_DIR}/csrc/base/*.c")
    foreach(MS_CASE
            "PUBLISH_EARLY;nothing_is_published_before_its_bytes_are_there"
            "SKIP_PIN;leased_slots_keep_their_bytes_when_all_others_are_used_up"
            "WINDOW_OFF_BY_ONE;slices_are_the_files_bytes_in_any_order_of_completion"
            "IGNORE_CHANGES;bytes_of_a_file_that_was_written_to_are_not_used"
            "STALE_SLOT;a_slot_given_to_another_expert_holds_the_other_experts_bytes")
        list(GET MS_CASE 0 MS_DEFECT)
        list(GET MS_CASE 1 MS_NOTICED_BY)
        string(TOLOWER "mutant_${MS_DEFECT}" MS_NAME)
        add_executable(${MS_NAME} EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/c/stream_test.c"
            "${PROJECT_SOURCE_DIR}/tests/support/fake_reader.c" ${MS_MUTANT_SOURCES})
        ms_own_code(${MS_NAME})
        set_target_properties(${MS_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
        target_compile_options(${MS_NAME} PRIVATE -UNDEBUG)
        target_compile_definitions(${MS_NAME} PRIVATE "MS_MUTATE_${MS_DEFECT}")
        target_include_directories(${MS_NAME} PRIVATE ${MS_TEST_INCLUDES})
        target_link_libraries(${MS_NAME} PRIVATE ms_uring Threads::Threads m)
        add_dependencies(ms_tests ${MS_NAME})
        add_test(NAME ${MS_NAME} COMMAND ${MS_NAME} ${MS_NOTICED_BY})
        set_tests_properties(${MS_NAME} PROPERTIES TIMEOUT 120 PASS_REGULAR_EXPRESSION "FAIL  ${MS_NOTICED_BY}")
    endforeach()
endif()

# The public header alone, as a caller meets it.
foreach(MS_CASE "c;-std=c11" "c++;-std=c++17")
    list(GET MS_CASE 0 MS_LANGUAGE)
    list(GET MS_CASE 1 MS_STANDARD)
    if(MS_LANGUAGE STREQUAL "c")
        set(MS_COMPILER_COMMAND "${CMAKE_C_COMPILER}")
    else()
        set(MS_COMPILER_COMMAND "${CMAKE_CXX_COMPILER}")
    endif()
    add_test(NAME header_alone_${MS_LANGUAGE} COMMAND "${MS_COMPILER_COMMAND}" -x ${MS_LANGUAGE} ${MS_STANDARD} -Wall
        -Wextra -Werror -pedantic -fsyntax-only "${CMAKE_CURRENT_LIST_DIR}/header_alone.c"
        "-I${PROJECT_SOURCE_DIR}/csrc/include")
endforeach()
