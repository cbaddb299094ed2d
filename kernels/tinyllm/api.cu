// What Python calls, by ctypes. A function gives 0, or -1 after an error whose text is tinyllm_error().
#include "host_control.cuh"
#include "model.cuh"

using namespace tinyllm;

namespace {
thread_local std::string error, text;

template <class Run>
int guarded(Run run) {
    try {
        run();
        return 0;
    } catch (const std::exception& caught) {
        error = caught.what();
        return -1;
    }
}

// The tensor that the copies are measured on.
Tensor& copied(size_t count) {
    static Tensor t;
    if (t.count() != count) {
        t = Tensor("copied", {count});
        t.host();
        t.h2d();
    }
    return t;
}
}  // namespace

extern "C" {

const char* tinyllm_error() { return error.c_str(); }

void* tinyllm_new(int vocabulary, int context, int width, int layers, int heads, int sequences, int engine, int tf32,
                  int overlap) {
    void* made = nullptr;
    guarded([&] {
        Config config;
        config.vocabulary = vocabulary;
        config.context = context;
        config.width = width;
        config.layers = layers;
        config.heads = heads;
        config.sequences = sequences;
        made = new TinyLLM(config, Engine(engine), tf32 != 0, overlap != 0);
    });
    return made;
}
void tinyllm_delete(void* model) { delete static_cast<TinyLLM*>(model); }

// Lines "name rows columns offset" of the parameters.
const char* tinyllm_layout(void* model) {
    text.clear();
    for (const Slice& s : static_cast<TinyLLM*>(model)->slices())
        text += s.name + " " + std::to_string(s.rows) + " " + std::to_string(s.columns) + " " + std::to_string(s.offset) + "\n";
    return text.c_str();
}
size_t tinyllm_count(void* model) { return static_cast<TinyLLM*>(model)->count(); }

int tinyllm_write(void* model, const float* from) {
    return guarded([&] {
        Tensor& w = static_cast<TinyLLM*>(model)->parameters();
        std::copy(from, from + w.count(), w.host().begin());
        w.h2d();
    });
}
// "parameters", "gradients" or a step, its first `count` elements.
int tinyllm_read(void* model, const char* name, float* to, size_t count) {
    return guarded([&] {
        TinyLLM& m = *static_cast<TinyLLM*>(model);
        const std::string which = name;
        Tensor* t = which == "parameters" ? &m.parameters() : which == "gradients" ? &m.gradients() : m.steps().at(which);
        if (count > t->count()) throw std::invalid_argument(which + ": holds " + std::to_string(t->count()) + " elements, not " + std::to_string(count));
        check(cudaMemcpy(to, t->data(), count * sizeof(float), cudaMemcpyDeviceToHost), "reading " + which);
    });
}

int tinyllm_forward(void* model, const int* tokens, int sequences, int context) {
    return guarded([&] { static_cast<TinyLLM*>(model)->forward(tokens, sequences, context); });
}
// The mean loss, after a forward.
int tinyllm_score(void* model, const int* targets, float* loss) {
    return guarded([&] {
        TinyLLM& m = *static_cast<TinyLLM*>(model);
        m.score(targets);
        if (loss) *loss = m.last_loss();
    });
}
int tinyllm_backward(void* model) {
    return guarded([&] { static_cast<TinyLLM*>(model)->backward(); });
}
int tinyllm_step(void* model, float rate, float beta1, float beta2, float epsilon, float decay) {
    return guarded([&] { static_cast<TinyLLM*>(model)->step(rate, beta1, beta2, epsilon, decay); });
}
int tinyllm_synchronize() {
    return guarded([] { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
}

// The Tensor by itself, for its tests: each scenario says what it found, "ok" if all is right.
const char* tinyllm_tensor_scenario(const char* name);

// One copy of a pinned tensor, h2d or d2h. The tensor stays, so that a second call copies and does no more.
int tinyllm_copy(size_t count, int to_device) {
    return guarded([&] {
        Tensor& t = copied(count);
        to_device ? t.h2d() : t.d2h();
    });
}
// What the same tensor holds after `from` went to the device, the host side was cleared, and all came back.
int tinyllm_round_trip(size_t count, const float* from, float* to) {
    return guarded([&] {
        Tensor& t = copied(count);
        std::copy(from, from + count, t.host().begin());
        t.h2d();
        std::fill(t.host().begin(), t.host().end(), 0.0f);
        t.d2h();
        std::copy(t.host().begin(), t.host().end(), to);
    });
}

#ifndef CUDA_HOST
int tinyllm_reset() { return int(cudaDeviceReset()); }  // so that a leak checker sees the end
#endif

}

namespace {
void expect(bool right, const char* what) {
    if (!right) throw std::runtime_error(what);
}
Tensor filled(size_t count, float first) {
    Tensor t("t", {count});
    for (size_t i = 0; i < count; ++i) t.host()[i] = first + float(i);
    t.h2d();
    return t;
}
bool holds(Tensor& t, size_t count, float first) {
    t.d2h();
    if (t.count() != count || t.host().size() != count) return false;
    for (size_t i = 0; i < count; ++i)
        if (t.host()[i] != first + float(i)) return false;
    return true;
}
void scenario(const std::string& name) {
    if (name == "copy") {
        Tensor a = filled(600, 1.0f), b = a;
        expect(a.data() != b.data(), "the copy shares the device buffer");
        expect(holds(b, 600, 1.0f) && holds(a, 600, 1.0f), "the copy or its source has other values");
    } else if (name == "assign") {
        Tensor a = filled(600, 1.0f), b = filled(7, 5.0f);
        b = a;
        expect(holds(b, 600, 1.0f) && holds(a, 600, 1.0f), "assignment between shapes went wrong");
    } else if (name == "move") {
        Tensor a = filled(600, 1.0f);
        const float* where = a.data();
        Tensor b = std::move(a);
        expect(b.data() == where && !a.data() && a.count() == 0, "the move copied, or left something behind");
        a = filled(3, 2.0f);
        b = std::move(a);
        expect(holds(b, 3, 2.0f), "move assignment lost the values");
    } else if (name == "self") {
        Tensor a = filled(600, 1.0f);
        Tensor& same = a;
        a = same;
        expect(holds(a, 600, 1.0f), "self-assignment lost the values");
    } else if (name == "return by value") {
        Tensor a = [] { Tensor inner = filled(600, 1.0f); return inner; }();
        expect(holds(a, 600, 1.0f), "returning by value lost the values");
    } else if (name == "empty") {
        Tensor a, b = a, c("none", {0, 5});
        a = b;
        c.h2d();
        c.d2h();
        expect(!a.data() && !c.data() && c.count() == 0, "an empty tensor has a buffer");
    } else if (name == "round trip") {
        Tensor a = filled(513, -3.0f);
        for (float& x : a.host()) x = 0.0f;
        expect(holds(a, 513, -3.0f), "d2h after h2d is not what was sent");
    } else if (name == "mismatched host") {
        Tensor a("a", {4});
        a.h2d();  // nothing on the host yet
    } else if (name == "nothing on the device") {
        Tensor a = filled(4, 0.0f), b = std::move(a);
        a = Tensor();
        Tensor none("none", {0});
        none.d2h();
        BasicTensor<float> c;
        c.d2h();
        expect(c.host().empty(), "d2h of an empty tensor made a host side");
    } else if (name == "too large") {
        Tensor a("giant", {size_t(1) << 45});
    } else if (name == "survives") {  // an allocation that fails leaves what was there
        Tensor a = filled(600, 1.0f);
        try {
            a = Tensor("giant", {size_t(1) << 45});
            expect(false, "an allocation of 128 TiB went well");
        } catch (const std::runtime_error&) {
        }
        expect(holds(a, 600, 1.0f), "a failed allocation spoiled the target");
    } else if (name == "thousand") {
        for (int i = 0; i < 1000; ++i) {
            Tensor a = filled(100, float(i)), b = a, c = std::move(a);
            a = b;
            b = c;
            expect(holds(b, 100, float(i)), "values lost");
        }
    } else {
        throw std::invalid_argument("scenario: " + name + " is none");
    }
}
}  // namespace

const char* tinyllm_tensor_scenario(const char* name) {
    text = "ok";
    if (guarded([&] { scenario(name); })) text = error;
    return text.c_str();
}
