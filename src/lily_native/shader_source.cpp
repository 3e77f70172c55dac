#include "shader_source.h"

#include <string_view>

namespace lily {

const ShaderFamily& family_of(const KernelInfo& kernel) {
    const std::string_view where = kernel.where;
    const std::string_view name = where.substr(0, where.find('.'));
    for (size_t i = 0; i < kShaderFamilyCount; ++i)
        if (name == kShaderFamilies[i].name) return kShaderFamilies[i];
    throw Error(ErrorKind::kLogic, std::string(kernel.name) + ": no shader text for " + kernel.where);
}

std::string function_name(const Variant& variant) {
    std::string name = variant.kernel->name;
    for (uint32_t i = 0; i < variant.kernel->const_count; ++i) name += "_" + std::to_string(variant.consts[i]);
    return name;
}

std::string metal_source(const ShaderFamily& family, std::span<const Variant> variants, bool tensor_ops) {
    std::string text = family.tiles && tensor_ops ? "#define LILY_TENSOR_OPS 1\n" : "";
    text += family.text;
    text += "#line 1 \"variants of " + std::string(family.name) + "\"\n";
    for (const Variant& variant : variants) {
        if (variant.kernel->const_count == 0 || &family_of(*variant.kernel) != &family) continue;
        std::string instance = std::string(variant.kernel->name) + "<";
        for (uint32_t i = 0; i < variant.kernel->const_count; ++i)
            instance += (i == 0 ? "" : ", ") + std::to_string(variant.consts[i]);
        instance += ">";
        text += "template [[host_name(\"" + function_name(variant) + "\")]] [[kernel]] decltype(" + instance + ") " +
                instance + ";\n";
    }
    return text;
}

}  // namespace lily
