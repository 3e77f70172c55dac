// Binary archives: files that name the pipelines that need no compiler, for one GPU and one build of the system.
#include <fstream>
#include <functional>

#include "objects.h"

using namespace metal_double;

namespace {

constexpr const char* kMagic = "metal double archive";

// Everything but the checksum of the last line.
std::string body_of(SoftDevice* device, const std::set<std::string>& pipelines) {
    std::string body = std::string(kMagic) + "\n" + device->gpu + "\n" + device->os_build + "\n";
    for (const std::string& identity : pipelines) body += identity + "\n";
    return body;
}

std::string checksum(const std::string& body) {
    return std::to_string(std::hash<std::string>()(body));
}

// The pipelines of a file; what is wrong with it goes to `problem`.
std::set<std::string> load(SoftDevice* device, const std::string& path, std::string& problem) {
    std::ifstream file(path, std::ios::binary);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    std::set<std::string> pipelines;
    if (lines.empty()) {
        problem = "cannot read " + path;
    } else if (lines[0] != kMagic || lines.size() < 4) {
        problem = path + " is not an archive";
    } else if (lines[1] != device->gpu || lines[2] != device->os_build) {
        problem = path + " was made for another GPU or another build of the system";
    } else {
        pipelines.insert(lines.begin() + 3, lines.end() - 1);
        if (lines.back() != checksum(body_of(device, pipelines))) problem = path + " is damaged";
    }
    return pipelines;
}

}  // namespace

@implementation SoftArchive
- (instancetype)initWithDevice:(SoftDevice*)owner url:(NSURL*)url error:(NSError**)error {
    constexpr const char* kCall = "newBinaryArchiveWithDescriptor:";
    check_error_place(error, kCall);
    self = [super init];
    device = owner;
    std::string problem;
    if (fails(Failure::kArchiveOpen)) problem = "injected archive error";
    if (url != nil && problem.empty()) {
        pipelines = load(device, url.path.UTF8String, problem);
        if (problem.empty()) add(Counter::kArchivesOpened);
    }
    if (problem.empty()) return self;
    set_error(error, kCall, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInvalidFile, problem);
    return nil;
}
- (id<MTLDevice>)device {
    return device;
}
- (bool)contains:(const std::string&)identity {
    const std::lock_guard lock(mutex);
    return pipelines.count(identity) != 0;
}
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor error:(NSError**)error {
    constexpr const char* kCall = "addComputePipelineFunctionsWithDescriptor:";
    check_process(device);
    check_error_place(error, kCall);
    if (descriptor == nil || descriptor.computeFunction == nil) misuse("%s is given no function", kCall);
    SoftFunction* const function = descriptor.computeFunction;
    check_device(function->library->device, device, kCall);
    if (fails(Failure::kArchiveAdd)) {
        set_error(error, kCall, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorCompilationFailure,
                  "injected archive error");
        return NO;
    }
    const std::lock_guard lock(mutex);
    pipelines.insert(identity_of(descriptor));
    return YES;
}
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
    constexpr const char* kCall = "serializeToURL:";
    check_process(device);
    check_error_place(error, kCall);
    if (url == nil) misuse("%s is given nil", kCall);
    const std::string path = url.path.UTF8String;
    const std::lock_guard lock(mutex);
    const std::string body = body_of(device, pipelines);
    if (!fails(Failure::kArchiveSerialize)) {
        std::ofstream file(path, std::ios::binary | std::ios::trunc);
        file << body << checksum(body) << "\n";
        file.close();
        if (file) {
            add(Counter::kArchivesSaved);
            return YES;
        }
    }
    set_error(error, kCall, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInternalError, "cannot write " + path);
    return NO;
}
@end

NSErrorDomain const MTLBinaryArchiveDomain = @"MTLBinaryArchiveDomain";
NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";
NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";
NSErrorDomain const MTLCaptureErrorDomain = @"MTLCaptureErrorDomain";
NSErrorUserInfoKey const MTLCommandBufferEncoderInfoErrorKey = @"MTLCommandBufferEncoderInfoErrorKey";

@interface MTLBinaryArchiveDescriptor ()
@property(nonatomic, copy) NSURL* url;
@end
@implementation MTLBinaryArchiveDescriptor
@end
