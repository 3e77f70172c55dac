// lily._native.Ablation, for tools/ablation.py and its tests.
#include "../lily_native/bindings.h"

#include "ablation.h"
#include "session.h"

namespace py = pybind11;

namespace lily {
namespace {

// A pass is prepared when it is first needed, and again for another engine or number of rows.
class Ablated {
public:
    explicit Ablated(const std::string& name) {
        const std::optional<Ablation> found = ablation_named(name);
        if (!found) throw Error(ErrorKind::kValue, "no ablation is called " + name);
        ablation_ = *found;
    }

    void prefill(Session& session, std::span<const int32_t> ids) {
        session.prefill_by(ids, [&](Device& device, const Model& model, const Pass& pass) {
            if (&model != model_ || pass.rows != rows_) pass_.emplace(device, model, pass, ablation_);
            model_ = &model;
            rows_ = pass.rows;
            pass_->run();
        });
    }

private:
    Ablation ablation_;
    std::optional<AblatedPass> pass_;
    const Model* model_ = nullptr;
    uint32_t rows_ = 0;
};

}  // namespace

void bind_bench(py::module_& m) {
    py::class_<Ablated>(m, "Ablation")
        .def(py::init<const std::string&>(), py::arg("name"))
        .def(
            "prefill",
            [](Ablated& ablated, Session& session, const Ids& ids) {
                const auto from = span_of(ids);
                without_gil([&] { ablated.prefill(session, from); });
            },
            py::arg("session"), py::arg("ids"));
}

}  // namespace lily
