// A doubly linked list whose links are members of its elements: every operation is O(1), nothing is
// allocated, and an element can be in several lists at once.

#ifndef TURNSTILE_CORE_INTRUSIVE_LIST_H_
#define TURNSTILE_CORE_INTRUSIVE_LIST_H_

#include <cstddef>
#include <type_traits>
#include <utility>

namespace turnstile {

template <typename T>
struct Link {
  T* before = nullptr;
  T* after = nullptr;
};

// The list owns nothing. An element must be removed before it is destroyed. A list that is not
// counted does not know its size, and is smaller.
template <typename T, Link<T> T::*kLink, bool kCounted = true>
class IntrusiveList {
 public:
  bool empty() const { return first_ == nullptr; }
  size_t size() const {
    static_assert(kCounted);
    return size_;
  }
  T* first() const { return first_; }
  T* last() const { return last_; }

  void Append(T& element) { InsertBefore(nullptr, element); }

  // Inserts before `next`, or at the end if `next` is null.
  void InsertBefore(T* next, T& element) {
    T*& before_next = Neighbour(next, last_, &Link<T>::before);
    element.*kLink = {.before = before_next, .after = next};
    Neighbour(before_next, first_, &Link<T>::after) = &element;
    before_next = &element;
    if constexpr (kCounted) ++size_;
  }

  void Remove(T& element) {
    const Link<T> link = std::exchange(element.*kLink, Link<T>());
    Neighbour(link.before, first_, &Link<T>::after) = link.after;
    Neighbour(link.after, last_, &Link<T>::before) = link.before;
    if constexpr (kCounted) --size_;
  }

 private:
  // The pointer to `element` on one side: the link of its neighbour, or the end of the list.
  static T*& Neighbour(T* element, T*& end, T* Link<T>::*side) {
    return element == nullptr ? end : (element->*kLink).*side;
  }

  T* first_ = nullptr;
  T* last_ = nullptr;
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<kCounted, size_t, Nothing> size_{};
};

template <typename T, Link<T> T::*kLink>
using UncountedList = IntrusiveList<T, kLink, /*kCounted=*/false>;

}  // namespace turnstile

#endif  // TURNSTILE_CORE_INTRUSIVE_LIST_H_
