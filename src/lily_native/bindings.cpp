// The Python module lily._native: argument conversion, GIL release, exception map. No logic.
#include "bindings.h"

#include "engine.h"
#include "session.h"

namespace py = pybind11;

namespace lily {
namespace {

template <class T>
py::array_t<T> array_of(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
    py::array_t<T> array(std::move(shape));
    std::copy(values.begin(), values.end(), array.mutable_data());
    return array;
}

py::array_t<int32_t> ids_of(const std::vector<uint32_t>& ids, std::vector<py::ssize_t> shape) {
    return array_of(std::vector<int32_t>(ids.begin(), ids.end()), std::move(shape));
}

// The class of lily.errors for each kind. Looked up when something is thrown, so that importing the module stays cheap.
void raise(ErrorKind kind, const char* message) {
    if (kind == ErrorKind::kValue) {
        PyErr_SetString(PyExc_ValueError, message);
        return;
    }
    const char* name = "LilyError";
    switch (kind) {
        case ErrorKind::kCheckpoint:
            name = "CheckpointError";
            break;
        case ErrorKind::kDevice:
            name = "DeviceError";
            break;
        case ErrorKind::kOutOfMemory:
            name = "OutOfMemoryError";
            break;
        case ErrorKind::kContextFull:
            name = "ContextFullError";
            break;
        case ErrorKind::kUnsupported:
            name = "UnsupportedError";
            break;
        case ErrorKind::kLogic:
        case ErrorKind::kValue:
        case ErrorKind::kFull:
        case ErrorKind::kCancelled:
            break;
    }
    const py::object type = py::module_::import("lily.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
}

Config config_of(uint32_t vocab, uint32_t hidden, uint32_t layers, uint32_t heads, uint32_t kv_heads,
                 uint32_t delta_key_heads, uint32_t delta_value_heads, uint32_t experts, uint32_t experts_used,
                 uint32_t inner, uint32_t shared_inner, uint32_t attention_interval, float rms_eps, float rope_theta) {
    Config config{vocab,   hidden,       layers, heads,        kv_heads,           delta_key_heads, delta_value_heads,
                  experts, experts_used, inner,  shared_inner, attention_interval, rms_eps,         rope_theta};
    check_config(config);
    return config;
}

std::map<std::string, uint64_t> memory_map(const MemoryPlan& plan) {
    return {{"weights", plan.weights}, {"kv", plan.kv},           {"state", plan.state},
            {"logits", plan.logits},   {"scratch", plan.scratch}, {"snapshots", plan.snapshots},
            {"total", plan.total()}};
}

void bind_config(py::module_& m) {
    py::class_<Config>(m, "Config")
        .def(py::init(&config_of), py::kw_only(), py::arg("vocab"), py::arg("hidden"), py::arg("layers"),
             py::arg("heads"), py::arg("kv_heads"), py::arg("delta_key_heads"), py::arg("delta_value_heads"),
             py::arg("experts"), py::arg("experts_used"), py::arg("inner"), py::arg("shared_inner"),
             py::arg("attention_interval"), py::arg("rms_eps"), py::arg("rope_theta"))
        .def_readonly("vocab", &Config::vocab)
        .def_readonly("hidden", &Config::hidden)
        .def_readonly("layers", &Config::layers)
        .def_readonly("heads", &Config::heads)
        .def_readonly("kv_heads", &Config::kv_heads)
        .def_readonly("delta_key_heads", &Config::delta_key_heads)
        .def_readonly("delta_value_heads", &Config::delta_value_heads)
        .def_readonly("experts", &Config::experts)
        .def_readonly("experts_used", &Config::experts_used)
        .def_readonly("inner", &Config::inner)
        .def_readonly("shared_inner", &Config::shared_inner)
        .def_readonly("attention_interval", &Config::attention_interval)
        .def_readonly("rms_eps", &Config::rms_eps)
        .def_readonly("rope_theta", &Config::rope_theta);
    py::class_<TensorTarget>(m, "TensorSpec")
        .def_readonly("name", &TensorTarget::name)
        .def_property_readonly("dtypes", [](const TensorTarget& t) { return py::tuple(py::cast(t.dtypes)); })
        .def_property_readonly("shape", [](const TensorTarget& t) { return py::tuple(py::cast(t.shape)); });
    m.def("tensor_specs", [](const Config& config) {
        std::vector<TensorTarget> targets;
        Carver carver(std::numeric_limits<uint64_t>::max());
        layout_weights(config, carver, targets);
        return targets;
    });
    m.def(
        "memory_plan",
        [](const Config& config, uint32_t context, uint32_t chunk, uint32_t sessions, const std::string& device,
           std::optional<uint64_t> snapshot_memory) {
            return memory_map(plan_memory(config, {.device = device,
                                                   .context = context,
                                                   .chunk = chunk,
                                                   .sessions = sessions,
                                                   .snapshot_bytes = snapshot_memory}));
        },
        py::arg("config"), py::kw_only(), py::arg("context"), py::arg("prefill_chunk"), py::arg("max_sessions"),
        py::arg("device"), py::arg("snapshot_memory") = py::none());
}

// A launch as lily.plan takes it.
py::dict launch_dict(const Launch& launch) {
    const KernelInfo& kernel = *launch.kernel;
    uint64_t read[kMaxSlots], written[kMaxSlots];
    kernel.traffic(launch.args.data(), launch.consts.data(), read, written);
    py::dict consts;
    for (uint32_t i = 0; i < kernel.const_count; ++i) consts[kernel.consts[i].name] = launch.consts[i];
    py::list slots;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const SlotRef& slot = launch.slots[i];
        slots.append(py::dict(py::arg("name") = kernel.slots[i].name, py::arg("written") = kernel.slots[i].written,
                              py::arg("buffer") = slot.buffer.index, py::arg("offset") = slot.offset,
                              py::arg("bytes") = slot.bytes, py::arg("bytes_read") = read[i],
                              py::arg("bytes_written") = written[i]));
    }
    return py::dict(py::arg("kernel") = kernel.name, py::arg("consts") = consts, py::arg("label") = launch.label,
                    py::arg("layer") = launch.layer, py::arg("recorded") = launch.recorded,
                    py::arg("stage") = launch.stage, py::arg("slots") = slots);
}

void bind_plans(py::module_& m) {
    m.def(
        "plan",
        [](const Config& config, const std::string& name, uint32_t context, uint32_t chunk, uint32_t sessions) {
            const Plan plan =
                named_plan(config, {.device = "cpu", .context = context, .chunk = chunk, .sessions = sessions}, name);
            py::list launches;
            for (const Launch& launch : plan.launches) launches.append(launch_dict(launch));
            return py::make_tuple(plan.name, launches);
        },
        py::arg("config"), py::arg("name"), py::kw_only(), py::arg("context"), py::arg("prefill_chunk"),
        py::arg("max_sessions"));
    m.def(
        "metal_sources",
        [](const Config& config, uint32_t context, uint32_t chunk, uint32_t sessions, bool tensor_ops) {
            return metal_sources(config, {.device = "cpu", .context = context, .chunk = chunk, .sessions = sessions},
                                 tensor_ops);
        },
        py::arg("config"), py::kw_only(), py::arg("context"), py::arg("prefill_chunk"), py::arg("max_sessions"),
        py::arg("tensor_ops"));
}

std::shared_ptr<Engine> open_engine(const Config& config, const std::vector<py::tuple>& tensors,
                                    const std::string& device, uint32_t context, uint32_t chunk, uint32_t threads,
                                    uint32_t sessions, const py::object& progress, uint32_t shuffle, uint32_t tile,
                                    std::optional<uint64_t> snapshot_memory, std::optional<uint64_t> memory_limit) {
    std::vector<TensorSource> sources;
    for (const py::tuple& t : tensors)
        sources.push_back({t[0].cast<std::string>(), t[1].cast<std::string>(), t[2].cast<std::string>(),
                           t[3].cast<uint64_t>(), t[4].cast<uint64_t>()});
    Progress report;
    // The callback also lets Ctrl-C through: an exception in it ends the loading.
    report = [&](uint64_t done, uint64_t total) {
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (!progress.is_none()) progress(done, total);
    };
    const EngineOptions options{.device = device,
                                .context = context,
                                .chunk = chunk,
                                .sessions = sessions,
                                .threads = threads,
                                .shuffle = shuffle,
                                .tile = tile,
                                .snapshot_bytes = snapshot_memory,
                                .memory_limit = memory_limit.value_or(UINT64_MAX)};
    auto engine = without_gil([&] { return std::make_shared<Engine>(config, sources, options, report); });
    // Signals are the main thread's. Another one could not come back from waiting for the GIL when Python ends.
    const auto main = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
    engine->set_interrupt([main] {
        if (PyThread_get_thread_ident() != main) return;
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
    return engine;
}

py::dict engine_info(Engine& engine) {
    py::dict info, device;
    for (const auto& [key, value] : engine.device_info()) device[py::str(key)] = value;
    info["device"] = engine.device_name();
    info["device_info"] = device;
    info["memory"] = memory_map(engine.memory());
    info["most_memory"] = engine.most_memory();
    info["context"] = engine.capacity().context;
    info["prefill_chunk"] = engine.capacity().chunk;
    info["max_sessions"] = engine.capacity().sessions;
    return info;
}

void bind_engine(py::module_& m) {
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
        .def(py::init(&open_engine), py::arg("config"), py::arg("tensors"), py::kw_only(), py::arg("device"),
             py::arg("context"), py::arg("prefill_chunk"), py::arg("threads"), py::arg("max_sessions"),
             py::arg("progress") = py::none(), py::arg("shuffle") = 0, py::arg("tile") = 0,
             py::arg("snapshot_memory") = py::none(), py::arg("memory_limit") = py::none())
        .def("info", &engine_info)
        .def("close", [](Engine& engine) { without_gil([&] { engine.close(); }); })
        .def("session",
             [](const std::shared_ptr<Engine>& engine) {
                 return without_gil([&] { return std::make_unique<Session>(engine); });
             })
        .def("session_unless_full",
             [](const std::shared_ptr<Engine>& engine) {
                 return without_gil([&]() -> std::unique_ptr<Session> {
                     try {
                         return std::make_unique<Session>(engine);
                     } catch (const Error& error) {
                         if (error.kind() != ErrorKind::kFull) throw;
                         return nullptr;
                     }
                 });
             })
        .def("free_sessions", &Engine::free_sessions)
        .def("cached", [](Engine& engine) {
            const Engine::Cached cached = without_gil([&] { return engine.cached(); });
            return py::dict(py::arg("snapshots") = cached.snapshots, py::arg("snapshot_bytes") = cached.bytes,
                            py::arg("kv_bytes") = cached.pages * cached.page_bytes,
                            py::arg("page_bytes") = cached.page_bytes);
        });
}

void set_sampling(Session& session, float temperature, uint32_t top_k, float top_p, float min_p, float presence,
                  float frequency, float repetition, uint64_t seed, const std::map<uint32_t, float>& bias) {
    const Sampling sampling{.params = {.temperature = temperature,
                                       .top_p = top_p,
                                       .min_p = min_p,
                                       .presence = presence,
                                       .frequency = frequency,
                                       .repetition = repetition,
                                       .top_k = top_k,
                                       .seed_low = static_cast<uint32_t>(seed),
                                       .seed_high = static_cast<uint32_t>(seed >> 32),
                                       .bias_count = 0},
                            .bias = {bias.begin(), bias.end()}};
    without_gil([&] { session.set_sampling(sampling); });
}

py::tuple score(Session& session, const Ids& ids, const Ids& targets, uint32_t top) {
    const auto from = span_of(ids), to = span_of(targets);
    const Scores scores = without_gil([&] { return session.score(from, to, top); });
    const auto taken = static_cast<py::ssize_t>(scores.taken), columns = static_cast<py::ssize_t>(top);
    return py::make_tuple(scores.taken, array_of(scores.logprobs, {taken}), ids_of(scores.top_ids, {taken, columns}),
                          array_of(scores.top_logprobs, {taken, columns}));
}

// Nothing when the call was over before its turn came.
template <class Work>
auto unless_cancelled(Work&& work) -> std::optional<std::invoke_result_t<Work>> {
    try {
        return without_gil(work);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::kCancelled) throw;
        return std::nullopt;
    }
}

py::object restart(Session& session, const Ids& ids, const CancelFlag* flag) {
    const auto from = span_of(ids);
    const auto reuse = unless_cancelled([&] { return session.restart(from, flag); });
    if (!reuse) return py::none();
    return py::make_tuple(reuse->tokens, reuse->common, reuse->expected);
}

void bind_flag(py::module_& m) {
    py::class_<CancelFlag, std::shared_ptr<CancelFlag>>(m, "Flag")
        // With its holder: one that cannot be made later would delete the flag under the object.
        .def(py::init([] { return std::make_shared<CancelFlag>(); }))
        .def_property_readonly("raised", &CancelFlag::raised)
        .def_property_readonly("expired", &CancelFlag::expired)
        .def("set", &CancelFlag::raise)
        .def("expire_after", &CancelFlag::expire_after, py::arg("seconds"));
}

// A session's own state: forks, snapshots, and what goes to files.
void bind_state(py::class_<Session>& c) {
    c.def("fork", [](Session& session) { return without_gil([&] { return session.fork(); }); })
        .def(
            "snapshot",
            [](Session& session, bool pinned) { return without_gil([&] { return session.snapshot(pinned); }); },
            py::arg("pinned"))
        .def("rewind", [](Session& session, uint32_t position) { without_gil([&] { session.rewind(position); }); })
        .def("checkpoints", [](Session& session) { return without_gil([&] { return session.checkpoints(); }); })
        .def("restart", &restart, py::arg("ids"), py::arg("flag") = py::none())
        .def("pages",
             [](Session& session) {
                 const Session::Pages pages = without_gil([&] { return session.pages(); });
                 return py::make_tuple(pages.own, pages.shared);
             })
        .def("tokens",
             [](Session& session) {
                 const std::vector<uint32_t> tokens = without_gil([&] { return session.tokens(); });
                 return ids_of(tokens, {static_cast<py::ssize_t>(tokens.size())});
             })
        .def("prompt_tokens", [](Session& session) { return without_gil([&] { return session.prompt_tokens(); }); })
        .def("parts",
             [](Session& session, uint32_t tokens) {
                 py::list parts;
                 for (const StatePart& part : without_gil([&] { return session.parts(tokens); }))
                     parts.append(py::make_tuple(part.name, part.dtype, py::tuple(py::cast(part.shape)), part.bytes()));
                 return parts;
             })
        .def("read_part",
             [](Session& session, uint32_t part, uint64_t offset, uint64_t count) {
                 if (count > Upload::kMostBytes) throw Error(ErrorKind::kValue, "too many bytes at once");
                 std::vector<std::byte> bytes(count);
                 without_gil([&] { session.read_part(part, offset, bytes); });
                 return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
             })
        .def("begin_load", [](Session& session, uint32_t tokens) { without_gil([&] { session.begin_load(tokens); }); })
        .def("write_part",
             [](Session& session, uint32_t part, uint64_t offset, const py::bytes& bytes) {
                 const std::string_view from = bytes;
                 without_gil(
                     [&] { session.write_part(part, offset, std::as_bytes(std::span(from.data(), from.size()))); });
             })
        .def("end_load", [](Session& session, const Ids& ids, uint32_t prompt_tokens) {
            const auto from = span_of(ids);
            without_gil([&] { session.end_load(from, prompt_tokens); });
        });
}

void bind_session(py::module_& m) {
    py::class_<Session> c(m, "Session");
    bind_state(c);
    c.def_property_readonly("position", &Session::position)
        .def("reset", [](Session& session) { without_gil([&] { session.reset(); }); })
        .def("close", [](Session& session) { without_gil([&] { session.close(); }); })
        .def(
            "prefill",
            [](Session& session, const Ids& ids, const CancelFlag* flag) {
                const auto from = span_of(ids);
                return unless_cancelled([&] { return session.prefill(from, flag); }).value_or(0);
            },
            py::arg("ids"), py::arg("flag") = py::none())
        .def("score", &score, py::arg("ids"), py::arg("targets"), py::arg("top"))
        .def("set_sampling", &set_sampling, py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
             py::arg("min_p"), py::arg("presence_penalty"), py::arg("frequency_penalty"), py::arg("repetition_penalty"),
             py::arg("seed"), py::arg("logit_bias"))
        .def(
            "step",
            [](Session& session, uint32_t ahead, const CancelFlag* flag) -> py::object {
                const std::optional<Picked> picked = unless_cancelled([&] { return session.step(ahead, flag); });
                if (!picked) return py::none();
                return py::make_tuple(picked->token, picked->logprob);
            },
            py::arg("ahead") = 0, py::arg("flag") = py::none())
        .def("last_token", [](Session& session) { return without_gil([&] { return session.last_token(); }); })
        .def("logits",
             [](Session& session) {
                 const std::vector<float> values = without_gil([&] { return session.logits(); });
                 return array_of(values, {static_cast<py::ssize_t>(values.size())});
             })
        .def("top_logprobs", [](Session& session, uint32_t k) {
            const std::vector<Picked> top = without_gil([&] { return session.top(k); });
            py::array_t<int32_t> ids(k);
            py::array_t<float> logprobs(k);
            for (uint32_t i = 0; i < k; ++i) {
                ids.mutable_at(i) = static_cast<int32_t>(top[i].token);
                logprobs.mutable_at(i) = top[i].logprob;
            }
            return py::make_tuple(ids, logprobs);
        });
}

}  // namespace
}  // namespace lily

PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
    m.doc() = "Native core of Lily; applications use the lily package.";
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const lily::Error& error) {
            lily::raise(error.kind(), error.what());
        }
    });
    // Of this module only: another's has nothing to do with Lily.
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const std::bad_alloc&) {
            lily::raise(lily::ErrorKind::kOutOfMemory, "out of memory");
        }
    });
    lily::bind_config(m);
    lily::bind_plans(m);
    lily::bind_flag(m);
    lily::bind_engine(m);
    lily::bind_session(m);
    lily::bind_kernels(m);
    lily::bind_doctor(m);
#if LILY_BENCH
    lily::bind_bench(m);
#endif
    lily::survive_full_memory<lily::Config>();
    lily::survive_full_memory<lily::TensorTarget>();
    lily::survive_full_memory<lily::CancelFlag>();
    lily::survive_full_memory<lily::Engine>();
    lily::survive_full_memory<lily::Session>();
}
