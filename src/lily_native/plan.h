// A Plan is data: the launches of one forward pass, recorded once and replayed by a device many times.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernel.h"

namespace lily {

// Launches of one stage are independent of each other; a stage needs the ones before it to be finished.
struct Plan {
    std::string name;
    std::vector<Launch> launches;  // in stage order
    uint32_t stage_count = 0;
    // Of each launch, those that must have ended before it; not those that one of these needs itself.
    std::vector<std::vector<uint32_t>> after;
};

// One launch of a plan as a plan of its own.
Plan single_launch(const Plan& plan, uint32_t index);

// The variants that plans launch, each once.
std::vector<Variant> variants_of(std::span<const Plan> plans);

// Records the launches of model.cpp: `run(k::rms_norm{...})`. Not for use by two threads at once.
class Recorder {
public:
    // Checks the launch (kLogic error) and appends it.
    template <class K>
    void operator()(const K& kernel) {
        add(kernel.launch());
    }
    void add(Launch launch);

    // Names the launches that follow. label is static text; layer -1 means none.
    void scope(const char* label, int layer = -1);

    // Levels the launches into stages and hands them over; the recorder is empty afterwards.
    Plan finish(std::string name);

private:
    std::vector<Launch> launches_;
    const char* label_ = "";
    int layer_ = -1;
};

}  // namespace lily
