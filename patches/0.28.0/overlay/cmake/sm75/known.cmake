# vllm-sm75: what vLLM 0.28.0 declares, as far as a Turing-only build knows it.
#
# sm75_finish orders and links the five extensions it knows and leaves all
# external projects out. An extension or project that it has never heard of
# would go unordered, unlinked or unbuilt without a word, so it is refused here.

set(SM75_KNOWN_EXTENSIONS _C_stable_libtorch _moe_C_stable_libtorch
                          cumem_allocator spinloop fs_io_C)
set(SM75_KNOWN_PROJECTS deepgemm flashkda flashmla fmha_sm100 qutlass tml_fa4
                        triton_kernels vllm_flash_attn)

# End the configuration of a Turing-only build when there is a library target or
# an external project that is not named above. Changes nothing in other builds.
function(sm75_refuse_unknown)
  sm75_only(only)
  if(NOT only)
    return()
  endif()
  get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    # An interface library compiles nothing; torch's own CMake files declare one.
    if(type MATCHES "(STATIC|SHARED|MODULE|OBJECT)_LIBRARY$"
       AND NOT target IN_LIST SM75_KNOWN_EXTENSIONS)
      message(FATAL_ERROR "vllm-sm75: extension ${target} is unknown; "
                          "this vLLM release needs a look before it is built")
    endif()
  endforeach()
  file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/CMakeLists.txt" lines
       REGEX "^[ \t]*include\\(.*external_projects/")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^.*external_projects/([^/)]*)\\.cmake.*$" "\\1" project "${line}")
    if(NOT project IN_LIST SM75_KNOWN_PROJECTS)
      message(FATAL_ERROR "vllm-sm75: external project ${project} is unknown; "
                          "this vLLM release needs a look before it is built")
    endif()
  endforeach()
endfunction()
