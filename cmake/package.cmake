# What goes into the Python package, component `moestream`: _native.abi3.so in the package folder, every shared library
# in moestream/_lib, the public header and the licences. No symbolic links: a wheel does not keep them.

if(MOESTREAM_BUILD_PYTHON)
    install(TARGETS _native LIBRARY DESTINATION moestream COMPONENT moestream)
endif()
install(TARGETS moestream ${MS_LLAMA_TARGETS}
    LIBRARY DESTINATION moestream/_lib COMPONENT moestream NAMELINK_SKIP
    RUNTIME DESTINATION moestream/_lib COMPONENT moestream
    PUBLIC_HEADER DESTINATION moestream/_lib/unused COMPONENT unused EXCLUDE_FROM_ALL)
install(FILES "${PROJECT_SOURCE_DIR}/csrc/include/moestream.h" DESTINATION moestream/include COMPONENT moestream)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION moestream/licenses COMPONENT moestream)
if(EXISTS "${MS_LLAMA_ROOT}/LICENSE" AND MS_LLAMA_TARGETS)
    install(FILES "${MS_LLAMA_ROOT}/LICENSE" DESTINATION moestream/licenses RENAME LICENSE.llama.cpp
        COMPONENT moestream)
endif()

# EXCLUDE_FROM_ALL above left these out of `all`.
add_custom_target(ms_package ALL)
add_dependencies(ms_package moestream ${MS_LLAMA_TARGETS})
include(c_package)
