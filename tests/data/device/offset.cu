extern "C" __global__ void offset(float *x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += a;
}
void offset_on(float *x) { offset<<<1, 32>>>(x, 2.0f, 32); }
