// lily._native._Ablation, for tools/ablation.py and its tests.
#include "../lily_native/bindings.h"

#include <map>
#include <memory>

#include "ablation.h"
#include "session.h"

namespace py = pybind11;

namespace lily {
namespace {

// The passes of one session, each prepared when it is first needed. Python keeps the session; once its engine is closed
// it refuses, and nothing here is touched.
class Ablated {
public:
    Ablated(Session& session, const std::string& name) : session_(session) {
        const std::optional<Ablation> found = ablation_named(name);
        if (!found) throw Error(ErrorKind::kValue, "no ablation is called " + name);
        ablation_ = *found;
    }

    void prefill(std::span<const int32_t> ids) {
        session_.prefill_by(ids, [&](Device& device, const Model& model, const Pass& pass) {
            if (ablation_ == Ablation::kExpandedWeights && expanded_.down.count == 0)
                expanded_ = allocate_expanded(device, model.config);
            std::unique_ptr<AblatedPass>& prepared = passes_[pass.rows];
            if (!prepared) prepared = std::make_unique<AblatedPass>(device, model, pass, ablation_, expanded_);
            prepared->run();
        });
    }

    // Feeds one token by a decode pass, which is carried out so many times.
    void decode(int32_t id, uint32_t times) {
        session_.prefill_by({&id, 1}, [&](Device& device, const Model& model, const Pass&) {
            const Pass pass = decode_pass(model.capacity, session_.position());
            std::unique_ptr<AblatedPass>& prepared = decode_passes_[pass.blocks * pass.block];
            if (!prepared) prepared = std::make_unique<AblatedPass>(device, model, pass, ablation_, expanded_);
            prepared->run(times);
        });
    }

private:
    Session& session_;
    Ablation ablation_;
    ExpandedWeights expanded_;
    std::map<uint32_t, std::unique_ptr<AblatedPass>> passes_;         // by rows
    std::map<uint32_t, std::unique_ptr<AblatedPass>> decode_passes_;  // by tokens
};

}  // namespace

void bind_bench(py::module_& m) {
    py::class_<Ablated>(m, "_Ablation")
        .def(py::init<Session&, const std::string&>(), py::arg("session"), py::arg("name"), py::keep_alive<1, 2>())
        .def(
            "prefill",
            [](Ablated& ablated, const Ids& ids) {
                const auto from = span_of(ids);
                without_gil([&] { ablated.prefill(from); });
            },
            py::arg("ids"))
        .def(
            "decode",
            [](Ablated& ablated, int32_t id, uint32_t times) { without_gil([&] { ablated.decode(id, times); }); },
            py::arg("id"), py::arg("times"));
}

}  // namespace lily
