# llama.cpp: finds a tree, builds it as shared libraries of their own names, and describes it:
#   MS_LLAMA_ROOT, MS_LLAMA_ORIGIN   where it is, and how it was found
#   MS_LLAMA_COMMIT, MS_GGML_VERSION what it is, "unknown" where nothing tells
#   MS_LLAMA_INCLUDES                folders of llama.h and ggml.h: public headers only
#   MS_LLAMA_LIBRARY                 an installed libllama to load, "" where ours lies beside libmoestream
#   MS_LLAMA_TARGETS                 the shared library targets that go into the package
# Order: MOESTREAM_LLAMA_DIR (CMake, then environment), third_party/llama.cpp, build/_llama-<commit> (fetched).

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

set(MS_LOCK "${PROJECT_SOURCE_DIR}/third_party/llama.lock")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${MS_LOCK}")
file(STRINGS "${MS_LOCK}" MS_LOCKED_COMMIT REGEX "^commit = ")
string(REPLACE "commit = " "" MS_LOCKED_COMMIT "${MS_LOCKED_COMMIT}")

# ---- where ---------------------------------------------------------------------------------------------------------

set(MS_SUBMODULE "${PROJECT_SOURCE_DIR}/third_party/llama.cpp")
if(MOESTREAM_LLAMA_DIR)
    get_filename_component(MS_LLAMA_ROOT "${MOESTREAM_LLAMA_DIR}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
    set(MS_LLAMA_ORIGIN "MOESTREAM_LLAMA_DIR")
elseif(DEFINED ENV{MOESTREAM_LLAMA_DIR} AND NOT "$ENV{MOESTREAM_LLAMA_DIR}" STREQUAL "")
    get_filename_component(MS_LLAMA_ROOT "$ENV{MOESTREAM_LLAMA_DIR}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
    set(MS_LLAMA_ORIGIN "environment MOESTREAM_LLAMA_DIR")
elseif(EXISTS "${MS_SUBMODULE}/CMakeLists.txt")
    set(MS_LLAMA_ROOT "${MS_SUBMODULE}")
    set(MS_LLAMA_ORIGIN "third_party")
else()
    set(MS_LLAMA_ROOT "${PROJECT_SOURCE_DIR}/build/_llama-${MS_LOCKED_COMMIT}")
    set(MS_LLAMA_ORIGIN "fetched")
    set(MS_FETCH_OUTPUT "")
    if(NOT EXISTS "${MS_LLAMA_ROOT}/.moestream-commit")
        # A source tree that cannot be written to: keep llama.cpp in the build tree.
        execute_process(COMMAND "${CMAKE_COMMAND}" -E make_directory "${PROJECT_SOURCE_DIR}/build"
            RESULT_VARIABLE MS_RESULT ERROR_QUIET)
        if(NOT MS_RESULT EQUAL 0)
            set(MS_LLAMA_ROOT "${CMAKE_BINARY_DIR}/_llama-${MS_LOCKED_COMMIT}")
        endif()
    endif()
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/fetch_llama.py" --dest "${MS_LLAMA_ROOT}"
        RESULT_VARIABLE MS_RESULT OUTPUT_QUIET)
    if(NOT MS_RESULT EQUAL 0)
        message(FATAL_ERROR "llama.cpp could not be fetched; the lines above say why. Set MOESTREAM_LLAMA_DIR to a "
            "llama.cpp source tree to build without fetching.")
    endif()
endif()

set(MS_LLAMA_INSTALLED OFF)
if(NOT EXISTS "${MS_LLAMA_ROOT}/include/llama.h")
    message(FATAL_ERROR "${MS_LLAMA_ROOT} (${MS_LLAMA_ORIGIN}) has no include/llama.h: it is neither a llama.cpp "
        "source tree nor the prefix of an installed llama.cpp.")
elseif(NOT EXISTS "${MS_LLAMA_ROOT}/ggml/CMakeLists.txt")
    set(MS_LLAMA_INSTALLED ON)
endif()

# ---- what ----------------------------------------------------------------------------------------------------------

set(MS_LLAMA_COMMIT "unknown")
if(EXISTS "${MS_LLAMA_ROOT}/.moestream-commit")
    file(READ "${MS_LLAMA_ROOT}/.moestream-commit" MS_LLAMA_COMMIT)
    string(STRIP "${MS_LLAMA_COMMIT}" MS_LLAMA_COMMIT)
elseif(EXISTS "${MS_LLAMA_ROOT}/.git")
    find_program(MS_GIT git)
    if(MS_GIT)
        # The top level is compared, or git would answer for the repository around a tree that is none itself.
        execute_process(COMMAND "${MS_GIT}" rev-parse --show-toplevel HEAD WORKING_DIRECTORY "${MS_LLAMA_ROOT}"
            RESULT_VARIABLE MS_RESULT OUTPUT_VARIABLE MS_OUTPUT ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(MS_RESULT EQUAL 0 AND MS_OUTPUT MATCHES "^(.*)\n([0-9a-f]+)$")
            set(MS_HEAD "${CMAKE_MATCH_2}")
            file(REAL_PATH "${CMAKE_MATCH_1}" MS_TOP)
            file(REAL_PATH "${MS_LLAMA_ROOT}" MS_REAL_ROOT)
            if(MS_TOP STREQUAL MS_REAL_ROOT)
                set(MS_LLAMA_COMMIT "${MS_HEAD}")
            endif()
        endif()
    endif()
endif()
if(MS_LLAMA_ORIGIN STREQUAL "third_party" AND NOT MS_LLAMA_COMMIT STREQUAL MS_LOCKED_COMMIT)
    message(WARNING "third_party/llama.cpp is at ${MS_LLAMA_COMMIT}, third_party/llama.lock says ${MS_LOCKED_COMMIT}.")
endif()

set(MS_GGML_VERSION "unknown")
if(NOT MS_LLAMA_INSTALLED)
    file(STRINGS "${MS_LLAMA_ROOT}/ggml/CMakeLists.txt" MS_LINES
        REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) [0-9]+\\)")
    string(REGEX MATCHALL "[0-9]+" MS_NUMBERS "${MS_LINES}")
    list(LENGTH MS_NUMBERS MS_N)
    if(MS_N EQUAL 3)
        list(JOIN MS_NUMBERS "." MS_GGML_VERSION)
    endif()
endif()

# ---- an installed llama.cpp: nothing to build, nothing to bundle --------------------------------------------------

set(MS_LLAMA_LIBRARY "")
set(MS_LLAMA_TARGETS "")
if(MS_LLAMA_INSTALLED)
    find_library(MS_INSTALLED_LLAMA NAMES libllama.so PATHS "${MS_LLAMA_ROOT}" PATH_SUFFIXES lib lib64 bin
        NO_DEFAULT_PATH NO_CACHE)
    if(NOT MS_INSTALLED_LLAMA)
        message(FATAL_ERROR "${MS_LLAMA_ROOT} has include/llama.h but no lib/libllama.so.")
    endif()
    set(MS_LLAMA_LIBRARY "${MS_INSTALLED_LLAMA}")
    set(MS_LLAMA_INCLUDES "${MS_LLAMA_ROOT}/include")
    message(STATUS "llama.cpp: ${MS_LLAMA_LIBRARY} is used where it is; loads through it read the whole file")
    return()
endif()

set(MS_LLAMA_INCLUDES "${MS_LLAMA_ROOT}/include" "${MS_LLAMA_ROOT}/ggml/include")

# ---- build ---------------------------------------------------------------------------------------------------------

# Our defaults; what the user gave on the command line is in the cache already and stays.
foreach(MS_OPTION BUILD_TESTS BUILD_TOOLS BUILD_EXAMPLES BUILD_SERVER BUILD_COMMON BUILD_APP BUILD_UI OPENSSL)
    set(LLAMA_${MS_OPTION} OFF CACHE BOOL "set by moestream")
endforeach()
file(STRINGS "${MS_LLAMA_ROOT}/CMakeLists.txt" MS_HAS_CURL REGEX "option\\(LLAMA_CURL ")
if(MS_HAS_CURL)
    set(LLAMA_CURL OFF CACHE BOOL "set by moestream") # newer trees warn when it is set
endif()
set(GGML_OPENMP OFF CACHE BOOL "set by moestream: contexts bring their own threadpool")
set(GGML_RPC ON CACHE BOOL "set by moestream: a second device for the tests")
# Upstream's warnings are upstream's: thousands of lines inside the compiler's own headers with some GCCs.
set(GGML_ALL_WARNINGS OFF CACHE BOOL "set by moestream")
set(LLAMA_ALL_WARNINGS OFF CACHE BOOL "set by moestream")
set(GGML_CCACHE OFF CACHE BOOL "set by moestream: ccache is the compiler launcher already")
set(BUILD_SHARED_LIBS ON CACHE BOOL "set by moestream")
if(MOESTREAM_PORTABLE)
    # One CPU backend per instruction set, beside libllama; ggml loads the best one that the machine runs.
    set(GGML_NATIVE OFF CACHE BOOL "set by MOESTREAM_PORTABLE" FORCE)
    set(GGML_BACKEND_DL ON CACHE BOOL "set by MOESTREAM_PORTABLE")
    set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "set by MOESTREAM_PORTABLE")
else()
    set(GGML_NATIVE ON CACHE BOOL "set by moestream")
endif()

string(SUBSTRING "${MS_LLAMA_COMMIT}" 0 7 MS_SHORT_COMMIT)
# ggml asks git for a commit by itself, and in a tree without a repository it would get the one around it.
set(GIT_EXE "")
set(LLAMA_BUILD_COMMIT "${MS_SHORT_COMMIT}")
set(GGML_BUILD_COMMIT "${MS_SHORT_COMMIT}")

# EXCLUDE_FROM_ALL: what the package does not need is not built, and none of upstream's install rules run.
if(MOESTREAM_SANITIZE)
    add_subdirectory("${MS_LLAMA_ROOT}/ggml" "${CMAKE_BINARY_DIR}/llama.cpp/ggml" EXCLUDE_FROM_ALL)
else()
    add_subdirectory("${MS_LLAMA_ROOT}" "${CMAKE_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)
endif()

# ---- identity ------------------------------------------------------------------------------------------------------

function(ms_collect_libraries folder out)
    get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(folders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
    set(found "")
    foreach(target ${targets})
        get_target_property(type ${target} TYPE)
        if(target MATCHES "^ggml" AND type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND found ${target})
        endif()
    endforeach()
    foreach(inner IN LISTS folders)
        ms_collect_libraries("${inner}" more)
        list(APPEND found ${more})
    endforeach()
    set(${out} "${found}" PARENT_SCOPE)
endfunction()

if(MOESTREAM_SANITIZE)
    ms_collect_libraries("${MS_LLAMA_ROOT}/ggml" MS_LLAMA_TARGETS)
else()
    ms_collect_libraries("${MS_LLAMA_ROOT}" MS_LLAMA_TARGETS)
endif()

# Another package in the same process may bring its own libggml.so.0. The loader matches libraries by SONAME, so ours
# carry a version nobody else has; one file each, named like the SONAME, because a wheel keeps no symbolic links.
foreach(MS_TARGET ${MS_LLAMA_TARGETS})
    set_target_properties(${MS_TARGET} PROPERTIES VERSION "ms-${MS_SHORT_COMMIT}" SOVERSION "ms-${MS_SHORT_COMMIT}")
endforeach()
if(TARGET llama)
    # llama-cpp-python looks for exactly libllama.so.
    set_property(TARGET llama PROPERTY VERSION)
    set_property(TARGET llama PROPERTY SOVERSION)
    list(APPEND MS_LLAMA_TARGETS llama)

    # The load policy replaces two calls of libllama at link time; compiled apart, with our flags.
    if(EXISTS "${PROJECT_SOURCE_DIR}/csrc/ggml/load_policy.c")
        add_library(ms_load_policy OBJECT "${PROJECT_SOURCE_DIR}/csrc/ggml/load_policy.c")
        ms_own_code(ms_load_policy)
        target_include_directories(ms_load_policy PRIVATE "${PROJECT_SOURCE_DIR}/csrc"
            "${PROJECT_SOURCE_DIR}/csrc/include")
        target_sources(llama PRIVATE $<TARGET_OBJECTS:ms_load_policy>)
        target_link_options(llama PRIVATE -Wl,--wrap=mmap -Wl,--wrap=posix_madvise)
    else()
        message(FATAL_ERROR "csrc/ggml/load_policy.c is missing.")
    endif()
endif()
foreach(MS_TARGET ${MS_LLAMA_TARGETS})
    set_target_properties(${MS_TARGET} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${MS_LIB_DIR}"
        INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
    target_compile_options(${MS_TARGET} PRIVATE "-ffile-prefix-map=${MS_LLAMA_ROOT}/=llama.cpp/"
        # Unique symbols are shared between all libraries of a process, also between two llama.cpp of different commits.
        $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
endforeach()

# ---- upstream's writer of small models -----------------------------------------------------------------------------

if(MOESTREAM_BUILD_ARCHS AND NOT MOESTREAM_SANITIZE)
    # It uses a few functions of llama.cpp's `common`, whose sixty files take longer than all the rest. Only the files
    # with these functions are compiled, and the linker drops what they have beside them, with its open ends.
    set(MS_COMMON "${MS_LLAMA_ROOT}/common")
    set(LLAMA_BUILD_NUMBER 0)
    set(BUILD_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
    set(BUILD_TARGET "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}")
    configure_file("${MS_COMMON}/build-info.cpp.in" "${CMAKE_BINARY_DIR}/archs/build-info.cpp" @ONLY)
    set(MS_COMMON_FILES "")
    foreach(MS_NAME common log json) # older trees lack json.cpp
        if(EXISTS "${MS_COMMON}/${MS_NAME}.cpp")
            list(APPEND MS_COMMON_FILES "${MS_COMMON}/${MS_NAME}.cpp")
        endif()
    endforeach()
    add_executable(ms_archs EXCLUDE_FROM_ALL "${MS_LLAMA_ROOT}/tests/test-llama-archs.cpp" ${MS_COMMON_FILES}
        "${CMAKE_BINARY_DIR}/archs/build-info.cpp")
    set_target_properties(ms_archs PROPERTIES OUTPUT_NAME test-llama-archs
        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tools")
    target_include_directories(ms_archs PRIVATE "${MS_COMMON}" "${MS_LLAMA_ROOT}/src" "${MS_LLAMA_ROOT}/vendor")
    target_compile_options(ms_archs PRIVATE -ffunction-sections -fdata-sections)
    target_link_options(ms_archs PRIVATE -Wl,--gc-sections)
    target_link_libraries(ms_archs PRIVATE llama Threads::Threads)
endif()
