// KVONCE_UNROLL before a loop of constant length keeps its arrays in registers, with gcc and clang alike.
#pragma once

#if defined(__clang__)
#define KVONCE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVONCE_UNROLL _Pragma("GCC unroll 32")
#endif
