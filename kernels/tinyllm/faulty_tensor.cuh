// The Tensor under investigation, after the lines that the report shows, with a switch for each way in which it may go wrong.
//
// Everything else includes tensor.cuh; only faulty.cu includes this.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace faulty {

enum Way : int { Copied = 0, Elided = 1, OutParameter = 2, Shared = 3 };
enum FreshMemory : int { NaNs = 0, Zeros = 1, Numbers = 2, AsLeft = 3 };  // what memory holds before anything is written to it
enum Outside : int {  // faults that are none of the switches
    Nothing, HalfDownload, DebugUpload, HeadsNotWritten, CopyReversed, LastNotAssigned, WrongOperand, CublasWritesNothing,
    ShiftedUpload, NoFinalNorm
};

// Zero is what a correct program does, one the fault. The last four have more than two values.
struct Switches {
    int size_in_elements;          // `size` counts elements, where every use of it counts bytes
    int resize_by_size;            // d2h resizes the host vector to `size`, not to size / sizeof(float)
    int h2d_by_host_size;          // h2d copies h_data.size() * sizeof(float) bytes, not `size`
    int constructor_by_host_size;  // so does the upload in the copy constructor
    int assignment_by_host_size;   // so does the upload in the assignment
    int constructor_omits_shape;   // the copy constructor allocates before it takes shape and size
    int assignment_omits_shape;    // so does the assignment
    int shallow_constructor;       // the copy constructor takes the other's device buffer instead of allocating one
    int shallow_assignment;        // so does the assignment
    int no_layer_d2h;              // a layer does not download its result before it returns it
    int no_other_d2h;              // the embedding and the logits are not downloaded before they are returned
    int prefer_host;               // copies upload the host vector where there is one, and copy the device buffer otherwise
    int zero_host;                 // the constructor fills the host vector with zeros
    int unchecked;                 // what CUDA calls return is not looked at
    int way, outside, engine, fresh;
};

struct Witness {  // what a run leaves behind for us, beside what its program would print
    int failed_calls = 0, failed_uploads = 0, failed_h2d = 0, first_error = 0, traces = 0;
    long traced_bytes = -1;
};

constexpr float PAIR[2] = {6.16847e-33f, 1.60859e-32f};  // what the report printed of x

struct Context {
    Switches s{};
    Witness seen;
    size_t x_bytes = 0;        // a buffer of this size holds PAIR where fresh memory is `Numbers`, every other one zeros
    void* pair = nullptr;      // such a buffer, to copy from
    std::set<void*> held;      // device buffers that were given out and not given back
    bool to_report = false;    // a call failed where nothing can be thrown
};
inline Context& context() {
    static Context one;
    return one;
}

struct Reported : std::runtime_error {  // a checked call failed, and the program says so
    using std::runtime_error::runtime_error;
};

inline bool call(cudaError_t error) {
    Context& c = context();
    if (error != cudaSuccess) {
        c.seen.failed_calls++;
        if (!c.seen.first_error) c.seen.first_error = int(error);
        cudaGetLastError();
    }
    if ((error != cudaSuccess || c.to_report) && !c.s.unchecked) throw Reported(cudaGetErrorName(error));
    return error == cudaSuccess;
}

// Fresh memory holds what `fresh` says. `AsLeft`: what is there, be it the program's own from before.
inline void fill(void* buffer, size_t bytes) {
    const Context& c = context();
    if (c.s.fresh == Numbers && bytes == (c.s.size_in_elements ? c.x_bytes / sizeof(float) : c.x_bytes))
        cudaMemcpy(buffer, c.pair, bytes, cudaMemcpyDeviceToDevice);
    else if (c.s.fresh != AsLeft) cudaMemset(buffer, c.s.fresh == NaNs ? 0xFF : 0, bytes);
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
    ~Tensor() { release(); }

    Tensor(const Tensor& other) {
        const Switches& s = context().s;
        h_data = other.h_data;
        if (s.shallow_constructor || !s.constructor_omits_shape) take_shape(other.rows, other.cols);
        if (s.shallow_constructor) d_data = other.d_data;
        else allocate();
        transfer(other, s.constructor_by_host_size);
        take_shape(other.rows, other.cols);
    }
    Tensor& operator=(const Tensor& other) {
        const Switches& s = context().s;
        if (this == &other) return *this;
        h_data = other.h_data;
        if (s.shallow_assignment || !s.assignment_omits_shape) take_shape(other.rows, other.cols);
        if (s.shallow_assignment) d_data = other.d_data;
        else allocate();
        if (transfer(other, s.assignment_by_host_size)) {  // "[TRACE] Assignment operator: used h_data to initialize GPU (%zu bytes)"
            if (context().seen.traces++ == 0) context().seen.traced_bytes = long(size);  // x is assigned before the logits
        }
        take_shape(other.rows, other.cols);
        return *this;
    }

    // [the lines under trial
    void d2h() {
        const Switches& s = context().s;
        if (!d_data || size == 0) return;
        h_data.resize(s.resize_by_size ? size : size / sizeof(float));
        call(cudaMemcpy(h_data.data(), d_data, s.outside == HalfDownload ? size / 2 : size, cudaMemcpyDeviceToHost));
    }
    void h2d() {
        const Switches& s = context().s;
        if (h_data.empty() || !d_data) return;
        context().seen.failed_h2d += !upload(s.h2d_by_host_size, s.outside == ShiftedUpload);
    }
    // the lines under trial]

   private:
    void take_shape(int r, int c) {
        rows = r;
        cols = c;
        size = size_t(r) * c * (context().s.size_in_elements ? 1 : sizeof(float));
    }
    void allocate() {
        release();
        if (size) call(cudaMalloc(&d_data, size));
        if (!d_data) return;
        fill(d_data, size);
        context().held.insert(d_data);
    }
    void release() {
        Context& c = context();
        if (d_data && cudaFree(d_data) != cudaSuccess) {
            c.seen.failed_calls++;
            if (!c.seen.first_error) c.seen.first_error = int(cudaGetLastError());
            cudaGetLastError();
            c.to_report = true;  // the next checked call says so, and at the latest the end of the run
        }
        c.held.erase(d_data);
        d_data = nullptr;
    }
    bool upload(bool by_host_size, bool shifted = false) {
        const size_t bytes = by_host_size ? h_data.size() * sizeof(float) : size;
        const bool done = shifted ? call(cudaMemcpy(d_data, h_data.data() + 1, bytes - sizeof(float), cudaMemcpyHostToDevice))
                                  : call(cudaMemcpy(d_data, h_data.data(), bytes, cudaMemcpyHostToDevice));
        context().seen.failed_uploads += !done;
        return done;
    }
    bool transfer(const Tensor& other, bool by_host_size) {
        const Switches& s = context().s;
        if (s.prefer_host && !h_data.empty() && d_data) {
            upload(by_host_size);
            return true;
        }
        if (!other.d_data || !d_data || d_data == other.d_data) return false;
        const bool reversed = s.outside == CopyReversed;
        call(cudaMemcpy(reversed ? other.d_data : d_data, reversed ? d_data : other.d_data, size, cudaMemcpyDeviceToDevice));
        return false;
    }
};

}  // namespace faulty
