// What Python sets and asks of the host runtime; empty where nvcc builds. Included once in each library.
#pragma once
#include <cuda_runtime.h>

#ifdef CUDA_HOST
extern "C" {
void cuda_host_set(int fresh, size_t guard, size_t limit, int no_kernel_image, int report) {
    auto& s = cuda_host::state();
    s.fresh = cuda_host::Fresh(fresh);
    s.guard = guard;
    s.limit = limit;
    s.no_kernel_image = no_kernel_image != 0;
    s.report = report != 0;
}
void cuda_host_mixed(size_t bytes) { cuda_host::state().mixed = bytes; }
size_t cuda_host_live() { return cuda_host::state().blocks.size(); }
size_t cuda_host_overruns() { return cuda_host::state().overruns; }
}
#endif
