/* NVIDIA's driver library as far as vllm.sm75.kernels calls it. It remembers what it is told to
   launch; nothing runs. An image is text: an entry and the sizes of its parameters. */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, MOST = 64 };

struct module { char entry[64]; int count, sizes[MOST], device, allowed; };
struct launch {
    unsigned grid[3], block[3], shared;
    int device, size;
    uint64_t stream;
    char entry[64];
    unsigned char bytes[512];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct launch *launches;
static int count, room, retained, loads, fail_code, fail_times, remember = 1;
static int contexts[2];
/* A thread has no context until it is given one, as with the real library. */
static __thread int *current;

int standin_count(void) { return count; }
int standin_loads(void) { return loads; }
int standin_retained(void) { return retained; }
void standin_get(int n, struct launch *to) { *to = launches[n]; }
void standin_forget(int keep) { count = loads = retained = 0; current = 0; remember = keep; }
void standin_fail(int code, int times) { fail_code = code; fail_times = times; }

int cuGetErrorName(int code, const char **text) {
    *text = code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
          : code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuDeviceGet(int *d, int n) { *d = n + 40; return n < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **c, int d) {
    if (d < 40) return INVALID_VALUE;
    __sync_fetch_and_add(&retained, 1);
    *c = &contexts[d - 40];
    return 0;
}
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuModuleLoadData(void **m, const void *image) {
    if (!current) return INVALID_CONTEXT;
    struct module *made = calloc(1, sizeof *made);
    const char *text = image;
    int used;
    if (sscanf(text, "entry %63s%n", made->entry, &used) == 1)
        for (text += used; sscanf(text, "%d%n", &made->sizes[made->count], &used) == 1; text += used)
            made->count++;
    else if (remember)
        return free(made), INVALID_IMAGE;
    made->device = current - contexts;
    __sync_fetch_and_add(&loads, 1);
    *m = made;
    return 0;
}
int cuModuleGetFunction(void **f, void *m, const char *name) {
    *f = m;
    return remember && strcmp(((struct module *)m)->entry, name) ? NOT_FOUND : 0;
}
int cuFuncGetParamInfo(void *f, size_t n, size_t *offset, size_t *size) {
    struct module *from = f;
    size_t at = 0;
    if (!remember || n >= (size_t)from->count) return INVALID_VALUE;
    for (size_t k = 0; k <= n; k++) {
        size_t own = (size_t)from->sizes[k];
        at = (at + own - 1) / own * own;
        *offset = at, *size = own;
        at += own;
    }
    return 0;
}
int cuFuncSetAttribute(void *f, int what, int value) {
    ((struct module *)f)->allowed = value;
    return what != 8 || value > 65536 ? INVALID_VALUE : 0;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **p, void **extra) {
    struct module *from = f;
    if (!remember) return 0;
    if (!current) return INVALID_CONTEXT;
    if (fail_times) { fail_times--; return fail_code; }
    if (extra || shared > 65536 || (shared > 49152 && (unsigned)from->allowed < shared)) return INVALID_VALUE;
    /* Time for another thread to write into this one's parameters, if they share them. */
    for (int n = 0; n < 4; n++) sched_yield();
    struct launch made = {{x, y, z}, {tx, ty, tz}, shared, current - contexts, 0, (uintptr_t)stream, "", ""};
    strcpy(made.entry, from->entry);
    for (int n = 0; n < from->count; n++) {
        memcpy(made.bytes + made.size, p[n], from->sizes[n]);
        made.size += from->sizes[n];
    }
    pthread_mutex_lock(&lock);
    if (count == room) launches = realloc(launches, (room = room * 2 + 64) * sizeof *launches);
    launches[count++] = made;
    pthread_mutex_unlock(&lock);
    return 0;
}
