# SPDX-License-Identifier: Apache-2.0
# cmake --install: libraries, headers, the program, and the package file that find_package(Espalier) reads.
# Core libraries (those that need no LibTorch) and the others stand in separate export sets, so that a project
# which uses the core alone needs no LibTorch.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# espalier_install_library(TARGET NAME [TORCH]): installs a library as Espalier::NAME. Not in a wheel, nor with libraries that
# were fetched: other projects could not link these. The operators are installed all the same, for Python.
function(espalier_install_library target name)
  if(ESPALIER_WHEEL)
    return()
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL SHARED_LIBRARY)
    espalier_install_rpath(${target} ${CMAKE_INSTALL_LIBDIR})
  endif()
  if(ESPALIER_FETCHED)
    if(type STREQUAL SHARED_LIBRARY)
      install(TARGETS ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    endif()
    return()
  endif()
  set(export_set EspalierCoreTargets)
  if("TORCH" IN_LIST ARGN)
    set(export_set EspalierTorchTargets)
  endif()
  add_library(Espalier::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ${target} EXPORT ${export_set}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# Where an installed file of `folder` finds libraries: our own relative to itself, so that the prefix may move;
# LibTorch's where it was found at configure time, or in ESPALIER_TORCH_RPATH.
function(espalier_install_rpath target folder)
  file(RELATIVE_PATH to_libraries /prefix/${folder} /prefix/${CMAKE_INSTALL_LIBDIR})
  if(to_libraries)
    set(own "$ORIGIN/${to_libraries}")
  else()
    set(own "$ORIGIN")
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${own};${ESPALIER_TORCH_RPATH}")
endfunction()

# Headers lie below include/ as they do below src/.
function(espalier_install_headers)
  foreach(module IN LISTS ARGN)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/espalier/${module}/
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/espalier/${module} FILES_MATCHING PATTERN "*.h")
  endforeach()
endfunction()

function(espalier_install_package)
  if(ESPALIER_WHEEL OR ESPALIER_FETCHED)
    return()
  endif()
  set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/Espalier)
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/EspalierConfig.cmake.in
                                ${PROJECT_BINARY_DIR}/EspalierConfig.cmake INSTALL_DESTINATION ${folder})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/EspalierConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/EspalierConfig.cmake ${PROJECT_BINARY_DIR}/EspalierConfigVersion.cmake
                cmake/FindXxhash.cmake cmake/FindZstd.cmake
          DESTINATION ${folder})
  install(EXPORT EspalierCoreTargets NAMESPACE Espalier:: DESTINATION ${folder})
  if(ESPALIER_TORCH)
    install(FILES cmake/FindLibTorch.cmake DESTINATION ${folder})
    install(EXPORT EspalierTorchTargets NAMESPACE Espalier:: DESTINATION ${folder})
  endif()
endfunction()
