// cuBLAS's sgemm and its strided batch on the host: column-major, the same signatures, a plain blocked loop.
#pragma once
#include "cuda_runtime.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_INVALID_VALUE = 7 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasMath_t { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
using cublasHandle_t = void*;

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return *handle = handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

namespace cuda_host {

// C^T [n, m] row-major = alpha (op(A) op(B))^T + beta C^T: rows of C^T are columns of C, which are contiguous.
inline void columns(int from, int to, int m, int k, float alpha, const float* a, long a_row, long a_column, const float* b,
                    long b_row, long b_column, float beta, float* c, int ldc) {
    constexpr int ROWS = 256, COLUMNS = 4;
    std::vector<float> packed(a_row == 1 ? 0 : size_t(ROWS) * size_t(k));
    for (int i0 = 0; i0 < m; i0 += ROWS) {
        const int rows = std::min(ROWS, m - i0);
        const float* left = a + i0;
        long step = a_column;
        if (a_row != 1) {  // transposed: gather a panel of rows once
            for (int i = 0; i < rows; ++i)
                for (int p = 0; p < k; ++p) packed[size_t(p) * ROWS + size_t(i)] = a[(i0 + i) * a_row + p * a_column];
            left = packed.data();
            step = ROWS;
        }
        for (int j0 = from; j0 < to; j0 += COLUMNS) {
            const int count = std::min(COLUMNS, to - j0);
            float sum[COLUMNS][ROWS] = {};
            for (int p = 0; p < k; ++p) {
                const float* line = left + p * step;
                if (count == COLUMNS) {
                    const float b0 = b[p * b_row + (j0 + 0) * b_column], b1 = b[p * b_row + (j0 + 1) * b_column];
                    const float b2 = b[p * b_row + (j0 + 2) * b_column], b3 = b[p * b_row + (j0 + 3) * b_column];
                    for (int i = 0; i < rows; ++i) {
                        const float x = line[i];
                        sum[0][i] += x * b0;
                        sum[1][i] += x * b1;
                        sum[2][i] += x * b2;
                        sum[3][i] += x * b3;
                    }
                } else {
                    for (int j = 0; j < count; ++j) {
                        const float y = b[p * b_row + (j0 + j) * b_column];
                        for (int i = 0; i < rows; ++i) sum[j][i] += line[i] * y;
                    }
                }
            }
            for (int j = 0; j < count; ++j) {
                float* to_column = c + (j0 + j) * long(ldc) + i0;
                for (int i = 0; i < rows; ++i)
                    to_column[i] = alpha * sum[j][i] + (beta == 0.0f ? 0.0f : beta * to_column[i]);
            }
        }
    }
}

}  // namespace cuda_host

inline cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                                int k, const float* alpha, const float* a, int lda, long long stride_a,
                                                const float* b, int ldb, long long stride_b, const float* beta, float* c,
                                                int ldc, long long stride_c, int batch) {
    const bool ta = op_a == CUBLAS_OP_T, tb = op_b == CUBLAS_OP_T;
    if (m < 0 || n < 0 || k < 0 || lda < std::max(1, ta ? k : m) || ldb < std::max(1, tb ? n : k) || ldc < std::max(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    constexpr int PART = 32;
    const int parts = (n + PART - 1) / PART;
#pragma omp parallel for schedule(static) if (double(m) * n * k * batch > 1e6)
    for (int task = 0; task < parts * batch; ++task) {
        const int one = task / parts, from = task % parts * PART;
        cuda_host::columns(from, std::min(n, from + PART), m, k, *alpha, a + one * stride_a, ta ? lda : 1, ta ? 1 : lda,
                           b + one * stride_b, tb ? ldb : 1, tb ? 1 : ldb, *beta, c + one * stride_c, ldc);
    }
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                  const float* alpha, const float* a, int lda, const float* b, int ldb, const float* beta,
                                  float* c, int ldc) {
    return cublasSgemmStridedBatched(handle, op_a, op_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
