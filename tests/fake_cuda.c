/* A CUDA driver that launches nothing: it notes launches, so that they can be looked at without a GPU. */
#include "cuda.h"
#include <string.h>

int params = 0;                 /* of every launch: so many are noted */
unsigned long long maps = 0;    /* bits: which of them are tensor maps */
int launches = 0, grid[3], attributes;
unsigned long long seen[256], stream, function;

CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 232448; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = 1024; return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "an error"; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *p) { static long made = 0; *m = (CUmodule)++made; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)m; return 0; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; return 0; }

/* A tensor map here: the address, then everything else, mixed into one number. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long mixed = type * 31 + swizzle * 7 + promotion * 5 + fill;
  for (cuuint32_t i = 0; i < rank; i++)
    mixed = mixed * 1000003 + sizes[i] * 131 + box[i] * 17 + (i + 1 < rank ? strides[i] : 0);
  memset(map, 0, sizeof *map);
  memcpy(map, (unsigned long long[]){(unsigned long long)address, mixed}, 16);
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
  launches++;
  grid[0] = c->gridDimX, grid[1] = c->gridDimY, grid[2] = c->gridDimZ;
  stream = (unsigned long long)c->hStream, function = (unsigned long long)f, attributes = c->numAttrs;
  for (int i = 0; i < params; i++) memcpy(seen + 2 * i, parameters[i], 8);
  for (int i = 0; i < params; i++) seen[2 * i + 1] = maps >> i & 1 ? ((unsigned long long *)parameters[i])[1] : 0;
  return 0;
}
