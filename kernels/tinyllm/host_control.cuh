// What Python sets and asks of the host runtime; empty where nvcc builds. Included once in each library.
#pragma once
#include <cuda_runtime.h>

#ifdef CUDA_HOST
extern "C" {
void cuda_host_set(int fresh, size_t guard, size_t limit, int recycle, int report) {
    auto& s = cuda_host::state();
    s.fresh = cuda_host::Fresh(fresh);
    s.guard = guard;
    s.limit = limit;
    s.recycle = recycle != 0;
    s.report = report != 0;
}
size_t cuda_host_live() { return cuda_host::state().blocks.size(); }
size_t cuda_host_overruns() { return cuda_host::state().overruns; }
}
#endif
