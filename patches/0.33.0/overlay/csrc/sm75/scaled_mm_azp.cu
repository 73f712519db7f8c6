// vllm-sm75: the INT8 GEMMs with asymmetric quantization (activation zero points).
#include "sm75/scaled_mm_sm75_part.cuh"

SM75_SCALED_MM(ScaledEpilogueBiasAzp)
SM75_SCALED_MM(ScaledEpilogueBiasAzpToken)
