"""What the generated Metal.h says beyond metal-cpp: corrections, types of elements, and what may be nil.

metal-cpp has no nullability. Here everything is nonnull unless a rule says otherwise, which is stricter than
Apple's header: a literal nil in the wrong place does not compile. Widen a rule only for a nil that is meant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Correction:
    """A text of the generated header that differs from Apple's SDK; it must be there to be corrected."""

    generations: tuple[int, ...]
    wrong: str
    right: str
    reason: str


CORRECTIONS = (
    Correction(
        (26,),
        "MTLResourceStorageModeMemoryless = 1 << 5",
        "MTLResourceStorageModeMemoryless = 3 << 4",
        "pyobjc's table says 48; 32 is the private mode",
    ),
    Correction(
        (15, 26),
        "newBufferWithBytesNoCopy:(const void*)",
        "newBufferWithBytesNoCopy:(void*)",
        "Apple's encoding has no const: the memory becomes the buffer",
    ),
    Correction(
        (15, 26),
        "loadBytes:(const void*)",
        "loadBytes:(void*)",
        "Apple's encoding has no const: the bytes are written",
    ),
)

# Position of a parameter that may be nil, by selector.
NULLABLE_PARAMETERS = {
    "newBufferWithBytesNoCopy:length:options:deallocator:": (3,),
    "newComputePipelineStateWithDescriptor:options:reflection:error:": (2,),
    "newComputePipelineStateWithFunction:options:reflection:error:": (2,),
    "setBuffer:offset:atIndex:": (0,),
    "setLabel:": (0,),
}

# Results that may be nil although their method does not begin with "new".
NULLABLE_RESULTS = (
    "captureObject",
    "commandBufferWithDescriptor:",
    "computeCommandEncoderWithDispatchType:",
    "error",
    "label",
    "url",
)

# Element types, which metal-cpp leaves out, of what the device uses: (owner, selector): type.
ELEMENTS = {
    ("MTLLibrary", "functionNames"): "NSArray<NSString*>*",
    ("MTLComputePipelineDescriptor", "binaryArchives"): "NSArray<id<MTLBinaryArchive>>*",
    ("MTLComputePipelineDescriptor", "setBinaryArchives:"): "NSArray<id<MTLBinaryArchive>>*",
    ("MTLCompileOptions", "preprocessorMacros"): "NSDictionary<NSString*, NSObject*>*",
    ("MTLCompileOptions", "setPreprocessorMacros:"): "NSDictionary<NSString*, NSObject*>*",
}

# Functions and constants that metal-cpp wraps or leaves out; their names are compared with pyobjc's tables.
EXTRA = """
FOUNDATION_EXPORT id<MTLDevice> _Nullable MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;
FOUNDATION_EXPORT NSArray<id<MTLDevice>>* MTLCopyAllDevices(void) NS_RETURNS_RETAINED;
FOUNDATION_EXPORT NSErrorDomain const MTLCaptureErrorDomain;
FOUNDATION_EXPORT NSErrorDomain const MTLCommandBufferErrorDomain;
FOUNDATION_EXPORT NSErrorDomain const MTLLibraryErrorDomain;

inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
    return MTLSize{width, height, depth};
}
"""
