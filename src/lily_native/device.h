// What the rest of the library may ask of a machine: memory, and the execution of a recorded plan. No model
// knowledge.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernel.h"
#include "plan.h"

namespace lily {

// One compiled form of a kernel: its constants in the order of KernelInfo::consts, unused entries 0.
struct Variant {
    const KernelInfo* kernel;
    std::array<uint32_t, kMaxConsts> consts;
};

// One thread at a time may use a device; the owner (the engine) serialises its callers.
// A plan with a single launch is a valid plan: that is how tests run one kernel.
class Device {
public:
    Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    virtual ~Device() = default;

    // Zero-filled memory, aligned to 256 bytes. Throws kOutOfMemory, naming the buffer and its size.
    virtual BufferId allocate(const char* name, uint64_t bytes) = 0;
    virtual void release(BufferId buffer) = 0;
    // The largest buffer that this device can have.
    virtual uint64_t max_buffer_bytes() const = 0;
    // Host address of a buffer, or nullptr where the host cannot reach it.
    virtual std::byte* map(BufferId buffer) = 0;

    // Checks and compiles whatever the plan needs. Throws kUnsupported when a variant does not exist here.
    virtual void prepare(const Plan& plan) = 0;
    // Starts a plan. Its buffers must stay alive until wait() returns.
    virtual void submit(const Plan& plan) = 0;
    // Returns when everything submitted has finished. Throws kDevice for what went wrong meanwhile.
    virtual void wait() = 0;

    virtual std::string name() const = 0;
    // Facts for people and bug reports, in display order.
    virtual std::vector<std::pair<std::string, std::string>> info() const = 0;
    // Rows of the matrix tile that this device multiplies best; the model picks GEMM variants by it.
    virtual uint32_t tile_rows() const = 0;
    // Every compiled variant that can be listed without a plan.
    virtual std::vector<Variant> variants() const = 0;
};

// width 1 is the fast device, width 32 the one that behaves as a GPU does (32 lanes, real barriers).
// threads = 0 takes one per physical core that this process may use.
std::unique_ptr<Device> make_cpu_device(uint32_t width, uint32_t threads);

}  // namespace lily
