# Install rules: headers, the shared library, the command, a CMake package and a pkg-config file. Everything is found
# relative to the place it is installed in, so the prefix may be moved.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvonce DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS kvonce EXPORT kvonceTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET kvonce_tool)
  file(RELATIVE_PATH libdir_from_bindir ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(kvonce_tool PROPERTIES INSTALL_RPATH "$ORIGIN/${libdir_from_bindir}")
  install(TARGETS kvonce_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvonce)
install(EXPORT kvonceTargets NAMESPACE kvonce:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvonceConfig.cmake.in
  ${PROJECT_BINARY_DIR}/kvonceConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvonceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvonceConfig.cmake ${PROJECT_BINARY_DIR}/kvonceConfigVersion.cmake
  DESTINATION ${package_dir})

# From the folder that holds kvonce.pc to the prefix, so that pkg-config finds a moved prefix.
file(RELATIVE_PATH prefix_from_pc ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/kvonce.pc.in ${PROJECT_BINARY_DIR}/kvonce.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvonce.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
