// The one exception type of the native core; bindings.cpp turns each kind into its Python class.
#pragma once

#include <stdexcept>
#include <string>

namespace lily {

enum class ErrorKind {
    kLogic,        // LilyError: a broken contract inside Lily, or a call at the wrong moment
    kCheckpoint,   // CheckpointError
    kDevice,       // DeviceError
    kOutOfMemory,  // OutOfMemoryError
    kContextFull,  // ContextFullError
    kUnsupported,  // UnsupportedError
    kValue,        // ValueError: a bad argument of the caller
    kFull,         // LilyError: all sessions are in use
    kCancelled,    // no exception: the caller has said that the call is over
};

// Header-only, so that the runtime error base (whose copies cannot throw) is shared by every object.
class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    ErrorKind kind() const noexcept { return kind_; }

private:
    ErrorKind kind_;
};

}  // namespace lily
