// Checks kernel.cpp and plan.cpp on the tiny kernel table of test_plan_native.py. Prints what is wrong.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu_object.h"
#include "kernels.gen.h"
#include "plan.h"

using namespace lily;

namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
    if (good) return;
    std::printf("FAIL %s\n", what.c_str());
    ++failures;
}

template <class F>
void expect_error(const std::string& text, F&& body) {
    try {
        body();
    } catch (const Error& error) {
        expect(error.kind() == ErrorKind::kLogic && text == error.what(),
               "expected '" + text + "', got '" + error.what() + "'");
        return;
    }
    expect(false, "no error, expected '" + text + "'");
}

template <class T>
Slot<T> slot(uint32_t buffer, uint64_t offset, uint64_t count) {
    return {BufferId{buffer}, offset, count};
}

k::add_row add(Slot<const float> x, Slot<float> y, uint32_t n = 8) {
    return {.x = x, .y = y, .args = {.n = n, .scale = 2.0f}};
}

k::mat_vec product() {
    return {.w = slot<uint4>(0, 0, 64), .y = slot<float>(1, 0, 16), .args = {.n = 16, .k = 128}, .consts = {.BITS = 4}};
}

void check_errors() {
    Recorder run;
    const auto x = slot<float>(0, 0, 8), y = slot<float>(0, 32, 8);
    run(add(x, y));
    expect_error("add_row.x: has 7 elements, needs 8 [n]", [&] { run(add(x.slice(0, 7), y)); });
    expect_error("add_row.y: has no buffer", [&] { run(add(x, {kNoBuffer, 0, 8})); });
    expect_error("add_row.y: offset 34 is not a multiple of 4 bytes (float)",
                 [&] { run(add(x, slot<float>(0, 34, 8))); });
    expect_error("slice: 5 elements from 4 of a slot that has 8", [&] { run(add(x.slice(4, 5), y)); });
    expect_error("slice: 1 elements from 9 of a slot that has 8", [&] { run(add(x.slice(9, 1), y)); });
    run(product());
    auto bad = product();
    bad.consts.BITS = 16;
    expect_error("mat_vec.BITS: is 16, must be 1 to 8", [&] { run(bad); });
    bad.consts.BITS = 0;
    expect_error("mat_vec.BITS: is 0, must be 1 to 8", [&] { run(bad); });
    bad = product();
    bad.args.k = 0;
    expect_error("mat_vec.y: shape [n + 128 / k - 1] has no value for these args", [&] { run(bad); });
    Launch launch = product().launch();
    launch.consts[1] = 64;
    expect_error("mat_vec.K: is 64, but args.k is 128", [&] { run.add(launch); });
    bad = product();
    bad.args.n = 1u << 30;
    bad.consts.BITS = 8;
    expect_error("mat_vec.w: needs 8589934592 elements, more than 32-bit indices reach", [&] { run(bad); });
    expect_error("launch without a kernel", [&] { run.add(Launch{}); });
    expect(run.finish("errors").launches.size() == 2, "a refused launch is not recorded");
}

void check_table() {
    expect(kKernelCount == 2 && find_kernel("mat_vec") == &kKernels[1] && !find_kernel("mat"), "table");
    const KernelInfo& info = k::mat_vec::info();
    const Launch launch = product().launch();
    expect(launch.consts == Consts{4, 128, 0, 0}, "consts of a launch");
    uint64_t out[kMaxSlots];
    info.counts(launch.args.data(), launch.consts.data(), out);
    expect(out[0] == 16 * 128 * 4 / 128 && out[1] == 16, "counts");
    uint64_t written[kMaxSlots];
    info.traffic(launch.args.data(), launch.consts.data(), out, written);
    expect(out[0] == 16 * 128 / 2 && out[1] == 0 && written[0] == 0 && written[1] == 64, "traffic");
    const Launch added = add(slot<float>(0, 0, 8), slot<float>(0, 32, 8)).launch();
    kKernels[0].traffic(added.args.data(), added.consts.data(), out, written);
    expect(out[0] == 32 && out[1] == 32 && written[1] == 32, "traffic of a slot that is read and written");
    expect(kShapeConstantCount == 2 && std::string(kShapeConstants[1].name) == "WIDE" && WIDE == 16, "shape.h");
    const Consts wanted{4, 256, 0, 0};
    const uint32_t exact[4] = {4, 256}, generic[4] = {4, 0}, other[4] = {4, 128}, bits[4] = {8, 256};
    expect(variant_score(info, exact, wanted) == 1 && variant_score(info, generic, wanted) == 0, "variants that fit");
    expect(variant_score(info, other, wanted) == -1 && variant_score(info, bits, wanted) == -1, "variants that do not");
    expect((Count(3) - Count(4)).value() == Count::kImpossible && (Count(1) / Count(0)).value() == Count::kImpossible &&
               (Count(uint64_t{1} << 40) * Count(uint64_t{1} << 40)).value() == Count::kImpossible &&
               Count(-1).value() == Count::kImpossible && ((Count(7) + 1) / 2).value() == 4,
           "counts that have no value");
}

void check_stages() {
    const auto a = slot<float>(0, 0, 8), b = slot<float>(0, 32, 8), c = slot<float>(0, 64, 8), d = slot<float>(1, 0, 8);
    Recorder run;
    run.scope("head", 3);
    run(add(a, b));
    run(add(b, c));  // reads what the first wrote
    run(add(a, d));  // independent
    run.scope("tail");
    run(add(d, a));  // overwrites what the first and the third read
    run(add(c.slice(4, 4), d.slice(4, 4), 4));
    const Plan plan = run.finish("small");
    std::string order;
    for (const Launch& launch : plan.launches) order += std::to_string(launch.stage) + launch.label[0];
    expect(order == "0h0h1h1t2t" && plan.stage_count == 3, "stages: " + order);
    expect(plan.launches[0].layer == 3 && plan.launches[1].recorded == 2 && plan.launches[2].recorded == 1, "places");
    expect(run.finish("empty").stage_count == 0, "a finished recorder is empty");
}

bool conflict(const Launch& a, const Launch& b) {
    for (uint32_t i = 0; i < a.kernel->slot_count; ++i) {
        for (uint32_t j = 0; j < b.kernel->slot_count; ++j) {
            const SlotRef &s = a.slots[i], &t = b.slots[j];
            if (s.bytes == 0 || t.bytes == 0) continue;
            if (!a.kernel->slots[i].written && !b.kernel->slots[j].written) continue;
            if (s.buffer == t.buffer && s.offset < t.offset + t.bytes && t.offset < s.offset + s.bytes) return true;
        }
    }
    return false;
}

// Every conflict is waited for, by an edge or by way of others, and every edge is a conflict that nothing else tells.
bool has_all_edges_and_no_other(const Plan& plan) {
    const size_t count = plan.launches.size();
    std::vector<std::vector<bool>> waits(count, std::vector<bool>(count));
    for (size_t i = 0; i < count; ++i) {
        for (const uint32_t parent : plan.after[i]) {
            if (parent >= i || waits[i][parent] || !conflict(plan.launches[parent], plan.launches[i])) return false;
            waits[i][parent] = true;
            for (size_t j = 0; j < count; ++j) waits[i][j] = waits[i][j] || waits[parent][j];
        }
        // Launches of one stage stand in the order they were recorded in, and do not conflict.
        for (size_t j = 0; j < i; ++j)
            if (conflict(plan.launches[j], plan.launches[i]) && !waits[i][j]) return false;
    }
    return true;
}

// The same stages as by comparing every pair of launches.
void check_random_plans() {
    std::mt19937 random(1);
    for (int round = 0; round < 300; ++round) {
        Recorder run;
        std::vector<Launch> launches;
        for (int i = 0; i < 40; ++i) {
            const auto any = [&] { return slot<float>(random() % 2, random() % 40 * 4, random() % 12); };
            launches.push_back(add(any(), any(), 0).launch());
            run.add(launches.back());
        }
        std::vector<uint32_t> wanted;
        uint32_t last = 0;
        for (size_t i = 0; i < launches.size(); ++i) {
            for (size_t j = 0; j < i; ++j) {
                if (conflict(launches[j], launches[i]))
                    launches[i].stage = std::max(launches[i].stage, launches[j].stage + 1);
            }
            last = std::max(last, launches[i].stage + 1);
        }
        std::stable_sort(launches.begin(), launches.end(),
                         [](const Launch& a, const Launch& b) { return a.stage < b.stage; });
        const Plan plan = run.finish("random");
        const bool same = std::equal(launches.begin(), launches.end(), plan.launches.begin(), plan.launches.end(),
                                     [](const Launch& a, const Launch& b) {
                                         return a.stage == b.stage && a.slots[0].offset == b.slots[0].offset &&
                                                a.slots[1].offset == b.slots[1].offset;
                                     });
        expect(same && plan.stage_count == last, "random plan " + std::to_string(round));
        expect(has_all_edges_and_no_other(plan), "edges of random plan " + std::to_string(round));
    }
}

void check_time() {
    SlotInfo slots[12];
    for (uint32_t i = 0; i < 12; ++i) slots[i] = {"s", "float", 4, i > 8, "[0]", 4};
    const auto none = [](const void*, const uint32_t*, uint64_t* out) { std::memset(out, 0, 12 * sizeof(*out)); };
    const auto nothing = [](const void*, const uint32_t*, uint64_t*, uint64_t*) {};
    const KernelInfo kernel{"wide", "", "", 0, 1, slots, 12, "", nullptr, 0, nullptr, 0, none, nothing};
    std::mt19937 random(2);
    Recorder run;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) {
        Launch launch;
        launch.kernel = &kernel;
        for (uint32_t s = 0; s < 12; ++s) launch.slots[s] = {BufferId{0}, random() % 100000 * 4, random() % 4000 * 4};
        run.add(launch);
    }
    run.finish("wide");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::printf("1000 launches of 12 slots: %.1f ms\n", took.count());
    expect(took.count() < 1000, "planning is slow");
}

// Runs mat_vec through the generated launchers and compares every element with the formula of the shader.
void check_object() {
    const CpuObject& object = *lily_cpu_object();
    expect(object.table_hash == kTableHash, "table hash");
    const Launch launch = product().launch();
    int ran = 0;
    for (uint32_t i = 0; i < object.count; ++i) {
        const CpuKernel& kernel = object.kernels[i];
        if (kernel.kernel != launch.kernel->index) continue;
        if (variant_score(*launch.kernel, kernel.consts, launch.consts) < 0) continue;
        uint32_t grid[3] = {};
        kernel.grid(launch.args.data(), grid);
        expect(grid[0] == 4 && grid[1] == 2 && grid[2] == 2, "grid");
        alignas(16) uint32_t w[64 * 4] = {};
        float y[16] = {};
        void* slots[] = {w, y};
        const CpuRun run{slots, launch.args.data(), {grid[0], grid[1], grid[2]}};
        expect(!kernel.run(run, 5, 16) && !kernel.run(run, 0, 5) && !kernel.run(run, 3, 3), "run");
        for (int g = 0; g < 16; ++g) {
            const int x = g % 4, yy = g / 4 % 2, z = g / 8;
            const float threads = object.width == 1 ? 1.0f : 64.0f;
            expect(y[g] == threads * float(100 * x + 10 * yy + z) + 128.0f, "value of group " + std::to_string(g));
        }
        ++ran;
    }
    expect(ran == 2, "variants in the object");
}

}  // namespace

int main() {
    check_errors();
    check_table();
    check_stages();
    check_random_plans();
    check_time();
    check_object();
    return failures != 0;
}
