// The part of Foundation that the Metal device uses, for machines without Apple's SDK: for a Mach-O object that is
// only checked, and for the test double on Linux. Declarations agree with Apple's in name and type
// (tools/metal/check_headers.py compares them), and are stricter where that catches mistakes: option sets are types
// of their own, and results that must be looked at cannot be dropped.
#pragma once

#if !defined(__cplusplus) || !defined(__OBJC__)
#error "this header is for Objective-C++"
#endif

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __APPLE__
#include <TargetConditionals.h>
#include <objc/NSObjCRuntime.h>
#import <objc/NSObject.h>
#else
using BOOL = bool;
using NSInteger = long;
using NSUInteger = unsigned long;
#define YES true
#define NO false
#define nil nullptr
#define NSIntegerMax LONG_MAX
#define NSUIntegerMax ULONG_MAX
#endif

#define FOUNDATION_EXPORT extern "C"
#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_RETURNS_INNER_POINTER __attribute__((objc_returns_inner_pointer))
#define NS_RETURNS_RETAINED __attribute__((ns_returns_retained))
#define NS_WARN_UNUSED_RESULT __attribute__((warn_unused_result))

// Without the word typedef that Apple's macros want in front. Apple's NS_OPTIONS is an integer in C++; here a flag of
// another set does not compile.
#define NS_ENUM(type, name) enum name : type
#define NS_OPTIONS(type, name)                                    \
    enum name : type;                                             \
    constexpr name operator|(name a, name b) {                    \
        return name(static_cast<type>(a) | static_cast<type>(b)); \
    }                                                             \
    constexpr name operator&(name a, name b) {                    \
        return name(static_cast<type>(a) & static_cast<type>(b)); \
    }                                                             \
    enum __attribute__((flag_enum)) name : type

NS_ASSUME_NONNULL_BEGIN

@class NSDictionary<KeyType, ObjectType>;
@class NSString;

struct _NSZone;
using NSZone = struct _NSZone;
using NSTimeInterval = double;
using NSErrorDomain = NSString*;
using NSErrorUserInfoKey = NSString*;

struct _NSRange {
    NSUInteger location;
    NSUInteger length;
};
using NSRange = struct _NSRange;

inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
    return NSRange{location, length};
}

struct NSOperatingSystemVersion {
    NSInteger majorVersion;
    NSInteger minorVersion;
    NSInteger patchVersion;
};

#ifndef __APPLE__
@protocol NSObject
- (BOOL)isEqual:(id)object;
@property(readonly) NSUInteger hash;
- (Class)class;
- (instancetype)self;
- (BOOL)isKindOfClass:(Class)aClass;
- (BOOL)conformsToProtocol:(Protocol*)aProtocol;
- (BOOL)respondsToSelector:(SEL)aSelector;
@property(readonly, copy) NSString* description;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
    Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
- (instancetype)init;
- (void)dealloc;
- (id)copy;
+ (Class)class;
@end
#endif

@protocol NSCopying
- (id)copyWithZone:(nullable NSZone*)zone;
@end

NS_ENUM(NSUInteger, NSStringEncoding){
    NSUTF8StringEncoding = 4,
};

@interface NSString : NSObject <NSCopying>
+ (nullable instancetype)stringWithUTF8String:(const char*)nullTerminatedCString NS_WARN_UNUSED_RESULT;
- (nullable instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)len encoding:(NSStringEncoding)encoding;
@property(readonly) NSUInteger length;
@property(nullable, readonly) const char* UTF8String NS_RETURNS_INNER_POINTER;
- (BOOL)isEqualToString:(NSString*)aString NS_WARN_UNUSED_RESULT;
@end

@interface NSArray<__covariant ObjectType> : NSObject <NSCopying>
+ (instancetype)arrayWithObjects:(const ObjectType _Nonnull[_Nullable])objects count:(NSUInteger)cnt;
@property(readonly) NSUInteger count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
- (ObjectType)objectAtIndexedSubscript:(NSUInteger)idx;
@end

@interface NSDictionary<__covariant KeyType, __covariant ObjectType> : NSObject <NSCopying>
+ (instancetype)dictionaryWithObjects:(const ObjectType _Nonnull[_Nullable])objects
                              forKeys:(const KeyType<NSCopying> _Nonnull[_Nullable])keys
                                count:(NSUInteger)cnt;
@property(readonly) NSUInteger count;
- (nullable ObjectType)objectForKey:(KeyType)aKey;
- (nullable ObjectType)objectForKeyedSubscript:(KeyType)key;
@end

@interface NSNumber : NSObject <NSCopying>
+ (NSNumber*)numberWithBool:(BOOL)value;
+ (NSNumber*)numberWithInt:(int)value;
+ (NSNumber*)numberWithInteger:(NSInteger)value;
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value;
@property(readonly) BOOL boolValue;
@property(readonly) NSInteger integerValue;
@property(readonly) NSUInteger unsignedIntegerValue;
@end

@interface NSException : NSObject
@end

@interface NSError : NSObject <NSCopying>
+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(nullable NSDictionary<NSErrorUserInfoKey, id>*)dict;
@property(readonly, copy) NSErrorDomain domain;
@property(readonly) NSInteger code;
@property(readonly, copy) NSDictionary<NSErrorUserInfoKey, id>* userInfo;
@property(readonly, copy) NSString* localizedDescription;
@end

FOUNDATION_EXPORT NSErrorUserInfoKey const NSLocalizedDescriptionKey;

@interface NSURL : NSObject <NSCopying>
+ (NSURL*)fileURLWithPath:(NSString*)path NS_WARN_UNUSED_RESULT;
@property(nullable, readonly, copy) NSString* path;
@end

@interface NSProcessInfo : NSObject
@property(class, readonly, strong) NSProcessInfo* processInfo;
@property(readonly, copy) NSString* operatingSystemVersionString;
@property(readonly) NSOperatingSystemVersion operatingSystemVersion;
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)version NS_WARN_UNUSED_RESULT;
@end

NS_ENUM(NSUInteger, NSSearchPathDirectory){
    NSCachesDirectory = 13,
};

NS_OPTIONS(NSUInteger, NSSearchPathDomainMask){
    NSUserDomainMask = 1,
};

FOUNDATION_EXPORT NSArray<NSString*>* NSSearchPathForDirectoriesInDomains(NSSearchPathDirectory directory,
                                                                          NSSearchPathDomainMask domainMask,
                                                                          BOOL expandTilde) NS_WARN_UNUSED_RESULT;

NS_ASSUME_NONNULL_END
