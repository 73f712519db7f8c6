/* NVIDIA's driver library as far as bench --memory calls it, on the host's memory: do the arguments
   arrive as the driver API declares them? The kernels are what memory.ptx says, in C. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t ptr;
static int live, context, events;

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int n) { *d = n + 40; return n < 2 ? 0 : 101; }
int cuGetErrorName(int code, const char **text) {
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; context++; return d < 40; }
int cuDevicePrimaryCtxRelease_v2(int d) { return d < 40 || live || events || --context; }
int cuCtxSetCurrent(void *c) { return c != &context; }
int cuDeviceGetName(char *name, int size, int d) { strncpy(name, d == 41 ? "second" : "first", size); return 0; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 3ull << 30; *t = 15ull << 30; return 0; }
int cuDeviceGetAttribute(int *v, int what, int d) {
    switch (what) {
    case 16: *v = 2; break;
    case 36: *v = 5001000; break;
    case 37: *v = 256; break;
    case 38: *v = 4096; break;
    case 39: *v = 1024; break;
    case 75: *v = 7; break;
    case 76: *v = OLD ? 0 : 5; break;
    default: return 1;
    }
    return d < 40;
}
int cuModuleLoadData(void **m, const void *image) { *m = &live; return !strstr(image, ".target sm_75"); }
int cuModuleGetFunction(void **f, void *m, const char *name) {
    *f = (void *)(intptr_t)(!strcmp(name, "fill") ? 1 : !strcmp(name, "read") ? 2 : !strcmp(name, "copy") ? 3 : 0);
    return m != &live || !*f;
}
int cuMemAlloc_v2(ptr *p, size_t n) {
    if (n > (1ull << 31)) return 2;
    /* High addresses: what is cut to 32 bits fails. */
    *p = (ptr)aligned_alloc(256, (n + 255) / 256 * 256);
    live++;
    return *p ? 0 : 2;
}
int cuMemFree_v2(ptr p) { free((void *)p); live--; return 0; }
int cuMemsetD32_v2(ptr p, unsigned v, size_t n) { for (size_t i = 0; i < n; i++) ((uint32_t *)p)[i] = v; return 0; }
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t n, void *s) { memcpy((void *)to, (void *)from, n); return s != 0; }
int cuMemcpyDtoH_v2(void *to, ptr from, size_t n) { memcpy(to, (void *)from, n); return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **p, void **extra) {
    if (x != 8 || tx != 256 || y * z * ty * tz != 1 || shared || stream || extra) return 1;
    uint32_t *first = *(uint32_t **)p[0];
    uint64_t n = *(uint64_t *)p[1];
    if ((intptr_t)f == 1)
        for (uint64_t i = 0; i < n; i++) first[i] = (uint32_t)i * *(uint32_t *)p[2] + *(uint32_t *)p[3];
    else if ((intptr_t)f == 2) {
        uint32_t *sums = *(uint32_t **)p[2];
        for (int t = 0; t < 2048; t++) sums[t] = 0;
        for (uint64_t i = 0; i < 4 * n; i++) sums[i / 4 % 2048] += first[i];
    } else
        memcpy(*(void **)p[2], first, 16 * n);
    return 0;
}
int cuEventCreate(void **e, unsigned flags) { *e = calloc(1, sizeof(struct timespec)); events++; return flags != 0; }
int cuEventRecord(void *e, void *s) { clock_gettime(CLOCK_MONOTONIC, e); return s != 0; }
int cuEventSynchronize(void *e) { return e == 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) {
    struct timespec *s = a, *e = b;
    *ms = (e->tv_sec - s->tv_sec) * 1e3 + (e->tv_nsec - s->tv_nsec) / 1e6;
    return 0;
}
int cuEventDestroy_v2(void *e) { free(e); events--; return 0; }
