// The runtime and Foundation.
#include <atomic>
#include <stdexcept>
#include <thread>

#include "objc_runtime.h"
#include "selftest.h"

namespace {

std::atomic<int> deallocated{0};
std::atomic<int> destroyed{0};

struct Member {
    int value = 7;
    ~Member() { destroyed.fetch_add(1); }
};

}  // namespace

@protocol Speaker
- (double)half:(double)value;
@end

@interface Animal : NSObject <Speaker> {
@public
    Member member;
    NSString* name;
}
@end

@implementation Animal
- (double)half:(double)value {
    return value / 2;
}
- (void)dealloc {
    deallocated.fetch_add(1);
}
@end

@interface Dog : Animal {
@public
    int legs;
}
@end

@implementation Dog
- (double)half:(double)value {
    return [super half:value] + 1;
}
@end

namespace {

void objects_live_and_die() {
    deallocated = destroyed = 0;
    const int64_t before = count("live:Dog");
    @autoreleasepool {
        Dog* dog = [Dog new];
        EXPECT(dog->member.value == 7 && dog->legs == 0 && dog->name == nil);
        dog->name = text("Rex");
        Dog* other = dog;
        EXPECT(count("live:Dog") == before + 1);
        dog = nil;
        EXPECT(deallocated == 0 && [other->name isEqualToString:@"Rex"]);
    }
    EXPECT(deallocated == 1 && destroyed == 1 && count("live:Dog") == before);
}

void messages_find_methods() {
    Animal* const animal = [Animal new];
    Animal* const dog = [Dog new];
    EXPECT([animal half:3] == 1.5 && [dog half:3] == 2.5);
    EXPECT([dog isKindOfClass:[Animal class]] && ![animal isKindOfClass:[Dog class]]);
    EXPECT([dog respondsToSelector:@selector(half:)] && ![dog respondsToSelector:@selector(UTF8String)]);
    EXPECT([dog conformsToProtocol:@protocol(Speaker)] && ![dog conformsToProtocol:@protocol(NSCopying)]);
    EXPECT([dog.description isEqualToString:@"Dog"]);
    Animal* const nobody = nil;
    NSProcessInfo* const no_process = nil;
    EXPECT([nobody half:3] == 0 && nobody.hash == 0 && no_process.operatingSystemVersion.majorVersion == 0);
}

void weak_references_end() {
    __weak Dog* weak = nil;
    __weak Dog* copy = nil;
    @autoreleasepool {
        Dog* const dog = [Dog new];
        weak = dog;
        copy = weak;
        EXPECT(weak == dog && copy == dog);
    }
    EXPECT(weak == nil && copy == nil);
}

// One thread drops the last reference while another one tries to get one.
void weak_references_race() {
    for (int i = 0; i < 200; ++i) {
        __block Dog* dog = [Dog new];
        __weak Dog* weak = dog;
        std::thread reader([&] {
            @autoreleasepool {
                Dog* const mine = weak;
                EXPECT(mine == nil || mine->member.value == 7);
            }
        });
        dog = nil;
        reader.join();
    }
}

void pools_drain() {
    deallocated = 0;
    @autoreleasepool {
        objc_autorelease(objc_retain([Dog new]));
        @autoreleasepool {
            for (int i = 0; i < 100; ++i) EXPECT([text("x") length] == 1);
            EXPECT(count("open_pools") == 3);
        }
        EXPECT(count("open_pools") == 2 && deallocated == 0);
    }
    EXPECT(deallocated == 1);
    EXPECT(count("autoreleased_without_pool") == 0);
}

void threads_drain_at_their_end() {
    const int64_t before = count("live_objects");
    std::thread([] { EXPECT([text("left over") length] == 9); }).join();
    EXPECT(count("live_objects") == before && count("autoreleased_without_pool") > 0);
}

void exceptions_skip_pools() {
    deallocated = 0;
    @autoreleasepool {
        try {
            @autoreleasepool {
                Dog* const dog = [Dog new];
                EXPECT(dog != nil && text("in the pool") != nil);
                throw std::runtime_error("out of the pool");
            }
        } catch (const std::runtime_error&) {
            EXPECT(deallocated == 1 && count("open_pools") == 3);
        }
    }
    EXPECT(count("skipped_pools") == 1 && count("open_pools") == 1);
}

void blocks_keep_what_they_capture() {
    deallocated = 0;
    const int64_t before = count("live_blocks");
    @autoreleasepool {
        __block int sum = 0;
        Dog* dog = [Dog new];
        int (^const add)(int) = ^(int value) {
          sum += value + dog->legs;
          return sum;
        };
        int (^const stored)(int) = [add copy];
        void (^const nested)() = ^{
          stored(10);
        };
        EXPECT(count("live_blocks") > before);
        dog = nil;
        add(1);
        nested();
        EXPECT(sum == 11 && deallocated == 0);
        std::thread([stored] { stored(5); }).join();
        EXPECT(sum == 16);
    }
    EXPECT(deallocated == 1 && count("live_blocks") == before);
}

void locks_exclude() {
    Dog* const dog = [Dog new];
    const auto work = [dog] {
        for (int i = 0; i < 1000; ++i) {
            @synchronized(dog) {
                @synchronized(dog) {
                    ++dog->legs;
                }
            }
        }
    };
    std::thread one(work), two(work);
    one.join();
    two.join();
    EXPECT(dog->legs == 2000);
}

void foundation_works() {
    NSArray<NSString*>* const array = @[ @"one", text("two") ];
    EXPECT(array.count == 2 && [array[1] isEqualToString:@"two"] && [array[0] isEqual:@"one"]);
    NSDictionary<NSString*, NSNumber*>* const dictionary = @{@"a" : @1, @"b" : @YES};
    EXPECT(dictionary.count == 2 && dictionary[text("b")].boolValue && dictionary[@"c"] == nil);
    NSString* const cut = [[NSString alloc] initWithBytes:"abcdef" length:3 encoding:NSUTF8StringEncoding];
    EXPECT([cut isEqualToString:@"abc"] && cut.length == 3 && cut.hash == @"abc".hash);
    NSError* const error = [NSError errorWithDomain:@"Domain" code:3 userInfo:@{NSLocalizedDescriptionKey : @"why"}];
    EXPECT(error.code == 3 && [error.localizedDescription isEqualToString:@"why"]);
    NSError* const silent = [NSError errorWithDomain:@"Domain" code:4 userInfo:nil];
    EXPECT(std::string(silent.localizedDescription.UTF8String).find("Domain error 4") != std::string::npos);
    EXPECT([[NSURL fileURLWithPath:@"/a/b"].path isEqualToString:@"/a/b"]);
}

void the_machine_is_simulated() {
    NSProcessInfo* const process = NSProcessInfo.processInfo;
    EXPECT([process.operatingSystemVersionString isEqualToString:@"Version 15.5 (Build 24F74)"]);
    EXPECT(([process isOperatingSystemAtLeastVersion:{15, 0, 0}] &&
            ![process isOperatingSystemAtLeastVersion:{26, 0, 0}]));
    const With newer("os_major", 26);
    EXPECT(([process isOperatingSystemAtLeastVersion:{26, 0, 0}]));
    EXPECT(NSSearchPathForDirectoriesInDomains(NSCachesDirectory, NSUserDomainMask, YES).count == 0);
    EXPECT(lily_double_set_text("caches_directory", "/caches") == 0);
    EXPECT(
        [NSSearchPathForDirectoriesInDomains(NSCachesDirectory, NSUserDomainMask, YES)[0] isEqualToString:@"/caches"]);
}

void control_knows_its_names() {
    EXPECT(lily_double_set("width", 32) == 1 && lily_double_set("width", 1) == 32);
    EXPECT(lily_double_set("no such", 1) == -1 && lily_double_set("fail:no such", 1) == -1);
    EXPECT(lily_double_set_text("no such", "") == -1 && lily_double_count("no such") == -1);
    EXPECT(lily_double_count("live:NoSuch") == -1);
    EXPECT(lily_double_set("fail:queue", 1) == 0 && lily_double_set("threadgroup_memory:qmv", 9) == 0);
    lily_double_reset();
    EXPECT(lily_double_set("fail:queue", 0) == 0 && lily_double_set("threadgroup_memory:qmv", 0) == 0);
}

}  // namespace

std::span<const Check> runtime_checks() {
    static constexpr Check checks[] = {
        {"objects live and die", objects_live_and_die},
        {"messages find methods", messages_find_methods},
        {"weak references end", weak_references_end},
        {"weak references race", weak_references_race},
        {"pools drain", pools_drain},
        {"threads drain at their end", threads_drain_at_their_end},
        {"exceptions skip pools", exceptions_skip_pools},
        {"blocks keep what they capture", blocks_keep_what_they_capture},
        {"locks exclude", locks_exclude},
        {"Foundation works", foundation_works},
        {"the machine is simulated", the_machine_is_simulated},
        {"control knows its names", control_knows_its_names},
    };
    return checks;
}
