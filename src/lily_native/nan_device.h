// LILY_DEBUG=nan: a device that looks for NaN and infinity in everything that a launch has written.
#pragma once

#include <memory>

#include "device.h"

namespace lily {

// Runs programs on `device` launch by launch, each at once, and throws kDevice, which names kernel, label, layer and
// slot, for the first that leaves a number that is none.
std::unique_ptr<Device> make_nan_device(std::unique_ptr<Device> device);

}  // namespace lily
