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

constexpr int LAYERS = 3, SHOWN = 8;

struct Outcome {
    int status;  // 0 ran to its end, 1 a checked call reported, 2 a kernel was given no memory, 3 another exception
    int failed_calls, failed_uploads, failed_h2d, first_error, traces;  // uploads: of copies, and of h2d
    long traced_bytes;
    int ff_failed, x_failed;         // the debug print's own copy failed
    int ff_right, x_right;           // how many elements of the first layer's ff_out, and of the last x, are within bound
    int host_size, host_right, host_zero;  // of the first ff_out's host vector, when the layer is done: elements, right ones, zeros
    int x_zero, x_nan;               // how many of x's are 0; NaN
    int logits_read, logits_right, logits_zero, logits_nan, predicted;
    // Prints that the report did not make. Sizes are of host vectors: of the embedding where it is copied, of the first
    // ff_out before its download, of x after the loop, of the logits before theirs.
    int embedded_host, ff_host, x_host, logits_host;
    int logits_made, logits_there;   // how many logits are right on the device before they are returned; whether there is a buffer after
    float ff_first[3], x[2], logits_low, logits_high, loss;
    // The same prints by a program that copies as many numbers as the host vector holds: of the first ff_out before and
    // after its download, of x.
    float ff_before[3], ff_after[3], x_by_length[2];
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
          const float* allowed)
        : T(tokens), V(vocabulary), D(width), H(heads) {
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
        blank = constant(size_t(T) * d, 0.0f);
        Context& c = context();
        c.x_bytes = size_t(T) * d * sizeof(float);
        pair = constant(size_t(T) * d, 0.0f);
        for (size_t i = 0; i < pair.count(); ++i) pair.host()[i] = PAIR[i % 2];
        pair.h2d();
        c.pair = pair.data();
        const size_t rows = size_t(T), compared = rows * (2 * d + size_t(V));
        golden_.assign(golden, golden + compared);
        allowed_.assign(allowed, allowed + compared);
        for (auto [tensor, width] : {std::pair{&normal, d}, {&wide, 3 * d}, {&heads_, 3 * d}, {&p, size_t(H) * T}, {&mixed, d}, {&attention, d}, {&x1, d}, {&hidden, 4 * d}, {&active, 4 * d}, {&mean, size_t(1)}, {&rstd, size_t(1)}})
            *tensor = tinyllm::Tensor("scratch", {rows, width});
    }

    size_t largest() const { return sizeof(float) * size_t(T) * std::max(D, V); }  // bytes of the largest buffer under investigation

    // Weights and constants once more: a run whose buffers are too small may have written into them.
    void restore() {
        for (tinyllm::Tensor* t : {&table, &positions, &head, &ones, &zeros, &blank, &pair}) t->h2d();
        for (Layer& l : layers)
            for (tinyllm::Tensor* t : {&l.qkv, &l.o, &l.up, &l.down}) t->h2d();
        tokens_.h2d();
    }

    void layer(const Layer& l, const Tensor& in, Tensor& out) {
        using namespace tinyllm;
        const float* x = there(in.d_data);
        norm(x, normal);
        product(normal.data(), false, l.qkv.data(), false, wide.data(), T, 3 * D, D);
        if (context().s.outside == HeadsNotWritten) cudaMemset(heads_.data(), 0, heads_.bytes());
        else LAUNCH(split_heads<1>, unsigned(T), THREADS, wide.data(), static_cast<const float*>(nullptr), heads_.data(), T, 3, H, D / H);
        const float *q = heads_.data(), *k = q + T * D, *v = k + T * D;
        product(q, false, k, true, p.data(), T, T, D / H, 0.0f, H);
        LAUNCH_BARRIER(causal_softmax, unsigned(T * H), LANES, p.data(), T, 1.0f / std::sqrt(float(D / H)));
        product(p.data(), false, v, false, mixed.data(), T, D / H, T, 0.0f, H);
        LAUNCH(join_heads<1>, unsigned(T), THREADS, mixed.data(), attention.data(), T, 1, H, D / H);
        product(attention.data(), false, l.o.data(), false, x1.data(), T, D, D);
        LAUNCH(add_residual, cover(size_t(T) * D), THREADS, x1.data(), x, zeros.data(), size_t(T) * D, D);
        norm(x1.data(), normal);
        product(normal.data(), false, l.up.data(), false, hidden.data(), T, 4 * D, D);
        LAUNCH(bias_gelu<1>, cover(size_t(T) * 4 * D), THREADS, hidden.data(), zeros.data(), active.data(), size_t(T) * 4 * D, 4 * D);
        float* ff = there(out.d_data);
        product(active.data(), false, l.down.data(), false, ff, T, D, 4 * D);
        LAUNCH(add_residual, cover(size_t(T) * D), THREADS, ff, x1.data(), zeros.data(), size_t(T) * D, D);
        synchronise();
    }

    // A result that is returned with a copy: the callee's tensor is gone before the caller goes on.
    template <class Callee>
    static Tensor copied(Callee callee) {
        const Tensor inner = callee();
        return Tensor(inner);
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
        if (!s.no_other_d2h) embedded.d2h();
        o.embedded_host = int(embedded.h_data.size());
        auto x = std::make_shared<Tensor>(embedded);
        for (int i = 0; i < LAYERS; ++i) {
            if (s.way == Copied) {
                const Tensor layer_out = copied([&] { return by_value(i, *x, o); });
                assign(i, layer_out, *x);
            } else if (s.way == Elided) {
                const Tensor layer_out = by_value(i, *x, o);
                assign(i, layer_out, *x);
            } else if (s.way == OutParameter) {
                Tensor layer_out(x->rows, x->cols);
                layer(layers[i], *x, layer_out);
                finish(i, layer_out, o);
                assign(i, layer_out, *x);
            } else {
                auto layer_out = std::make_shared<Tensor>(x->rows, x->cols);
                layer(layers[i], *x, *layer_out);
                finish(i, *layer_out, o);
                if (i + 1 < LAYERS || s.outside != LastNotAssigned) x = layer_out;
            }
            x->h2d();
        }
        look(*x, o);
        if (s.way == OutParameter || s.way == Shared) {
            Tensor logits(T, V);
            project(*x, logits, o);
            check(logits, o);
        } else {
            Tensor logits;
            if (s.way == Copied) {
                const Tensor returned = copied([&] { return projected(*x, o); });
                logits = returned;
            } else {
                logits = projected(*x, o);
            }
            check(logits, o);
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
    void project(const Tensor& x, Tensor& logits, Outcome& o) {
        const Switches& s = context().s;
        norm(there(x.d_data), normal);
        const float* operand = s.outside == WrongOperand ? blank.data() : s.outside == NoFinalNorm ? x.d_data : normal.data();
        product(operand, false, head.data(), false, there(logits.d_data), T, V, D);
        synchronise();
        std::vector<float> made(size_t(T) * V);
        if (cudaMemcpy(made.data(), logits.d_data, made.size() * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess)
            o.logits_made = right(made, 2 * size_t(T) * D);
        cudaGetLastError();
        if (!s.no_other_d2h) logits.d2h();
    }
    Tensor projected(const Tensor& x, Outcome& o) {
        Tensor logits(T, V);
        project(x, logits, o);
        return logits;
    }
    // By cuBLAS, by our kernel, or on the host.
    void product(const float* a, bool ta, const float* b, bool tb, float* c, int M, int N, int K, float beta = 0.0f, int batch = 1) {
        const Switches& s = context().s;
        if (s.outside == CublasWritesNothing && s.engine == int(tinyllm::Engine::Cublas))
            call(cudaMemset(c, 0, size_t(M) * N * batch * sizeof(float)));  // what that memory held before
        else matmul[s.engine](a, ta, b, tb, c, M, N, K, beta, batch);
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
    // What a host buffer holds to which nothing was written.
    static std::vector<float> not_written(size_t count) {
        const int fresh = context().s.fresh;
        std::vector<float> buffer(count, fresh == Zeros ? 0.0f : NAN);
        if (fresh == Numbers)
            for (size_t i = 0; i < count; ++i) buffer[i] = PAIR[i % 2];
        return buffer;
    }
    // A debug print that trusts the host vector's length: a copy that is too long is refused, an empty one copies nothing.
    static void shown_by_length(const Tensor& t, float* first, int count) {
        std::vector<float> seen = not_written(std::max(t.h_data.size(), size_t(SHOWN)));
        if (cudaMemcpy(seen.data(), t.d_data, t.h_data.size() * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess) cudaGetLastError();
        std::copy(seen.begin(), seen.begin() + count, first);
    }
    // A debug print: copies into a buffer of its own, to which nothing was written, and does not look at what the copy returns.
    bool shown(const Tensor& t, std::vector<float>& seen) {
        seen = not_written(size_t(T) * D);
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
        const Switches& s = context().s;
        const bool failed = shown(ff_out, last);
        if (i == 0) {
            std::copy(last.begin(), last.begin() + 3, o.ff_first);
            o.ff_failed = failed;
            o.ff_right = right(last, 0);
            o.ff_host = int(ff_out.h_data.size());
            shown_by_length(ff_out, o.ff_before, 3);
        }
        if (s.outside == DebugUpload) ff_out.h2d();
        if (!s.no_layer_d2h) ff_out.d2h();
        if (i == 0) {
            shown_by_length(ff_out, o.ff_after, 3);
            const std::vector<float>& host = ff_out.h_data;
            o.host_size = int(host.size());
            o.host_right = right({host.begin(), host.begin() + long(std::min(host.size(), size_t(T) * D))}, 0);
            o.host_zero = int(std::count(host.begin(), host.end(), 0.0f));
        }
    }
    void assign(int i, const Tensor& layer_out, Tensor& x) {
        if (i + 1 < LAYERS || context().s.outside != LastNotAssigned) x = layer_out;
    }
    void look(const Tensor& x, Outcome& o) {
        std::vector<float> seen;
        o.x_host = int(x.h_data.size());
        o.x_failed = shown(x, seen);
        std::copy(seen.begin(), seen.begin() + 2, o.x);
        shown_by_length(x, o.x_by_length, 2);
        o.x_right = right(seen, seen.size());
        for (size_t i = 0; i < seen.size(); ++i) {
            o.x_zero += seen[i] == 0.0f;
            o.x_nan += std::isnan(seen[i]);
        }
    }
    // As the report's caller: download the logits, take the last token's likeliest, and the cross-entropy of token 1.
    void check(Tensor& logits, Outcome& o) {
        o.logits_host = int(logits.h_data.size());
        o.logits_there = logits.d_data != nullptr;
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
    tinyllm::Matmul matmul[3] = {tinyllm::Matmul{tinyllm::Engine::Cublas}, tinyllm::Matmul{tinyllm::Engine::Kernel}, tinyllm::Matmul{tinyllm::Engine::Host}};
    tinyllm::Tensor table, positions, head, ones, zeros, blank, pair, normal, wide, heads_, p, mixed, attention, x1, hidden, active, mean, rstd;
    tinyllm::BasicTensor<int> tokens_;
    Layer layers[LAYERS];
    std::vector<float> last, golden_, allowed_;
};

}  // namespace faulty

namespace {
thread_local std::string error;

}  // namespace

extern "C" {

const char* faulty_error() { return error.c_str(); }
size_t faulty_outcome_size() { return sizeof(faulty::Outcome); }

void* faulty_new(int tokens, int vocabulary, int width, int heads, const int* ids, const float* weights, const float* golden,
                 const float* allowed) {
    try {
        return new faulty::Model(tokens, vocabulary, width, heads, ids, weights, golden, allowed);
    } catch (const std::exception& caught) {
        error = caught.what();
        return nullptr;
    }
}
void faulty_delete(void* model) { delete static_cast<faulty::Model*>(model); }

// Fills the memory that a run will be given with one byte: blocks of `bytes` and of the least size, all held at a time, each
// given back. `keep`: a buffer of ours stays, without which the driver may take the whole page back, and clear it.
int faulty_fill(size_t bytes, int blocks, int byte, int keep) {
    static void* anchor = nullptr;
    constexpr size_t LEAST = 512;  // what cudaMalloc gives at least, and rounds up to
    const size_t size = (bytes + LEAST - 1) / LEAST * LEAST;
    if (!anchor && cudaMalloc(&anchor, size) != cudaSuccess) return -1;
    std::vector<void*> held;
    for (int i = 0; i < 2 * blocks; ++i) {
        void* block = nullptr;
        const size_t wanted = i < blocks ? size : LEAST;
        if (cudaMalloc(&block, wanted) != cudaSuccess) return -1;
        if (cudaMemset(block, byte, wanted) != cudaSuccess) return -1;
        held.push_back(block);
    }
    for (void* block : held) cudaFree(block);
    if (!keep) {
        cudaFree(anchor);
        anchor = nullptr;
    }
    return 0;
}

// One run with these switches. -1 only where a later run in this process cannot be trusted.
int faulty_run(void* model, const faulty::Switches* switches, faulty::Outcome* out) {
    auto& program = *static_cast<faulty::Model*>(model);
    faulty::Context& c = faulty::context();
    c.s = *switches;
    c.seen = {};
    c.to_report = false;
    *out = {};
#ifdef CUDA_HOST
    cuda_host::forget();  // as a new process: memory is zero until it is used
    struct sigaction caught {}, before {};
    caught.sa_handler = [](int) { siglongjmp(faulty::rescue(), 1); };
    sigaction(SIGSEGV, &caught, &before);
    if (sigsetjmp(faulty::rescue(), 1)) {
        out->status = 2;
    } else
#else
    if (c.s.fresh == faulty::AsLeft && faulty_fill(program.largest(), 12, 0, 1)) return -1;
#endif
        try {
            program.forward(*out);
            if (c.to_report && !c.s.unchecked) throw faulty::Reported("cudaFree");
        } catch (const faulty::Reported& reported) {
            out->status = 1;
            error = reported.what();
        } catch (const faulty::Illegal&) {
            out->status = 2;
        } catch (const std::exception& other) {
            out->status = 3;
            error = other.what();
        }
    for (void* buffer : c.held) cudaFree(buffer);  // what a shallow assignment leaves to nobody
    c.held.clear();
    cudaGetLastError();
#ifdef CUDA_HOST
    sigaction(SIGSEGV, &before, nullptr);
#else
    if (c.s.size_in_elements) program.restore();  // what was written beyond buffers may have hit a weight
#endif
    out->failed_calls = c.seen.failed_calls;
    out->failed_uploads = c.seen.failed_uploads;
    out->failed_h2d = c.seen.failed_h2d;
    out->first_error = c.seen.first_error;
    out->traces = c.seen.traces;
    out->traced_bytes = c.seen.traced_bytes;
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : -1;
}

// The lines under trial alone: known values go to the device, d2h, `known` over them on the device, h2d. `host` takes the first
// `room` of the host vector, whose length is the result; `back` what the device holds in the end, rows * cols each.
int faulty_round_trip(const faulty::Switches* switches, int rows, int cols, const float* values, const float* known, float* host,
                      size_t room, float* back) {
    faulty::context().s = *switches;
    faulty::Tensor t(rows, cols);
    const size_t bytes = size_t(rows) * cols * sizeof(float);
    if (cudaMemcpy(t.d_data, values, bytes, cudaMemcpyHostToDevice) != cudaSuccess) return -1;
    t.d2h();
    std::copy(t.h_data.begin(), t.h_data.begin() + long(std::min(room, t.h_data.size())), host);
    if (cudaMemcpy(t.d_data, known, bytes, cudaMemcpyHostToDevice) != cudaSuccess) return -1;
    t.h2d();
    if (cudaMemcpy(back, t.d_data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) return -1;
    return int(t.h_data.size());
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
