// vllm-sm75: the entry points that vLLM's INT8 GEMM dispatcher calls. Those of
// newer architectures only say so: this build has no code for them.
#include <optional>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "sm75/scaled_mm_sm75.h"

using vllm_sm75::MaybeTensor;
using vllm_sm75::Scales;
using vllm_sm75::Tensor;
using torch::headeronly::ScalarType;

namespace vllm_sm75 {
namespace {

void require(Tensor const& tensor, ScalarType type, char const* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, "scaled_mm on sm_75: wrong dtype of ", name);
}

void check(Tensor const& a, Tensor const& b, Tensor const& a_scales, Tensor const& b_scales) {
  require(a, ScalarType::Char, "a");
  require(b, ScalarType::Char, "b");
  require(a_scales, ScalarType::Float, "a_scales");
  require(b_scales, ScalarType::Float, "b_scales");
}

template <typename Epilogue>
void run(Tensor& out, Tensor const& a, Tensor const& b, Scales const& scales) {
  // vLLM serves no bfloat16 model below compute capability 8.0, so that half of
  // upstream's kernels is not built.
  require(out, ScalarType::Half, "out");
  scaled_mm<Epilogue>(out, a, b, scales);
}

[[noreturn]] void not_built(char const* arch) {
  STD_TORCH_CHECK(false, "this vLLM is built for sm_75 alone; it has no INT8 GEMM for ", arch);
}

}  // namespace
}  // namespace vllm_sm75

void cutlass_scaled_mm_sm75(Tensor& out, Tensor const& a, Tensor const& b, Tensor const& a_scales,
                            Tensor const& b_scales, MaybeTensor const& bias) {
  vllm_sm75::check(a, b, a_scales, b_scales);
  if (!bias) {
    return vllm_sm75::run<vllm_sm75::ScaledEpilogue>(out, a, b, Scales{a_scales, b_scales});
  }
  vllm_sm75::require(*bias, out.scalar_type(), "bias");
  vllm_sm75::run<vllm_sm75::ScaledEpilogueBias>(
      out, a, b, Scales{a_scales, b_scales, nullptr, nullptr, &bias});
}

void cutlass_scaled_mm_azp_sm75(Tensor& out, Tensor const& a, Tensor const& b,
                                Tensor const& a_scales, Tensor const& b_scales,
                                Tensor const& azp_adj, MaybeTensor const& azp,
                                MaybeTensor const& bias) {
  vllm_sm75::check(a, b, a_scales, b_scales);
  Scales const scales{a_scales, b_scales, &azp_adj, azp ? &*azp : nullptr, &bias};
  if (azp) {
    return vllm_sm75::run<vllm_sm75::ScaledEpilogueBiasAzpToken>(out, a, b, scales);
  }
  vllm_sm75::run<vllm_sm75::ScaledEpilogueBiasAzp>(out, a, b, scales);
}

#define SM75_NOT_BUILT(ARCH)                                                                \
  void cutlass_scaled_mm_##ARCH(Tensor&, Tensor const&, Tensor const&, Tensor const&,       \
                                Tensor const&, MaybeTensor const&) {                        \
    vllm_sm75::not_built(#ARCH);                                                            \
  }                                                                                         \
  void cutlass_scaled_mm_azp_##ARCH(Tensor&, Tensor const&, Tensor const&, Tensor const&,   \
                                    Tensor const&, Tensor const&, MaybeTensor const&,       \
                                    MaybeTensor const&) {                                   \
    vllm_sm75::not_built(#ARCH);                                                            \
  }
SM75_NOT_BUILT(sm80)
SM75_NOT_BUILT(sm89)
