// Preloaded into a Python process, makes reading the files of one folder go wrong.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum class Fault : uint32_t {
    kNone,
    kShort,        // reads give at most `amount` bytes
    kInterrupted,  // every other read ends with EINTR
    kSlow,         // reads of native code take `amount` microseconds
    kError,        // the n-th read fails with the error `amount`
    kEnd,          // the n-th read finds the end of the file
    kOpen,         // the n-th opening fails with the error `amount`
};

char folder[4096];  // written while nothing reads
std::atomic<Fault> fault{Fault::kNone};
std::atomic<uint64_t> wanted{0}, amount{0}, reads{0}, opens{0};

bool concerns(const char* path) {
    return folder[0] != '\0' && std::strncmp(path, folder, std::strlen(folder)) == 0;
}

bool concerns(int file) {
    if (fault.load() == Fault::kNone) return false;
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return false;
    path[length] = '\0';
    return concerns(path);
}

// Sees to a read of `bytes` bytes, of which it may leave fewer; true if `result` is all that comes of it. Native code
// reads at a position.
bool faulty(bool native, size_t& bytes, ssize_t& result) {
    const uint64_t number = reads.fetch_add(1) + 1;
    switch (fault.load()) {
        case Fault::kShort:
            bytes = bytes < amount.load() ? bytes : amount.load();
            return false;
        case Fault::kInterrupted:
            errno = EINTR;
            result = -1;
            return number % 2 == 1;
        case Fault::kSlow:
            if (native) usleep(static_cast<useconds_t>(amount.load()));
            return false;
        case Fault::kError:
            errno = static_cast<int>(amount.load());
            result = -1;
            return number == wanted.load();
        case Fault::kEnd:
            result = 0;
            return number == wanted.load();
        default:
            return false;
    }
}

int open_file(const char* path, int flags, mode_t mode) {
    if (fault.load() != Fault::kNone && concerns(path)) {
        if (opens.fetch_add(1) + 1 == wanted.load() && fault.load() == Fault::kOpen) {
            errno = static_cast<int>(amount.load());
            return -1;
        }
    }
    return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

}  // namespace

// From now on, until the next call.
EXPORT void lily_reads(const char* path, uint32_t kind, uint64_t n, uint64_t value) {
    fault.store(Fault::kNone);
    std::snprintf(folder, sizeof folder, "%s", path);
    wanted.store(n);
    amount.store(value);
    reads.store(0);
    opens.store(0);
    fault.store(static_cast<Fault>(kind));
}

EXPORT uint64_t lily_reads_count() {
    return reads.load();
}

EXPORT uint64_t lily_opens_count() {
    return opens.load();
}

EXPORT ssize_t read(int file, void* to, size_t bytes) {
    ssize_t result = 0;
    if (concerns(file) && faulty(false, bytes, result)) return result;
    return syscall(SYS_read, file, to, bytes);
}

EXPORT ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
    ssize_t result = 0;
    if (concerns(file) && faulty(true, bytes, result)) return result;
    return syscall(SYS_pread64, file, to, bytes, offset);
}

EXPORT ssize_t pread64(int file, void* to, size_t bytes, off64_t offset) __attribute__((alias("pread")));

EXPORT int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file(path, flags, mode);
}

EXPORT int open64(const char* path, int flags, ...) __attribute__((alias("open")));
