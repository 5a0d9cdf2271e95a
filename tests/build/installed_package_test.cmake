# Installs the build into a prefix, moves the prefix, and uses it as other projects do: C++ through find_package, C
# through pkg-config, and the command.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT OUTPUT_VARIABLE output ERROR_VARIABLE output
    RESULT_VARIABLE status)
  message("${output}")
  if(NOT status STREQUAL "0")
    message(FATAL_ERROR "exit ${status}: ${ARGV}")
  endif()
  set(run_output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${scratch_dir})
file(MAKE_DIRECTORY ${scratch_dir})
run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${scratch_dir}/first)
file(RENAME ${scratch_dir}/first ${scratch_dir}/moved)
set(prefix ${scratch_dir}/moved)

file(GLOB headers RELATIVE ${source_dir}/include ${source_dir}/include/kvonce/*)
foreach(header ${headers})
  if(NOT EXISTS ${prefix}/${includedir}/${header})
    message(FATAL_ERROR "not installed: ${header}")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${consumer_dir} -B ${scratch_dir}/consumer -G Ninja -D CMAKE_PREFIX_PATH=${prefix}
  -D CMAKE_CXX_COMPILER=${cxx} -D CMAKE_BUILD_TYPE=${build_type} -D KVONCE_EXPECTED_VERSION=${version})
run(${CMAKE_COMMAND} --build ${scratch_dir}/consumer)
run(${scratch_dir}/consumer/consumer_cpp)
if(NOT run_output STREQUAL "kvonce ${version}: out 3\n")
  message(FATAL_ERROR "consumer_cpp printed: ${run_output}")
endif()

find_program(pkg_config pkg-config REQUIRED)
set(ENV{PKG_CONFIG_PATH} ${prefix}/${libdir}/pkgconfig)
run(${pkg_config} --modversion kvonce)
run(${pkg_config} --cflags --libs kvonce)
separate_arguments(flags UNIX_COMMAND "${run_output}")
run(${cc} -std=c99 -Wall -Wextra -Werror -pedantic ${consumer_dir}/consumer.c -o ${scratch_dir}/consumer_c ${flags}
  -Wl,-rpath,${prefix}/${libdir})
run(${scratch_dir}/consumer_c)
if(NOT run_output STREQUAL "kvonce ${version}: out 3\n")
  message(FATAL_ERROR "consumer_c printed: ${run_output}")
endif()

if(EXISTS ${prefix}/${bindir}/kvonce)
  run(${prefix}/${bindir}/kvonce --help)
  run(${prefix}/${bindir}/kvonce devices)
endif()
