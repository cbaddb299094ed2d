// How a kernel is launched: by nvcc as CUDA does, by g++ over kernels/cuda_host.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, ...) kernel<<<(grid), (block), 0, tinyllm::current()>>>(__VA_ARGS__)
#define LAUNCH_BARRIER(kernel, grid, block, ...) LAUNCH(kernel, grid, block, __VA_ARGS__)
#endif

namespace tinyllm {

// The stream that launches go to: the default one but within SecondStream::run and Recorded::run.
inline cudaStream_t& current() {
    thread_local cudaStream_t stream = nullptr;
    return stream;
}

// Launches go to `stream` as long as this lives.
class Within {
   public:
    explicit Within(cudaStream_t stream) : before_(current()) { current() = stream; }
    ~Within() { current() = before_; }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    cudaStream_t before_;
};

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
