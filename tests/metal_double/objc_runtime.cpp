// A small Objective-C runtime for Linux: classes, selectors, message lookup and the life of objects. It finds what
// clang emitted through the linker's start and stop symbols of each section, so it serves one image: the executable or
// shared object that it is linked into. Reference counting is in objc_arc.cpp, blocks are in objc_blocks.cpp.
#include "objc_runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "objc_abi.h"

extern "C" {
void* _objc_empty_cache = nullptr;
#define SECTION(type, name)                                                   \
    extern type __start_##name[] __attribute__((weak, visibility("hidden"))); \
    extern type __stop_##name[] __attribute__((weak, visibility("hidden")))
SECTION(objc_class*, objc_classlist);
SECTION(Category*, objc_catlist);
SECTION(SEL, objc_selrefs);
#undef SECTION
}

namespace lily_objc {
namespace {

// Lives until the process ends: threads may still send messages while it does.
struct Tables {
    std::mutex mutex;
    std::unordered_set<std::string> selectors;
    std::map<std::string_view, Class> classes;  // written while loading only
};

Tables& tables() {
    static auto* instance = new Tables;
    return *instance;
}

void intern_names(MethodList* list) {
    if (list == nullptr) return;
    for (uint32_t i = 0; i < list->count; ++i) list->methods[i].name = intern(list->methods[i].name);
}

IMP find_in(const MethodList* list, SEL selector) {
    if (list == nullptr) return nullptr;
    for (uint32_t i = 0; i < list->count; ++i)
        if (list->methods[i].name == selector) return list->methods[i].code;
    return nullptr;
}

void load_class(Class type) {
    tables().classes[type->data->name] = type;
    for (Class each : {type, type->isa}) {
        each->info = new ClassInfo;
        intern_names(each->data->methods);
    }
    // Apple's runtime would move the members of a class whose superclass grew; here both come from one build.
    if (type->super != nullptr && type->data->instance_start < type->super->data->instance_size)
        fail("members of %s overlap those of %s", type->data->name, type->super->data->name);
}

void find_cxx_members(Class type) {
    static const SEL construct = intern(".cxx_construct"), destruct = intern(".cxx_destruct");
    for (Class each = type; each != nullptr; each = each->super) {
        if (IMP code = find_in(each->data->methods, construct))
            type->info->construct.insert(type->info->construct.begin(), code);
        if (IMP code = find_in(each->data->methods, destruct)) type->info->destruct.push_back(code);
    }
}

// Before the constructors of C++ objects, which may send messages.
__attribute__((constructor(101))) void load() {
    for (Class* type = __start_objc_classlist; type < __stop_objc_classlist; ++type) load_class(*type);
    for (Category** each = __start_objc_catlist; each < __stop_objc_catlist; ++each) {
        Category& category = **each;
        intern_names(category.instance_methods);
        intern_names(category.class_methods);
        category.type->info->category_methods.push_back(category.instance_methods);
        category.type->isa->info->category_methods.push_back(category.class_methods);
    }
    for (SEL* selector = __start_objc_selrefs; selector < __stop_objc_selrefs; ++selector)
        *selector = intern(*selector);
    for (Class* type = __start_objc_classlist; type < __stop_objc_classlist; ++type) find_cxx_members(*type);
}

// The class of freed objects. Messages to it name the class that the object had.
ClassData freed_data{0, 0, 0, 0, nullptr, "freed object", nullptr, nullptr, nullptr, nullptr, nullptr};
objc_class freed_class{nullptr, nullptr, nullptr, nullptr, &freed_data};

[[noreturn]] void fail_freed(id object, const char* what) {
    const Header& header = *(reinterpret_cast<Header*>(object) - 1);
    const auto* type = reinterpret_cast<const objc_class*>(header.references.load(std::memory_order_relaxed));
    fail("%s a freed object of class %s", what, type->data->name);
}

#if __has_feature(address_sanitizer)
// The sanitizer keeps freed memory, and reports its use with both stacks.
void free_later(Header* header) {
    std::free(header);
}
#else
// Freed objects stay around for a while, so that their use is noticed before their memory has another owner.
void free_later(Header* header) {
    static std::mutex mutex;
    static Header* ring[4096];
    static size_t next;
    const std::lock_guard lock(mutex);
    std::free(std::exchange(ring[next], header));
    next = (next + 1) % std::size(ring);
}
#endif

bool has_protocol(const ProtocolList* list, const char* name) {
    if (list == nullptr) return false;
    for (uintptr_t i = 0; i < list->count; ++i)
        if (std::strcmp(list->protocols[i]->name, name) == 0 || has_protocol(list->protocols[i]->protocols, name))
            return true;
    return false;
}

// Methods never change, so what a thread has looked up once stays right; its own table needs no lock.
struct Found {
    Class type;
    SEL selector;
    IMP code;
};
constexpr size_t kFoundEntries = 1024;
thread_local Found found[kFoundEntries];

IMP lookup(Class type, SEL selector, id receiver) {
    const auto mixed = reinterpret_cast<uintptr_t>(type) / 8 + reinterpret_cast<uintptr_t>(selector) / 8 * 31;
    Found& entry = found[mixed % kFoundEntries];
    if (entry.type == type && entry.selector == selector) return entry.code;
    if (type == &freed_class) fail_freed(receiver, (std::string(selector) + " sent to").c_str());
    const IMP code = find_method(type, selector);
    if (code == nullptr)
        fail("%s does not understand %c%s", type->data->name, type->is_metaclass() ? '+' : '-', selector);
    entry = {type, selector, code};
    return code;
}

Class block_class() {
    static const Class type = tables().classes.at("BlockObject");
    return type;
}

}  // namespace

void fail(const char* format, ...) {
    std::fputs("objc: ", stderr);
    va_list list;
    va_start(list, format);
    std::vfprintf(stderr, format, list);
    va_end(list);
    std::fputc('\n', stderr);
    std::abort();
}

SEL intern(const char* name) {
    Tables& all = tables();
    const std::lock_guard lock(all.mutex);
    return all.selectors.insert(name).first->c_str();
}

IMP find_method(Class type, SEL selector) {
    for (; type != nullptr; type = type->super) {
        for (const MethodList* list : type->info->category_methods)
            if (IMP code = find_in(list, selector)) return code;
        if (IMP code = find_in(type->data->methods, selector)) return code;
    }
    return nullptr;
}

Header& header_of(id object) {
    Header& header = *(reinterpret_cast<Header*>(object) - 1);
    if (header.magic == kLiveMagic) return header;
    if (header.magic == kFreedMagic) fail_freed(object, "retain or release of");
    fail("%p is no object", static_cast<void*>(object));
}

bool is_static(id object) {
    return object->isa == &__CFConstantStringClassReference || object->isa->is_metaclass();
}

int64_t live_objects(const char* class_name) {
    if (class_name != nullptr) {
        const auto type = tables().classes.find(class_name);
        return type == tables().classes.end() ? -1 : type->second->info->live.load();
    }
    int64_t sum = 0;
    for (const auto& [name, type] : tables().classes) sum += type->info->live.load();
    return sum;
}

}  // namespace lily_objc

using namespace lily_objc;

extern "C" {

// Called by objc_msgSend.
IMP lily_objc_lookup(id receiver, SEL selector) {
    return lookup(is_block(receiver) ? block_class() : receiver->isa, selector, receiver);
}

struct SuperCall {
    id receiver;
    Class type;  // the class whose method calls super
};

// Called by objc_msgSendSuper2.
IMP lily_objc_lookup_super(const SuperCall* call, SEL selector) {
    return lookup(call->type->super, selector, call->receiver);
}

id lily_objc_alloc(Class type) {
    auto* header = static_cast<Header*>(std::calloc(1, sizeof(Header) + type->data->instance_size));
    if (header == nullptr) fail("no memory for %s", type->data->name);
    header->references.store(1, std::memory_order_relaxed);
    header->magic = kLiveMagic;
    auto* object = reinterpret_cast<id>(header + 1);
    object->isa = type;
    type->info->live.fetch_add(1, std::memory_order_relaxed);
    for (IMP code : type->info->construct) reinterpret_cast<id (*)(id, SEL)>(code)(object, nullptr);
    return object;
}

void lily_objc_dispose(id object) {
    Header& header = header_of(object);
    const Class type = object->isa;
    for (IMP code : type->info->destruct) reinterpret_cast<void (*)(id, SEL)>(code)(object, nullptr);
    type->info->live.fetch_sub(1, std::memory_order_relaxed);
    header.magic = kFreedMagic;
    header.references.store(reinterpret_cast<int64_t>(type), std::memory_order_relaxed);
    object->isa = &freed_class;
    free_later(&header);
}

void lily_objc_make_immortal(id object) {
    header_of(object).references.store(kImmortal, std::memory_order_relaxed);
    object->isa->info->live.fetch_sub(1, std::memory_order_relaxed);
}

bool lily_objc_is_kind(id object, Class type) {
    for (Class each = object->isa; each != nullptr; each = each->super)
        if (each == type) return true;
    return false;
}

bool lily_objc_conforms(Class type, Protocol* protocol) {
    for (; type != nullptr; type = type->super)
        if (has_protocol(type->data->protocols, protocol->name)) return true;
    return false;
}

bool lily_objc_responds(Class type, SEL selector) {
    return find_method(type, selector) != nullptr;
}

const char* lily_objc_class_name(Class type) {
    return type->data->name;
}

// What the compiler calls instead of the messages alloc, init, class and so on.

id objc_alloc(Class type) {
    return lily_objc_alloc(type);
}

id objc_alloc_init(Class type) {
    static const SEL init = intern("init");
    return reinterpret_cast<id (*)(id, SEL)>(objc_msgSend)(lily_objc_alloc(type), init);
}

id objc_opt_new(Class type) {
    return objc_alloc_init(type);
}

id objc_opt_self(id object) {
    return object;
}

Class objc_opt_class(id object) {
    if (object == nullptr) return nullptr;
    return object->isa->is_metaclass() ? reinterpret_cast<Class>(object) : object->isa;
}

bool objc_opt_isKindOfClass(id object, Class type) {
    return object != nullptr && lily_objc_is_kind(object, type);
}

bool objc_opt_respondsToSelector(id object, SEL selector) {
    return object != nullptr && lily_objc_responds(object->isa, selector);
}

}  // extern "C"
