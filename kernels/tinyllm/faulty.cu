// The report's program around the Tensor under investigation: embedding, three layers, logits; any set of switches.
//
// What is inside a layer is right (the report saw right values there); between layers go faulty::Tensors.
#include "attention.cuh"
#include "faulty_tensor.cuh"
#include "host_control.cuh"
#include "matmul.cuh"

#include <csetjmp>
#include <csignal>
#include <memory>

namespace faulty {

constexpr float PROBE = NAN;  // what a debug print's own buffer holds before the copy into it: no number
constexpr int LAYERS = 3, SHOWN = 8;

struct Outcome {
    int status;  // 0 ran to its end, 1 a checked call reported, 2 a kernel read or wrote what is not there
    int failed_calls, first_error, traces;
    long traced_bytes;
    int ff_failed, x_failed;        // the debug print's own copy failed
    int ff_right, x_right;          // how many elements of the first layer's ff_out, and of the last x, are within bound
    int host_size, host_zero;       // of the first ff_out's host vector, when the layer is done: elements, and zeros
    int x_zero, x_nan;              // how many of x's are 0; NaN
    int logits_read, logits_right, logits_zero, logits_nan, strays, predicted;
    float ff_first[2], ff_last[2];
    float x[2], logits_low, logits_high, loss;
};

struct Illegal : std::runtime_error {
    Illegal() : std::runtime_error("a kernel was given no memory") {}
};

#ifdef CUDA_HOST
inline sigjmp_buf& rescue() {
    static sigjmp_buf one;
    return one;
}
#endif

// Right parts: weights and scratch, made once a process.
class Layer {
   public:
    tinyllm::Tensor qkv, o, up, down, gain, shift, biases;
};

class Model {
   public:
    // `weights`: table, positions; qkv, o, up, down of each layer; head. `golden` and `allowed`: the first ff_out, the last
    // x, the logits.
    Model(int tokens, int vocabulary, int width, int heads, const int* ids, const float* weights, const float* golden,
          const float* allowed, tinyllm::Engine engine)
        : T(tokens), V(vocabulary), D(width), H(heads), matmul(engine) {
        const auto drawn = [&](size_t rows, size_t columns) {
            tinyllm::Tensor t("weights", {rows, columns});
            std::copy(weights, weights + t.count(), t.host().begin());
            weights += t.count();
            t.h2d();
            return t;
        };
        const auto constant = [](size_t count, float value) {
            tinyllm::Tensor t("weights", {count});
            std::fill(t.host().begin(), t.host().end(), value);
            t.h2d();
            return t;
        };
        const size_t d = size_t(D);
        table = drawn(size_t(V), d);
        positions = drawn(size_t(T), d);
        for (Layer& l : layers) {
            l.qkv = drawn(d, 3 * d);
            l.o = drawn(d, d);
            l.up = drawn(d, 4 * d);
            l.down = drawn(4 * d, d);
        }
        head = drawn(d, size_t(V));
        ones = constant(d, 1.0f);
        zeros = constant(4 * d, 0.0f);
        tokens_ = tinyllm::BasicTensor<int>("tokens", {size_t(T)});
        std::copy(ids, ids + T, tokens_.host().begin());
        tokens_.h2d();
        const size_t rows = size_t(T), compared = rows * (2 * d + size_t(V));
        golden_.assign(golden, golden + compared);
        allowed_.assign(allowed, allowed + compared);
        for (auto [tensor, width] : {std::pair{&normal, d}, {&wide, 3 * d}, {&heads_, 3 * d}, {&p, size_t(H) * T}, {&mixed, d}, {&attention, d}, {&x1, d}, {&hidden, 4 * d}, {&active, 4 * d}, {&mean, size_t(1)}, {&rstd, size_t(1)}})
            *tensor = tinyllm::Tensor("scratch", {rows, width});
    }

    // Weights and constants once more: a run whose buffers are too small may have written into them.
    void restore() {
        for (tinyllm::Tensor* t : {&table, &positions, &head, &ones, &zeros}) t->h2d();
        for (Layer& l : layers)
            for (tinyllm::Tensor* t : {&l.qkv, &l.o, &l.up, &l.down}) t->h2d();
        tokens_.h2d();
    }

    void layer(const Layer& l, const Tensor& in, Tensor& out) {
        using namespace tinyllm;
        const float* x = there(in.d_data);
        norm(x, normal);
        matmul(normal.data(), false, l.qkv.data(), false, wide.data(), T, 3 * D, D);
        LAUNCH(split_heads<1>, unsigned(T), THREADS, wide.data(), static_cast<const float*>(nullptr), heads_.data(), T, 3, H, D / H);
        const float *q = heads_.data(), *k = q + T * D, *v = k + T * D;
        matmul(q, false, k, true, p.data(), T, T, D / H, 0.0f, H);
        LAUNCH_BARRIER(causal_softmax, unsigned(T * H), LANES, p.data(), T, 1.0f / std::sqrt(float(D / H)));
        matmul(p.data(), false, v, false, mixed.data(), T, D / H, T, 0.0f, H);
        LAUNCH(join_heads<1>, unsigned(T), THREADS, mixed.data(), attention.data(), T, 1, H, D / H);
        matmul(attention.data(), false, l.o.data(), false, x1.data(), T, D, D);
        LAUNCH(add_residual, cover(size_t(T) * D), THREADS, x1.data(), x, zeros.data(), size_t(T) * D, D);
        norm(x1.data(), normal);
        matmul(normal.data(), false, l.up.data(), false, hidden.data(), T, 4 * D, D);
        LAUNCH(bias_gelu<1>, cover(size_t(T) * 4 * D), THREADS, hidden.data(), zeros.data(), active.data(), size_t(T) * 4 * D, 4 * D);
        float* ff = there(out.d_data);
        matmul(active.data(), false, l.down.data(), false, ff, T, D, 4 * D);
        LAUNCH(add_residual, cover(size_t(T) * D), THREADS, ff, x1.data(), zeros.data(), size_t(T) * D, D);
        synchronise();
    }

    // As the report's TransformerLayer::Forward: print ff_out, perhaps d2h, return it.
    Tensor by_value(int i, const Tensor& x, Outcome& o) {
        Tensor ff_out(x.rows, x.cols);
        layer(layers[i], x, ff_out);
        finish(i, ff_out, o);
        return ff_out;
    }

    void forward(Outcome& o) {
        Switches& s = context().s;
        Tensor embedded(T, D);
        LAUNCH(tinyllm::embed, tinyllm::cover(size_t(T) * D), tinyllm::THREADS, tokens_.data(), table.data(), positions.data(), there(embedded.d_data), size_t(T) * D, T, D);
        synchronise();
        if (!s.no_d2h && !s.layers_only) embedded.d2h();
        Tensor x = embedded;
        for (int i = 0; i < LAYERS; ++i) {
            if (s.way == Copied) {
                const Tensor inner = by_value(i, x, o);
                Tensor layer_out = inner;
                after(layer_out, x);
            } else if (s.way == Elided) {
                Tensor layer_out = by_value(i, x, o);
                after(layer_out, x);
            } else if (s.way == OutParameter) {
                Tensor layer_out(x.rows, x.cols);
                layer(layers[i], x, layer_out);
                finish(i, layer_out, o);
                after(layer_out, x);
            } else {
                auto layer_out = std::make_shared<Tensor>(x.rows, x.cols);
                layer(layers[i], x, *layer_out);
                finish(i, *layer_out, o);
                after(*layer_out, x);
            }
        }
        look(x, o);
        if (s.way == OutParameter || s.way == Shared) {
            Tensor logits(T, V);
            project(x, logits);
            judge(logits, o);
        } else if (s.way == Copied) {
            Tensor logits;
            const Tensor inner = projected(x);
            const Tensor returned = inner;
            logits = returned;
            judge(logits, o);
        } else {
            Tensor logits;
            logits = projected(x);
            judge(logits, o);
        }
    }

   private:
    template <class P>
    static P there(P pointer) {
        if (!pointer) throw Illegal();  // a kernel that reads address 0 would take the whole context with it
        return pointer;
    }
    void synchronise() {
        call(cudaGetLastError());
        call(cudaDeviceSynchronize());
    }
    void project(const Tensor& x, Tensor& logits) {
        norm(there(x.d_data), normal);
        matmul(normal.data(), false, head.data(), false, there(logits.d_data), T, V, D);
        synchronise();
        if (!context().s.no_d2h && !context().s.layers_only) logits.d2h();
    }
    Tensor projected(const Tensor& x) {
        Tensor logits(T, V);
        project(x, logits);
        return logits;
    }
    void norm(const float* x, tinyllm::Tensor& y) {
        const float* none = nullptr;
        LAUNCH_BARRIER(tinyllm::layernorm<1>, unsigned(T), tinyllm::LANES, x, none, none, y.data(), ones.data(), zeros.data(), y.data(), mean.data(), rstd.data(), D, 1e-5f);
    }
    int right(const std::vector<float>& seen, size_t from) const {
        int count = 0;
        for (size_t i = 0; i < seen.size(); ++i) count += std::fabs(seen[i] - golden_[from + i]) <= allowed_[from + i];
        return count;
    }
    // A debug print: copies into a buffer of its own, and does not look at what the copy returns.
    bool shown(const Tensor& t, std::vector<float>& seen) {
        seen.assign(size_t(T) * D, PROBE);
        const bool failed = cudaMemcpy(seen.data(), t.d_data, seen.size() * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess;
        if (failed) cudaGetLastError();
        if (failed) {  // what the five numbers of the print need
            const bool few = cudaMemcpy(seen.data(), t.d_data, SHOWN * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess;
            if (few) cudaGetLastError();
            return few;
        }
        return false;
    }
    void finish(int i, Tensor& ff_out, Outcome& o) {
        const bool failed = shown(ff_out, last);
        if (i == 0) {
            std::copy(last.begin(), last.begin() + 2, o.ff_first);
            o.ff_failed = failed;
            o.ff_right = right(last, 0);
        }
        std::copy(last.begin(), last.begin() + 2, o.ff_last);
        if (!context().s.no_d2h) ff_out.d2h();
        if (i == 0) {
            o.host_size = int(ff_out.h_data.size());
            o.host_zero = int(std::count(ff_out.h_data.begin(), ff_out.h_data.end(), 0.0f));
        }
    }
    void after(const Tensor& layer_out, Tensor& x) {
        x = layer_out;
        x.h2d();
    }
    void look(const Tensor& x, Outcome& o) {
        std::vector<float> seen;
        o.x_failed = shown(x, seen);
        std::copy(seen.begin(), seen.begin() + 2, o.x);
        o.x_right = right(seen, seen.size());
        for (size_t i = 0; i < seen.size(); ++i) {
            o.x_zero += seen[i] == 0.0f;
            o.x_nan += std::isnan(seen[i]);
        }
    }
    // As the report's caller: download the logits, take the last token's likeliest, and the cross-entropy of token 1.
    void judge(Tensor& logits, Outcome& o) {
        logits.d2h();
        const size_t count = std::min(logits.h_data.size(), size_t(T) * V);
        o.logits_read = int(count);
        o.predicted = -1;
        if (count < size_t(T) * V) return;
        o.logits_low = INFINITY;
        o.logits_high = -INFINITY;
        for (size_t i = 0; i < count; ++i) {
            const float v = logits.h_data[i];
            o.logits_zero += v == 0.0f;
            o.logits_nan += std::isnan(v);
            o.logits_low = std::fmin(o.logits_low, v);
            o.logits_high = std::fmax(o.logits_high, v);
        }
        o.logits_right = right({logits.h_data.begin(), logits.h_data.begin() + long(count)}, 2 * size_t(T) * D);
        const float* row = logits.h_data.data() + size_t(T - 1) * V;
        o.predicted = 0;
        double total = 0.0;
        for (int v = 0; v < V; ++v) {
            if (row[v] > row[o.predicted]) o.predicted = v;
            total += std::exp(double(row[v]));
        }
        o.loss = float(std::log(total) - row[1]);
    }

    int T, V, D, H;
    tinyllm::Matmul matmul;
    tinyllm::Tensor table, positions, head, ones, zeros, normal, wide, heads_, p, mixed, attention, x1, hidden, active, mean, rstd;
    tinyllm::BasicTensor<int> tokens_;
    Layer layers[LAYERS];
    std::vector<float> last, golden_, allowed_;
};

}  // namespace faulty

namespace {
thread_local std::string error;

struct {  // of one size and one pair of numbers as long as it is kept
    void* buffer = nullptr;
    bool written = false;
} pattern;
}  // namespace

extern "C" {

const char* faulty_error() { return error.c_str(); }
size_t faulty_outcome_size() { return sizeof(faulty::Outcome); }

void* faulty_new(int tokens, int vocabulary, int width, int heads, const int* ids, const float* weights, const float* golden,
                 const float* allowed, int engine) {
    try {
        return new faulty::Model(tokens, vocabulary, width, heads, ids, weights, golden, allowed, tinyllm::Engine(engine));
    } catch (const std::exception& caught) {
        error = caught.what();
        return nullptr;
    }
}
void faulty_delete(void* model) { delete static_cast<faulty::Model*>(model); }

// What a run that wrote beyond its buffers may have spoiled is as it was before.
void faulty_restore(void* model) {
    static_cast<faulty::Model*>(model)->restore();
    pattern.written = false;
}

// Fills the memory that a run will be given: blocks of `bytes` and of the least size, all held at a time, each filled with
// `pair` and given back. `keep`: a buffer of ours stays, without which the driver may take the whole page back, and clear it.
int faulty_fill(size_t bytes, int blocks, const float* pair, int keep) {
    constexpr size_t LEAST = 512;  // what cudaMalloc gives at least, and rounds up to
    const size_t size = (bytes + LEAST - 1) / LEAST * LEAST;
    if (!pattern.buffer && cudaMalloc(&pattern.buffer, size) != cudaSuccess) return -1;
    if (!pattern.written) {  // a copy from there need not be waited for, as one from the host
        std::vector<float> host(size / sizeof(float));
        for (size_t i = 0; i < host.size(); ++i) host[i] = pair[i % 2];
        if (cudaMemcpy(pattern.buffer, host.data(), size, cudaMemcpyHostToDevice) != cudaSuccess) return -1;
        pattern.written = true;
    }
    std::vector<std::pair<char*, size_t>> held;
    for (int i = 0; i < 2 * blocks; ++i) {
        void* block = nullptr;
        const size_t wanted = i < blocks ? size : LEAST;
        if (cudaMalloc(&block, wanted) != cudaSuccess) return -1;
        if (cudaMemcpy(block, pattern.buffer, wanted, cudaMemcpyDeviceToDevice) != cudaSuccess) return -1;
        held.emplace_back(static_cast<char*>(block), wanted);
    }
    std::sort(held.begin(), held.end());
    std::vector<faulty::Range>& ranges = faulty::filled();
    ranges.clear();
    for (auto [block, length] : held) {
        if (ranges.empty() || ranges.back().end != block) ranges.push_back({block, block});
        ranges.back().end = block + length;
        cudaFree(block);
    }
    if (!keep) {
        cudaFree(pattern.buffer);
        pattern = {};
    }
    return 0;
}

// One run with these switches. -1 only where a later run in this process cannot be trusted.
int faulty_run(void* model, const faulty::Switches* switches, faulty::Outcome* out) {
    faulty::Context& c = faulty::context();
    c.s = *switches;
    c.seen = {};
    *out = {};
#ifdef CUDA_HOST
    struct sigaction caught {}, before {};
    caught.sa_handler = [](int) { siglongjmp(faulty::rescue(), 1); };
    sigaction(SIGSEGV, &caught, &before);
    if (sigsetjmp(faulty::rescue(), 1)) {
        out->status = 2;
    } else
#endif
        try {
            static_cast<faulty::Model*>(model)->forward(*out);
        } catch (const faulty::Reported& reported) {
            out->status = 1;
            error = reported.what();
        } catch (const faulty::Illegal&) {
            out->status = 2;
        } catch (const std::exception& other) {
            out->status = 3;
            error = other.what();
        }
#ifdef CUDA_HOST
    sigaction(SIGSEGV, &before, nullptr);
#endif
    out->failed_calls = c.seen.failed_calls;
    out->first_error = c.seen.first_error;
    out->traces = c.seen.traces;
    out->strays = c.seen.strays;
    out->traced_bytes = c.seen.traced_bytes;
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : -1;
}

// The first `count` floats of memory just given out, before anybody wrote to it.
int faulty_fresh(float* to, size_t count) {
    float* block = nullptr;
    if (cudaMalloc(&block, count * sizeof(float)) != cudaSuccess) return -1;
    const int failed = cudaMemcpy(to, block, count * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess;
    cudaFree(block);
    return failed;
}

}
