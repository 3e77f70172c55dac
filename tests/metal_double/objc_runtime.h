// What Foundation and the double ask of the Objective-C runtime, beyond the entry points that the compiler calls.
#pragma once

#include <cstdint>

#ifndef __OBJC__
// The compiler knows these words in Objective-C only.
struct objc_object;
struct objc_class;
using id = objc_object*;
using Class = objc_class*;
using SEL = const char*;
struct Protocol;
#endif

extern "C" {
// A zero-filled instance with one reference.
id lily_objc_alloc(Class type);
// Destroys the members that have destructors and frees the memory; NSObject's -dealloc.
void lily_objc_dispose(id object);
// For objects that live as long as the process: retain and release do nothing, and it is no longer counted.
void lily_objc_make_immortal(id object);
bool lily_objc_is_kind(id object, Class type);
bool lily_objc_conforms(Class type, Protocol* protocol);
bool lily_objc_responds(Class type, SEL selector);
const char* lily_objc_class_name(Class type);

// The compiler's own entry points, for code without automatic reference counting.
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
void* objc_autoreleasePoolPush();
void objc_autoreleasePoolPop(void* pool);
Class objc_opt_class(id object);
void* _Block_copy(const void* block);
}

namespace lily_objc {

// Live instances of a class, of every class for nullptr; -1 for a class that does not exist.
int64_t live_objects(const char* class_name);
// Blocks that were copied to the heap and not yet released.
int64_t live_blocks();

// Objects that were autoreleased where no pool was open: on a thread that lives on they would leak.
int64_t autoreleased_without_pool();
// Pools that were left by an exception and therefore not drained when their scope ended.
int64_t skipped_pools();
// Pools open on the calling thread.
int64_t open_pools();

// Prints "objc: ..." and aborts.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace lily_objc
