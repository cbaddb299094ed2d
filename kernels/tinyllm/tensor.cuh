// A tensor that owns memory on both sides: a host vector and a device buffer. Sizes are counted in elements, everywhere.
//
// h2d and d2h copy `count()` elements. The host side is empty until d2h or host() asks for it, the device side until
// something needs it. Copies copy what is there; moves leave an empty tensor. Every allocation and copy is checked, and an
// error names the call, the tensor, its elements and bytes.
#pragma once
#include <cuda_runtime.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tinyllm {

inline void check(cudaError_t error, const std::string& what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // so that the next call starts clean
    throw std::runtime_error(what + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

// Host memory that the device can read and write directly: copies run at the full rate of the bus.
template <class T>
struct PinnedAllocator {
    using value_type = T;
    PinnedAllocator() = default;
    template <class U>
    PinnedAllocator(const PinnedAllocator<U>&) {}
    T* allocate(size_t count) {
        T* pointer = nullptr;
        check(cudaMallocHost(&pointer, count * sizeof(T)), "cudaMallocHost of " + std::to_string(count * sizeof(T)) + " bytes");
        return pointer;
    }
    void deallocate(T* pointer, size_t) { cudaFreeHost(pointer); }
    bool operator==(const PinnedAllocator&) const { return true; }
};

template <class T>
class BasicTensor {
   public:
    using Shape = std::vector<size_t>;
    using Host = std::vector<T, PinnedAllocator<T>>;

    BasicTensor() = default;
    BasicTensor(std::string name, Shape shape) : name_(std::move(name)), shape_(std::move(shape)) { allocate(); }
    ~BasicTensor() { cudaFree(device_); }

    BasicTensor(const BasicTensor& other) : name_(other.name_), shape_(other.shape_), host_(other.host_) {
        if (!other.device_) return;
        allocate();
        copy(device_, other.device_, cudaMemcpyDeviceToDevice, "copy");
    }
    BasicTensor(BasicTensor&& other) noexcept { swap(other); }
    BasicTensor& operator=(BasicTensor other) noexcept {  // by value: copies or moves first, so self-assignment is safe
        swap(other);
        return *this;
    }
    void swap(BasicTensor& other) noexcept {
        std::swap(name_, other.name_);
        std::swap(shape_, other.shape_);
        std::swap(host_, other.host_);
        std::swap(device_, other.device_);
    }

    const std::string& name() const { return name_; }
    const Shape& shape() const { return shape_; }
    size_t count() const {
        return shape_.empty() ? 0 : std::accumulate(shape_.begin(), shape_.end(), size_t(1), std::multiplies<>());
    }
    size_t bytes() const { return count() * sizeof(T); }
    T* data() { return device_; }
    const T* data() const { return device_; }
    Host& host() {
        host_.resize(count());
        return host_;
    }
    const Host& host() const { return host_; }

    // Host to device. The host side must hold count() elements, and keep them until the copy is done if nobody waits.
    void h2d(bool wait = true) {
        if (host_.size() != count())
            throw std::logic_error("h2d of " + describe() + ": the host holds " + std::to_string(host_.size()) + " elements");
        allocate();
        if (wait)
            copy(device_, host_.data(), cudaMemcpyHostToDevice, "h2d");
        else if (count())
            check(cudaMemcpyAsync(device_, host_.data(), bytes(), cudaMemcpyHostToDevice), "h2d of " + describe());
    }
    // Device to host.
    void d2h() {
        if (count() && !device_) throw std::logic_error("d2h of " + describe() + ": there is nothing on the device");
        host_.resize(count());
        copy(host_.data(), device_, cudaMemcpyDeviceToHost, "d2h");
    }
    void zero(cudaStream_t stream = nullptr) {
        allocate();
        check(cudaMemsetAsync(device_, 0, bytes(), stream), "zero of " + describe());
    }

   private:
    void allocate() {
        if (!device_ && count()) check(cudaMalloc(&device_, bytes()), "cudaMalloc of " + describe());
    }
    void copy(T* to, const T* from, cudaMemcpyKind kind, const char* what) {
        if (count()) check(cudaMemcpy(to, from, bytes(), kind), std::string(what) + " of " + describe());
    }
    std::string describe() const {
        std::string sizes;
        for (size_t size : shape_) sizes += (sizes.empty() ? "" : " x ") + std::to_string(size);
        return (name_.empty() ? "a tensor" : name_) + " [" + sizes + "], " + std::to_string(count()) + " elements, " +
               std::to_string(bytes()) + " bytes";
    }

    std::string name_;
    Shape shape_;
    Host host_;
    T* device_ = nullptr;
};

using Tensor = BasicTensor<float>;

}  // namespace tinyllm
