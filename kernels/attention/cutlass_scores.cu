// Q K^T of every head by CUTLASS's batched product of three TF32 products, in tiles that its own generator lists.

#include <cutlass/gemm/device/gemm_batched.h>

namespace {

template <int M, int N, int K, int WARP_M, int WARP_N, int STAGES, int ALIGNED>
int product(const float* q, const float* k, float* out, int heads, int queries, int keys, int columns,
            cudaStream_t stream) {
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;  // K as it lies is K^T by columns
  using Store = cutlass::epilogue::thread::LinearCombination<float, ALIGNED, float, float>;
  using Gemm = cutlass::gemm::device::GemmBatched<
      float, Row, float, Column, float, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      cutlass::gemm::GemmShape<M, N, K>, cutlass::gemm::GemmShape<WARP_M, WARP_N, K>,
      cutlass::gemm::GemmShape<16, 8, 8>, Store, cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle,
      STAGES, ALIGNED, ALIGNED, cutlass::arch::OpMultiplyAddFastF32>;
  int64_t q_head = int64_t(queries) * columns, k_head = int64_t(keys) * columns, out_head = int64_t(queries) * keys;
  typename Gemm::Arguments given({queries, keys, columns}, {q, columns}, q_head, {k, columns}, k_head, {out, keys},
                                 out_head, {out, keys}, out_head, {1.0f, 0.0f}, heads);
  Gemm gemm;
  cutlass::Status status = gemm.initialize(given, nullptr, stream);
  return int(status == cutlass::Status::kSuccess ? gemm.run(stream) : status);
}

template <int ALIGNED>
int in_tiles(int tile, const float* q, const float* k, float* out, int heads, int queries, int keys, int columns,
             cudaStream_t stream) {
  switch (tile) {
    case 0: return product<128, 128, 16, 32, 64, 4, ALIGNED>(q, k, out, heads, queries, keys, columns, stream);
    case 1: return product<128, 64, 32, 64, 32, 3, ALIGNED>(q, k, out, heads, queries, keys, columns, stream);
    case 2: return product<64, 64, 32, 32, 32, 3, ALIGNED>(q, k, out, heads, queries, keys, columns, stream);
    default: return int(cutlass::Status::kErrorNotSupported);
  }
}

}  // namespace

// Status of CUTLASS, 0 for success. q [heads, queries, columns], k [heads, keys, columns], out [heads, queries, keys].
extern "C" int cutlass_scores(int tile, const float* q, const float* k, float* out, int heads, int queries, int keys,
                              int columns, cudaStream_t stream) {
  bool whole = queries % 4 == 0 && keys % 4 == 0 && columns % 4 == 0;  // 16 bytes at a time
  return whole ? in_tiles<4>(tile, q, k, out, heads, queries, keys, columns, stream)
               : in_tiles<1>(tile, q, k, out, heads, queries, keys, columns, stream);
}
