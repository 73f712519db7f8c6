// vllm-sm75: the INT8 GEMMs of CUTLASS 2.x for Turing, two epilogues a source.
#pragma once

#include <optional>
#include <type_traits>

#include <torch/csrc/stable/tensor.h>

// torch::stable::Tensor is hidden, so what is made of it is hidden as well.
namespace vllm_sm75 __attribute__((visibility("hidden"))) {

using Tensor = torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// What the epilogues read; which of it a GEMM reads is said by its epilogue.
struct Scales {
  Tensor const& a;
  Tensor const& b;
  Tensor const* azp_adj = nullptr;
  Tensor const* azp = nullptr;
  MaybeTensor const* bias = nullptr;
};

// Names only: CUTLASS's own types stay in the sources that instantiate them.
struct ScaledEpilogue;
struct ScaledEpilogueBias;
struct ScaledEpilogueBiasAzp;
struct ScaledEpilogueBiasAzpToken;

// out = epilogue(a @ b); `out` is fp16 (checked by the caller).
template <typename Epilogue>
void scaled_mm(Tensor& out, Tensor const& a, Tensor const& b, Scales const& scales);

template <>
void scaled_mm<ScaledEpilogue>(Tensor&, Tensor const&, Tensor const&, Scales const&);
template <>
void scaled_mm<ScaledEpilogueBias>(Tensor&, Tensor const&, Tensor const&, Scales const&);
template <>
void scaled_mm<ScaledEpilogueBiasAzp>(Tensor&, Tensor const&, Tensor const&, Scales const&);
template <>
void scaled_mm<ScaledEpilogueBiasAzpToken>(Tensor&, Tensor const&, Tensor const&, Scales const&);

// Call `call` with the operands of `Epilogue`, in its order.
template <typename Epilogue, typename Call>
void with_operands(Scales const& s, Call&& call) {
  if constexpr (std::is_same_v<Epilogue, ScaledEpilogue>) {
    call(s.a, s.b);
  } else if constexpr (std::is_same_v<Epilogue, ScaledEpilogueBias>) {
    call(s.a, s.b, **s.bias);
  } else if constexpr (std::is_same_v<Epilogue, ScaledEpilogueBiasAzp>) {
    call(s.a, s.b, *s.azp_adj, *s.bias);
  } else {
    static_assert(std::is_same_v<Epilogue, ScaledEpilogueBiasAzpToken>);
    call(s.a, s.b, *s.azp_adj, *s.azp, *s.bias);
  }
}

}  // namespace vllm_sm75
