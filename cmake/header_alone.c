/* moestream.h as the only include, twice: what a caller in C11 or C++17 may do. Compiled, never run. */
#include "moestream.h"
#include "moestream.h"

int main(void) {
    return moestream_abi_version() == MOESTREAM_ABI_VERSION ? 0 : 1;
}
