// Attention's kernels but the products: heads brought together and back, and the softmax between the products.
#pragma once
#include "ops.cuh"

namespace tinyllm {

// Where column i of token blockIdx.x, [sequence, token, part, head, column], lies in [part, sequence, head, token, column].
__device__ inline size_t by_head(int i, int context, int heads, int columns) {
    const int c = i % columns, h = i / columns % heads, p = i / columns / heads;
    const int t = blockIdx.x % context, s = blockIdx.x / context, sequences = gridDim.x / context;
    return ((size_t(p * sequences + s) * heads + h) * context + t) * columns + c;
}

// From the first order into the second, plus a bias [part, head, column] if there is one; a block a token.
template <int V>
__global__ void split_heads(const float* from, const float* bias, float* to, int context, int parts, int heads, int columns) {
    const int width = parts * heads * columns;
    for (int i = V * threadIdx.x; i < width; i += V * blockDim.x) {
        Pack<V> value = load<V>(from + size_t(blockIdx.x) * width + i);
        if (bias) {
            const Pack<V> added = load<V>(bias + i);
            for (int v = 0; v < V; ++v) value.at[v] += added.at[v];
        }
        store(to + by_head(i, context, heads, columns), value);
    }
}

// And back.
template <int V>
__global__ void join_heads(const float* from, float* to, int context, int parts, int heads, int columns) {
    const int width = parts * heads * columns;
    for (int i = V * threadIdx.x; i < width; i += V * blockDim.x)
        store(to + size_t(blockIdx.x) * width + i, load<V>(from + by_head(i, context, heads, columns)));
}

// Rows of scores [.., context, context]: softmax of scale x over the keys up to the row's own; zeros after it.
__global__ void causal_softmax(float* scores, int context, float scale) {
    float* row = scores + size_t(blockIdx.x) * context;
    const int last = blockIdx.x % context;
    float largest = -INFINITY, total = 0.0f;
    for (int k = threadIdx.x; k <= last; k += LANES) largest = fmaxf(largest, scale * row[k]);
    largest = block_max(largest);
    for (int k = threadIdx.x; k <= last; k += LANES) total += row[k] = expf(scale * row[k] - largest);
    total = block_sum(total);
    for (int k = threadIdx.x; k < context; k += LANES) row[k] = k <= last ? row[k] / total : 0.0f;
}

// dscores = scale p (dp - <dp, p>), in place of dp.
__global__ void softmax_backward(const float* p, float* dp, int context, float scale) {
    const size_t row = size_t(blockIdx.x) * context;
    float dot = 0.0f;
    for (int k = threadIdx.x; k < context; k += LANES) dot += p[row + k] * dp[row + k];
    dot = block_sum(dot);
    for (int k = threadIdx.x; k < context; k += LANES) dp[row + k] = scale * p[row + k] * (dp[row + k] - dot);
}

}  // namespace tinyllm
