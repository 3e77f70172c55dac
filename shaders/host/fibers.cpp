#include "fibers.h"

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <vector>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

// lily_fiber_switch(save, stack): keeps the callee-saved registers on this stack and its address in *save,
// and goes on with what another stack kept. A new stack holds zeros for the registers and the address of its
// first function.
extern "C" void lily_fiber_switch(void** save, void* stack);

#if defined(__APPLE__)
#define LILY_SYMBOL "_lily_fiber_switch"
#define LILY_SYMBOL_KIND ".private_extern _lily_fiber_switch\n"
#else
#define LILY_SYMBOL "lily_fiber_switch"
#define LILY_SYMBOL_KIND ".hidden lily_fiber_switch\n.type lily_fiber_switch, %function\n"
#endif

#if defined(__x86_64__)
constexpr size_t kFrameWords = 8, kReturnWord = 6;  // the last word aligns the stack as after a call
asm(".text\n.globl " LILY_SYMBOL "\n" LILY_SYMBOL_KIND LILY_SYMBOL
    ":\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    popq %rcx\n    jmpq *%rcx\n");  // a return would always be mispredicted
#elif defined(__aarch64__)
constexpr size_t kFrameWords = 20, kReturnWord = 1;
asm(".text\n.globl " LILY_SYMBOL "\n.p2align 2\n" LILY_SYMBOL_KIND LILY_SYMBOL
    ":\n"
    "    sub sp, sp, #160\n"
    "    stp x29, x30, [sp]\n    stp x19, x20, [sp, #16]\n    stp x21, x22, [sp, #32]\n"
    "    stp x23, x24, [sp, #48]\n    stp x25, x26, [sp, #64]\n    stp x27, x28, [sp, #80]\n"
    "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n"
    "    stp d12, d13, [sp, #128]\n    stp d14, d15, [sp, #144]\n"
    "    mov x9, sp\n    str x9, [x0]\n"
    "    mov sp, x1\n"
    "    ldp x29, x30, [sp]\n    ldp x19, x20, [sp, #16]\n    ldp x21, x22, [sp, #32]\n"
    "    ldp x23, x24, [sp, #48]\n    ldp x25, x26, [sp, #64]\n    ldp x27, x28, [sp, #80]\n"
    "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n"
    "    ldp d12, d13, [sp, #128]\n    ldp d14, d15, [sp, #144]\n"
    "    add sp, sp, #160\n"
    "    br x30\n");
#else
#error "no fiber switch for this processor"
#endif

namespace lily_fibers {
namespace {

constexpr uint32_t kLanes = 32, kMaxThreads = 1024;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 512 * 1024;  // instrumented frames are much larger
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif
constexpr uint64_t kCanary = 0x6c696c795f656e64;

enum class Wait : uint8_t { kDone, kBarrier, kExchange };

// A stack and what a sanitizer needs to know about it; also used for the thread that runs the fibers.
struct Context {
    void* stack_pointer = nullptr;
    const void* bottom = nullptr;
    size_t bytes = 0;
    void* fake_stack = nullptr;
    void* race_state = nullptr;
};

struct Fiber {
    Context context;
    Wait wait = Wait::kDone;
    Combine combine = nullptr;
    uint32_t operand = 0;
};

void switch_context([[maybe_unused]] Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.race_state, 0);
#endif
    lily_fiber_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

class Worker {
public:
    Worker();
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    bool ready() const { return stacks_ != MAP_FAILED; }
    const char* run(uint32_t simds, Body body, const void* body_context);
    uint32_t current_thread() const { return current_; }
    void wait(Wait wait, Combine combine, uint32_t operand, void* value);

private:
    [[noreturn]] static void fiber_main();
    void start(uint32_t tid);
    void resume(uint32_t tid);
    const char* run_simdgroup(uint32_t simd);
    const char* meet(uint32_t simds) const;
    void abandon(uint32_t threads);
    std::byte* stack_of(uint32_t tid) const { return static_cast<std::byte*>(stacks_) + tid * kStackBytes; }

    void* stacks_;
    std::vector<Fiber> fibers_;
    uint32_t started_ = 0;  // fibers that have a stack with fiber_main() on it
    Context main_;
    uint32_t current_ = 0;
    // Neighbouring segments run in opposite orders, so that a missing barrier shows whichever way it points.
    bool upwards_ = false;
    Body body_ = nullptr;
    const void* body_context_ = nullptr;
    void* values_[kMaxThreads];  // each on the stack of a fiber that waits
};

thread_local std::unique_ptr<Worker> owned_worker;
thread_local Worker* worker = nullptr;  // the same; a plain pointer is quicker to reach

Worker::Worker() : fibers_(kMaxThreads) {
    // Address space only: the kernel commits what the fibers touch.
    stacks_ =
        mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
#if defined(__SANITIZE_THREAD__)
    main_.race_state = __tsan_get_current_fiber();
#endif
}

Worker::~Worker() {
#if defined(__SANITIZE_THREAD__)
    for (uint32_t tid = 0; tid < started_; ++tid) __tsan_destroy_fiber(fibers_[tid].context.race_state);
#endif
    if (!ready()) return;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stacks_, kStackBytes * kMaxThreads);
#endif
    munmap(stacks_, kStackBytes * kMaxThreads);
}

void Worker::start(uint32_t tid) {
    Context& context = fibers_[tid].context;
    std::byte* bottom = stack_of(tid);
    std::memcpy(bottom, &kCanary, sizeof kCanary);
    // Stacks that began at equal offsets would fight for the same cache sets.
    const size_t colour = tid * 832 % 16384 / 64 * 64;
    auto** frame = reinterpret_cast<void**>(bottom + kStackBytes - colour) - kFrameWords;
    std::memset(frame, 0, kFrameWords * sizeof(void*));
    frame[kReturnWord] = reinterpret_cast<void*>(&fiber_main);
    context.stack_pointer = frame;
    context.bottom = bottom;
    context.bytes = kStackBytes;
#if defined(__SANITIZE_THREAD__)
    context.race_state = __tsan_create_fiber(0);
#endif
}

void Worker::fiber_main() {
    Worker& self = *worker;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self.main_.bottom, &self.main_.bytes);
#endif
    for (;;) {
        self.body_(self.body_context_, self.current_);
        self.wait(Wait::kDone, nullptr, 0, nullptr);
    }
}

void Worker::wait(Wait wait, Combine combine, uint32_t operand, void* value) {
    Fiber& fiber = fibers_[current_];
    fiber.wait = wait;
    fiber.combine = combine;
    fiber.operand = operand;
    values_[current_] = value;
    switch_context(fiber.context, main_);
}

void Worker::resume(uint32_t tid) {
    current_ = tid;
    switch_context(main_, fibers_[tid].context);
}

// Runs a simdgroup until its lanes stand at a barrier or are done.
const char* Worker::run_simdgroup(uint32_t simd) {
    const uint32_t base = simd * kLanes;
    for (;;) {
        for (uint32_t i = 0; i < kLanes; ++i) resume(base + (upwards_ ? i : kLanes - 1 - i));
        upwards_ = !upwards_;
        const Fiber& first = fibers_[base];
        for (uint32_t i = 1; i < kLanes; ++i) {
            const Fiber& lane = fibers_[base + i];
            if (lane.wait != first.wait || lane.combine != first.combine)
                return "lanes of one simdgroup wait at different operations (divergent control flow)";
            if (lane.operand != first.operand) return "lanes of one simdgroup gave different shuffle operands";
        }
        if (first.wait != Wait::kExchange) return nullptr;
        first.combine(&values_[base], first.operand);
    }
}

// Whether all simdgroups stand at the same thing.
const char* Worker::meet(uint32_t simds) const {
    for (uint32_t s = 1; s < simds; ++s)
        if (fibers_[s * kLanes].wait != fibers_[0].wait)
            return "some simdgroups wait at a barrier that others never reach (divergent control flow)";
    return nullptr;
}

// After an error the fibers stand anywhere, never to be resumed: their stacks are used anew.
void Worker::abandon(uint32_t threads) {
    for (uint32_t tid = 0; tid < threads; ++tid) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(stack_of(tid), kStackBytes);
        fibers_[tid].context.fake_stack = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
        __tsan_destroy_fiber(fibers_[tid].context.race_state);
#endif
        start(tid);
    }
}

const char* Worker::run(uint32_t simds, Body body, const void* body_context) {
    const uint32_t threads = simds * kLanes;
    if (!ready()) return "no address space for the stacks of the fibers";
    if (threads > kMaxThreads) return "a threadgroup has more than 32 simdgroups";
    for (; started_ < threads; ++started_) start(started_);
    body_ = body;
    body_context_ = body_context;
    upwards_ = false;
    const char* error = nullptr;
    do {
        const bool in_order = upwards_;
        for (uint32_t s = 0; s < simds && error == nullptr; ++s) error = run_simdgroup(in_order ? s : simds - 1 - s);
        if (error == nullptr) error = meet(simds);
    } while (error == nullptr && fibers_[0].wait == Wait::kBarrier);
    for (uint32_t tid = 0; tid < threads && error == nullptr; ++tid)
        if (std::memcmp(stack_of(tid), &kCanary, sizeof kCanary) != 0) error = "a thread overran its stack";
    if (error != nullptr) abandon(threads);
    return error;
}

}  // namespace

const char* run_threads(uint32_t simds, Body body, const void* context) {
    if (worker == nullptr) {
        owned_worker = std::make_unique<Worker>();
        worker = owned_worker.get();
    }
    return worker->run(simds, body, context);
}

uint32_t current_thread() {
    return worker->current_thread();
}

void threadgroup_barrier() {
    worker->wait(Wait::kBarrier, nullptr, 0, nullptr);
}

void simd_exchange(Combine combine, uint32_t operand, void* value) {
    worker->wait(Wait::kExchange, combine, operand, value);
}

}  // namespace lily_fibers
