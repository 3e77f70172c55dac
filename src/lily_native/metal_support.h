// Parts of device_metal.mm, which alone includes this: talking to Foundation, and pipelines that outlive the process.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.h"
#include "shader_source.h"

namespace lily {

// What is being handled, as an exception of C++.
inline std::exception_ptr current_failure() {
#ifdef __APPLE__
    try {
        throw;
    } catch (NSException* exception) {  // a driver's way to refuse
        const char* reason = exception.description.UTF8String;
        return std::make_exception_ptr(
            Error(ErrorKind::kDevice, std::string("metal: ") + (reason ? reason : "an exception without a reason")));
    } catch (...) {
    }
#endif
    return std::current_exception();
}

// Runs f in an autorelease pool. An exception that left the pool would not drain it, so it is carried around it.
template <class F>
auto pooled(F&& f) {
    using Result = std::invoke_result_t<F>;
    std::exception_ptr error;
    if constexpr (std::is_void_v<Result>) {
        @autoreleasepool {
            try {
                f();
            } catch (...) {
                error = current_failure();
            }
        }
        if (error) std::rethrow_exception(error);
    } else {
        std::optional<Result> result;
        @autoreleasepool {
            try {
                result.emplace(f());
            } catch (...) {
                error = current_failure();
            }
        }
        if (error) std::rethrow_exception(error);
        return std::move(*result);
    }
}

inline NSString* ns(const std::string& text) {
    return [[NSString alloc] initWithBytes:text.data() length:text.size() encoding:NSUTF8StringEncoding];
}

inline std::string text_of(NSString* text) {
    const char* utf8 = text.UTF8String;
    return utf8 == nullptr ? "" : utf8;
}

inline std::string message_of(NSError* error) {
    return error == nil ? "no reason given" : text_of(error.localizedDescription);
}

[[noreturn]] inline void fail(const std::string& what, NSError* error) {
    throw Error(ErrorKind::kDevice, "metal: " + what + ": " + message_of(error));
}

// A program that was built before macOS 26 may be told that it is 16, which does not exist.
inline bool system_is_at_least(NSOperatingSystemVersion version) {
    NSProcessInfo* process = NSProcessInfo.processInfo;
    const bool told_sixteen =
        [process isOperatingSystemAtLeastVersion:{16, 0, 0}] && ![process isOperatingSystemAtLeastVersion:{17, 0, 0}];
    if (told_sixteen && version.majorVersion == 26) version.majorVersion = 16;
    return [process isOperatingSystemAtLeastVersion:version];
}

// Compiled pipelines that outlive the process, in a file of the user's cache folder. Never more than a help: whatever
// is wrong with the file, pipelines are compiled as if there was none.
class PipelineCache {
public:
    PipelineCache(id<MTLDevice> device) : device_(device) {
        NSArray<NSString*>* folders = NSSearchPathForDirectoriesInDomains(NSCachesDirectory, NSUserDomainMask, YES);
        if (folders.count == 0) return;
        const std::string folder = text_of(folders[0]) + "/lily";
        mkdir(text_of(folders[0]).c_str(), 0700);
        mkdir(folder.c_str(), 0700);
        std::string key = text_of(device.name) + " " + text_of(NSProcessInfo.processInfo.operatingSystemVersionString);
        std::replace_if(
            key.begin(), key.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '-');
        char hash[20];
        std::snprintf(hash, sizeof(hash), "%016llx", static_cast<unsigned long long>(kShaderHash));
        path_ = folder + "/" + key + "-" + hash + ".metalarchive";
        open();
    }

    // nil where the archive does not hold the pipeline.
    id<MTLComputePipelineState> find(MTLComputePipelineDescriptor* wanted) {
        if (!loaded_) return nil;
        wanted.binaryArchives = @[ archive_ ];
        NSError* error = nil;
        id<MTLComputePipelineState> found =
            [device_ newComputePipelineStateWithDescriptor:wanted
                                                   options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                                reflection:nil
                                                     error:&error];
        if (found != nil) ++hits_;
        return found;
    }

    // Called by several threads; save() does the work.
    void add(MTLComputePipelineDescriptor* made) {
        const std::lock_guard guard(mutex_);
        if (archive_ != nil) made_.push_back(made);
    }

    // Replaces the file in one step, so that another process never reads half of it.
    void save() {
        bool changed = false;
        NSError* failure = nil;
        for (MTLComputePipelineDescriptor* made : std::exchange(made_, {})) {
            if ([archive_ addComputePipelineFunctionsWithDescriptor:made error:&failure])
                changed = true;
            else
                problem_ = message_of(failure);
        }
        if (!changed) return;
        static std::atomic<uint32_t> engines{0};  // several may save at once
        const std::string fresh = path_ + "." + std::to_string(getpid()) + "." + std::to_string(++engines);
        NSError* error = nil;
        if (![archive_ serializeToURL:[NSURL fileURLWithPath:ns(fresh)] error:&error]) {
            problem_ = message_of(error);
            unlink(fresh.c_str());
        } else if (rename(fresh.c_str(), path_.c_str()) != 0) {
            problem_ = std::strerror(errno);
            unlink(fresh.c_str());
        }
    }

    std::string description() const {
        if (path_.empty()) return "none: there is no cache folder";
        return path_ + (problem_.empty() ? "" : " (" + problem_ + ")");
    }
    uint32_t hits() const { return hits_; }

private:
    void open() {
        NSError* error = nil;
        if (access(path_.c_str(), R_OK) == 0) {
            MTLBinaryArchiveDescriptor* descriptor = [MTLBinaryArchiveDescriptor new];
            descriptor.url = [NSURL fileURLWithPath:ns(path_)];
            archive_ = [device_ newBinaryArchiveWithDescriptor:descriptor error:&error];
            loaded_ = archive_ != nil;
            if (loaded_) return;
            problem_ = "replaced: " + message_of(error);
        }
        archive_ = [device_ newBinaryArchiveWithDescriptor:[MTLBinaryArchiveDescriptor new] error:&error];
        if (archive_ == nil) problem_ = message_of(error);
    }

    id<MTLDevice> device_;
    id<MTLBinaryArchive> archive_ = nil;
    std::mutex mutex_;
    std::string path_, problem_;
    std::atomic<uint32_t> hits_{0};
    std::vector<MTLComputePipelineDescriptor*> made_;
    bool loaded_ = false;
};

}  // namespace lily
