// Counts which bytes of a kernel's slots are read and written. The shaders are compiled so that every access to memory
// calls one of these functions (as the kernel's address sanitizer of Linux does it); this file is not.
#include <cstdint>

namespace {

constexpr uint8_t kRead = 1, kWritten = 2;

struct Slot {
    uintptr_t first, last;
    uint8_t* marks;  // one for each byte
};
Slot slots[16];
uint32_t slot_count = 0;

void mark(uintptr_t address, uintptr_t size, bool write) {
    for (uint32_t i = 0; i < slot_count; ++i) {
        const Slot& slot = slots[i];
        if (address >= slot.last || address + size <= slot.first) continue;
        for (uintptr_t at = address < slot.first ? slot.first : address; at < address + size && at < slot.last; ++at) {
            uint8_t& seen = slot.marks[at - slot.first];
            // What the launch itself has written need not come from memory.
            if (write)
                seen |= kWritten;
            else if (!(seen & kWritten))
                seen |= kRead;
        }
    }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void watch_nothing() {
    slot_count = 0;
}
__attribute__((visibility("default"))) void watch_slot(uintptr_t first, uint64_t bytes, uint8_t* marks) {
    slots[slot_count++] = {first, first + bytes, marks};
}

#define COUNTED(SIZE)                                      \
    void __asan_load##SIZE##_noabort(uintptr_t address) {  \
        mark(address, SIZE, false);                        \
    }                                                      \
    void __asan_store##SIZE##_noabort(uintptr_t address) { \
        mark(address, SIZE, true);                         \
    }
COUNTED(1)
COUNTED(2)
COUNTED(4)
COUNTED(8)
COUNTED(16)
void __asan_loadN_noabort(uintptr_t address, uintptr_t size) {
    mark(address, size, false);
}
void __asan_storeN_noabort(uintptr_t address, uintptr_t size) {
    mark(address, size, true);
}
void __asan_handle_no_return() {}
}
