// A queue of at most N elements that never allocates.
#pragma once

#include <array>
#include <cstddef>

#include "error.h"

namespace lily {

template <class T, size_t N>
class Ring {
public:
    bool empty() const { return count_ == 0; }
    size_t size() const { return count_; }
    T& front() { return at(0); }
    T& back() { return at(count_ - 1); }

    void push_back(const T& value) {
        if (count_ == N) throw Error(ErrorKind::kLogic, "a queue has no more room");
        ++count_;
        back() = value;
    }
    void pop_front() {
        first_ = (first_ + 1) % N;
        --count_;
    }
    void pop_back() { --count_; }
    void clear() { count_ = 0; }

private:
    T& at(size_t i) { return items_[(first_ + i) % N]; }

    std::array<T, N> items_{};
    size_t first_ = 0, count_ = 0;
};

}  // namespace lily
