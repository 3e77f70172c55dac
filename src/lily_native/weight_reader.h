// Reads checkpoint bytes from files straight into their final place, on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device.h"

namespace lily {

// One tensor, or a part of one, to be copied from a file.
struct ReadJob {
    enum class Check : uint8_t { kNone, kFiniteBf16, kFiniteF32 };

    uint32_t file;    // index into the list of files
    uint64_t offset;  // first byte in the file
    uint64_t bytes;   // bytes in the file: rows of row_bytes, one right behind the other
    uint64_t row_bytes;
    BufferId buffer;  // receives the rows from `at` on, `stride` bytes apart; each of twice as many with bf16_to_f32
    uint64_t at;
    uint64_t stride;
    Check check;         // a NaN or infinity among the source values is an error
    const char* tensor;  // for messages; must outlive the call
    bool bf16_to_f32;    // widen bf16 values of the file to fp32
};

// Fills every job's destination through `upload`. `progress(done, total)` counts bytes read from files; it runs on the
// calling thread, at least every 50 ms and once at the end, may be empty, and may throw to cancel. Throws
// Error(kCheckpoint) when a file cannot be read, is too short or holds a value that `check` forbids; the text names
// file and tensor. Whatever is thrown, all threads have ended and all files are closed; what the destinations hold is
// then undefined.
void read_weights(const std::vector<std::string>& files, std::vector<ReadJob> jobs, uint32_t threads, Upload& upload,
                  const std::function<void(uint64_t done, uint64_t total)>& progress);

}  // namespace lily
