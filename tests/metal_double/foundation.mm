// The part of Foundation that the Metal device uses. Compiled without automatic reference counting, because this is
// what it rests on.
#import <Foundation/Foundation.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "control.h"
#include "objc_runtime.h"

using metal_double::misuse;
using metal_double::Setting;
using metal_double::setting;
using metal_double::Text;
using metal_double::text;

@implementation NSObject
+ (instancetype)alloc {
    return lily_objc_alloc(self);
}
+ (instancetype)new {
    return [[self alloc] init];
}
- (instancetype)init {
    return self;
}
- (void)dealloc {
    lily_objc_dispose(self);
}
- (id)copy {
    return [(id<NSCopying>)self copyWithZone:nullptr];
}
// Everything here that can be copied is immutable.
- (id)copyWithZone:(NSZone*)zone {
    return objc_retain(self);
}
+ (Class)class {
    return self;
}
- (Class)class {
    return objc_opt_class(self);
}
- (instancetype)self {
    return self;
}
- (BOOL)isEqual:(id)object {
    return self == object;
}
- (NSUInteger)hash {
    return reinterpret_cast<NSUInteger>(self);
}
- (BOOL)isKindOfClass:(Class)type {
    return lily_objc_is_kind(self, type);
}
- (BOOL)conformsToProtocol:(Protocol*)protocol {
    return lily_objc_conforms(objc_opt_class(self), protocol);
}
- (BOOL)respondsToSelector:(SEL)selector {
    return lily_objc_responds(objc_opt_class(self), selector);
}
- (NSString*)description {
    return [NSString stringWithUTF8String:lily_objc_class_name(objc_opt_class(self))];
}
@end

// What a block answers to; the runtime sends a block's messages here.
@interface BlockObject : NSObject
@end
@implementation BlockObject
- (id)copy {
    return (id)_Block_copy(self);
}
@end

// A string that was made at run time.
@interface HeapString : NSString {
@public
    char* bytes;
}
@end

@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)bytes {
    if (bytes == nullptr) misuse("stringWithUTF8String: is given no text");
    return objc_autorelease([[NSString alloc] initWithBytes:bytes length:strlen(bytes) encoding:NSUTF8StringEncoding]);
}
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length encoding:(NSStringEncoding)encoding {
    if (encoding != NSUTF8StringEncoding) misuse("a string in another encoding than UTF-8");
    HeapString* string = (HeapString*)lily_objc_alloc([HeapString class]);
    string->bytes = static_cast<char*>(malloc(length + 1));
    memcpy(string->bytes, bytes, length);
    string->bytes[length] = '\0';
    objc_release(self);
    return string;
}
- (const char*)UTF8String {
    return "";
}
- (NSUInteger)length {
    return strlen(self.UTF8String);
}
- (BOOL)isEqualToString:(NSString*)other {
    return other != nil && strcmp(self.UTF8String, other.UTF8String) == 0;
}
- (BOOL)isEqual:(id)object {
    return object != nil && lily_objc_is_kind(object, [NSString class]) && [self isEqualToString:object];
}
- (NSUInteger)hash {
    return std::hash<std::string>()(self.UTF8String);
}
- (NSString*)description {
    return self;
}
@end

@implementation HeapString
- (const char*)UTF8String {
    return bytes;
}
- (void)dealloc {
    free(bytes);
    [super dealloc];
}
@end

// A literal; the compiler lays its members out.
@interface ConstantString : NSString {
    int flags;
    const char* bytes;
    long count;
}
@end
@implementation ConstantString
- (const char*)UTF8String {
    constexpr int kUtf16 = 0x10;
    if ((flags & kUtf16) != 0) misuse("a string literal with other characters than ASCII");
    return bytes;
}
@end
asm(".globl __CFConstantStringClassReference\n"
    ".hidden __CFConstantStringClassReference\n"
    ".set __CFConstantStringClassReference, OBJC_CLASS_$_ConstantString");

@interface NSArray () {
    id* objects;
    NSUInteger number;
}
@end

@implementation NSArray
+ (instancetype)arrayWithObjects:(const id*)objects count:(NSUInteger)count {
    NSArray* array = [self alloc];
    array->objects = static_cast<id*>(calloc(count + 1, sizeof(id)));
    array->number = count;
    for (NSUInteger i = 0; i < count; ++i) {
        if (objects[i] == nil) misuse("an array cannot hold nil, at index %lu", static_cast<unsigned long>(i));
        array->objects[i] = objc_retain(objects[i]);
    }
    return objc_autorelease(array);
}
- (NSUInteger)count {
    return number;
}
- (id)objectAtIndex:(NSUInteger)index {
    if (index >= number)
        misuse("index %lu of an array of %lu", static_cast<unsigned long>(index), static_cast<unsigned long>(number));
    return objects[index];
}
- (id)objectAtIndexedSubscript:(NSUInteger)index {
    return [self objectAtIndex:index];
}
- (void)dealloc {
    for (NSUInteger i = 0; i < number; ++i) objc_release(objects[i]);
    free(objects);
    [super dealloc];
}
@end

@interface NSDictionary () {
    NSArray *keys, *values;
}
@end

@implementation NSDictionary
+ (instancetype)dictionaryWithObjects:(const id*)objects forKeys:(const id<NSCopying>*)keys count:(NSUInteger)count {
    NSDictionary* dictionary = [self alloc];
    if (count == 0) return objc_autorelease(dictionary);
    std::vector<id> copies;
    for (NSUInteger i = 0; i < count; ++i) copies.push_back([(id)keys[i] copy]);
    dictionary->keys = (NSArray*)objc_retain([NSArray arrayWithObjects:copies.data() count:count]);
    dictionary->values = (NSArray*)objc_retain([NSArray arrayWithObjects:objects count:count]);
    for (id copy : copies) objc_release(copy);
    return objc_autorelease(dictionary);
}
- (NSUInteger)count {
    return keys.count;
}
// For the handful of entries that dictionaries have here.
- (id)objectForKey:(id)key {
    for (NSUInteger i = 0; i < keys.count; ++i)
        if ([[keys objectAtIndex:i] isEqual:key]) return [values objectAtIndex:i];
    return nil;
}
- (id)objectForKeyedSubscript:(id)key {
    return [self objectForKey:key];
}
- (void)dealloc {
    objc_release(keys);
    objc_release(values);
    [super dealloc];
}
@end

// What the compiler makes of @[] and @{}.
extern "C" {
NSArray* __NSArray0__;
NSDictionary* __NSDictionary0__;
}
__attribute__((constructor(102))) static void make_empty_literals() {
    void* const pool = objc_autoreleasePoolPush();
    __NSArray0__ = (NSArray*)objc_retain([NSArray arrayWithObjects:nullptr count:0]);
    __NSDictionary0__ = (NSDictionary*)objc_retain([NSDictionary dictionaryWithObjects:nullptr
                                                                               forKeys:nullptr
                                                                                 count:0]);
    objc_autoreleasePoolPop(pool);
    lily_objc_make_immortal(__NSArray0__);
    lily_objc_make_immortal(__NSDictionary0__);
}

@interface NSNumber () {
    long long value;
}
@end

@implementation NSNumber
+ (NSNumber*)numberWithInteger:(NSInteger)value {
    NSNumber* number = [self alloc];
    number->value = value;
    return objc_autorelease(number);
}
+ (NSNumber*)numberWithBool:(BOOL)value {
    return [self numberWithInteger:value];
}
+ (NSNumber*)numberWithInt:(int)value {
    return [self numberWithInteger:value];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value {
    return [self numberWithInteger:static_cast<NSInteger>(value)];
}
- (BOOL)boolValue {
    return value != 0;
}
- (NSInteger)integerValue {
    return value;
}
- (NSUInteger)unsignedIntegerValue {
    return static_cast<NSUInteger>(value);
}
- (BOOL)isEqual:(id)object {
    return object != nil && lily_objc_is_kind(object, [NSNumber class]) && value == ((NSNumber*)object)->value;
}
- (NSUInteger)hash {
    return static_cast<NSUInteger>(value);
}
@end

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@interface NSError () {
    NSErrorDomain domain;
    NSInteger code;
    NSDictionary* information;
}
@end

@implementation NSError
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)information {
    NSError* error = [self alloc];
    error->domain = (NSErrorDomain)objc_retain(domain);
    error->code = code;
    error->information = (NSDictionary*)objc_retain(information);
    return objc_autorelease(error);
}
- (NSErrorDomain)domain {
    return domain;
}
- (NSInteger)code {
    return code;
}
- (NSDictionary*)userInfo {
    return information;
}
- (NSString*)localizedDescription {
    NSString* description = [information objectForKey:NSLocalizedDescriptionKey];
    if (description != nil) return description;
    const std::string made = "The operation couldn't be completed. (" + std::string(domain.UTF8String) + " error " +
                             std::to_string(code) + ".)";
    return [NSString stringWithUTF8String:made.c_str()];
}
- (void)dealloc {
    objc_release(domain);
    objc_release(information);
    [super dealloc];
}
@end

@interface NSURL () {
    NSString* file;
}
@end

@implementation NSURL
+ (NSURL*)fileURLWithPath:(NSString*)path {
    if (path == nil || path.length == 0) misuse("fileURLWithPath: is given no path");
    NSURL* url = [self alloc];
    url->file = (NSString*)objc_retain(path);
    return objc_autorelease(url);
}
- (NSString*)path {
    return file;
}
- (void)dealloc {
    objc_release(file);
    [super dealloc];
}
@end

@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
    static NSProcessInfo* const shared = [] {
        NSProcessInfo* made = [NSProcessInfo alloc];
        lily_objc_make_immortal(made);
        return made;
    }();
    return shared;
}
- (NSOperatingSystemVersion)operatingSystemVersion {
    return {setting(Setting::kOsMajor), setting(Setting::kOsMinor), setting(Setting::kOsPatch)};
}
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)wanted {
    const NSOperatingSystemVersion have = self.operatingSystemVersion;
    if (have.majorVersion != wanted.majorVersion) return have.majorVersion > wanted.majorVersion;
    if (have.minorVersion != wanted.minorVersion) return have.minorVersion > wanted.minorVersion;
    return have.patchVersion >= wanted.patchVersion;
}
- (NSString*)operatingSystemVersionString {
    const NSOperatingSystemVersion have = self.operatingSystemVersion;
    std::string made = "Version " + std::to_string(have.majorVersion) + "." + std::to_string(have.minorVersion);
    if (have.patchVersion != 0) made += "." + std::to_string(have.patchVersion);
    made += " (Build " + text(Text::kOsBuild) + ")";
    return [NSString stringWithUTF8String:made.c_str()];
}
@end

NSArray<NSString*>* NSSearchPathForDirectoriesInDomains(NSSearchPathDirectory directory, NSSearchPathDomainMask domains,
                                                        BOOL expandTilde) {
    if (directory != NSCachesDirectory || domains != NSUserDomainMask || !expandTilde)
        misuse("only the user's caches directory is known, with its tilde expanded");
    const std::string path = text(Text::kCachesDirectory);
    if (path.empty()) return [NSArray arrayWithObjects:nullptr count:0];
    NSString* const paths[] = {[NSString stringWithUTF8String:path.c_str()]};
    return [NSArray arrayWithObjects:paths count:1];
}
