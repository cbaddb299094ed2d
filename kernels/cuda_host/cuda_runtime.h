// A small CUDA runtime on the host, so that g++ builds the same .cuh files that nvcc does. README.md says what it is not.
#pragma once
#define CUDA_HOST 1

#include <ucontext.h>
#include <setjmp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__  // guard zones are for nobody then
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size)
#define ASAN_UNPOISON_MEMORY_REGION(at, size)
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static thread_local

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUDA_HOST_INDEX inline thread_local dim3
CUDA_HOST_INDEX threadIdx;
CUDA_HOST_INDEX blockIdx;
CUDA_HOST_INDEX blockDim;
CUDA_HOST_INDEX gridDim;

enum cudaError_t {  // the numbers are CUDA's
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
using cudaStream_t = void*;
using cudaEvent_t = void*;
constexpr unsigned cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1;

namespace cuda_host {

enum class Fresh : int { Poison = 0, Zero = 1 };

// What guard zones are filled with, two hex digits: what a buffer's neighbours hold, for what reads or writes beyond it.
inline unsigned char guard_byte() {
    static const char* given = std::getenv("CUDA_HOST_GUARD");
    static const auto byte = static_cast<unsigned char>(given ? std::strtoul(given, nullptr, 16) : 0xA5);
    return byte;
}

struct Block {
    size_t size, guard;
    char* raw;
};

struct State {
    std::mutex mutex;
    std::map<uintptr_t, Block> blocks;             // by the address that cudaMalloc gave
    cudaError_t last = cudaSuccess;
    Fresh fresh = Fresh::Poison;
    bool recycle = false;                          // freed blocks are kept, and given out again as they were left
    std::map<size_t, std::vector<char*>> freed;    // those, by size; the last that was freed comes first
    size_t guard = 256, limit = size_t(4) << 30, used = 0, overruns = 0;
    bool report = true;

    ~State() {
        if (!report || blocks.empty()) return;
        size_t bytes = 0;
        for (auto& [at, block] : blocks) bytes += block.size;
        std::fprintf(stderr, "cuda_host: %zu allocations of %zu bytes were never freed\n", blocks.size(), bytes);
    }
};

inline State shared;  // made when the library is loaded, so that static tensors, made later, free theirs before it ends
inline State& state() { return shared; }

inline cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess) state().last = error;
    return error;
}

// The allocation that holds `pointer`, or none.
inline std::map<uintptr_t, Block>::iterator find(const void* pointer) {
    auto& blocks = state().blocks;
    auto at = blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (at == blocks.begin()) return blocks.end();
    --at;
    const uintptr_t end = at->first + std::max<size_t>(at->second.size, 1);
    return reinterpret_cast<uintptr_t>(pointer) < end ? at : blocks.end();
}

inline bool on_device(const void* pointer) { return find(pointer) != state().blocks.end(); }

inline bool inside(const void* pointer, size_t bytes) {
    auto at = find(pointer);
    return at != state().blocks.end() &&
           reinterpret_cast<uintptr_t>(pointer) + bytes <= at->first + at->second.size;
}

inline bool guards_hold(const Block& block) {
    ASAN_UNPOISON_MEMORY_REGION(block.raw, block.size + 2 * block.guard);
    const auto untouched = [&](const char* from) {
        return std::all_of(from, from + block.guard, [](char c) { return static_cast<unsigned char>(c) == guard_byte(); });
    };
    return untouched(block.raw) && untouched(block.raw + block.guard + block.size);
}

inline cudaError_t allocate(void** pointer, size_t bytes) {
    State& s = state();
    std::lock_guard lock(s.mutex);
    if (!pointer) return fail(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > s.limit || s.used + bytes > s.limit) return fail(cudaErrorMemoryAllocation);
    std::vector<char*>& freed = s.freed[bytes];
    char* raw = nullptr;
    if (freed.empty()) {
        raw = static_cast<char*>(std::aligned_alloc(256, (bytes + 2 * s.guard + 255) / 256 * 256));
        if (!raw) return fail(cudaErrorMemoryAllocation);
        std::memset(raw + s.guard, s.fresh == Fresh::Zero ? 0 : 0xFF, bytes);  // 0xFF in each byte is a NaN
    } else {
        raw = freed.back();
        freed.pop_back();
    }
    std::memset(raw, guard_byte(), s.guard);
    std::memset(raw + s.guard + bytes, guard_byte(), s.guard);
    ASAN_POISON_MEMORY_REGION(raw, s.guard);
    ASAN_POISON_MEMORY_REGION(raw + s.guard + bytes, s.guard);
    s.blocks[reinterpret_cast<uintptr_t>(raw + s.guard)] = {bytes, s.guard, raw};
    s.used += bytes;
    *pointer = raw + s.guard;
    return cudaSuccess;
}

inline cudaError_t release(void* pointer) {
    State& s = state();
    std::lock_guard lock(s.mutex);
    if (!pointer) return cudaSuccess;
    auto at = s.blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (at == s.blocks.end()) return fail(cudaErrorInvalidValue);  // never given out, or freed before
    const Block block = at->second;
    s.overruns += !guards_hold(block);
    s.used -= block.size;
    s.blocks.erase(at);
    if (s.recycle) s.freed[block.size].push_back(block.raw);
    else std::free(block.raw);
    return cudaSuccess;
}

// Freed blocks are not given out again.
inline void forget() {
    for (auto& [size, blocks] : state().freed)
        for (char* raw : blocks) std::free(raw);
    state().freed.clear();
}

inline cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    State& s = state();
    std::lock_guard lock(s.mutex);
    if (bytes == 0) return cudaSuccess;
    if (!to || !from) return fail(cudaErrorInvalidValue);
    const bool to_device = kind == cudaMemcpyDefault ? on_device(to)
                                                     : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDefault
                                 ? on_device(from)
                                 : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (to_device ? !inside(to, bytes) : on_device(to)) return fail(cudaErrorInvalidValue);
    if (from_device ? !inside(from, bytes) : on_device(from)) return fail(cudaErrorInvalidValue);
    std::memmove(to, from, bytes);
    return cudaSuccess;
}

inline cudaError_t set(void* to, int value, size_t bytes) {
    std::lock_guard lock(state().mutex);
    if (bytes && !inside(to, bytes)) return fail(cudaErrorInvalidValue);
    std::memset(to, value, bytes);
    return cudaSuccess;
}

// Threads of a block with barriers: one stack each, switched at __syncthreads. They live on from block to block, since
// making one costs system calls and switching costs none.
struct Fibre {
    ucontext_t context;
    jmp_buf at;
    bool started = false, done = true;
    dim3 thread;
    std::unique_ptr<char[]> stack;
};
constexpr size_t STACK = 64 << 10;

#if defined(__USE_FORTIFY_LEVEL) && __USE_FORTIFY_LEVEL > 0
#error "cuda_host: build with -U_FORTIFY_SOURCE; a fortified longjmp refuses to go to another stack"
#endif
struct Crew {
    std::vector<std::unique_ptr<Fibre>> fibres;
    std::function<void()> body;
    Fibre* current = nullptr;
    jmp_buf home;
};

inline Crew& crew() {
    static thread_local Crew one;
    return one;
}

inline void fibre_main() {
    Crew& mine = crew();
    for (;;) {
        mine.body();
        Fibre* self = mine.current;
        self->done = true;
        if (!_setjmp(self->at)) _longjmp(mine.home, 1);
    }
}

inline void resume(Crew& mine, Fibre& fibre) {
    mine.current = &fibre;
    threadIdx = fibre.thread;
    if (_setjmp(mine.home)) return;
    if (fibre.started) _longjmp(fibre.at, 1);
    fibre.started = true;
    fibre.stack.reset(new char[STACK]);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = STACK;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, fibre_main, 0);
    setcontext(&fibre.context);
}

inline void barrier() {
    Crew& mine = crew();
    if (!mine.current) {
        std::fprintf(stderr, "cuda_host: __syncthreads in a kernel that was not launched with LAUNCH_BARRIER\n");
        std::abort();
    }
    Fibre* self = mine.current;
    if (!_setjmp(self->at)) _longjmp(mine.home, 1);
}

inline bool launchable(dim3 grid, dim3 block) {
    const size_t threads = size_t(block.x) * block.y * block.z;
    if (!threads || threads > 1024 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
        return fail(cudaErrorInvalidConfiguration), false;
    return true;
}

template <class Run>
void each_block(dim3 grid, dim3 block, Run run) {
    const long count = long(grid.x) * grid.y * grid.z;
#pragma omp parallel for schedule(static) if (count * long(block.x) * block.y * block.z > 8192)
    for (long b = 0; b < count; ++b) {
        gridDim = grid;
        blockDim = block;
        blockIdx = dim3(unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y));
        run();
    }
}

template <class Kernel, class... Arguments>
void launch(dim3 grid, dim3 block, Kernel kernel, Arguments... arguments) {
    if (!launchable(grid, block)) return;
    each_block(grid, block, [&] {
        for (unsigned z = 0; z < block.z; ++z)
            for (unsigned y = 0; y < block.y; ++y)
                for (unsigned x = 0; x < block.x; ++x) {
                    threadIdx = dim3(x, y, z);
                    kernel(arguments...);
                }
    });
}

template <class Kernel, class... Arguments>
void launch_barrier(dim3 grid, dim3 block, Kernel kernel, Arguments... arguments) {
    if (!launchable(grid, block)) return;
    each_block(grid, block, [&] {
        Crew& mine = crew();
        const size_t count = size_t(block.x) * block.y * block.z;
        while (mine.fibres.size() < count) mine.fibres.push_back(std::make_unique<Fibre>());
        mine.body = [&] { kernel(arguments...); };
        for (size_t i = 0; i < count; ++i) {
            mine.fibres[i]->done = false;
            mine.fibres[i]->thread =
                dim3(unsigned(i % block.x), unsigned(i / block.x % block.y), unsigned(i / block.x / block.y));
        }
        for (bool waiting = true; waiting;) {
            waiting = false;
            for (size_t i = 0; i < count; ++i)
                if (!mine.fibres[i]->done) {
                    resume(mine, *mine.fibres[i]);
                    waiting |= !mine.fibres[i]->done;
                }
        }
        mine.current = nullptr;
    });
}

}  // namespace cuda_host

#define LAUNCH(kernel, grid, block, ...) cuda_host::launch(grid, block, [](auto... a) { kernel(a...); }, __VA_ARGS__)
#define LAUNCH_BARRIER(kernel, grid, block, ...) \
    cuda_host::launch_barrier(grid, block, [](auto... a) { kernel(a...); }, __VA_ARGS__)

inline void __syncthreads() { cuda_host::barrier(); }

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    return cuda_host::allocate(reinterpret_cast<void**>(pointer), bytes);
}
inline cudaError_t cudaFree(void* pointer) { return cuda_host::release(pointer); }
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
    *pointer = static_cast<T*>(std::malloc(bytes));
    return *pointer || !bytes ? cudaSuccess : cuda_host::fail(cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeHost(void* pointer) { return std::free(pointer), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cuda_host::copy(to, from, bytes, kind);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = nullptr) {
    return cuda_host::copy(to, from, bytes, kind);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = stream, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cuda_host::set(to, value, bytes); }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
    return cuda_host::set(to, value, bytes);
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cuda_host::state().last; }
inline cudaError_t cudaGetLastError() {
    const cudaError_t last = cuda_host::state().last;
    cuda_host::state().last = cudaSuccess;
    return last;
}
inline const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    }
    return "unknown";
}
inline const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
