// The Tensor under investigation, as the report shows it, with a switch for each thing that it might have done.
//
// Everything else includes tensor.cuh; only faulty.cu includes this.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace faulty {

enum Way : int { Copied = 0, Elided = 1, OutParameter = 2, Shared = 3 };

// Zero is what a right program does, one the fault (where there is one: `way` has four values, none of them wrong).
struct Switches {
    int size_in_elements;    // `size` counts elements, where every use of it counts bytes
    int resize_by_size;      // d2h resizes the host vector to `size`, not to size / sizeof(float)
    int h2d_by_host_size;    // h2d copies h_data.size() * sizeof(float) bytes, not `size`
    int copy_by_host_size;   // so do the uploads in copies
    int constructor_omits;   // the copy constructor allocates before it takes shape and size
    int assignment_omits;    // so does the assignment
    int no_d2h;              // a layer does not d2h its result before it returns it
    int layers_only;         // only layers do: the embedding and the logits leave without
    int prefer_host;         // copies upload the host vector where there is one, and copy the device buffer otherwise
    int zero_host;           // the constructor fills the host vector with zeros
    int unchecked;           // nobody looks at what CUDA calls return
    int way;                 // how a layer gives its result
};

struct Witness {  // what a run leaves behind for us, beside what its program would print
    int failed_calls = 0, first_error = 0, traces = 0, strays = 0;
    long traced_bytes = -1;
};

// Memory that was filled before the run, [begin, end): where the run's buffers are expected. Empty: not known.
struct Range {
    const char *begin, *end;
};
inline std::vector<Range>& filled() {
    static std::vector<Range> ranges;
    return ranges;
}
inline bool stray(const void* buffer, size_t bytes) {
    const char* begin = static_cast<const char*>(buffer);
    for (const Range& r : filled())
        if (r.begin <= begin && begin + bytes <= r.end) return false;
    return !filled().empty();
}

struct Context {
    Switches s{};
    Witness seen;
};
inline Context& context() {
    static Context one;
    return one;
}

struct Reported : std::runtime_error {  // a checked call failed, and the program says so
    using std::runtime_error::runtime_error;
};

inline void call(cudaError_t error) {
    Context& c = context();
    if (error == cudaSuccess) return;
    c.seen.failed_calls++;
    if (!c.seen.first_error) c.seen.first_error = int(error);
    cudaGetLastError();
    if (!c.s.unchecked) throw Reported(cudaGetErrorName(error));
}

class Tensor {
   public:
    std::vector<float> h_data;
    float* d_data = nullptr;
    size_t size = 0;
    int rows = 0, cols = 0;

    Tensor() = default;
    Tensor(int rows, int cols) {
        take_shape(rows, cols);
        if (context().s.zero_host) h_data.assign(size_t(rows) * cols, 0.0f);
        allocate();
    }
    ~Tensor() { cudaFree(d_data); }

    Tensor(const Tensor& other) {
        h_data = other.h_data;
        if (!context().s.constructor_omits) take_shape(other.rows, other.cols);
        allocate();
        transfer(other);
        take_shape(other.rows, other.cols);
    }
    Tensor& operator=(const Tensor& other) {
        if (this == &other) return *this;
        h_data = other.h_data;
        if (!context().s.assignment_omits) take_shape(other.rows, other.cols);
        allocate();
        if (transfer(other)) {  // "[TRACE] Assignment operator: used h_data to initialize GPU (%zu bytes)"
            context().seen.traces++;
            context().seen.traced_bytes = std::max(context().seen.traced_bytes, long(size));
        }
        take_shape(other.rows, other.cols);
        return *this;
    }

    void d2h() {
        const Switches& s = context().s;
        if (!d_data || size == 0) return;
        h_data.resize(s.resize_by_size ? size : size / sizeof(float));
        call(cudaMemcpy(h_data.data(), d_data, size, cudaMemcpyDeviceToHost));
    }
    void h2d() {
        if (h_data.empty() || !d_data) return;
        call(cudaMemcpy(d_data, h_data.data(), context().s.h2d_by_host_size ? h_data.size() * sizeof(float) : size,
                        cudaMemcpyHostToDevice));
    }

   private:
    void take_shape(int r, int c) {
        rows = r;
        cols = c;
        size = size_t(r) * c * (context().s.size_in_elements ? 1 : sizeof(float));
    }
    void allocate() {
        cudaFree(d_data);
        d_data = nullptr;
        if (size) call(cudaMalloc(&d_data, size));
        if (d_data) context().seen.strays += stray(d_data, size);
    }
    bool transfer(const Tensor& other) {
        const Switches& s = context().s;
        if (s.prefer_host && !h_data.empty() && d_data) {
            call(cudaMemcpy(d_data, h_data.data(), s.copy_by_host_size ? h_data.size() * sizeof(float) : size, cudaMemcpyHostToDevice));
            return true;
        }
        if (other.d_data && d_data) call(cudaMemcpy(d_data, other.d_data, size, cudaMemcpyDeviceToDevice));
        return false;
    }
};

}  // namespace faulty
