// What devices have in common, and what those do whose memory the host can reach.
#include "device.h"

#include <charconv>
#include <cstring>
#include <string_view>

namespace lily {
namespace {

class MappedUpload final : public Upload {
public:
    explicit MappedUpload(Device& device) : device_(device) {}
    void fill(BufferId buffer, const Rows& rows, const Make& make) override {
        std::byte* const memory = device_.map(buffer) + rows.offset;
        if (rows.stride == rows.bytes) return make(memory, 0, rows.count);
        for (uint64_t i = 0; i < rows.count; ++i) make(memory + i * rows.stride, i, 1);
    }
    void finish() override {}

private:
    Device& device_;
};

}  // namespace

std::optional<uint32_t> cuda_index(const std::string& device) {
    constexpr std::string_view kName = "cuda", kNumbered = "cuda:";
    if (device == kName) return 0;
    if (!device.starts_with(kNumbered)) return std::nullopt;
    uint32_t index = 0;
    const char *first = device.data() + kNumbered.size(), *last = device.data() + device.size();
    const auto [end, error] = std::from_chars(first, last, index);
    return error == std::errc() && end == last ? std::optional(index) : std::nullopt;
}

void Device::write(BufferId buffer, uint64_t offset, const void* from, uint64_t bytes) {
    std::memcpy(map(buffer) + offset, from, bytes);
}

void Device::read(BufferId buffer, uint64_t offset, void* to, uint64_t bytes) {
    std::memcpy(to, map(buffer) + offset, bytes);
}

void Device::copy(BufferId from, uint64_t from_offset, BufferId to, uint64_t to_offset, uint64_t bytes) {
    std::memcpy(map(to) + to_offset, map(from) + from_offset, bytes);
}

std::unique_ptr<Upload> Device::upload() {
    return std::make_unique<MappedUpload>(*this);
}

}  // namespace lily
