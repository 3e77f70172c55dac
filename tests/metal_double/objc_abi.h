// Data that clang emits for Objective-C with -fobjc-runtime=macosx, as it lies in memory: Apple's non-fragile ABI, in
// ELF sections instead of Mach-O ones. Private to the runtime.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "objc_runtime.h"

using IMP = void (*)();

struct Method {
    SEL name;
    const char* types;
    IMP code;
};

struct MethodList {
    uint32_t entry_size, count;
    Method methods[];
};

struct ProtocolList;

struct Protocol {
    void* isa;
    const char* name;
    ProtocolList* protocols;
};

struct ProtocolList {
    uintptr_t count;
    Protocol* protocols[];
};

struct ClassData {
    uint32_t flags, instance_start, instance_size, reserved;
    const void* strong_layout;
    const char* name;
    MethodList* methods;
    ProtocolList* protocols;
    void* members;
    const void* weak_layout;
    void* properties;
};
constexpr uint32_t kMetaclass = 1;

// What the runtime adds to a class when it is loaded.
struct ClassInfo {
    std::atomic<int64_t> live{0};
    std::vector<MethodList*> category_methods;
    std::vector<IMP> construct, destruct;  // of members written in C++, in the order to run them
};

struct objc_class {
    objc_class* isa;
    objc_class* super;
    ClassInfo* info;  // the method cache in Apple's runtime
    void* unused;
    ClassData* data;

    bool is_metaclass() const { return (data->flags & kMetaclass) != 0; }
};

struct objc_object {
    objc_class* isa;
};

struct Category {
    const char* name;
    objc_class* type;
    MethodList *instance_methods, *class_methods;
};

// Precedes every object on the heap.
struct Header {
    std::atomic<int64_t> references;  // kImmortal and above are not counted; a freed object's class
    uint32_t magic;
    std::atomic<uint32_t> weakly_referenced;
};
constexpr uint32_t kLiveMagic = 0x6f626a63, kFreedMagic = 0x64656164;
constexpr int64_t kImmortal = int64_t{1} << 62;

extern "C" {
extern void* _NSConcreteGlobalBlock[32];
extern void* _NSConcreteStackBlock[32];
extern void* _NSConcreteMallocBlock[32];
extern objc_class __CFConstantStringClassReference;
void objc_msgSend();  // cast it to what the method is
}

inline bool is_block(id object) {
    const void* isa = object->isa;
    return isa == _NSConcreteGlobalBlock || isa == _NSConcreteStackBlock || isa == _NSConcreteMallocBlock;
}

namespace lily_objc {

// The one copy of a selector's name; two selectors are equal when their pointers are.
SEL intern(const char* name);
// nullptr when neither the class nor those above it have the method.
IMP find_method(Class type, SEL selector);
// The header of a live object; fails for anything else.
Header& header_of(id object);
// Classes and literals are never counted.
bool is_static(id object);

}  // namespace lily_objc
