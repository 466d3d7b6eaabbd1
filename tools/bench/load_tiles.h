// Says what the instruction that configures AMX's tiles reads: all 64 bytes.
//
// GCC's intrinsic says eight of them in some versions, such as 12.2, so the compiler may leave out stores to the others.
// That is what happens to llama.cpp's configuration, which is on the stack.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
