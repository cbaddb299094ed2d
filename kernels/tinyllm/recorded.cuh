// Launches that are the same each time, as a CUDA graph: a launch costs the host microseconds, and a step has over a hundred.
#pragma once
#include <map>

#include "launch.cuh"
#include "tensor.cuh"

namespace tinyllm {

class Recorded {
   public:
    // Off, work is done as it comes: on a host runtime, and where work is more than launches.
    explicit Recorded(bool on) : on_(on) {}
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;

#ifdef CUDA_HOST
    template <class Work>
    void run(std::pair<int, int>, Work work) {
        work();
    }
#else
    ~Recorded() {
        for (auto& [key, graph] : graphs_)
            if (graph) cudaGraphExecDestroy(graph);
        if (stream_) cudaStreamDestroy(stream_);
    }
    // Does `work`, which depends on `key` alone. It is recorded when a key comes for the second time: many come once, and
    // the first time lets libraries allocate what they keep.
    template <class Work>
    void run(std::pair<int, int> key, Work work) {
        if (!on_) return work();
        const auto [place, isnew] = graphs_.try_emplace(key, nullptr);
        if (isnew) return work();
        if (!place->second) place->second = record(work);
        check(cudaGraphLaunch(place->second, current()), "launching a graph");
    }

   private:
    template <class Work>
    cudaGraphExec_t record(Work work) {
        if (!stream_) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a graph");
        cudaGraph_t graph = nullptr;
        try {
            const Within within(stream_);
            work();
        } catch (...) {
            cudaStreamEndCapture(stream_, &graph);
            if (graph) cudaGraphDestroy(graph);
            throw;
        }
        check(cudaStreamEndCapture(stream_, &graph), "recording a graph");
        cudaGraphExec_t made = nullptr;
        const cudaError_t error = cudaGraphInstantiate(&made, graph, 0);
        cudaGraphDestroy(graph);
        check(error, "cudaGraphInstantiate");
        return made;
    }

    std::map<std::pair<int, int>, cudaGraphExec_t> graphs_;
    cudaStream_t stream_ = nullptr;
#endif

   private:
    bool on_;
};

}  // namespace tinyllm
