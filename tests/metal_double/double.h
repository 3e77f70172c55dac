// How tests steer and watch the software double of Metal. Exported with C linkage from whatever the double is linked
// into, so that Python reaches it through ctypes: ctypes.CDLL(lily._native.__file__).lily_double_set(b"width", 32).
//
// Misuse of Metal is not an error that a program could handle: the double prints "metal double: misuse: ..." to stderr
// and aborts. Misuse of reference counting prints "objc: ..." and aborts.
//
// Settings (lily_double_set), with their defaults:
//
//   width 1                  SIMD width of the CPU objects that kernels run on: 1 (fast) or 32 (as a GPU); of pipelines
//                            made from then on
//   threads 2                threads that share the threadgroups of a dispatch; of queues made from then on
//   order 0                  dispatches between two barriers run in order (0), reversed (1) or shuffled (2)
//   seed 1                   of the shuffle; of queues made from then on
//   hazards 1                dispatches between two barriers that touch the same bytes, one of them writing, are misuse
//   latency_us 0             time from commit until a command buffer starts, at least
//   hold 0                   while 1, no command buffer starts
//   dispatch_ns 0            GPU time of a dispatch as command buffers report it; 0: the time that really passed
//   late_handlers 0          1: completed handlers run after those who wait for the command buffer have gone on
//   handler_observes 1       a completed handler tells the program that what its command buffer used may be released;
//                            with 0 only waiting for the command buffer or a later one, or reading its status, does
//   compile_warnings 1       libraries that compile still set their error to the compiler's warnings, as Metal may
//   execution_error 1        code of an injected command buffer error: a value of MTLCommandBufferError
//   device 0                 number of the GPU that is the system's default one
//   os_major 15, os_minor 5, os_patch 0
//   apple_family 9           the newest MTLGPUFamilyApple; above 9 only macOS 26 knows it
//   metal4 0                 whether the GPU supports Metal 4, on macOS 26
//   max_buffer_length        8 GiB
//   working_set              12 GiB, recommendedMaxWorkingSetSize
//   max_threads 1024         what a pipeline allows per threadgroup, if its kernel and descriptor ask for no less
//   max_command_buffers 64   that are made and not completed; further ones wait
//   constant_alignment 4     of the offset of the args
//   capture_supported 1
//   threadgroup_memory:KERNEL 0   staticThreadgroupMemoryLength of a kernel's pipelines
//   fail:KIND 0              n > 0: the nth call from now fails, once. KIND is device, queue, buffer, library,
//                            function, pipeline, pipeline_lookup (with FailOnBinaryArchiveMiss), archive_open,
//                            archive_add, archive_serialize, residency_set, command_buffer, encoder, execution (a
//                            command buffer, counted as they start: it runs half of its dispatches, then has an error)
//                            or capture
//
// Texts (lily_double_set_text): os_build "24F74", gpu_name "Apple M4 Double", caches_directory "" (then the user has
// none), objects_directory "" (then the folder of the library that the double is in).
//
// Counts (lily_double_count): what exists now -
//
//   live_devices live_queues live_libraries live_functions live_pipelines live_archives live_residency_sets
//   live_buffers live_command_buffers live_encoders live_blocks live_objects live:CLASS
//   buffer_bytes             lengths of all buffers
//   attached_residency_sets  that a queue has
//   resident_buffers         allocations in residency sets that were committed and requested
//   in_flight                command buffers committed and not completed
//   open_pools               autorelease pools open on the calling thread
//
// and what happened since the start or the last reset -
//
//   libraries pipelines_compiled pipelines_from_archive archive_misses archives_opened archives_saved
//   command_buffers (committed) failed_command_buffers encoders dispatches barriers
//   max_in_flight            most command buffers that were in flight at once
//   unchecked_command_buffers     released without anyone having read status or error after completion
//   captures captured_command_buffers
//   autoreleased_without_pool     objects that would leak on a thread that lives on
//   skipped_pools            autorelease pools that an exception jumped out of
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns the value before; -1 for a name that does not exist.
int64_t lily_double_set(const char* name, int64_t value);
// Returns 0; -1 for a name that does not exist.
int64_t lily_double_set_text(const char* name, const char* value);
// -1 for a name that does not exist.
int64_t lily_double_count(const char* name);
// Settings and texts to their defaults, injected errors off, counts of what happened to zero.
void lily_double_reset(void);

#ifdef __cplusplus
}
#endif
