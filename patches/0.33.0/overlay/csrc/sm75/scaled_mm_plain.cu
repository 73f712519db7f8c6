// vllm-sm75: the INT8 GEMMs with symmetric quantization.
#include "sm75/scaled_mm_sm75_part.cuh"

SM75_SCALED_MM(ScaledEpilogue)
SM75_SCALED_MM(ScaledEpilogueBias)
