// Libraries, functions and pipelines.
#include <algorithm>
#include <functional>

#include "objects.h"

using namespace metal_double;

namespace {

constexpr NSUInteger kNewestLanguage[][2] = {{26, 4 << 16}, {15, (3 << 16) + 2}, {14, (3 << 16) + 1}, {13, 3 << 16}};
constexpr NSUInteger kOldestLanguage = (3 << 16) + 2, kTensorLanguage = 4 << 16;  // of the shaders

std::string version_text(NSUInteger version) {
    return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

NSUInteger newest_language() {
    for (const auto& [system, language] : kNewestLanguage)
        if (system_major() >= static_cast<int64_t>(system)) return language;
    return 0;
}

// What the compiler has against a source, or "".
std::string compile_error(const Source& source, NSUInteger language) {
    if (language > newest_language())
        return "error: invalid value 'metal" + version_text(language) + "' in '-std=metal" + version_text(language) +
               "'";
    if (language < kOldestLanguage) return "program_source:1:1: error: unknown type name 'bfloat'";
    if (source.tensor_form && language < kTensorLanguage)
        return "program_source:1:1: fatal error: 'MetalPerformancePrimitives/MetalPerformancePrimitives.h' file not "
               "found";
    return source.error;
}

std::string hash_text(const std::string& text) {
    return std::to_string(std::hash<std::string>()(text));
}

NSUInteger compiled_threads(const Function& function) {
    return function.kernel->simds * 32;  // KERNEL's max_total_threads_per_threadgroup
}

// What is wrong with a pipeline, or "".
std::string pipeline_error(SoftDevice* device, SoftFunction* function, const Form& form) {
    const std::string kernel = form.function.kernel->name;
    const auto memory = static_cast<NSUInteger>(threadgroup_memory(kernel));
    if (fails(Failure::kPipeline)) return "injected pipeline error";
    if (memory > device.maxThreadgroupMemoryLength)
        return "Threadgroup memory size (" + std::to_string(memory) +
               ") exceeds the maximum threadgroup memory allowed (32768)";
    if (form.run == nullptr) return "the double has no CPU form of " + function->function_name;
    return "";
}

}  // namespace

namespace metal_double {

SoftLibrary* make_library(SoftDevice* device, NSString* text, MTLCompileOptions* options, NSError** error) {
    constexpr const char* kCall = "newLibraryWithSource:";
    check_error_place(error, kCall);
    if (text == nil) misuse("%s is given no source", kCall);
    if (options == nil) misuse("%s is given no options: fast math is the default", kCall);
    const auto language = static_cast<NSUInteger>(options.languageVersion);
    if (language == 0) misuse("%s without a language version", kCall);
    if (options.mathMode != MTLMathModeSafe) misuse("%s needs the safe math mode, set explicitly", kCall);
    const std::string source_text = text.UTF8String;
    Source source = read_source(source_text);
    std::string wrong = compile_error(source, language);
    if (wrong.empty() && fails(Failure::kLibrary)) wrong = "program_source:1:1: error: injected compiler error";
    if (!wrong.empty()) {
        set_error(error, kCall, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, wrong);
        return nil;
    }
    // Metal reports warnings this way, so that the error alone does not tell whether the call failed.
    if (setting(Setting::kCompileWarnings) != 0)
        set_error(error, kCall, MTLLibraryErrorDomain, MTLLibraryErrorCompileWarning,
                  "program_source:1:1: warning: unused variable 'simd'");
    SoftLibrary* const library = [SoftLibrary new];
    library->device = device;
    library->source = std::move(source);
    library->identity = hash_text(source_text) + " " + version_text(language);
    add(Counter::kLibraries);
    return library;
}

std::string identity_of(MTLComputePipelineDescriptor* descriptor) {
    SoftFunction* const function = descriptor.computeFunction;
    return function->function_name + " " + function->library->identity + " " +
           std::to_string(descriptor.maxTotalThreadsPerThreadgroup) + " " +
           std::to_string(descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth);
}

static bool in_archives(SoftDevice* device, MTLComputePipelineDescriptor* descriptor) {
    const std::string identity = identity_of(descriptor);
    bool found = false;
    for (NSUInteger i = 0; i < descriptor.binaryArchives.count; ++i)
        found |= [checked<SoftArchive>(descriptor.binaryArchives[i], "binaryArchives", device) contains:identity];
    return found;
}

SoftPipeline* make_pipeline(SoftDevice* device, MTLComputePipelineDescriptor* descriptor, MTLPipelineOption options,
                            NSError** error) {
    constexpr const char* kCall = "newComputePipelineStateWithDescriptor:";
    check_error_place(error, kCall);
    if (descriptor == nil || descriptor.computeFunction == nil) misuse("%s is given no function", kCall);
    if ((options & ~static_cast<NSUInteger>(MTLPipelineOptionFailOnBinaryArchiveMiss)) != 0)
        misuse("%s with options %lu", kCall, static_cast<unsigned long>(options));
    SoftFunction* const function = descriptor.computeFunction;
    check_device(function->library->device, device, kCall);
    const bool only_archives = options == MTLPipelineOptionFailOnBinaryArchiveMiss;
    const bool found = in_archives(device, descriptor);
    if (!found && descriptor.binaryArchives.count > 0) add(Counter::kArchiveMisses);
    if (only_archives && (fails(Failure::kPipelineLookup) || !found)) {
        set_error(error, kCall, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorCompilationFailure,
                  function->function_name + " is in none of the archives");
        return nil;
    }
    const Form form = find_form(function->function, static_cast<uint32_t>(setting(Setting::kWidth)),
                                function->library->source.tensor_form);
    const std::string wrong = pipeline_error(device, function, form);
    if (!wrong.empty()) {
        set_error(error, kCall, @"CompilerError", 2, wrong);
        return nil;
    }
    SoftPipeline* const pipeline = [SoftPipeline new];
    pipeline->device = device;
    pipeline->form = form;
    pipeline->name = [descriptor.label copy];
    const NSUInteger asked = descriptor.maxTotalThreadsPerThreadgroup;
    pipeline->max_threads = std::min(static_cast<NSUInteger>(setting(Setting::kMaxThreads)),
                                     asked != 0 ? asked : compiled_threads(form.function));
    pipeline->threadgroup_memory = static_cast<NSUInteger>(threadgroup_memory(form.function.kernel->name));
    pipeline->whole_simdgroups = descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth;
    add(found ? Counter::kPipelinesFromArchive : Counter::kPipelinesCompiled);
    return pipeline;
}

}  // namespace metal_double

@implementation SoftLibrary
- (id<MTLDevice>)device {
    return device;
}
- (NSString*)label {
    return name;
}
- (void)setLabel:(NSString*)label {
    name = [label copy];
}
- (NSArray<NSString*>*)functionNames {
    std::vector<NSString*> names;
    for (const auto& entry : source.functions) names.push_back(string(entry.first));
    return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)wanted {
    if (wanted == nil) misuse("newFunctionWithName: is given nil");
    const auto entry = source.functions.find(wanted.UTF8String);
    if (entry == source.functions.end() || fails(Failure::kFunction)) return nil;
    SoftFunction* const made = [SoftFunction new];
    made->library = self;
    made->function_name = entry->first;
    made->function = entry->second;
    return made;
}
@end

@implementation SoftFunction
- (id<MTLDevice>)device {
    return library->device;
}
- (NSString*)name {
    return string(function_name);
}
@end

@implementation SoftPipeline
- (id<MTLDevice>)device {
    return device;
}
- (NSString*)label {
    return name;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
    return max_threads;
}
- (NSUInteger)threadExecutionWidth {
    return 32;
}
- (NSUInteger)staticThreadgroupMemoryLength {
    return threadgroup_memory;
}
- (void)dealloc {
    [self checkUnused:"pipeline"];
}
@end

@interface MTLCompileOptions () {
    MTLLanguageVersion version;
    MTLMathMode mode;
}
@end

@implementation MTLCompileOptions
- (instancetype)init {
    self = [super init];
    mode = MTLMathModeFast;  // Metal's default
    return self;
}
- (MTLLanguageVersion)languageVersion {
    return version;
}
- (void)setLanguageVersion:(MTLLanguageVersion)value {
    version = value;
}
- (MTLMathMode)mathMode {
    return mode;
}
- (void)setMathMode:(MTLMathMode)value {
    if (value != MTLMathModeSafe) misuse("the math mode must be safe");
    mode = value;
}
@end

@interface MTLComputePipelineDescriptor ()
@property(nonatomic, strong) id<MTLFunction> computeFunction;
@property(nonatomic, copy) NSString* label;
@property(nonatomic) BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
@property(nonatomic) NSUInteger maxTotalThreadsPerThreadgroup;
@property(nonatomic, copy) NSArray<id<MTLBinaryArchive>>* binaryArchives;
@end
@implementation MTLComputePipelineDescriptor
@end
