# fmt as headers alone: libfmt-dev's library is the build machine's.
if(NOT TARGET fmt::fmt)
  find_path(fmt_INCLUDE_DIR fmt/format-inl.h REQUIRED)
  add_library(fmt::fmt INTERFACE IMPORTED)
  target_include_directories(fmt::fmt INTERFACE ${fmt_INCLUDE_DIR})
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
endif()
set(fmt_FOUND TRUE)
