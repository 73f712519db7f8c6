/* SHIM of the device tests, for LD_PRELOAD: what vLLM's own extensions are told about the GPU.

   Their host code picks kernels by capability and by shared memory a block can have, and of the
   kernels for other capabilities this build has none. So callers inside vLLM's extensions get a
   T4G's figures; everybody else gets the real ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

/* cudaDeviceAttr of CUDA's driver_types.h. */
enum { MAJOR = 75, MINOR = 76, SHARED_PER_SM = 81, SHARED_OPTIN = 97 };

static int ours(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "/vllm/") &&
         strstr(info.dli_fname, "_stable_libtorch");
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  static int (*real)(int *, int, int);
  if (!real) real = (int (*)(int *, int, int))dlsym(RTLD_NEXT, "cudaDeviceGetAttribute");
  if (!real) {
    /* torch loads the runtime later than this and not for everybody to see. */
    void *runtime = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
    if (runtime) real = (int (*)(int *, int, int))dlsym(runtime, "cudaDeviceGetAttribute");
  }
  if (!real) return 3; /* cudaErrorInitializationError */
  int status = real(value, attribute, device);
  if (status == 0 && ours(__builtin_return_address(0))) {
    if (attribute == MAJOR) *value = 7;
    if (attribute == MINOR) *value = 5;
    if (attribute == SHARED_PER_SM || attribute == SHARED_OPTIN) *value = 65536;
  }
  return status;
}
