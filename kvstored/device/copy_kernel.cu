/* Copies many small pieces between host and device, for the device worker: `copy_kernel.py` compiles and runs it.
 *
 * Copy n pieces of memory: to[i], from[i] and sizes[i] bytes each. A block of threads takes a piece at a time, each thread
 * 16 bytes at a time where both ends lie at multiples of 16. Few blocks are enough to keep a PCIe link busy, and leave
 * the rest of the device to its engine. No thread waits for another, so tests run them one after the other on the CPU,
 * where DEVICE_POINTER says how an address is followed there.
 */
#ifndef DEVICE_POINTER
#define DEVICE_POINTER(type, at) ((type*)(at))
#endif
typedef unsigned long long u64;
struct alignas(16) Wide {
  u64 low, high;
};

extern "C" __global__ void __launch_bounds__(256)
    kvstored_copy(const u64* to, const u64* from, const u64* sizes, u64 count) {
  const u64 *targets = DEVICE_POINTER(const u64, to), *sources = DEVICE_POINTER(const u64, from);
  const u64* lengths = DEVICE_POINTER(const u64, sizes);
  for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
    const u64 length = lengths[i];
    u64 wide = (targets[i] | sources[i]) & 15 ? 0 : length / 16;
    Wide* target = DEVICE_POINTER(Wide, targets[i]);
    const Wide* source = DEVICE_POINTER(const Wide, sources[i]);
    u64 at = threadIdx.x;
    for (; at + 3 * (u64)blockDim.x < wide; at += 4 * (u64)blockDim.x) { /* four reads are under way at once */
      const Wide a = source[at], b = source[at + blockDim.x], c = source[at + 2 * (u64)blockDim.x],
                 d = source[at + 3 * (u64)blockDim.x];
      target[at] = a;
      target[at + blockDim.x] = b;
      target[at + 2 * (u64)blockDim.x] = c;
      target[at + 3 * (u64)blockDim.x] = d;
    }
    for (; at < wide; at += blockDim.x) target[at] = source[at];
    char* rest = DEVICE_POINTER(char, targets[i]);
    const char* from_rest = DEVICE_POINTER(const char, sources[i]);
    for (u64 byte = wide * 16 + threadIdx.x; byte < length; byte += blockDim.x) rest[byte] = from_rest[byte];
  }
}
