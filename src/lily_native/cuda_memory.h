// Parts of device_cuda.cpp, which alone includes this: the GPU's context, its memory, and the way of the weights there.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cuda_api.h"
#include "device.h"
#include "error.h"

namespace lily {

using cuda::check;

constexpr uint32_t kUploads = 16;  // pieces on their way to the GPU at once

// The GPU's primary context, for as long as anything of it is in use.
class GpuContext {
public:
    explicit GpuContext(uint32_t index) {
        const cuda::Driver& driver = cuda::driver();
        int count = 0;
        check(driver.device_count(&count), "cannot count GPUs");
        if (index >= static_cast<uint32_t>(count))
            throw Error(ErrorKind::kUnsupported, "cuda: there is no GPU " + std::to_string(index) +
                                                     ", this process sees " + std::to_string(count));
        check(driver.device_get(&device_, static_cast<int>(index)), "cannot use GPU " + std::to_string(index));
        check(driver.retain_context(&context_, device_), "cannot use GPU " + std::to_string(index));
    }
    GpuContext(const GpuContext&) = delete;
    GpuContext& operator=(const GpuContext&) = delete;
    ~GpuContext() { cuda::driver().release_context(device_); }

    int attribute(int which) const {
        int value = 0;
        check(cuda::driver().device_attribute(&value, which, device_), "cannot ask the GPU");
        return value;
    }
    std::string name() const {
        char text[256] = "";
        check(cuda::driver().device_name(text, sizeof(text), device_), "cannot ask the GPU");
        return text;
    }
    cuda::Context handle() const { return context_; }
    // {free, all} bytes.
    std::pair<uint64_t, uint64_t> memory() const;

private:
    cuda::DeviceHandle device_ = 0;
    cuda::Context context_ = nullptr;
};

// Makes a context current for a block, and what was current before it again.
class Current {
public:
    explicit Current(const GpuContext& context) : Current(context, std::nothrow) {
        check(outcome_, "cannot use the GPU");
    }
    // For destructors, which must ask whether it is current.
    Current(const GpuContext& context, std::nothrow_t) : outcome_(cuda::driver().push_context(context.handle())) {}
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
        cuda::Context popped;
        if (*this) cuda::driver().pop_context(&popped);
    }
    explicit operator bool() const { return outcome_.ok(); }

private:
    cuda::Outcome outcome_;
};

inline std::pair<uint64_t, uint64_t> GpuContext::memory() const {
    const Current current(*this);
    size_t available = 0, total = 0;
    check(cuda::driver().memory_info(&available, &total), "cannot ask for free memory");
    return {available, total};
}

// An event that goes with this; its context must be current then.
class OwnEvent {
public:
    explicit OwnEvent(unsigned flags) { check(cuda::driver().event_create(&event_, flags), "cannot make an event"); }
    OwnEvent(const OwnEvent&) = delete;
    OwnEvent& operator=(const OwnEvent&) = delete;
    ~OwnEvent() { cuda::driver().event_destroy(event_); }
    cuda::Event get() const { return event_; }

private:
    cuda::Event event_ = nullptr;
};

struct Memory {
    cuda::DevicePointer address = 0;
    std::byte* host = nullptr;  // of shared memory
    uint64_t bytes = 0;
};

// Pieces of pinned memory that threads fill and the GPU empties, each by a stream of its own.
class CudaUpload final : public Upload {
public:
    CudaUpload(std::shared_ptr<GpuContext> context, const std::vector<Memory>& buffers)
        : context_(std::move(context)), buffers_(buffers) {}
    ~CudaUpload() override {
        if (pieces_.empty()) return;  // as after finish()
        const Current current(*context_, std::nothrow);
        if (!current) return;
        for (const Piece& piece : pieces_) cuda::driver().stream_wait(piece.stream);
        free_pieces();
    }

    void fill(BufferId buffer, const Rows& rows, const Make& make) override {
        const Current current(*context_);
        const Piece piece = take();
        try {
            check(cuda::driver().stream_wait(piece.stream), "cannot write to the GPU");
            make(static_cast<std::byte*>(piece.memory), 0, rows.count);
            const cuda::RowsCopy copy{.from_kind = cuda::kHostMemory,
                                      .from_host = piece.memory,
                                      .from_pitch = rows.bytes,
                                      .to_kind = cuda::kDeviceMemory,
                                      .to_device = buffers_.at(buffer.index).address + rows.offset,
                                      .to_pitch = rows.count > 1 ? rows.stride : rows.bytes,
                                      .bytes = rows.bytes,
                                      .rows = rows.count};
            check(cuda::driver().copy_rows(&copy, piece.stream), "cannot write to the GPU");
        } catch (...) {
            give_back(piece);
            throw;
        }
        give_back(piece);
    }

    void finish() override {
        const Current current(*context_);
        const std::lock_guard guard(mutex_);
        for (const Piece& piece : pieces_) check(cuda::driver().stream_wait(piece.stream), "cannot write to the GPU");
        free_pieces();  // here, where the context is current for certain
    }

private:
    struct Piece {
        void* memory = nullptr;
        cuda::Stream stream = nullptr;
    };

    void free_pieces() {
        for (const Piece& piece : pieces_) {
            cuda::driver().stream_destroy(piece.stream);
            cuda::driver().free_host(piece.memory);
        }
        pieces_.clear();
        unused_.clear();
    }

    Piece take() {
        std::unique_lock guard(mutex_);
        given_back_.wait(guard, [&] { return !unused_.empty() || pieces_.size() < kUploads; });
        if (unused_.empty()) {
            // Its parts are there as soon as they are made, so that nothing is lost when one of them cannot be.
            Piece& piece = pieces_.emplace_back();
            try {
                check(cuda::driver().allocate_host(&piece.memory, kMostBytes, 0), "cannot allocate pinned memory");
                check(cuda::driver().stream_create(&piece.stream, cuda::kStreamNonBlocking), "cannot make a stream");
            } catch (...) {
                if (piece.memory) cuda::driver().free_host(piece.memory);
                pieces_.pop_back();
                given_back_.notify_all();
                throw;
            }
            return piece;
        }
        const Piece piece = unused_.front();
        unused_.pop_front();
        return piece;
    }
    void give_back(const Piece& piece) {
        const std::lock_guard guard(mutex_);
        unused_.push_back(piece);  // the one that has had most time is taken first
        given_back_.notify_one();
    }

    std::shared_ptr<GpuContext> context_;
    const std::vector<Memory>& buffers_;
    std::mutex mutex_;
    std::condition_variable given_back_;
    std::vector<Piece> pieces_;
    std::deque<Piece> unused_;
};

}  // namespace lily
