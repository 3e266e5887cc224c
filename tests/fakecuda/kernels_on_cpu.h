/* CUDA's words for a compiler of the CPU, and a launch that runs all threads of a kernel one after the other. */
#pragma once
#define __global__
#define __launch_bounds__(threads)
struct Index {
  unsigned x, y, z;
};
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
#ifdef ON_THE_FAKE
extern "C" void* fakecuda_alias(unsigned long long at);
#define DEVICE_POINTER(type, at) ((type*)fakecuda_alias((unsigned long long)(at)))
#endif
extern "C" void kvstored_copy(const unsigned long long*, const unsigned long long*, const unsigned long long*,
                              unsigned long long);
extern "C" __attribute__((visibility("default"))) void kvstored_copy_on_cpu(unsigned blocks, unsigned threads,
                                                                           unsigned long long* a) {
  typedef const unsigned long long* p;
  gridDim.x = blocks, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kvstored_copy((p)a[0], (p)a[1], (p)a[2], a[3]);
}
