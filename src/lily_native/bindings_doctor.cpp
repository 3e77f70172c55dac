// What `lily doctor` asks of the native core beside the kernels: the audit of a pass, and what act_t is.
#include "audit.h"
#include "bindings.h"
#include "session.h"

namespace py = pybind11;

namespace lily {
namespace {

py::list audit_session(Session& session, const Ids& ids) {
    const auto from = span_of(ids);
    std::vector<AuditRow> found;
    without_gil([&] {
        session.prefill_by(from, [&](Device& device, const Model& model, const Pass& pass) {
            found = audit(device, record_body(model, pass));
        });
    });
    py::list rows;
    for (const AuditRow& row : found)
        rows.append(py::dict(py::arg("launch") = row.launch, py::arg("kernel") = row.kernel,
                             py::arg("label") = row.label, py::arg("layer") = row.layer, py::arg("slot") = row.slot,
                             py::arg("type") = row.type, py::arg("values") = row.values,
                             py::arg("saturated") = row.saturated, py::arg("nonfinite") = row.nonfinite,
                             py::arg("largest") = row.largest));
    return rows;
}

}  // namespace

void bind_doctor(py::module_& m) {
    m.def("act_type", [] { return std::is_same_v<act_t, half> ? "half" : "bfloat"; });
    m.def("audit", &audit_session, py::arg("session"), py::arg("ids"));
}

}  // namespace lily
