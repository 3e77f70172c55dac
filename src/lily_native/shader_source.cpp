#include "shader_source.h"

#include <string_view>

namespace lily {

#define constant
#include "host/shape_cuda.h"
#undef constant

CudaGroup cuda_group(const Variant& variant, const std::string& architecture) {
    const KernelInfo& kernel = *variant.kernel;
    for (const wide_kernel& wide : WIDE_KERNELS)
        if (std::string_view(kernel.name).starts_with(wide.name) && (!wide.warpgroups || architecture.back() == 'a'))
            return {wide.simdgroups * 32, wide.bytes, 1};
    for (const tile_kernel& tile : TILE_KERNELS)
        if (kernel.name == std::string_view(tile.name)) {
            const uint32_t bits = const_named(kernel, variant.consts, "BITS").value_or(4);
            const uint32_t rows = const_named(kernel, variant.consts, "BM").value_or(0);
            const uint32_t columns = tile.small_k ? short_tile_n(rows) : tile_n(rows);
            return {kernel.simds * 32, tile.matrices * W_STEPS * w_step_bytes(bits, columns), 1};
        }
    const uint32_t k = const_named(kernel, variant.consts, "K").value_or(0);
    const bool staged = stages(k / (k >= 2048 ? SPLIT_2048 : 2), MV_SETS);  // as mv_split has it
    for (const shared_kernel& shared : SHARED_KERNELS)
        if (staged && function_name(variant).starts_with(shared.name)) return {kernel.simds * 32, 0, shared.groups};
    return {kernel.simds * 32, 0, 1};
}

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

std::vector<Variant> listed_variants(std::span<const uint32_t> tile_rows) {
    std::vector<Variant> listed;
    for (const auto& [kernel, consts] : std::span(kListedVariants, kListedVariantCount)) {
        const uint32_t height = const_named(kKernels[kernel], consts, "BM").value_or(tile_rows.front());
        if (height >= tile_rows.front() && height <= tile_rows.back()) listed.push_back({&kKernels[kernel], consts});
    }
    return listed;
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

std::string cuda_source(const Variant& variant, const std::string& architecture) {
    const KernelInfo& kernel = *variant.kernel;
    std::string parameters, values, consts;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const SlotInfo& slot = kernel.slots[i];
        parameters += std::string(slot.written ? "" : "const ") + slot.type + "* " + slot.name + ", ";
        values += std::string(slot.name) + ", ";
    }
    for (uint32_t i = 0; i < kernel.const_count; ++i)
        consts += (i == 0 ? "<" : ", ") + std::to_string(variant.consts[i]) + (i + 1 == kernel.const_count ? ">" : "");
    const CudaGroup group = cuda_group(variant, architecture);
    const std::string bounds = std::to_string(group.threads) + ", " + std::to_string(group.groups);
    return std::string("#define LILY_SHIM \"") + kCudaHeaders[0].name + "\"\nnamespace lily_shader {\n" +
           family_of(kernel).text + "#line 1 \"entry of " + kernel.name + "\"\n" +
           "extern \"C\" __global__ void __launch_bounds__(" + bounds + ") " + function_name(variant) + "(" +
           parameters + "const __grid_constant__ " + kernel.args_type + " args) {\n    " + kernel.name + consts + "(" +
           values +
           "args, uint3(blockIdx.x, blockIdx.y, blockIdx.z), threadIdx.x, threadIdx.x % SIMD_WIDTH,\n        "
           "__shfl_sync(ALL_LANES, threadIdx.x / SIMD_WIDTH, 0));\n}\n}\n";
}

}  // namespace lily
