// What lives in the double of libcuda. Handles are numbers that are never used twice, so that a dead one is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../../src/lily_native/cuda_api.h"
#include "control.h"

namespace cuda_double {

using lily::cuda::DevicePointer;
using lily::cuda::Result;

inline constexpr Result kInvalidValue = 1, kNoMemory = 2, kNotInitialized = 3, kInvalidDevice = 101;
inline constexpr Result kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500;

struct Context {
    int device;
    int users = 0;
    Result broken = 0;  // what everything returns
    Result late = 0;    // what the next wait returns, and then everything
};

// Memory of the device or pinned memory of the host, by address.
struct Block {
    uint64_t context;
    size_t bytes;
    bool host;
};

struct Work {
    std::function<void()> run;
    size_t launches;
};

// Work in a stream runs when somebody waits for it, or at once.
struct Stream {
    uint64_t context;
    std::deque<Work> queue;
    uint64_t given = 0, done = 0;
};

struct Event {
    uint64_t context;
    bool timing;
    uint64_t stream = 0, place = 0;  // of the last record; none before one
};

struct Module {
    uint64_t context;
    std::string kernel;
    size_t arrays;
    bool has_function = false;
};

// Of the same number as its module.
struct Function {
    size_t shared_bytes = 48 << 10;  // at most, by its attribute
};

struct Launch {
    uint64_t function;
    std::vector<DevicePointer> arrays;
};

struct Graph {
    std::map<uint64_t, Launch> nodes;
    std::map<uint64_t, std::vector<uint64_t>> after;
};

struct Exec {
    std::vector<Launch> launches;
    bool uploaded = false;
};

// Everything, under one mutex.
struct World {
    std::mutex mutex;
    bool initialised = false;
    uint64_t handles = 0;
    std::map<uint64_t, Context> contexts;
    std::map<DevicePointer, Block> blocks;
    std::map<uint64_t, Stream> streams;
    std::map<uint64_t, Event> events;
    std::map<uint64_t, Module> modules;
    std::map<uint64_t, Function> functions;
    std::map<uint64_t, Graph> graphs;
    std::map<uint64_t, Exec> execs;
    size_t used = 0;     // bytes of the device
    size_t orphans = 0;  // objects that their context took with it though it worked
};

World& world();
// The contexts that are current for this thread, the last one now.
std::vector<uint64_t>& stack();

template <class T>
uint64_t number(T* handle) {
    return reinterpret_cast<uint64_t>(handle);
}
template <class T>
T* handle(uint64_t of) {
    return reinterpret_cast<T*>(of);
}

// One call of a function, under the lock.
class Call {
public:
    // bare: needs no context, and works in one that is broken.
    explicit Call(const char* called, bool bare = false) : Call(called, bare, stack().empty() ? 0 : stack().back()) {}
    // An error that stays does so with this context.
    Call(const char* called, bool bare, uint64_t context);

    const char* const name;
    // Why the call fails. What destroys something does it all the same: the error may be one of earlier work.
    Result result = 0;

    Context& context() { return world().contexts.at(stack().back()); }
    Result fail(Result with, const char* why) const;
    // Finds an object of the context that is current.
    template <class T>
    T* find(std::map<uint64_t, T>& table, uint64_t key, const char* what) {
        const auto found = table.find(key);
        if (found != table.end() && !stack().empty() && belongs(found->second)) return &found->second;
        misuse("%s: no such %s in this context", name, what);
        return nullptr;
    }
    // Whether these bytes lie in one block.
    bool inside(DevicePointer address, size_t bytes) const;
    // Runs what was given to a stream, up to a place, and finds what went wrong.
    Result wait(Stream& stream, uint64_t place);
    // Gives a stream something to do.
    Result give(uint64_t stream, std::function<void()> work, size_t launches = 0);

private:
    template <class T>
    static bool belongs(const T& object) {
        if constexpr (requires { object.context; })
            return object.context == stack().back();
        else
            return true;
    }

    const std::lock_guard<std::mutex> guard_;
};

void free_block(std::map<DevicePointer, Block>::iterator block);
// Takes everything in it along.
void destroy_context(uint64_t context);

}  // namespace cuda_double
