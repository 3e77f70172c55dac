#include "weight_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "error.h"

namespace lily {
namespace {

using Check = ReadJob::Check;

constexpr uint64_t kPieceBytes = Upload::kMostBytes / 2;  // widened, a piece takes twice its bytes
constexpr uint64_t kReportBytes = uint64_t{64} << 20;
constexpr auto kReportTime = std::chrono::milliseconds(50);
// A checkpoint of more than this part of the machine's memory must not push everything else out of the page cache; a
// smaller one stays there, and the next start is faster.
constexpr uint64_t kCachePart = 4;

std::string errno_text(int code) {
    return std::generic_category().message(code);
}

uint64_t physical_memory() {
    return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

class File {
public:
    explicit File(const std::string& path) : path_(path), fd_(open_retrying(path)) {
        if (fd_ < 0) {
            const int code = errno;
            throw Error(ErrorKind::kCheckpoint, path + ": cannot be opened (" + errno_text(code) + ")");
        }
        struct stat info{};
        if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
            ::close(fd_);
            throw Error(ErrorKind::kCheckpoint, path + ": is not a regular file");
        }
        size_ = static_cast<uint64_t>(info.st_size);
    }
    File(File&& other) noexcept
        : path_(std::move(other.path_)),
          fd_(std::exchange(other.fd_, -1)),
          size_(other.size_),
          drops_cached_(other.drops_cached_) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    File& operator=(File&&) = delete;
    ~File() {
        if (fd_ < 0) return;
#ifdef __linux__
        // What lies across the edges of pieces, too.
        if (drops_cached_) ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
#endif
        ::close(fd_);
    }

    const std::string& path() const { return path_; }
    uint64_t size() const { return size_; }

    // What is read from now on does not stay in the page cache.
    void drop_cached() {
        drops_cached_ = true;
#ifdef F_NOCACHE
        ::fcntl(fd_, F_NOCACHE, 1);  // a Mac takes no advice after reading
#endif
    }

    void read(uint64_t offset, std::byte* dst, uint64_t bytes) const {
        uint64_t done = 0;
        while (done < bytes) {
            const ssize_t got = ::pread(fd_, dst + done, bytes - done, static_cast<off_t>(offset + done));
            if (got > 0) {
                done += static_cast<uint64_t>(got);
            } else if (got == 0) {
                throw Error(ErrorKind::kCheckpoint, path_ + ": became shorter while it was read");
            } else if (const int code = errno; code != EINTR) {
                const std::string where = path_ + ": cannot be read at byte " + std::to_string(offset + done);
                throw Error(ErrorKind::kCheckpoint, where + " (" + errno_text(code) + ")");
            }
        }
#ifdef __linux__
        if (drops_cached_) {
            ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
        }
#endif
    }

private:
    // Does not wait for the other end of what turns out to be no file.
    static int open_retrying(const std::string& path) {
        int fd = -1;
        do {
            fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        } while (fd < 0 && errno == EINTR);
        return fd;
    }

    std::string path_;
    int fd_;
    uint64_t size_ = 0;
    bool drops_cached_ = false;
};

// Index of the first value whose exponent bits are all set (NaN or infinity), or `count`.
template <class Word, Word kExponent>
uint64_t first_not_finite(const std::byte* data, uint64_t count) {
    constexpr uint64_t kBlock = 512;
    uint64_t start = 0;
    // Blocks of fixed size without an early exit, so that the compiler vectorises them; the rest one by one.
    for (; start + kBlock <= count; start += kBlock) {
        Word words[kBlock];
        std::memcpy(words, data + start * sizeof(Word), sizeof words);
        Word found = 0;
        for (const Word word : words) found |= (word & kExponent) == kExponent ? Word(~Word{0}) : Word{0};
        if (found) break;
    }
    for (uint64_t i = start; i < count; ++i) {
        Word word;
        std::memcpy(&word, data + i * sizeof(Word), sizeof(Word));
        if ((word & kExponent) == kExponent) return i;
    }
    return count;
}

// `data` has room for 4 * count bytes; its upper half holds bf16 values. Going upwards, a write never reaches
// a value that is still to be read.
void widen_in_place(std::byte* data, uint64_t count) {
    const std::byte* source = data + 2 * count;
    for (uint64_t i = 0; i < count; ++i) {
        uint16_t narrow;
        std::memcpy(&narrow, source + 2 * i, sizeof narrow);
        const uint32_t wide = uint32_t{narrow} << 16;
        std::memcpy(data + 4 * i, &wide, sizeof wide);
    }
}

// At most kPieceBytes of one job: rows of it, or a part of one.
struct Piece {
    const ReadJob* job;
    uint64_t row, rows;
    uint64_t start;  // byte within a row
    uint64_t bytes;  // of each row

    uint64_t position() const { return job->offset + row * job->row_bytes + start; }
};

std::string tensor_name(const ReadJob& job) {
    return job.tensor ? job.tensor : "?";
}

uint64_t element_bytes(const ReadJob& job) {
    if (job.check == Check::kFiniteF32) return 4;
    return job.check == Check::kFiniteBf16 || job.bf16_to_f32 ? 2 : 1;
}

class Reader {
public:
    Reader(const std::vector<std::string>& paths, std::vector<ReadJob> jobs, Upload& upload)
        : upload_(upload), jobs_(std::move(jobs)) {
        files_.reserve(paths.size());
        uint64_t size = 0;
        for (const std::string& path : paths) size += files_.emplace_back(path).size();
        if (size > physical_memory() / kCachePart)
            for (File& file : files_) file.drop_cached();
        for (const ReadJob& job : jobs_) add_pieces(job);
        // Neighbouring reads stay together, which disks and read-ahead like.
        const auto position = [](const Piece& p) { return std::pair(p.job->file, p.position()); };
        std::sort(pieces_.begin(), pieces_.end(),
                  [&](const Piece& a, const Piece& b) { return position(a) < position(b); });
    }

    void run(uint32_t threads, const std::function<void(uint64_t, uint64_t)>& progress) {
        std::vector<std::thread> pool;
        try {
            start(pool, threads);
            watch(progress);
        } catch (...) {
            stop_.store(true, std::memory_order_relaxed);
            join(pool);
            throw;
        }
        join(pool);
        if (error_) std::rethrow_exception(error_);
        if (progress) progress(total_, total_);
    }

private:
    void add_pieces(const ReadJob& job) {
        const std::string name = tensor_name(job);
        if (job.file >= files_.size() || job.row_bytes == 0 || job.bytes % job.row_bytes ||
            job.row_bytes % element_bytes(job) || (job.bf16_to_f32 && job.check == Check::kFiniteF32)) {
            throw Error(ErrorKind::kLogic, "read_weights: bad job for tensor " + name);
        }
        const File& file = files_[job.file];
        if (job.bytes > file.size() || job.offset > file.size() - job.bytes) {
            const std::string needs = std::to_string(job.bytes) + " bytes at " + std::to_string(job.offset);
            const std::string has = " and the file has " + std::to_string(file.size());
            throw Error(ErrorKind::kCheckpoint, file.path() + ": truncated, tensor " + name + " needs " + needs + has);
        }
        const uint64_t rows = job.bytes / job.row_bytes, at_once = std::max<uint64_t>(1, kPieceBytes / job.row_bytes);
        for (uint64_t row = 0; row < rows; row += at_once)
            for (uint64_t start = 0; start < job.row_bytes; start += kPieceBytes)
                pieces_.push_back({.job = &job,
                                   .row = row,
                                   .rows = std::min(at_once, rows - row),
                                   .start = start,
                                   .bytes = std::min(kPieceBytes, job.row_bytes - start)});
        total_ += job.bytes;
    }

    void start(std::vector<std::thread>& pool, uint32_t threads) {
        const size_t wanted = std::min<size_t>(std::max(threads, 1u), pieces_.size());
        pool.reserve(wanted);
        running_ = wanted;
        for (size_t i = 0; i < wanted; ++i) {
            try {
                pool.emplace_back([this] { work(); });
            } catch (const std::system_error&) {
                // Fewer threads are slower, none is an error.
                std::lock_guard lock(mutex_);
                running_ -= wanted - i;
                if (i == 0) throw Error(ErrorKind::kOutOfMemory, "read_weights: no thread can be started");
                return;
            }
        }
    }

    void work() noexcept {
        while (!stop_.load(std::memory_order_relaxed)) {
            const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= pieces_.size()) break;
            try {
                read_piece(pieces_[index]);
            } catch (...) {
                fail(index);
                break;
            }
            const std::lock_guard lock(mutex_);
            done_ += pieces_[index].rows * pieces_[index].bytes;
            if (done_ - reported_ >= kReportBytes) wake_.notify_one();
        }
        const std::lock_guard lock(mutex_);
        if (--running_ == 0) wake_.notify_one();
    }

    // Of several failures the one that comes first in the files is reported.
    void fail(size_t index) noexcept {
        stop_.store(true, std::memory_order_relaxed);
        const std::lock_guard lock(mutex_);
        if (!error_ || index < error_piece_) {
            error_ = std::current_exception();
            error_piece_ = index;
        }
    }

    void read_piece(const Piece& piece) const {
        const ReadJob& job = *piece.job;
        const uint64_t growth = job.bf16_to_f32 ? 2 : 1;
        upload_.fill(job.buffer,
                     {.offset = job.at + piece.row * job.stride + piece.start * growth,
                      .count = piece.rows,
                      .bytes = piece.bytes * growth,
                      .stride = job.stride},
                     [&](std::byte* dst, uint64_t first, uint64_t rows) {
                         Piece part = piece;
                         part.row += first;
                         part.rows = rows;
                         read_piece_to(part, dst);
                     });
    }

    void read_piece_to(const Piece& piece, std::byte* dst) const {
        const ReadJob& job = *piece.job;
        const uint64_t bytes = piece.rows * piece.bytes;
        std::byte* raw = job.bf16_to_f32 ? dst + bytes : dst;
        files_[job.file].read(piece.position(), raw, bytes);

        const uint64_t count = bytes / element_bytes(job);
        uint64_t bad = count;
        if (job.check == Check::kFiniteBf16) bad = first_not_finite<uint16_t, 0x7F80>(raw, count);
        if (job.check == Check::kFiniteF32) bad = first_not_finite<uint32_t, 0x7F800000>(raw, count);
        if (bad != count) {
            const std::string element = std::to_string((piece.position() - job.offset) / element_bytes(job) + bad);
            const std::string where = files_[job.file].path() + ": tensor " + tensor_name(job);
            throw Error(ErrorKind::kCheckpoint, where + ": element " + element + " is NaN or infinite");
        }
        if (job.bf16_to_f32) widen_in_place(dst, count);
    }

    void watch(const std::function<void(uint64_t, uint64_t)>& progress) {
        std::unique_lock lock(mutex_);
        const auto due = [this] { return running_ == 0 || done_ - reported_ >= kReportBytes; };
        while (running_ > 0) {
            wake_.wait_for(lock, kReportTime, due);
            const uint64_t done = reported_ = done_;
            if (running_ == 0 || !progress) continue;
            lock.unlock();
            progress(done, total_);
            lock.lock();
        }
    }

    static void join(std::vector<std::thread>& pool) {
        for (std::thread& thread : pool) thread.join();
        pool.clear();
    }

    Upload& upload_;
    std::vector<File> files_;
    const std::vector<ReadJob> jobs_;
    std::vector<Piece> pieces_;
    uint64_t total_ = 0;

    std::atomic<size_t> next_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;  // guards everything below
    std::condition_variable wake_;
    uint64_t done_ = 0;
    uint64_t reported_ = 0;
    size_t running_ = 0;
    std::exception_ptr error_;
    size_t error_piece_ = 0;
};

}  // namespace

void read_weights(const std::vector<std::string>& files, std::vector<ReadJob> jobs, uint32_t threads, Upload& upload,
                  const std::function<void(uint64_t done, uint64_t total)>& progress) {
    Reader reader(files, std::move(jobs), upload);
    reader.run(threads, progress);
}

}  // namespace lily
