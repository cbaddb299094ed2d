// Matrix products, row-major: by cuBLAS, by a kernel of our own, or on the host, as the report's program fell back to.
#pragma once
#include <cublas_v2.h>

#include "tensor.cuh"
#include "launch.cuh"

namespace tinyllm {

enum class Engine : int { Cublas = 0, Kernel = 1, Host = 2 };

constexpr int TILE = 16;
// C [M, N] = op(A) op(B) + beta C; a product a z of the grid.
__global__ void product(const float* a, const float* b, float* c, int M, int N, int K, int a_row, int a_column, int b_row,
                        int b_column, float beta, size_t a_next, size_t b_next, size_t c_next) {
    __shared__ float left[TILE][TILE], right[TILE][TILE + 1];
    const int i = blockIdx.y * TILE + threadIdx.y, j = blockIdx.x * TILE + threadIdx.x;
    a += blockIdx.z * a_next;
    b += blockIdx.z * b_next;
    c += blockIdx.z * c_next;
    float total = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = i < M && ka < K ? a[size_t(i) * a_row + size_t(ka) * a_column] : 0.0f;
        right[threadIdx.y][threadIdx.x] = j < N && kb < K ? b[size_t(kb) * b_row + size_t(j) * b_column] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) total += left[threadIdx.y][k] * right[k][threadIdx.x];
        __syncthreads();
    }
    if (i < M && j < N) c[size_t(i) * N + j] = total + (beta == 0.0f ? 0.0f : beta * c[size_t(i) * N + j]);
}

class Matmul {
   public:
    // `second_stream`: a second stream that launches may go to, with a handle of its own, since a handle's workspace is one.
    // `recorded`: launches may be recorded in a graph, which keeps the workspace's address; cuBLAS's own is given up with
    // each change of the stream.
    explicit Matmul(Engine engine = Engine::Cublas, bool tf32 = false, cudaStream_t second_stream = nullptr, bool recorded = false)
        : engine_(engine), stream_second_(second_stream) {
        if (engine != Engine::Cublas) return;
        for (cublasHandle_t* handle : {&handle_, &second_}) {
            if (handle == &second_ && !second_stream) break;
            require(cublasCreate(handle), "cublasCreate");
            require(cublasSetMathMode(*handle, tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
            if (recorded) workspace(*handle) = {"cuBLAS's workspace", {WORKSPACE}};
            follow(*handle, handle == &second_ ? second_stream : nullptr);
        }
    }
    ~Matmul() {
        for (cublasHandle_t handle : {handle_, second_})
            if (handle) cublasDestroy(handle);
    }
    Matmul(const Matmul&) = delete;
    Matmul& operator=(const Matmul&) = delete;

    // C [M, N] = op(A) op(B) + beta C, `batch` times. op(A) is [M, K]; A is stored [K, M] where it is transposed.
    void operator()(const float* a, bool ta, const float* b, bool tb, float* c, int M, int N, int K, float beta = 0.0f,
                    int batch = 1) {
        const long long next_a = (long long)M * K, next_b = (long long)K * N, next_c = (long long)M * N;
        if (engine_ == Engine::Cublas) {  // column-major: C^T = op(B)^T op(A)^T
            const float one = 1.0f;
            const bool beside = second_ && current() == stream_second_;
            if (!beside && current() != stream_) {
                follow(handle_, current());
                stream_ = current();
            }
            require(cublasSgemmStridedBatched(beside ? second_ : handle_, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N, N, M, K,
                                              &one, b, tb ? K : N, next_b, a, ta ? M : K, next_a, &beta, c, N, next_c, batch),
                    "cublasSgemmStridedBatched");
        } else if (engine_ == Engine::Kernel) {
            const dim3 grid(unsigned((N + TILE - 1) / TILE), unsigned((M + TILE - 1) / TILE), unsigned(batch));
            LAUNCH_BARRIER(product, grid, dim3(TILE, TILE), a, b, c, M, N, K, ta ? 1 : K, ta ? M : 1, tb ? 1 : N, tb ? K : 1,
                           beta, size_t(next_a), size_t(next_b), size_t(next_c));
        } else {
            on_host(a, ta, b, tb, c, M, N, K, beta, batch);
        }
    }

   private:
    static void require(cublasStatus_t status, const char* what) {
        if (status != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error(std::string(what) + ": cuBLAS status " + std::to_string(int(status)));
    }
    BasicTensor<char>& workspace(cublasHandle_t handle) { return handle == second_ ? workspace_second_ : workspace_; }
    void follow(cublasHandle_t handle, cudaStream_t stream) {
        require(cublasSetStream(handle, stream), "cublasSetStream");
        BasicTensor<char>& own = workspace(handle);
        if (own.count()) require(cublasSetWorkspace(handle, own.data(), own.bytes()), "cublasSetWorkspace");
    }
    void on_host(const float* a, bool ta, const float* b, bool tb, float* c, int M, int N, int K, float beta, int batch) {
        std::vector<float> A(size_t(M) * K * batch), B(size_t(K) * N * batch), C(size_t(M) * N * batch);
        const auto get = [](std::vector<float>& to, const float* from) {
            check(cudaMemcpy(to.data(), from, to.size() * sizeof(float), cudaMemcpyDeviceToHost), "product on the host");
        };
        get(A, a);
        get(B, b);
        get(C, c);
        for (int z = 0; z < batch; ++z)
            for (int i = 0; i < M; ++i) {
                float* row = C.data() + (size_t(z) * M + i) * N;
                for (int j = 0; j < N; ++j) row[j] = beta == 0.0f ? 0.0f : beta * row[j];
                for (int k = 0; k < K; ++k) {
                    const float x = A[size_t(z) * M * K + (ta ? size_t(k) * M + i : size_t(i) * K + k)];
                    const float* line = B.data() + size_t(z) * K * N + (tb ? size_t(k) : size_t(k) * N);
                    for (int j = 0; j < N; ++j) row[j] += x * line[tb ? size_t(j) * K : size_t(j)];
                }
            }
        check(cudaMemcpy(c, C.data(), C.size() * sizeof(float), cudaMemcpyHostToDevice), "product on the host");
    }

    static constexpr size_t WORKSPACE = size_t(32) << 20;  // what NVIDIA recommends for Hopper; other GPUs need less
    Engine engine_;
    cublasHandle_t handle_ = nullptr, second_ = nullptr;
    cudaStream_t stream_ = nullptr, stream_second_ = nullptr;
    BasicTensor<char> workspace_, workspace_second_;
};

}  // namespace tinyllm
