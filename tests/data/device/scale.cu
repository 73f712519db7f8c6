extern "C" __global__ void scale(float *x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= a;
}
#ifndef DEVICE_ONLY
void scale_on(float *x) { scale<<<1, 32>>>(x, 2.0f, 32); }
#endif
