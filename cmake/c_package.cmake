# For C and other languages, beside the Python package and part of it: the prefix is the package's folder, with
# include/, _lib/, lib/pkgconfig/moestream.pc and lib/cmake/moestream. Without Python:
#   cmake -S . -B build -DMOESTREAM_BUILD_PYTHON=OFF && cmake --build build && cmake --install build --prefix P
# and the prefix is P/moestream.
include(CMakePackageConfigHelpers)

set(MS_PC_CFLAGS "")
set(MS_PC_LIBS "")
if(MS_LLAMA_TARGETS)
    # The public headers of the very llama.cpp whose libraries lie in _lib: a caller fills its parameter structs.
    set(MS_PC_CFLAGS " -I\${prefix}/include/llama.cpp")
    set(MS_PC_LIBS " -lllama")
    foreach(MS_FOLDER ${MS_LLAMA_INCLUDES})
        install(DIRECTORY "${MS_FOLDER}/" DESTINATION moestream/include/llama.cpp COMPONENT moestream
            FILES_MATCHING PATTERN "llama.h" PATTERN "ggml*.h" PATTERN "gguf.h")
    endforeach()
endif()

configure_file("${CMAKE_CURRENT_LIST_DIR}/moestream.pc.in" "${CMAKE_BINARY_DIR}/moestream.pc" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/moestreamConfig.cmake.in" "${CMAKE_BINARY_DIR}/moestreamConfig.cmake" @ONLY)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/moestreamConfigVersion.cmake" VERSION "${MS_VERSION}"
    COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/moestream.pc" DESTINATION moestream/lib/pkgconfig COMPONENT moestream)
install(FILES "${CMAKE_BINARY_DIR}/moestreamConfig.cmake" "${CMAKE_BINARY_DIR}/moestreamConfigVersion.cmake"
    DESTINATION moestream/lib/cmake/moestream COMPONENT moestream)
