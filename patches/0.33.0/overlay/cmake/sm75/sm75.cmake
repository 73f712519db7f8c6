# vllm-sm75: build for Turing alone.
#
# vLLM's CMakeLists.txt calls the three functions of this file. They change
# nothing when another architecture is asked for as well.

set(SM75_DIR "${CMAKE_CURRENT_LIST_DIR}")

# True when CUDA_ARCHS has 7.5 and nothing else.
function(sm75_only out)
  set(${out} FALSE PARENT_SCOPE)
  if(NOT VLLM_GPU_LANG STREQUAL "CUDA" OR NOT CUDA_ARCHS)
    return()
  endif()
  foreach(arch IN LISTS CUDA_ARCHS)
    string(REGEX REPLACE "[^0-9.].*$" "" number "${arch}")
    if(NOT number VERSION_EQUAL 7.5)
      return()
    endif()
  endforeach()
  set(${out} TRUE PARENT_SCOPE)
endfunction()

# Replace upstream's one INT8 GEMM source, which instantiates its sm80 and sm89
# variants whatever the arch list says, by sources that hold the sm75 variants
# only, cut so that they compile side by side.
function(sm75_scaled_mm_sources var)
  sm75_only(only)
  if(only)
    set(${var} "csrc/sm75/scaled_mm_sm75.cpp" "csrc/sm75/scaled_mm_azp.cu"
               "csrc/sm75/scaled_mm_plain.cu" PARENT_SCOPE)
  endif()
endfunction()

# The name of `source` inside the tree, whatever directory it is built in.
function(_sm75_name source out)
  foreach(base IN ITEMS "${CMAKE_CURRENT_BINARY_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
    string(FIND "${source}" "${base}/" at)
    if(at EQUAL 0)
      string(LENGTH "${base}/" length)
      string(SUBSTRING "${source}" ${length} -1 source)
    endif()
  endforeach()
  set(${out} "${source}" PARENT_SCOPE)
endfunction()

# Last step of the configuration. For a Turing-only build it orders the sources
# by how long they take (ninja starts jobs in this order), makes the objects
# independent of the run and of the directory, and tells the caller that the
# external projects, none of which has a kernel for sm_75, are to be left out.
function(sm75_finish out)
  sm75_only(only)
  set(${out} ${only} PARENT_SCOPE)
  if(NOT only)
    return()
  endif()
  file(STRINGS "${SM75_DIR}/slowest.txt" slowest REGEX "^[^#]")
  list(TRANSFORM slowest REPLACE "^[0-9]+ " "")
  foreach(target IN ITEMS _C_stable_libtorch _moe_C_stable_libtorch
                          cumem_allocator spinloop fs_io_C)
    if(NOT TARGET ${target})
      message(FATAL_ERROR "vllm-sm75: extension ${target} is not declared; "
                          "this vLLM release needs a look before it is built")
    endif()
    get_target_property(sources ${target} SOURCES)
    set(first "")
    foreach(pattern IN LISTS slowest)
      foreach(source IN LISTS sources)
        _sm75_name("${source}" name)
        if(name STREQUAL pattern)
          list(APPEND first "${source}")
        endif()
      endforeach()
    endforeach()
    list(REMOVE_ITEM sources ${first})
    set_property(TARGET ${target} PROPERTY SOURCES ${first} ${sources})
    foreach(source IN LISTS first sources)
      _sm75_name("${source}" name)
      if(name MATCHES "\\.(cu|cpp|cc)$")
        set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS
                     "-frandom-seed=${target}/${name}")
      endif()
    endforeach()
  endforeach()
  # These use nothing of torch. Linked with it all the same, they could not be
  # loaded before it, nor on a machine without it.
  foreach(target IN ITEMS cumem_allocator spinloop fs_io_C)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    list(FILTER libraries INCLUDE REGEX "^(Python::.*|CUDA::cuda_driver)$")
    set_property(TARGET ${target} PROPERTY LINK_LIBRARIES ${libraries})
  endforeach()
  target_include_directories(cumem_allocator PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  # Say what is needed, whatever the compiler's default is: the libraries that
  # are linked here may be stubs without symbols.
  foreach(target IN ITEMS _C_stable_libtorch _moe_C_stable_libtorch cumem_allocator)
    target_link_options(${target} PRIVATE "LINKER:--no-as-needed")
  endforeach()
  message(STATUS "vllm-sm75: Turing only; external projects are left out")
endfunction()
