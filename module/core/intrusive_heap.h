// A binary heap of pointers whose elements know where they are: the first element is found in O(1),
// and any element is added or removed in O(log n). It takes 8 to 16 bytes for each element, where a
// tree takes 48.

#ifndef TURNSTILE_CORE_INTRUSIVE_HEAP_H_
#define TURNSTILE_CORE_INTRUSIVE_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace turnstile {

// The heap owns nothing. An element must be removed before it is destroyed, or before its place in
// the order of `Before` changes. No two elements may be equal in that order.
template <typename T, uint32_t T::*kIndex, typename Before>
class IntrusiveHeap {
 public:
  bool empty() const { return elements_.empty(); }
  size_t size() const { return elements_.size(); }
  T* first() const { return empty() ? nullptr : elements_.front(); }
  // In no particular order.
  const std::vector<T*>& all() const { return elements_; }

  void Add(T& element) {
    elements_.push_back(&element);
    Raise(elements_.size() - 1);
  }

  void Remove(T& element) {
    const size_t at = element.*kIndex;
    T* last = elements_.back();
    elements_.pop_back();
    if (last != &element) {
      Put(at, last);
      Raise(at);
      Lower(last->*kIndex);
    }
    // Without exceptions, shrink_to_fit of libstdc++ does nothing.
    if (elements_.size() < elements_.capacity() / 4) std::vector<T*>(elements_).swap(elements_);
  }

  // For tests.
  bool IsConsistent() const {
    for (size_t i = 0; i < size(); ++i) {
      if (elements_[i]->*kIndex != i) return false;
      if (i > 0 && !Before()(*elements_[(i - 1) / 2], *elements_[i])) return false;
    }
    return true;
  }

 private:
  void Put(size_t at, T* element) {
    elements_[at] = element;
    element->*kIndex = static_cast<uint32_t>(at);
  }

  void Raise(size_t at) {
    T* element = elements_[at];
    while (at > 0 && Before()(*element, *elements_[(at - 1) / 2])) {
      Put(at, elements_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    Put(at, element);
  }

  void Lower(size_t at) {
    T* element = elements_[at];
    for (size_t child = 2 * at + 1; child < size(); child = 2 * at + 1) {
      if (child + 1 < size() && Before()(*elements_[child + 1], *elements_[child])) ++child;
      if (!Before()(*elements_[child], *element)) break;
      Put(at, elements_[child]);
      at = child;
    }
    Put(at, element);
  }

  std::vector<T*> elements_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_INTRUSIVE_HEAP_H_
