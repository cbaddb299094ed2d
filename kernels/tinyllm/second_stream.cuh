// A second stream beside the one that launches go to, for work whose results are needed later only.
#pragma once
#include "launch.cuh"
#include "tensor.cuh"

namespace tinyllm {

class Event {
   public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(cudaStream_t stream = nullptr) { check(cudaEventRecord(event_, stream), "marking a place in a stream"); }
    void synchronize() { check(cudaEventSynchronize(event_), "waiting for a copy"); }
    // What is launched in `stream` from here on runs after what was recorded; nothing is waited for that never was.
    void before(cudaStream_t stream) { check(cudaStreamWaitEvent(stream, event_, 0), "ordering two streams"); }

    long turn = 0;  // between which two joins of a SecondStream it was recorded last

   private:
    cudaEvent_t event_ = nullptr;
};

class SecondStream {
   public:
    explicit SecondStream(bool on) {
        if (on) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~SecondStream() {
        if (stream_) cudaStreamDestroy(stream_);
    }
    SecondStream(const SecondStream&) = delete;
    SecondStream& operator=(const SecondStream&) = delete;
    cudaStream_t stream() const { return stream_; }

    // Launches `work` beside what follows and after all that is before it; `done` is when it has ended.
    template <class Work>
    void run(Event& done, Work work) {
        if (!stream_) return work();
        before_.record(current());
        before_.before(stream_);
        const Within within(stream_);
        work();
        done.record(stream_);
        done.turn = turn_;
    }
    // What follows runs after `done`. What was done before the last join is not waited for: it may belong to another graph.
    void wait(Event& done) {
        if (stream_ && done.turn == turn_) done.before(current());
    }
    // What follows runs after everything.
    void join() {
        if (!stream_) return;
        all_.record(stream_);
        all_.before(current());
        ++turn_;
    }

   private:
    cudaStream_t stream_ = nullptr;
    Event before_, all_;
    long turn_ = 1;
};

}  // namespace tinyllm
