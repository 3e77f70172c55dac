// What the rest of the library may ask of a machine: memory, and the execution of a recorded plan. No model
// knowledge.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "work_split.h"

namespace lily {

// A plan that a device has made ready. It can run while the device and the plan's buffers are there, and must be there
// itself until it has ended; a device ends what is in flight before it goes.
class Program {
public:
    Program() = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;
    virtual ~Program() = default;
};

// Puts much into a device's memory, before anything uses it.
class Upload {
public:
    Upload() = default;
    Upload(const Upload&) = delete;
    Upload& operator=(const Upload&) = delete;
    // Waits until everything is where it belongs.
    virtual ~Upload() = default;

    // Places in a buffer.
    struct Rows {
        uint64_t offset;
        uint64_t count;
        uint64_t bytes;   // of each
        uint64_t stride;  // from one to the next
    };
    // make(memory, first, count) makes so many rows, one right behind the other.
    using Make = std::function<void(std::byte*, uint64_t, uint64_t)>;
    // Has all rows made, of at most kMostBytes together, in one or more calls. Any thread may call it, several at a
    // time.
    virtual void fill(BufferId buffer, const Rows& rows, const Make& make) = 0;
    // Throws what went wrong behind a call of fill().
    virtual void finish() = 0;

    static constexpr uint64_t kMostBytes = uint64_t{16} << 20;
};

// Rows of the matrix tiles of devices with simdgroups, ascending; no device has fewer.
inline constexpr uint32_t kGpuTileRows[] = {8, 16, 32, 64};

// Rows of a prompt at a time on a device that nobody measured, and on CPUs, where more gain nothing
// (docs/PERF_LOG.md).
inline constexpr uint32_t kPrefillChunk = 2048;
inline constexpr uint32_t kWidePrefillChunk = 256;    // of the device for tests, which is slow
inline constexpr uint32_t kLargePrefillChunk = 8192;  // of GPUs with much memory: experts' tiles are full

// Counts submissions; 0 comes before the first.
using Ticket = uint64_t;

// One thread at a time may use a device; the owner (the engine) serialises its callers.
// A plan with a single launch is a valid plan: that is how tests run one kernel.
class Device {
public:
    Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    virtual ~Device() = default;

    // Zero-filled memory, aligned to 256 bytes. Throws kOutOfMemory, naming the buffer and its size. The host may read
    // `shared` memory at any time; the device is slow to read it.
    virtual BufferId allocate(const char* name, uint64_t bytes, bool shared = false) = 0;
    // Nothing that was submitted may still use the buffer.
    virtual void release(BufferId buffer) = 0;
    // The largest buffer that this device can have.
    virtual uint64_t max_buffer_bytes() const = 0;
    // How much memory the device can work on at once; UINT64_MAX where it is the machine's.
    virtual uint64_t memory_limit() const = 0;
    // Host address of a buffer; nullptr where the host cannot reach it, which is never so for shared memory.
    virtual std::byte* map(BufferId buffer) = 0;
    // Copies between host and buffer, after what was submitted. The range must lie in the buffer.
    virtual void write(BufferId buffer, uint64_t offset, const void* from, uint64_t bytes);
    virtual void read(BufferId buffer, uint64_t offset, void* to, uint64_t bytes);
    // From one place to another, after what was submitted. The ranges must lie in their buffers and be apart.
    virtual void copy(BufferId from, uint64_t from_offset, BufferId to, uint64_t to_offset, uint64_t bytes);
    virtual std::unique_ptr<Upload> upload();

    // Compiles ahead, as many at a time as the machine allows; prepare() compiles what is missing. Throws kUnsupported
    // when a variant does not exist here.
    virtual void compile(std::span<const Variant> variants) = 0;
    virtual std::unique_ptr<Program> prepare(const Plan& plan) = 0;
    // Starts programs, one after the other. They must stay alive until they have finished.
    virtual Ticket submit(std::span<const Program* const> programs) = 0;
    // Returns when a submission and all before it have finished. Throws kDevice or kOutOfMemory for what went wrong in
    // any of them; nothing is running then, and the device goes on working unless the system has taken it away.
    virtual void wait(Ticket ticket) = 0;
    void run(const Program& program) {
        const Program* const programs[] = {&program};
        wait(submit(programs));
    }
    // Submissions worth having in flight: more than one hides the host's work behind the device's.
    virtual uint32_t queue_depth() const = 0;

    virtual std::string name() const = 0;
    // Facts for people and bug reports, in display order.
    virtual std::vector<std::pair<std::string, std::string>> info() const = 0;
    virtual TileChoice tiles() const = 0;
    virtual AttentionSplit attention_split() const { return {}; }
    // Rows of a prompt that this device reads best at a time; more take more memory.
    virtual uint32_t prefill_rows() const { return kPrefillChunk; }
    // Rows that a launch can have at most.
    virtual uint32_t most_rows() const { return UINT32_MAX; }
    // Variants that tests should run: all there are, or a selection where any can be compiled.
    virtual std::vector<Variant> variants() const = 0;
};

// width 1 is the fast device, width 32 the one that behaves as a GPU does (32 lanes, real barriers).
// threads = 0 takes one per physical core that this process may use.
// object names the shared object with the shaders where it is not the usual one of the width.
// shuffle, unless 0, is the seed of an order in which each stage's threadgroups run: it must not matter.
std::unique_ptr<Device> make_cpu_device(uint32_t width, uint32_t threads, const char* object = nullptr,
                                        uint32_t shuffle = 0);

// The GPU that "cuda" or "cuda:1" names; nothing for other names.
std::optional<uint32_t> cuda_index(const std::string& device);
// The NVIDIA GPU of this number, as CUDA counts them. Throws kUnsupported, with the reason, when there is none or no
// compiler for it. mma: matrix products as GPUs without warpgroup instructions multiply them, for tests.
std::unique_ptr<Device> make_cuda_device(uint32_t index, bool mma = false);

#if LILY_METAL
// The GPU of this machine. Throws kUnsupported when it has none that can run the shaders.
std::unique_ptr<Device> make_metal_device();
#endif

}  // namespace lily
