// vllm-sm75: defines the INT8 GEMM of one epilogue for Turing.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "cutlass/cutlass.h"

#include "libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c2x.cuh"
#include "libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c2x_sm75_dispatch.cuh"
#include "libtorch_stable/cutlass_extensions/epilogue/scaled_mm_epilogues_c2x.hpp"

#include "sm75/scaled_mm_sm75.h"

#define SM75_SCALED_MM(EPILOGUE)                                                         \
  template <>                                                                            \
  void vllm_sm75::scaled_mm<vllm_sm75::EPILOGUE>(Tensor & out, Tensor const& a,          \
                                                 Tensor const& b, Scales const& scales) { \
    with_operands<EPILOGUE>(scales, [&](auto const&... operands) {                       \
      vllm::cutlass_gemm_sm75_dispatch<int8_t, cutlass::half_t, vllm::c2x::EPILOGUE>(    \
          out, a, b, operands...);                                                       \
    });                                                                                  \
  }
