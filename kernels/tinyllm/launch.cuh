// How a kernel is launched: by nvcc as CUDA does, by g++ over kernels/cuda_host.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, ...) kernel<<<(grid), (block)>>>(__VA_ARGS__)
#define LAUNCH_BARRIER(kernel, grid, block, ...) kernel<<<(grid), (block)>>>(__VA_ARGS__)
#endif

namespace tinyllm {

#ifdef CUDA_HOST
constexpr int LANES = 8;  // threads that share a row: a barrier costs the host a switch of each
#else
constexpr int LANES = 64;
#endif
constexpr int THREADS = 256;

inline dim3 cover(size_t count, int threads = THREADS) {
    return dim3(unsigned((count + size_t(threads) - 1) / size_t(threads)));
}

}  // namespace tinyllm
