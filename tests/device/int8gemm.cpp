// Makes the INT8 GEMMs of the package callable from Python, alone; for int8gemm.py.
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

void cutlass_scaled_mm_sm75(Tensor& out, Tensor const& a, Tensor const& b, Tensor const& a_scales,
                            Tensor const& b_scales, std::optional<Tensor> const& bias);
void cutlass_scaled_mm_azp_sm75(Tensor& out, Tensor const& a, Tensor const& b,
                                Tensor const& a_scales, Tensor const& b_scales,
                                Tensor const& azp_adj, std::optional<Tensor> const& azp,
                                std::optional<Tensor> const& bias);

STABLE_TORCH_LIBRARY(sm75_int8, m) {
  m.def("plain(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor? bias) -> ()");
  m.def("azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sm75_int8, CUDA, m) {
  m.impl("plain", TORCH_BOX(&cutlass_scaled_mm_sm75));
  m.impl("azp", TORCH_BOX(&cutlass_scaled_mm_azp_sm75));
}
