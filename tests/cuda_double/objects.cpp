#include "objects.h"

#include <cstdlib>
#include <utility>

namespace cuda_double {

World& world() {
    static World& made = *new World;  // threads may outlive static objects
    return made;
}

std::vector<uint64_t>& stack() {
    thread_local std::vector<uint64_t> contexts;
    return contexts;
}

Call::Call(const char* called, bool bare, uint64_t context) : name(called), guard_(world().mutex) {
    const Order order = begin(name);
    if (!world().initialised) {
        result = fail(kNotInitialized, "cuInit comes first");
        return;
    }
    const auto found = world().contexts.find(context);
    const bool there = found != world().contexts.end();
    if (!bare && !there) {
        result = fail(kInvalidContext, "no context is current");
    } else if (there && order.manner == kLate) {
        found->second.late = order.result;
    } else if (order.result) {
        if (there && order.manner == kSticky) found->second.broken = order.result;
        result = order.result;
    }
    if (!result && !bare) result = found->second.broken;
}

Result Call::fail(Result with, const char* why) const {
    misuse("%s: %s", name, why);
    return with;
}

bool Call::inside(DevicePointer address, size_t bytes) const {
    auto block = world().blocks.upper_bound(address);
    if (block != world().blocks.begin()) {
        --block;
        const uint64_t offset = address - block->first;
        if (offset <= block->second.bytes && bytes <= block->second.bytes - offset &&
            block->second.context == stack().back())
            return true;
    }
    misuse("%s: %zu bytes are not inside allocated memory", name, bytes);
    return false;
}

Result Call::wait(Stream& stream, uint64_t place) {
    Context& of = world().contexts.at(stream.context);
    for (; stream.done < place; ++stream.done) {
        if (!of.broken) stream.queue.front().run();
        stream.queue.pop_front();
    }
    if (of.late) of.broken = std::exchange(of.late, 0);
    return of.broken;
}

Result Call::give(uint64_t stream, std::function<void()> work, size_t launches) {
    Stream* const to = find(world().streams, stream, "stream");
    if (!to) return kInvalidHandle;
    to->queue.push_back({std::move(work), launches});
    ++to->given;
    if (setting("defer", 0)) return 0;
    for (; to->done < to->given; ++to->done) {
        to->queue.front().run();
        to->queue.pop_front();
    }
    return 0;
}

void free_block(std::map<DevicePointer, Block>::iterator block) {
    if (!block->second.host) world().used -= block->second.bytes;
    std::free(reinterpret_cast<void*>(block->first));
    world().blocks.erase(block);
}

void destroy_context(uint64_t context) {
    World& all = world();
    const bool worked = !all.contexts.at(context).broken;
    size_t taken = 0;
    const auto take = [&](auto& table) {
        for (auto i = table.begin(); i != table.end();) {
            const auto next = std::next(i);
            if (i->second.context == context) {
                ++taken;
                if constexpr (requires { i->second.host; })
                    free_block(i);
                else
                    table.erase(i);
            }
            i = next;
        }
    };
    take(all.events);
    take(all.streams);
    take(all.blocks);
    take(all.modules);
    std::erase_if(all.functions, [&](const auto& each) { return !all.modules.contains(each.first); });
    all.contexts.erase(context);
    if (worked) all.orphans += taken;
}

}  // namespace cuda_double
