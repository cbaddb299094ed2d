// Where each parameter lies in the one buffer that holds them all: matrices, which alone decay, then the rest.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace tinyllm {

struct Config {
    int vocabulary = 256, context = 128, width = 256, layers = 3, heads = 4, sequences = 32;
    float epsilon = 1e-5f;
    int hidden() const { return 4 * width; }
    int columns() const { return width / heads; }
};

struct Slice {
    std::string name;
    int rows, columns;
    size_t offset;
};

struct Layout {
    explicit Layout(const Config& c) {
        const int d = c.width, h = c.hidden();
        const auto add = [this](std::string name, int rows, int columns) {
            places[name] = slices.size();
            slices.push_back({std::move(name), rows, columns, count});
            count += size_t(rows) * columns;
        };
        std::vector<std::string> at;
        for (int i = 0; i < c.layers; ++i) at.push_back("L" + std::to_string(i) + ".");
        for (auto& p : at) {
            add(p + "qkv.w", d, 3 * d);
            add(p + "o.w", d, d);
            add(p + "up.w", d, h);
            add(p + "down.w", h, d);
        }
        add("head.w", d, c.vocabulary);
        decayed = count;
        add("table", c.vocabulary, d);
        add("positions", c.context, d);
        vectors = count;
        for (auto& p : at)
            for (auto [name, size] : {std::pair{"ln1.gain", d}, {"ln1.shift", d}, {"qkv.b", 3 * d}, {"o.b", d}, {"ln2.gain", d}, {"ln2.shift", d}, {"up.b", h}, {"down.b", d}})
                add(p + name, 1, size);
        add("lnf.gain", 1, d);
        add("lnf.shift", 1, d);
        add("head.b", 1, c.vocabulary);
    }
    // Where a parameter begins.
    size_t at(const std::string& name) const { return slices[places.at(name)].offset; }

    std::vector<Slice> slices;
    std::map<std::string, size_t> places;
    size_t count = 0, decayed = 0, vectors = 0;  // of all; the first that decay; where biases, gains and shifts begin
};

}  // namespace tinyllm
