// The capture manager: it writes a folder where Metal writes a GPU trace, and counts what is committed meanwhile.
#include <filesystem>
#include <fstream>

#include "objc_runtime.h"
#include "objects.h"

using namespace metal_double;

namespace {

namespace fs = std::filesystem;

struct Capture {
    std::mutex mutex;
    bool active = false;
    __weak id object;  // the device or the queue whose work is captured
    fs::path folder;
    int64_t command_buffers = 0;
};

Capture& capture() {
    static Capture& only = *new Capture;
    return only;
}

// What is wrong with a request, or "".
std::string request_error(MTLCaptureDescriptor* descriptor, NSInteger& code) {
    code = MTLCaptureErrorNotSupported;
    if (setting(Setting::kCaptureSupported) == 0) return "capturing is not enabled";
    if (fails(Failure::kCapture)) return "injected capture error";
    code = MTLCaptureErrorAlreadyCapturing;
    if (capture().active) return "a capture is running already";
    code = MTLCaptureErrorInvalidDescriptor;
    const fs::path folder = descriptor.outputURL.path.UTF8String;
    if (folder.extension() != ".gputrace") return "the output must end in .gputrace";
    if (fs::exists(folder)) return "the output exists already";
    std::error_code problem;
    if (!fs::create_directory(folder, problem)) return "cannot create the output: " + problem.message();
    return "";
}

}  // namespace

namespace metal_double {

void note_commit(SoftQueue* queue) {
    Capture& current = capture();
    const std::lock_guard lock(current.mutex);
    const id object = current.object;
    if (!current.active || (object != queue && object != queue->device)) return;
    ++current.command_buffers;
    add(Counter::kCapturedCommandBuffers);
}

}  // namespace metal_double

@interface MTLCaptureDescriptor ()
@property(nonatomic, strong) id captureObject;
@property(nonatomic) MTLCaptureDestination destination;
@property(nonatomic, copy) NSURL* outputURL;
@end
@implementation MTLCaptureDescriptor
@end

@implementation MTLCaptureManager
+ (MTLCaptureManager*)sharedCaptureManager {
    static MTLCaptureManager* const shared = [] {
        MTLCaptureManager* made = [MTLCaptureManager new];
        lily_objc_make_immortal(made);
        return made;
    }();
    return shared;
}
- (BOOL)supportsDestination:(MTLCaptureDestination)destination {
    return destination == MTLCaptureDestinationGPUTraceDocument && setting(Setting::kCaptureSupported) != 0;
}
- (BOOL)isCapturing {
    const std::lock_guard lock(capture().mutex);
    return capture().active;
}
- (BOOL)startCaptureWithDescriptor:(MTLCaptureDescriptor*)descriptor error:(NSError**)error {
    constexpr const char* kCall = "startCaptureWithDescriptor:";
    check_error_place(error, kCall);
    if (descriptor == nil || descriptor.captureObject == nil) misuse("%s is given nothing to capture", kCall);
    const id object = descriptor.captureObject;
    if (![object isKindOfClass:[SoftDevice class]] && ![object isKindOfClass:[SoftQueue class]])
        misuse("%s is given neither a device nor a queue", kCall);
    if (descriptor.destination != MTLCaptureDestinationGPUTraceDocument || descriptor.outputURL == nil)
        misuse("%s needs a trace document and where to put it", kCall);
    Capture& current = capture();
    const std::lock_guard lock(current.mutex);
    NSInteger code = 0;
    const std::string wrong = request_error(descriptor, code);
    if (!wrong.empty()) {
        set_error(error, kCall, MTLCaptureErrorDomain, code, wrong);
        return NO;
    }
    current.active = true;
    current.object = object;
    current.folder = descriptor.outputURL.path.UTF8String;
    current.command_buffers = 0;
    add(Counter::kCaptures);
    return YES;
}
- (void)stopCapture {
    Capture& current = capture();
    const std::lock_guard lock(current.mutex);
    if (!current.active) misuse("stopCapture without a capture");
    current.active = false;
    current.object = nil;
    std::ofstream(current.folder / "index") << current.command_buffers << "\n";
}
@end
