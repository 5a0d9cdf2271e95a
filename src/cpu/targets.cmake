# One translation unit per instruction set: target_<name>.cpp compiled with that set's flags, never anything shared.
target_sources(kvonce_objects PRIVATE
  cpu/backend.cpp
  cpu/features.cpp
  cpu/plan.cpp
  cpu/pool.cpp
  cpu/run.cpp
  cpu/target_portable.cpp)

set(KVONCE_CPU_TARGETS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  list(APPEND KVONCE_CPU_TARGETS avx2 avx512 avx512_bf16)
  set(KVONCE_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(KVONCE_FLAGS_avx512 ${KVONCE_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # gcc 12 takes the undefined operands inside its own AVX-512 intrinsics for uninitialised variables (gcc bug 105593).
    list(APPEND KVONCE_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set(KVONCE_FLAGS_avx512_bf16 ${KVONCE_FLAGS_avx512} -mavx512bf16)
  target_sources(kvonce_objects PRIVATE cpu/target_avx2.cpp cpu/target_avx512.cpp cpu/target_avx512_bf16.cpp)
  target_compile_definitions(kvonce_objects PRIVATE KVONCE_X86=1)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  list(APPEND KVONCE_CPU_TARGETS neon neon_bf16)
  set(KVONCE_FLAGS_neon "")
  # FEAT_BF16 is an extension of Armv8.2: a processor that has it has the rest of these flags.
  set(KVONCE_FLAGS_neon_bf16 -march=armv8.2-a+bf16)
  target_sources(kvonce_objects PRIVATE cpu/target_neon.cpp cpu/target_neon_bf16.cpp)
  target_compile_definitions(kvonce_objects PRIVATE KVONCE_AARCH64=1)
endif()
# For the bench baselines, which are compiled per target too.
set(KVONCE_CPU_TARGETS ${KVONCE_CPU_TARGETS} CACHE INTERNAL "")
foreach(target ${KVONCE_CPU_TARGETS})
  set(KVONCE_FLAGS_${target} ${KVONCE_FLAGS_${target}} CACHE INTERNAL "")
  set_source_files_properties(cpu/target_${target}.cpp PROPERTIES COMPILE_OPTIONS "${KVONCE_FLAGS_${target}};-fno-math-errno")
endforeach()
