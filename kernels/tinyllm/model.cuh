// The TinyLLM: bytes in, pre-norm transformer layers, logits out; forward, backward, AdamW. Everything is float32.
//
// Parameters lie in one tensor, so that one launch of AdamW takes them all; so do their gradients.
#pragma once
#include <map>

#include "second_stream.cuh"
#include "layout.cuh"
#include "matmul.cuh"
#include "attention.cuh"
#include "recorded.cuh"

namespace tinyllm {

class TinyLLM {
   public:
    // With cuBLAS, `overlap` lets the gradients of parameters be computed beside those of activations, in a second stream.
    TinyLLM(const Config& config, Engine engine, bool tf32, bool overlap)
        : c(config),
          layout(config),
          second_stream(overlap && engine == Engine::Cublas),
          matmul(engine, tf32, second_stream.stream(), records(engine)),
          recorded_forward(records(engine)),
          recorded_score(records(engine)),
          recorded_backward(records(engine)) {
        const size_t rows = size_t(c.sequences) * c.context, d = c.width, square = size_t(c.context) * c.context;
        for (auto [tensor, name] : {std::pair{&w, "parameters"}, {&g, "gradients"}, {&m, "first moments"}, {&v, "second moments"}}) {
            *tensor = Tensor(name, {layout.count});
            tensor->zero();
        }
        tokens = {"tokens", {rows}};
        targets = {"targets", {rows}};
        by_token = {"rows by token", {size_t(c.vocabulary) + 1 + rows}};
        layers.resize(size_t(c.layers));
        make("x0", x0, {rows, d});
        for (int i = 0; i < c.layers; ++i) {
            Layer& l = layers[size_t(i)];
            const std::string at = "L" + std::to_string(i) + ".";
            make(at + "ln1", l.ln1, {rows, d});
            make(at + "heads", l.heads, {3 * rows, d});
            make(at + "p", l.p, {size_t(c.sequences) * c.heads, square});
            make(at + "mixed", l.mixed, {rows, d});
            make(at + "attention", l.attention, {rows, d});
            make(at + "x1", l.x1, {rows, d});
            make(at + "ln2", l.ln2, {rows, d});
            make(at + "up", l.up, {rows, size_t(c.hidden())});
            make(at + "gelu", l.gelu, {rows, size_t(c.hidden())});
            make(at + "out", l.out, {rows, d});
            for (auto [tensor, name] : {std::pair{&l.mean1, "mean1"}, {&l.rstd1, "rstd1"}, {&l.mean2, "mean2"}, {&l.rstd2, "rstd2"}})
                *tensor = Tensor(at + name, {rows});
        }
        make("lnf", lnf, {rows, d});
        make("logits", logits, {rows, size_t(c.vocabulary)});
        make("losses", losses, {rows});
        make("loss", loss, {1});
        for (auto [tensor, width] : {std::pair{&mean, size_t(1)}, {&rstd, size_t(1)}, {&dlogits, size_t(c.vocabulary)}, {&dx, d}, {&dln, d}, {&dattention, d},
                                     {&wide, 3 * d}, {&heads, 3 * d}, {&dup, size_t(c.hidden())}, {&dgelu, size_t(c.hidden())}})
            *tensor = Tensor("scratch", {rows, width});
        dp = Tensor("scratch", {size_t(c.sequences) * c.heads, square});
        parts = Tensor("scratch", {size_t(CHUNKS), layout.count - layout.vectors});
    }

    ~TinyLLM() { cudaDeviceSynchronize(); }
    TinyLLM(const TinyLLM&) = delete;
    TinyLLM& operator=(const TinyLLM&) = delete;

    const std::vector<Slice>& slices() const { return layout.slices; }
    const std::map<std::string, Tensor*>& steps() const { return steps_; }
    size_t count() const { return layout.count; }
    Tensor& parameters() { return w; }
    Tensor& gradients() { return g; }

    // Logits of `sequences` sequences of `context` tokens each; both at most what the model was made for.
    void forward(const int* from, int sequences, int context) {
        begin(from, tokens, sequences, context);
        sort_rows();
        recorded_forward.run({sequences_, context_}, [&] { launch_forward(); });
    }

    // Cross-entropy of the last forward's logits, and its gradient.
    void score(const int* wanted) {
        begin(wanted, targets, sequences_, context_);
        recorded_score.run({sequences_, context_}, [&] { launch_score(); });
    }

    // Every parameter's gradient, after forward and score.
    void backward() {
        recorded_backward.run({sequences_, context_}, [&] { launch_backward(); });
    }

    void step(float rate, float beta1, float beta2, float epsilon, float decay) {
        ++steps_taken;
        const float correct1 = 1.0f - std::pow(beta1, float(steps_taken)), correct2 = 1.0f - std::pow(beta2, float(steps_taken));
        LAUNCH(adamw, cover(layout.count), THREADS, w.data(), g.data(), m.data(), v.data(), layout.count, layout.decayed, rate, beta1, beta2, epsilon, decay, correct1, correct2);
        launched("step");
    }

    float last_loss() {
        loss.d2h();
        return loss.host()[0];
    }
    int rows() const { return rows_; }

   private:
    // Whether work is launches alone: the host's products wait for copies, and the host runtime has no graphs.
    static bool records(Engine engine) {
#ifdef CUDA_HOST
        return false;
#else
        return engine != Engine::Host;
#endif
    }

    struct Layer {
        Tensor ln1, mean1, rstd1, heads, p, mixed, attention, x1, ln2, mean2, rstd2, up, gelu, out;
    };

    void launch_forward() {
        LAUNCH(embed, cover(n(c.width)), THREADS, tokens.data(), at("table"), at("positions"), x0.data(), n(c.width), context_, c.width);
        const float* x = x0.data();
        for (int i = 0; i < c.layers; ++i) {
            Layer& l = layers[size_t(i)];
            const std::string p = "L" + std::to_string(i) + ".";
            if (i == 0) norm(x, p + "ln1", l.ln1, l.mean1, l.rstd1);
            matmul(l.ln1.data(), false, at(p + "qkv.w"), false, wide.data(), rows_, 3 * c.width, c.width);
            split(wide.data(), at(p + "qkv.b"), l.heads.data(), 3);
            matmul(q(l.heads), false, k(l.heads), true, l.p.data(), context_, context_, c.columns(), 0.0f, sequences_ * c.heads);
            LAUNCH_BARRIER(causal_softmax, dim3(unsigned(rows_ * c.heads)), LANES, l.p.data(), context_, scale());
            matmul(l.p.data(), false, val(l.heads), false, l.mixed.data(), context_, c.columns(), context_, 0.0f, sequences_ * c.heads);
            join(l.mixed.data(), l.attention.data(), 1);
            matmul(l.attention.data(), false, at(p + "o.w"), false, l.x1.data(), rows_, c.width, c.width);
            norm(l.x1.data(), p + "ln2", l.ln2, l.mean2, l.rstd2, x, at(p + "o.b"), l.x1.data());
            matmul(l.ln2.data(), false, at(p + "up.w"), false, l.up.data(), rows_, c.hidden(), c.width);
            LAUNCH(bias_gelu<4>, cover(n(c.width)), THREADS, l.up.data(), at(p + "up.b"), l.gelu.data(), n(c.hidden()), c.hidden());
            matmul(l.gelu.data(), false, at(p + "down.w"), false, l.out.data(), rows_, c.width, c.hidden());
            const bool last = i + 1 == c.layers;  // the norm that reads this layer's result adds it up
            Layer& next = layers[size_t(last ? i : i + 1)];
            norm(l.out.data(), last ? "lnf" : "L" + std::to_string(i + 1) + ".ln1", last ? lnf : next.ln1, last ? mean : next.mean1,
                 last ? rstd : next.rstd1, l.x1.data(), at(p + "down.b"), l.out.data());
            x = l.out.data();
        }
        if (c.layers == 0) norm(x, "lnf", lnf, mean, rstd);
        matmul(lnf.data(), false, at("head.w"), false, logits.data(), rows_, c.vocabulary, c.width);
        LAUNCH(add_bias, cover(n(c.vocabulary)), THREADS, logits.data(), at("head.b"), n(c.vocabulary), c.vocabulary);
        launched("forward");
    }

    void launch_score() {
        LAUNCH_BARRIER(cross_entropy, dim3(unsigned(rows_)), LANES, logits.data(), targets.data(), losses.data(), dlogits.data(), c.vocabulary, 1.0f / float(rows_));
        LAUNCH_BARRIER(mean_of, 1, LANES, losses.data(), loss.data(), rows_);
        launched("score");
    }

    // What a gradient of parameters still reads is not written over: each `wait` says whose turn it was.
    void launch_backward() {
        if (context_ < c.context) g.zero(current());  // positions that this batch does not have
        const int d = c.width, big = c.hidden();
        dense_backward(lnf, dlogits.data(), "head", dln, d, c.vocabulary, read.head);
        dx.zero(current());
        norm_backward(c.layers ? layers.back().out : x0, "lnf", mean, rstd);
        for (int i = c.layers; i-- > 0;) {
            Layer& l = layers[size_t(i)];
            const std::string p = "L" + std::to_string(i) + ".";
            dense_backward(l.gelu, dx.data(), p + "down", dgelu, big, d, read.down);
            second_stream.wait(read.up);  // dup, by the layer above
            LAUNCH(gelu_backward<4>, cover(n(d)), THREADS, l.up.data(), dgelu.data(), dup.data(), n(big));
            second_stream.wait(read.norm);  // dln
            dense_backward(l.ln2, dup.data(), p + "up", dln, d, big, read.up);
            second_stream.wait(read.down);  // dx
            norm_backward(l.x1, p + "ln2", l.mean2, l.rstd2);
            dense_backward(l.attention, dx.data(), p + "o", dattention, d, d, read.o);
            Tensor& dmixed = dgelu;
            split(dattention.data(), nullptr, dmixed.data(), 1);
            const int batch = sequences_ * c.heads, t = context_, e = c.columns();
            matmul(l.p.data(), true, dmixed.data(), false, val(heads), t, e, t, 0.0f, batch);
            matmul(dmixed.data(), false, val(l.heads), true, dp.data(), t, t, e, 0.0f, batch);
            LAUNCH_BARRIER(softmax_backward, dim3(unsigned(rows_ * c.heads)), LANES, l.p.data(), dp.data(), context_, scale());
            matmul(dp.data(), false, k(l.heads), false, q(heads), t, e, t, 0.0f, batch);
            matmul(dp.data(), true, q(l.heads), false, k(heads), t, e, t, 0.0f, batch);
            second_stream.wait(read.qkv);  // wide, by the layer above
            join(heads.data(), wide.data(), 3);
            second_stream.wait(read.norm);  // dln
            dense_backward(l.ln1, wide.data(), p + "qkv", dln, d, 3 * d, read.qkv);
            second_stream.wait(read.o);  // dx
            norm_backward(i ? layers[size_t(i - 1)].out : x0, p + "ln1", l.mean1, l.rstd1);
        }
        const dim3 grid(unsigned((d + COLUMNS - 1) / COLUMNS), unsigned(c.vocabulary));
        const int *first = by_token.data(), *order = first + c.vocabulary + 1;
        LAUNCH_BARRIER(embed_backward, grid, dim3(COLUMNS, ROW_LANES), first, order, dx.data(), gradient("table"), d);
        const size_t places = size_t(context_) * d;
        LAUNCH(position_backward, cover(places), THREADS, dx.data(), gradient("positions"), places, sequences_);
        second_stream.join();
        add_vectors();
        launched("backward");
    }

    void make(const std::string& name, Tensor& tensor, Tensor::Shape shape) {
        tensor = Tensor(name, std::move(shape));
        steps_[name] = &tensor;
    }
    void begin(const int* from, BasicTensor<int>& to, int sequences, int context) {
        if (sequences < 1 || sequences > c.sequences || context < 1 || context > c.context)
            throw std::invalid_argument(to.name() + ": expected 1 to " + std::to_string(c.sequences) + " sequences of 1 to " +
                                        std::to_string(c.context) + ", got " + std::to_string(sequences) + " of " +
                                        std::to_string(context));
        sequences_ = sequences;
        context_ = context;
        rows_ = sequences * context;
        for (int i = 0; i < rows_; ++i)
            if (from[i] < 0 || from[i] >= c.vocabulary)
                throw std::invalid_argument(to.name() + ": expected 0 to " + std::to_string(c.vocabulary - 1) + ", got " +
                                            std::to_string(from[i]) + " at " + std::to_string(i));
        sent.synchronize();
        std::copy(from, from + rows_, to.host().begin());
        send(to);
    }
    // h2d that does not wait; `sent` tells when the host side may change again.
    void send(BasicTensor<int>& to) {
        to.h2d(false);
        sent.record();
    }
    // by_token: where each token's rows begin, and the rows in the order of their tokens, for the table's gradient.
    void sort_rows() {
        auto& to = by_token.host();
        int *first = to.data(), *order = first + c.vocabulary + 1;
        std::fill(first, order, 0);
        for (int t = 0; t < rows_; ++t) ++first[tokens.host()[size_t(t)] + 1];
        std::partial_sum(first, order, first);
        std::vector<int> next(first, order);
        for (int t = 0; t < rows_; ++t) order[next[size_t(tokens.host()[size_t(t)])]++] = t;
        send(by_token);
    }
    static void launched(const char* what) { check(cudaGetLastError(), std::string("a kernel of ") + what); }

    size_t n(int width) const { return size_t(rows_) * width; }
    float scale() const { return 1.0f / std::sqrt(float(c.columns())); }
    const float* at(const std::string& name) const { return w.data() + layout.at(name); }
    float* gradient(const std::string& name) { return g.data() + layout.at(name); }
    float* q(Tensor& heads) const { return heads.data(); }
    float* k(Tensor& heads) const { return heads.data() + n(c.width); }
    float* val(Tensor& heads) const { return heads.data() + 2 * n(c.width); }

    // Whether rows of so many numbers may be read four at a time: every buffer then begins at a multiple of four, the
    // parameters of each name too, since all but the last are multiples of the width.
    static bool packs(int row) { return row % 4 == 0; }
    void split(const float* from, const float* bias, float* to, int parts) {
        if (packs(c.columns()))
            LAUNCH(split_heads<4>, unsigned(rows_), threads(parts), from, bias, to, context_, parts, c.heads, c.columns());
        else
            LAUNCH(split_heads<1>, unsigned(rows_), THREADS, from, bias, to, context_, parts, c.heads, c.columns());
    }
    void join(const float* from, float* to, int parts) {
        if (packs(c.columns()))
            LAUNCH(join_heads<4>, unsigned(rows_), threads(parts), from, to, context_, parts, c.heads, c.columns());
        else
            LAUNCH(join_heads<1>, unsigned(rows_), THREADS, from, to, context_, parts, c.heads, c.columns());
    }
    // For four of a token's numbers each.
    int threads(int parts) const { return std::min(THREADS, (parts * c.width / 4 + 31) / 32 * 32); }

    // Of x, or of sum = x + residual + bias.
    void norm(const float* x, const std::string& name, Tensor& y, Tensor& mean, Tensor& rstd, const float* residual = nullptr,
              const float* bias = nullptr, float* sum = nullptr) {
        if (packs(c.width))
            LAUNCH_BARRIER(layernorm<4>, unsigned(rows_), LANES, x, residual, bias, sum, at(name + ".gain"), at(name + ".shift"), y.data(),
                           mean.data(), rstd.data(), c.width, c.epsilon);
        else
            LAUNCH_BARRIER(layernorm<1>, unsigned(rows_), LANES, x, residual, bias, sum, at(name + ".gain"), at(name + ".shift"), y.data(),
                           mean.data(), rstd.data(), c.width, c.epsilon);
    }
    // dx += what dln gives through the norm of x; gain's and shift's gradients.
    void norm_backward(Tensor& x, const std::string& name, Tensor& mean, Tensor& rstd) {
        second_stream.run(read.norm, [&] { column_sums(dln.data(), name + ".shift", c.width, x.data(), mean.data(), rstd.data(), name + ".gain"); });
        if (packs(c.width))
            LAUNCH_BARRIER(layernorm_backward<4>, unsigned(rows_), LANES, x.data(), at(name + ".gain"), mean.data(), rstd.data(), dln.data(), dx.data(), c.width);
        else
            LAUNCH_BARRIER(layernorm_backward<1>, unsigned(rows_), LANES, x.data(), at(name + ".gain"), mean.data(), rstd.data(), dln.data(), dx.data(), c.width);
    }
    // Of y = x W + b: W's and b's gradients, in the second stream, which have read dy at `done`; and din = dy W^T.
    void dense_backward(Tensor& x, const float* dy, const std::string& name, Tensor& din, int in, int out, Event& done) {
        second_stream.run(done, [&] {
            matmul(x.data(), true, dy, false, gradient(name + ".w"), in, out, rows_);
            column_sums(dy, name + ".b", out);
        });
        matmul(dy, false, at(name + ".w"), true, din.data(), rows_, in, out);
    }
    // Parts of a vector's gradient, and of a norm's gain; `add_vectors` adds all parts of all vectors in the end.
    void column_sums(const float* a, const std::string& name, int width, const float* x = nullptr, const float* mean = nullptr,
                     const float* rstd = nullptr, const std::string& gain = "") {
        const dim3 grid(unsigned((width + COLUMNS - 1) / COLUMNS), unsigned(chunks()));
        LAUNCH_BARRIER(column_parts, grid, dim3(COLUMNS, ROW_LANES), a, x, mean, rstd, part(name), x ? part(gain) : nullptr,
                       layout.count - layout.vectors, rows_, width, (rows_ + chunks() - 1) / chunks());
    }
    void add_vectors() {
        const size_t width = layout.count - layout.vectors;
        LAUNCH(add_parts, cover(width), THREADS, parts.data(), g.data() + layout.vectors, chunks(), width);
    }
    int chunks() const { return std::min(CHUNKS, (rows_ + 63) / 64); }
    float* part(const std::string& vector) { return parts.data() + layout.at(vector) - layout.vectors; }

    const Config c;
    const Layout layout;
    SecondStream second_stream;
    Matmul matmul;
    Recorded recorded_forward, recorded_score, recorded_backward;
    std::map<std::string, Tensor*> steps_;
    int sequences_ = 0, context_ = 0, rows_ = 0;
    long steps_taken = 0;
    Event sent;
    struct {
        Event head, down, up, o, qkv, norm;
    } read;
    BasicTensor<int> tokens, targets, by_token;
    Tensor w, g, m, v, x0, lnf, mean, rstd, logits, losses, loss;
    std::vector<Layer> layers;
    Tensor dlogits, dx, dln, dattention, wide, heads, dup, dgelu, dp, parts;
};

}  // namespace tinyllm
