// Every kernel of the model but the matrix products. Rows are tokens; matrices are row-major and contiguous.
//
// Each sum is taken in a fixed order and without atomics, so results repeat bit for bit.
#pragma once
#include "launch.cuh"

namespace tinyllm {

__device__ inline size_t here() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// V neighbouring numbers, which a thread reads and writes at once: addresses are multiples of V numbers.
template <int V>
struct alignas(V * sizeof(float)) Pack {
    float at[V];
};
template <int V>
__device__ inline Pack<V> load(const float* from) {
    return *reinterpret_cast<const Pack<V>*>(from);
}
template <int V>
__device__ inline void store(float* to, const Pack<V>& value) {
    *reinterpret_cast<Pack<V>*>(to) = value;
}

#ifdef __CUDACC__
// The sum of `value` over the block's LANES threads, the same in each of them: by shuffles within a warp, then over warps.
__device__ inline float block_sum(float value) {
    __shared__ float part[LANES / 32];
    for (int half = 16; half > 0; half /= 2) value += __shfl_xor_sync(0xffffffffu, value, half);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    float total = part[0];
    for (int warp = 1; warp < LANES / 32; ++warp) total += part[warp];
    __syncthreads();
    return total;
}

__device__ inline float block_max(float value) {
    __shared__ float part[LANES / 32];
    for (int half = 16; half > 0; half /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, half));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    float largest = part[0];
    for (int warp = 1; warp < LANES / 32; ++warp) largest = fmaxf(largest, part[warp]);
    __syncthreads();
    return largest;
}
#else
// The same on the host runtime, which has no warps.
__device__ inline float block_sum(float value) {
    __shared__ float part[LANES];
    part[threadIdx.x] = value;
    __syncthreads();
    for (int half = LANES / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    const float total = part[0];
    __syncthreads();
    return total;
}

__device__ inline float block_max(float value) {
    __shared__ float part[LANES];
    part[threadIdx.x] = value;
    __syncthreads();
    for (int half = LANES / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
        __syncthreads();
    }
    const float largest = part[0];
    __syncthreads();
    return largest;
}
#endif

// x[t] = table[tokens[t]] + positions[t mod context]
__global__ void embed(const int* tokens, const float* table, const float* positions, float* x, size_t count, int context,
                      int width) {
    const size_t i = here();
    if (i >= count) return;
    const size_t t = i / width, d = i % width;
    x[i] = table[size_t(tokens[t]) * width + d] + positions[t % context * width + d];
}

// The gradient of the table: COLUMNS columns of one token of the vocabulary to a block, whose rows of the batch are
// order[first[token]] to order[first[token + 1] - 1].
constexpr int COLUMNS = 32, ROW_LANES = 8;
__global__ void embed_backward(const int* first, const int* order, const float* dx, float* dtable, int width) {
    __shared__ float sums[ROW_LANES][COLUMNS];
    const int d = blockIdx.x * COLUMNS + threadIdx.x, last = first[blockIdx.y + 1];
    float sum = 0.0f;
    for (int i = first[blockIdx.y] + threadIdx.y; i < last && d < width; i += ROW_LANES) sum += dx[size_t(order[i]) * width + d];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || d >= width) return;
    for (int lane = 1; lane < ROW_LANES; ++lane) sum += sums[lane][threadIdx.x];
    dtable[size_t(blockIdx.y) * width + d] = sum;
}

__global__ void position_backward(const float* dx, float* dpositions, size_t count, int sequences) {
    const size_t i = here();  // over [context, width]
    if (i >= count) return;
    float total = 0.0f;
    for (int s = 0; s < sequences; ++s) total += dx[s * count + i];
    dpositions[i] = total;
}

// y = (x - mean) rstd gain + shift, by row; with a residual, of sum = x + residual + bias in x's place.
template <int V>
__global__ void layernorm(const float* x, const float* residual, const float* bias, float* sum, const float* gain,
                          const float* shift, float* y, float* mean, float* rstd, int width, float epsilon) {
    const size_t row = size_t(blockIdx.x) * width;
    const int first = V * threadIdx.x;
    float total = 0.0f, squares = 0.0f;
    for (int d = first; d < width; d += V * LANES) {
        Pack<V> value = load<V>(x + row + d);
        if (residual) {
            const Pack<V> other = load<V>(residual + row + d), added = load<V>(bias + d);
            for (int v = 0; v < V; ++v) value.at[v] += other.at[v] + added.at[v];
            store(sum + row + d, value);
        }
        for (int v = 0; v < V; ++v) total += value.at[v];
    }
    const float* from = residual ? sum : x;
    const float centre = block_sum(total) / float(width);
    for (int d = first; d < width; d += V * LANES) {
        const Pack<V> value = load<V>(from + row + d);
        for (int v = 0; v < V; ++v) squares += (value.at[v] - centre) * (value.at[v] - centre);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / float(width) + epsilon);
    for (int d = first; d < width; d += V * LANES) {
        Pack<V> value = load<V>(from + row + d);
        const Pack<V> by = load<V>(gain + d), plus = load<V>(shift + d);
        for (int v = 0; v < V; ++v) value.at[v] = (value.at[v] - centre) * scale * by.at[v] + plus.at[v];
        store(y + row + d, value);
    }
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = centre;
        rstd[blockIdx.x] = scale;
    }
}

// dx += the gradient of layernorm.
template <int V>
__global__ void layernorm_backward(const float* x, const float* gain, const float* mean, const float* rstd, const float* dy,
                                   float* dx, int width) {
    const size_t row = size_t(blockIdx.x) * width;
    const int first = V * threadIdx.x;
    const float centre = mean[blockIdx.x], scale = rstd[blockIdx.x];
    float sum = 0.0f, dot = 0.0f;
    for (int d = first; d < width; d += V * LANES) {
        const Pack<V> value = load<V>(x + row + d), upper = load<V>(dy + row + d), by = load<V>(gain + d);
        for (int v = 0; v < V; ++v) {
            const float g = upper.at[v] * by.at[v];
            sum += g;
            dot += g * (value.at[v] - centre) * scale;
        }
    }
    const float average = block_sum(sum) / float(width), along = block_sum(dot) / float(width);
    for (int d = first; d < width; d += V * LANES) {
        const Pack<V> value = load<V>(x + row + d), upper = load<V>(dy + row + d), by = load<V>(gain + d);
        Pack<V> to = load<V>(dx + row + d);
        for (int v = 0; v < V; ++v)
            to.at[v] += scale * (upper.at[v] * by.at[v] - average - (value.at[v] - centre) * scale * along);
        store(dx + row + d, to);
    }
}

// Sums over rows, by column, of a and (with x) of a (x - mean) rstd: a part for each chunk of rows, `stride` apart.
constexpr int CHUNKS = 64;
__global__ void column_parts(const float* a, const float* x, const float* mean, const float* rstd, float* sum_parts,
                             float* dot_parts, size_t stride, int rows, int width, int chunk) {
    __shared__ float sums[ROW_LANES][COLUMNS], dots[ROW_LANES][COLUMNS];
    const int d = blockIdx.x * COLUMNS + threadIdx.x, first = blockIdx.y * chunk;
    const int end = d >= width ? 0 : first + chunk < rows ? first + chunk : rows;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll 8  // so that many loads are on their way at a time
    for (int t = first + threadIdx.y; t < end; t += ROW_LANES) {
        const float value = a[size_t(t) * width + d];
        sum += value;
        if (x) dot += value * (x[size_t(t) * width + d] - mean[t]) * rstd[t];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    dots[threadIdx.y][threadIdx.x] = dot;
    __syncthreads();
    if (threadIdx.y || d >= width) return;
    for (int lane = 1; lane < ROW_LANES; ++lane) {
        sum += sums[lane][threadIdx.x];
        dot += dots[lane][threadIdx.x];
    }
    sum_parts[blockIdx.y * stride + d] = sum;
    if (x) dot_parts[blockIdx.y * stride + d] = dot;
}

__global__ void add_parts(const float* parts, float* out, int chunks, size_t width) {
    const size_t d = here();
    if (d >= width) return;
    float total = 0.0f;
    for (int c = 0; c < chunks; ++c) total += parts[c * width + d];
    out[d] = total;
}

__global__ void add_bias(float* x, const float* bias, size_t count, int width) {
    const size_t i = here();
    if (i < count) x[i] += bias[i % width];
}

// y = gelu(u += bias), by the error function.
template <int V>
__global__ void bias_gelu(float* u, const float* bias, float* y, size_t count, int width) {
    const size_t i = V * here();
    if (i >= count) return;
    Pack<V> value = load<V>(u + i), gelu;
    const float* added = bias + i % width;
    for (int v = 0; v < V; ++v) {
        const float x = value.at[v] += added[v];
        gelu.at[v] = 0.5f * x * (1.0f + erff(x * 0.70710678f));
    }
    store(u + i, value);
    store(y + i, gelu);
}

template <int V>
__global__ void gelu_backward(const float* u, const float* dy, float* du, size_t count) {
    const size_t i = V * here();
    if (i >= count) return;
    const Pack<V> value = load<V>(u + i);
    Pack<V> d = load<V>(dy + i);
    for (int v = 0; v < V; ++v) {
        const float x = value.at[v];
        d.at[v] *= 0.5f * (1.0f + erff(x * 0.70710678f)) + x * 0.39894228f * expf(-0.5f * x * x);
    }
    store(du + i, d);
}

// x += residual + bias
__global__ void add_residual(float* x, const float* residual, const float* bias, size_t count, int width) {
    const size_t i = here();
    if (i < count) x[i] += residual[i] + bias[i % width];
}

// losses[t] = log sum exp(logits[t]) - logits[t, target]; dlogits = (softmax - one-hot) weight.
__global__ void cross_entropy(const float* logits, const int* targets, float* losses, float* dlogits, int vocabulary,
                              float weight) {
    const float* row = logits + size_t(blockIdx.x) * vocabulary;
    float* drow = dlogits + size_t(blockIdx.x) * vocabulary;
    const int target = targets[blockIdx.x];
    float largest = -INFINITY, total = 0.0f;
    for (int v = threadIdx.x; v < vocabulary; v += LANES) largest = fmaxf(largest, row[v]);
    largest = block_max(largest);
    for (int v = threadIdx.x; v < vocabulary; v += LANES) total += expf(row[v] - largest);
    total = block_sum(total);
    for (int v = threadIdx.x; v < vocabulary; v += LANES)
        drow[v] = (expf(row[v] - largest) / total - (v == target ? 1.0f : 0.0f)) * weight;
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) + largest - row[target];
}

__global__ void mean_of(const float* values, float* mean, int count) {
    float total = 0.0f;
    for (int i = threadIdx.x; i < count; i += LANES) total += values[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *mean = total / float(count);
}

// Decoupled weight decay (Loshchilov and Hutter); `correct1` and `correct2` are 1 - beta^step; the first `decayed`
// parameters decay.
__global__ void adamw(float* w, const float* g, float* m, float* v, size_t count, size_t decayed, float rate, float beta1,
                      float beta2, float epsilon, float decay, float correct1, float correct2) {
    const size_t i = here();
    if (i >= count) return;
    const float m1 = m[i] = beta1 * m[i] + (1.0f - beta1) * g[i];
    const float v1 = v[i] = beta2 * v[i] + (1.0f - beta2) * g[i] * g[i];
    const float kept = i < decayed ? w[i] * (1.0f - rate * decay) : w[i];
    w[i] = kept - rate * (m1 / correct1) / (sqrtf(v1 / correct2) + epsilon);
}

}  // namespace tinyllm
