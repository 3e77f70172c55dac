// Runs dispatches as a GPU would that is free to choose the order of what no barrier separates.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace metal_double {

// A buffer as it was bound: the kernel may use `room` bytes from `address` on.
struct Binding {
    std::byte* address = nullptr;
    uint64_t room = 0;
};

// One dispatch. The args struct is the binding after those of the slots; it is read when the dispatch runs, as the
// host may still write it until the commit.
struct Dispatch {
    Form form;
    std::array<Binding, lily::kMaxSlots + 1> bindings{};
    std::array<uint32_t, 3> grid{};
};

// Dispatches between two barriers.
using Batch = std::vector<Dispatch>;

class Executor {
public:
    // How many threads, and the seed of the shuffle, are the settings of this moment.
    Executor();

    // Runs the first `limit` dispatches, counted in the order of encoding. Returns what kernels found wrong, or "".
    std::string run(const std::vector<Batch>& batches, size_t limit);

private:
    std::string run(const Dispatch& dispatch);

    lily::ThreadPool pool_;
    std::minstd_rand random_;
};

}  // namespace metal_double
